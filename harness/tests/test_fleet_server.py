from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fleet_support import ends, eventually, messages, under

from shardproof.fleet import (
    ForkServer,
    MessageError,
    PreloadError,
    PreloadThreadError,
    ServerError,
    SurvivorError,
    make_scratch,
)
from shardproof.fleet.forkserver import ONE_THREAD
from shardproof.fleet.processes import alive, identify
from shardproof.fleet.stacks import STACK_SIGNAL

ECHO = "tests.fleet_support:echo"
REPORT = "tests.fleet_support:report"

Make = Callable[..., ForkServer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    servers: list[ForkServer] = []

    def factory(*preload: str, **options: object) -> ForkServer:
        scratch = make_scratch(root=tmp_path)
        servers.append(ForkServer(preload=preload, scratch=scratch, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield factory
    for server in servers:
        server.close()
        assert under(server.token or "none") == set()
    assert [path for path in tmp_path.iterdir() if "shardproof-" in path.name] == []


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module that can be imported, and return its name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(code: str) -> str:
        (folder / "fleet_preloaded.py").write_text(code)
        return "fleet_preloaded"

    return write


# Preloading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("import no_such_module_at_all", r"line 1, in <module>(?s:.*)No module named 'no_such_mod"),
        ("1 / 0", r"ZeroDivisionError"),
        ("raise SystemExit('leaving')", r"SystemExit: leaving"),
        ("import os; os._exit(5)", r"while importing it, the fork server exited with code 5"),
        ("import os; os.kill(os.getpid(), 9)", r"the fork server was killed by signal 9"),
        (
            "import os, sys; sys.stderr.write('last words'); sys.stderr.flush(); os.abort()",
            r"killed by signal 6; its stderr:\nlast words",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(
    make: Make, module: Callable[[str], str], code: str, details: str
) -> None:
    server = make("json", module(code), "csv")
    with pytest.raises(PreloadError, match=r"cannot preload 'fleet_preloaded'.*no rank") as caught:
        server.start()
    assert caught.value.module == "fleet_preloaded"
    assert re.search(details, caught.value.details), caught.value.details
    assert not server.alive
    assert under(server.token) == set()


def test_an_import_that_starts_a_thread_is_refused(
    make: Make, module: Callable[[str], str]
) -> None:
    """Only the thread that forks lives on in a rank; locks that others hold stay locked there."""
    name = module(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), name='poller', daemon=True).start()"
    )
    with pytest.raises(
        PreloadThreadError, match=r"importing it started 1 thread.*in Python: 'poller'"
    ):
        make("json", name).start()


def test_a_thread_that_ends_again_does_no_harm(make: Make, module: Callable[[str], str]) -> None:
    name = module(
        "import threading, time; threading.Thread(target=time.sleep, args=(0.05,)).start()"
    )
    make(name).start()


def test_an_import_without_end_is_given_up(make: Make, module: Callable[[str], str]) -> None:
    server = make(module("import time; time.sleep(1000)"), import_timeout=0.1)
    with pytest.raises(PreloadError, match=r"importing it took the fork server more than 0.1 s"):
        server.start()
    assert under(server.token) == set()


def test_ranks_find_preloaded_modules_imported(make: Make, module: Callable[[str], str]) -> None:
    name = module("")
    fleet = make(name).fork(size=1, entry=REPORT, setup={}, label="x")
    [told] = messages(fleet, 1)
    assert told.payload["modules"] == [name]


def test_modules_come_from_where_the_controller_finds_them(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory may hold a json.py; that is not the one the controller would get."""
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    fleet = make().fork(size=1, entry=REPORT, setup={}, label="x")
    [told] = messages(fleet, 1)
    assert told.payload["path"] == sys.path
    assert told.payload["environ"]["PYTHONPATH"] == "/of/the/user"


def test_the_environment_has_one_thread_a_rank_and_what_the_caller_adds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("FROM_CONTROLLER", "yes")
    server = make(env={"MKL_NUM_THREADS": "2", "EXTRA": "more"})
    [told] = messages(server.fork(size=1, entry=REPORT, setup={}, label="x"), 1)
    expected = {**ONE_THREAD, "MKL_NUM_THREADS": "2", "EXTRA": "more", "FROM_CONTROLLER": "yes"}
    assert expected.items() <= told.payload["environ"].items()


# Asking for ranks --------------------------------------------------------------------------------


def test_bad_arguments_start_nothing(make: Make) -> None:
    server = make()
    with pytest.raises(MessageError, match=r"message\['path'\] is of type \S*Path"):
        server.fork(size=1, entry=ECHO, setup={"path": Path("/x")}, label="x")
    with pytest.raises(ValueError, match="1 to 250 ranks, not 0"):
        server.fork(size=0, entry=ECHO, setup={}, label="x")
    for entry in ("no_colon", "a:", ":b", "a b:c", "a:b:c"):
        with pytest.raises(ValueError, match=r"must look like 'package\.module:function'"):
            server.fork(size=1, entry=entry, setup={}, label="x")
    assert server.pid is None


def test_a_fork_that_fails_is_told_and_leaves_no_rank(
    make: Make, module: Callable[[str], str]
) -> None:
    name = module(
        "import os\n"
        "real, calls = os.fork, []\n"
        "def fork():\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return real()\n"
        "os.fork = fork\n"
    )
    server = make(name)
    server.start()
    before = len(under(server.token))
    with pytest.raises(ServerError, match=r"could not fork 4 ranks: BlockingIOError"):
        server.fork(size=4, entry=ECHO, setup={}, label="x")
    assert len(under(server.token)) == before
    messages(server.fork(size=2, entry=ECHO, setup={}, label="x"), 2)


def test_a_setup_larger_than_a_socket_takes_arrives(make: Make) -> None:
    setup = {"filling": "x" * 2**22}
    fleet = make().fork(size=2, entry=ECHO, setup=setup, label="x")
    assert all(message.payload["setup"] == setup for message in messages(fleet, 2))


def test_the_server_has_nothing_to_do_with_the_terminal_or_with_requests_for_stacks(
    make: Make,
) -> None:
    """A rank that has no handler yet inherits this: a request for stacks must not kill it."""
    server = make()
    server.start()
    assert server.pid is not None
    assert os.getsid(server.pid) == server.pid
    status = Path(f"/proc/{server.pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn"))[8:], 16)
    for number in (STACK_SIGNAL, signal.SIGINT, signal.SIGHUP):
        assert ignored & 1 << (number - 1), number


# Ending ------------------------------------------------------------------------------------------


def test_close_ends_everything_and_may_be_repeated(make: Make) -> None:
    server = make()
    fleet = server.fork(size=2, entry="tests.fleet_support:deaf", setup={}, label="x")
    messages(fleet, 2)
    server.close()
    assert under(server.token) == set()
    assert not server.scratch.exists()
    assert {end.signal for end in fleet.exits.values()} == {signal.SIGKILL}
    server.close()
    with pytest.raises(ServerError, match="has been closed"):
        server.fork(size=1, entry=ECHO, setup={}, label="x")


def test_close_ends_even_a_daemon_that_bears_no_mark(make: Make) -> None:
    """It has a session, a parent and an environment of its own; but the server adopted it."""
    server = make()
    setup = {"how": "stay", "unmarked": True}
    fleet = server.fork(size=1, entry="tests.fleet_support:parent", setup=setup, label="x")
    daemon = identify(messages(fleet, 1)[0].payload["daemon, unmarked"])
    assert daemon is not None
    assert alive(daemon)
    fleet.kill()
    server.close()
    assert not alive(daemon)


def test_a_stopped_server_is_closed_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.fleet.forkserver._CLOSE_TIMEOUT", 0.2)
    server = make()
    messages(server.fork(size=1, entry=ECHO, setup={}, label="x"), 1)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert under(server.token) == set()


def test_a_dead_server_takes_its_ranks_along_and_is_replaced(make: Make) -> None:
    server = make()
    fleet = server.fork(size=2, entry="tests.fleet_support:deaf", setup={}, label="x")
    messages(fleet, 2)
    first, token = server.pid, server.token
    assert first is not None
    os.kill(first, signal.SIGKILL)
    for end in ends(fleet).values():
        assert end.signal == signal.SIGKILL
        assert "the fork server was killed by signal 9" in end.note
    assert under(token) == set()
    assert not server.alive
    again = server.fork(size=1, entry=ECHO, setup={}, label="y")
    messages(again, 1)
    assert server.pid != first
    assert server.scratch.exists()


def test_a_server_that_died_unnoticed_is_replaced_by_the_next_fork(make: Make) -> None:
    server = make()
    server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{server.pid}/fd/0").exists())
    messages(server.fork(size=1, entry=ECHO, setup={}, label="x"), 1)


def test_a_server_told_to_end_takes_its_ranks_along(make: Make) -> None:
    server = make()
    fleet = server.fork(size=1, entry="tests.fleet_support:deaf", setup={}, label="x")
    messages(fleet, 1)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGTERM)
    assert ends(fleet)[0].signal == signal.SIGKILL
    assert server.scratch.exists()  # the controller lives, and it is the controller's


def test_a_forked_child_of_the_controller_closes_nothing(make: Make) -> None:
    """A plain test that forks runs the controller's exit handlers in its child."""
    server = make()
    fleet = server.fork(size=1, entry=ECHO, setup={}, label="x")
    messages(fleet, 1)
    child = os.fork()
    if child == 0:
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    fleet.send(0, {"type": "still there"})
    messages(fleet, 1)


def test_survivors_of_a_close_are_reported_and_the_directory_goes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make()
    server.start()

    def kill(self: object, *, timeout: float = 10.0) -> None:
        raise SurvivorError("still there: 1 (x, state D, parent 1)")

    with monkeypatch.context() as patch:
        patch.setattr("shardproof.fleet.processes.Family.kill", kill)
        with pytest.raises(SurvivorError):
            server.close()
    assert not server.scratch.exists()


def test_a_server_of_its_own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardproof.fleet.cleanup.scratch_root", lambda: tmp_path)
    with ForkServer(preload=()) as server:
        assert server.scratch.parent == tmp_path
        fleet = server.fork(size=1, entry=ECHO, setup={}, label="x")
        messages(fleet, 1)
        assert fleet.poll(0) == []
    assert list(tmp_path.iterdir()) == []
