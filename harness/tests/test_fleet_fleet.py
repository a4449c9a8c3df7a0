from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fleet_support import LIMIT, ends, eventually, messages, under

from shardproof.fleet import Exited, Fleet, FleetError, ForkServer, Message, wait
from shardproof.fleet import capture as capture_module
from shardproof.fleet.events import exited
from shardproof.fleet.processes import Ident, alive, identify, read_stat

Fork = Callable[..., Fleet]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A server that has preloaded a module with habits of its own."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "fleet_preloaded.py").write_text(
        "import atexit, os, pathlib, signal, tempfile\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        f"atexit.register(pathlib.Path({str(folder / 'server-atexit')!r}).touch)\n"
        "shared = tempfile.TemporaryDirectory()\n"
        "os.environ['PRELOADED_DIRECTORY'] = shared.name\n"
        f"os.environ['PRELOADED_FOLDER'] = {str(folder)!r}\n"
    )
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    env = {"PYTHONUNBUFFERED": ""}
    with ForkServer(preload=["fleet_preloaded"], env=env) as server:
        yield server
    patch.undo()
    assert under(server.token) == set()


@pytest.fixture
def fork(server: ForkServer) -> Iterator[Fork]:
    fleets: list[Fleet] = []

    def factory(entry: str, size: int = 1, **setup: object) -> Fleet:
        fleets.append(
            server.fork(
                size=size, entry=f"tests.fleet_support:{entry}", setup=setup, label="under test"
            )
        )
        return fleets[-1]

    yield factory
    for fleet in fleets:
        fleet.discard()
        assert not fleet.directory.exists()


# How ranks end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "code", "number"),
    [
        ({"how": "return"}, 0, None),
        ({"how": "raise"}, 1, None),
        ({"how": "_exit", "value": 3}, 3, None),
        ({"how": "exit", "value": 4}, 4, None),
        ({"how": "exit", "value": None}, 0, None),
        ({"how": "exit", "value": "a farewell"}, 1, None),
        ({"how": "signal", "value": 9}, None, 9),
        ({"how": "signal", "value": 11}, None, 11),
        ({"how": "signal", "value": 15}, None, 15),
    ],
)
def test_every_end_is_reported_as_it_was(
    fork: Fork, setup: dict[str, Any], code: int | None, number: int | None
) -> None:
    fleet = fork("quick", **setup)
    end = ends(fleet)[0]
    assert (end.rank, end.code, end.signal, end.note) == (0, code, number, "")
    assert fleet.live == []
    if setup["how"] == "raise":
        stderr = fleet.output(0).stderr
        assert "RuntimeError: rank 0 has had enough" in stderr
        assert "fleet_support.py" in stderr
    if setup.get("value") == "a farewell":
        assert fleet.output(0).stderr == "a farewell\n"
    if number == 11:
        assert "Segmentation fault" in fleet.output(0).stderr


def test_an_entry_that_does_not_exist_ends_with_a_traceback(fork: Fork) -> None:
    fleet = fork("no_such_function")
    assert ends(fleet)[0].code == 1
    assert "no_such_function" in fleet.output(0).stderr


@pytest.mark.parametrize("how", ["return", "_exit", "signal"])
def test_the_end_comes_after_all_messages(fork: Fork, how: str) -> None:
    """The end is heard from the fork server, and so on another channel than the messages."""
    fleet = fork("quick", size=3, how=how, value=9, messages=40, filling=2000)
    events: list[Message | Exited] = []
    while batch := fleet.poll(LIMIT):
        events += batch
    assert fleet.poll(None) == []  # all is said, so this does not wait
    for rank in range(3):
        own = [event for event in events if event.rank == rank]
        assert isinstance(own.pop(), Exited)
        numbers = [event.payload["number"] for event in own if isinstance(event, Message)]
        assert numbers == list(range(40))
    assert [event.at for event in own] == sorted(event.at for event in own)


def test_what_is_unread_when_the_end_is_heard_comes_before_it(fork: Fork) -> None:
    fleet = fork("quick", how="return", messages=3)
    eventually(lambda: not alive(fleet.ranks[0].ident))
    fleet.take((), [exited(0, 0, time.monotonic())])
    events = fleet.poll(0)
    assert [type(event) for event in events] == [Message] * 3 + [Exited]


def test_a_message_cut_short_by_death_is_noted(fork: Fork) -> None:
    end = ends(fork("quick", how="half a message", messages=1))[0]
    assert end.code == 0
    assert end.note == "its last message was cut short after 4 bytes"


def test_a_rank_that_sends_garbage_is_killed_and_says_so(fork: Fork) -> None:
    """Code under test that writes to a descriptor it does not own must not end the session."""
    fleet = fork("quick", how="garbage")
    end = ends(fleet)[0]
    assert end.signal == signal.SIGKILL
    assert "killed, since what it sent is no message" in str(end)


def test_ends_in_words() -> None:
    assert str(exited(1, 3 << 8, 0.0)) == "rank 1 exited with code 3"
    assert str(exited(2, 9, 0.0)) == "rank 2 killed by SIGKILL (9)"
    assert str(exited(2, 40, 0.0, "a note")) == "rank 2 killed by a real-time signal (40); a note"
    assert str(Exited(0, None, None, 0.0)) == "rank 0 ended in a way that is not known"


# Messages ----------------------------------------------------------------------------------------


def test_ranks_know_who_they_are_and_answer(fork: Fork) -> None:
    fleet = fork("echo", size=3, key=[1, None])
    for message in messages(fleet, 3):
        assert message.payload["rank"] == message.rank
        assert message.payload["size"] == fleet.size == 3
        assert message.payload["setup"] == {"key": [1, None]}
        assert message.payload["pid"] == fleet.ranks[message.rank].pid
    fleet.send(1, {"type": "one"})
    assert [message.rank for message in messages(fleet, 1)] == [1]
    fleet.send(None, {"type": "all"})
    assert sorted(message.rank for message in messages(fleet, 3)) == [0, 1, 2]
    assert fleet.poll(0.01) == []
    with pytest.raises(FleetError, match=r"'under test' has ranks 0 to 2, not 3"):
        fleet.send(3, {})


def test_what_is_sent_to_dead_and_stopped_ranks_holds_nobody_up(fork: Fork) -> None:
    """A rank that hangs does not read; the controller has its peers to look after."""
    fleet = fork("echo", size=3)
    messages(fleet, 3)
    os.kill(fleet.ranks[0].pid, signal.SIGKILL)
    os.kill(fleet.ranks[1].pid, signal.SIGSTOP)
    large = {"type": "large", "filling": "x" * 2**23}
    fleet.send(None, large)
    received: list[Message | Exited] = []
    while {type(event) for event in received} != {Message, Exited}:
        received += fleet.poll(LIMIT)
    assert fleet.live == [1, 2]
    os.kill(fleet.ranks[1].pid, signal.SIGCONT)
    assert [message.payload for message in messages(fleet, 1)] == [large]


def test_several_fleets_are_waited_for_at_once(fork: Fork) -> None:
    one, other = fork("echo", size=2), fork("echo")
    messages(one, 2)
    messages(other, 1)
    assert wait([one, other], 0.01) == []
    one.send(1, {"type": "x"})
    [(fleet, event)] = wait([one, other], LIMIT)
    assert (fleet, event.rank) == (one, 1)
    other.send(0, {"type": "stop"})
    [(fleet, event)] = wait([one, other], LIMIT)
    assert fleet is other
    assert isinstance(event, Exited)
    one.kill()
    assert len(wait([one, other], None)) == 2
    assert wait([one, other], None) == []


def test_times_tell_which_rank_was_first(fork: Fork) -> None:
    """The controller may read the later failure first: their times are those of the ranks."""
    fleet = fork("echo", size=2)
    messages(fleet, 2)
    for rank in (1, 0):
        fleet.send(rank, {"type": "fail"})
        eventually(functools.partial(fleet.ranks[rank].channel._readable, 0.0))
    assert [event.rank for event in fleet.poll(0)] == [1, 0]


# What ranks are given ----------------------------------------------------------------------------


def test_ranks_are_isolated(fork: Fork, server: ForkServer) -> None:
    told = [message.payload for message in messages(fork("report", size=3), 3)]
    for facts in told:
        assert facts["group"] == facts["session"] == facts["pid"]
        assert len(facts["sockets"]) == 1, facts["sockets"]  # its channel, and nobody else's
        assert facts["stdin"] == "/dev/null"
        assert facts["interrupt"]
        assert facts["term"]
        assert int(facts["blocked"].split()[1], 16) == 0
    assert len({facts["sockets"][0] for facts in told}) == 3


def test_what_a_rank_leaves_to_be_done_at_its_end_is_done(
    fork: Fork, tmp_path: Path, server: ForkServer
) -> None:
    assert ends(fork("tidy", folder=str(tmp_path)))[0].code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit", "thread"]


def test_what_preloads_leave_to_be_done_is_not_done_by_ranks(
    fork: Fork, server: ForkServer
) -> None:
    """Each rank would remove the temporary directory that all of them share."""
    fleet = fork("report", size=2)
    environ = messages(fleet, 2)[0].payload["environ"]
    assert {end.code for end in fleet.stop().values()} == {0}
    assert not (Path(environ["PRELOADED_FOLDER"]) / "server-atexit").exists()
    Path(environ["PRELOADED_DIRECTORY"]).rmdir()  # it is still there


# Output ------------------------------------------------------------------------------------------


def test_output_is_captured_from_python_and_past_it(fork: Fork) -> None:
    fleet = fork("write", size=2)
    messages(fleet, 2)
    for how in ("python", "descriptor", "library"):
        fleet.send(0, {"type": "write", "how": how, "text": f"{how}\n"})
        messages(fleet, 1)
    output = fleet.output(0)
    assert output.stdout == "python\ndescriptor\nlibrary\n\n"
    assert output.stderr == "PYTHON\n"
    assert fleet.output(1).stdout == ""
    fleet.mark()
    assert fleet.output(0).stdout == ""
    fleet.send(0, {"type": "write", "how": "descriptor", "text": "x", "times": 3_000_000})
    messages(fleet, 1)
    assert re.fullmatch(
        r"x{500}\n\[\.\.\. 2,999,000 bytes left out \.\.\.\]\nx{500}",
        fleet.output(0, limit=1000).stdout,
    )
    fleet.kill()
    assert len(fleet.output(0).stdout) > 2**20  # also after its death


def test_what_was_printed_before_a_kill_is_there(fork: Fork) -> None:
    fleet = fork("write")
    messages(fleet, 1)
    fleet.send(0, {"type": "write", "how": "python", "text": "a line\n"})
    messages(fleet, 1)
    os.kill(fleet.ranks[0].pid, signal.SIGKILL)
    ends(fleet)
    assert fleet.output(0).stdout == "a line\n"


def test_a_flood_is_bounded_while_the_controller_waits(
    fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that prints for ever would else fill the memory of the machine until its timeout."""
    monkeypatch.setattr(capture_module, "KEPT_LIMIT", 4 * 2**20)
    fleet = fork("flood")
    path = fleet.ranks[0].capture.stdout.path
    eventually(lambda: path.exists() and path.stat().st_size > 32 * 2**20)
    os.kill(fleet.ranks[0].pid, signal.SIGSTOP)
    eventually(lambda: (stat := read_stat(fleet.ranks[0].pid)) and stat.state == "T")

    def small() -> bool:
        fleet.poll(0.05)
        return path.stat().st_blocks * 512 < 8 * 2**20

    eventually(small)
    assert "left out" in fleet.output(0).stdout


# Stacks ------------------------------------------------------------------------------------------


def test_stacks_of_living_stopped_and_dead_ranks(fork: Fork) -> None:
    fleet = fork("echo", size=3)
    messages(fleet, 3)
    os.kill(fleet.ranks[1].pid, signal.SIGSTOP)
    eventually(lambda: (stat := read_stat(fleet.ranks[1].pid)) and stat.state == "T")
    os.kill(fleet.ranks[2].pid, signal.SIGKILL)
    eventually(lambda: fleet.poll(0.1) or fleet.live == [0, 1])
    stacks = fleet.stacks()
    assert "in echo" in stacks[0]
    assert "channel.py" in stacks[0]
    assert re.fullmatch(r"\(no stack: rank 1, process \d+: it is stopped by a signal\)", stacks[1])
    assert stacks[2] == "(no stack: rank 2 killed by SIGKILL (9))"
    assert fleet.stacks()[0].count("in echo") == 1  # each answer is the last one only


def test_a_rank_that_does_not_answer_is_told_apart(fork: Fork) -> None:
    fleet = fork("unstackable")
    messages(fleet, 1)
    text = fleet.stacks(timeout=0.1)[0]
    assert re.search(r"no stack within 0.1 s: rank 0, process \d+: it is asleep, but", text)
    os.kill(fleet.ranks[0].pid, signal.SIGKILL)
    eventually(lambda: not alive(fleet.ranks[0].ident))
    assert "is gone" in fleet.stacks(timeout=0.1)[0]


# Ending ------------------------------------------------------------------------------------------


def test_stop_lets_ranks_end_by_themselves(fork: Fork) -> None:
    fleet = fork("echo", size=2)
    messages(fleet, 2)
    assert {end.code for end in fleet.stop().values()} == {0}
    heard = fork("hear_end", size=2)
    assert {end.code for end in heard.stop().values()} == {7}
    assert len(heard.poll(None)) == 2


def test_stop_ends_those_that_do_not(fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.fleet.fleet._TERM_GRACE", 0.1)
    idle, deaf = fork("flood"), fork("deaf")
    messages(idle, 1)
    messages(deaf, 1)
    assert idle.stop(0.05)[0].signal == signal.SIGTERM
    assert deaf.stop(0.05)[0].signal == signal.SIGKILL


def test_kill_takes_whatever_a_rank_started_along(fork: Fork) -> None:
    fleet = fork("parent", size=2, how="stay")
    told = [pid for message in messages(fleet, 2) for pid in message.payload.values()]
    started = [ident for pid in told if (ident := identify(pid))]
    assert len(started) == 10
    assert all(alive(ident) for ident in started)
    bystander = fork("echo")
    messages(bystander, 1)
    os.kill(fleet.ranks[0].pid, signal.SIGSTOP)
    fleet.kill()
    # At once, without any wait: kill returns when they are gone.
    assert [ident for ident in started if alive(ident)] == []
    assert not any(alive(rank.ident) for rank in fleet.ranks)
    assert {end.signal for end in fleet.exits.values()} == {signal.SIGKILL}
    assert {end.note for end in fleet.exits.values()} == {""}
    fleet.kill()
    bystander.send(0, {"type": "unharmed"})
    messages(bystander, 1)


def test_a_rank_that_ends_by_itself_takes_what_it_started_along(fork: Fork) -> None:
    fleet = fork("parent", how="return")
    [message] = messages(fleet, 1)
    assert ends(fleet)[0].code == 0
    assert [pid for pid in message.payload.values() if _lives(pid)] == []


def _lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.dead


def test_kill_works_without_the_servers_help(
    fork: Fork, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardproof.fleet.fleet._REPORT_GRACE", 0.1)
    fleet = fork("parent", how="stay")
    [message] = messages(fleet, 1)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        fleet.kill()
        assert [pid for pid in message.payload.values() if _lives(pid)] == []
        assert not alive(fleet.ranks[0].ident)
        assert "the fork server did not report it" in fleet.exits[0].note
    finally:
        os.kill(server.pid, signal.SIGCONT)
    messages(fork("echo"), 1)


def test_a_controller_with_threads_and_redirected_streams(fork: Fork, tmp_path: Path) -> None:
    """As under pytest's own capture and under pytest-xdist."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        fleet = fork("echo")
        messages(fleet, 1)
        assert fleet.stop()[0].code == 0
    finally:
        done.set()
        thread.join()


def test_identities_are_those_of_the_ranks(fork: Fork) -> None:
    fleet = fork("echo", size=2)
    told = {message.rank: message.payload["pid"] for message in messages(fleet, 2)}
    for rank in fleet.ranks:
        assert rank.ident == identify(told[rank.index]) == Ident(rank.pid, rank.ident.started)
        assert "alive" in repr(rank)
    fleet.kill()
    assert "killed by SIGKILL" in repr(fleet.ranks[0])
    assert time.monotonic() - fleet.exits[0].at < LIMIT
