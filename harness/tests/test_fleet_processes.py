from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.fleet_support import eventually

from shardproof.fleet import processes
from shardproof.fleet.errors import SurvivorError
from shardproof.fleet.processes import (
    TOKEN_VARIABLE,
    Family,
    Ident,
    alive,
    identify,
    marks,
    read_stat,
    scan,
    send_signal,
)

SLEEP = "import signal; print(flush=True); signal.pause()"
DAEMON = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {SLEEP}
    os._exit(0)
os.wait()
"""


class Starter:
    """Starts processes and sees to it that none is left."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, code: str = SLEEP, **options: object) -> Ident:
        process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-c", code], stdout=subprocess.PIPE, **options
        )
        process.stdout.readline()
        self.started.append(process)
        ident = identify(process.pid)
        assert ident is not None
        return ident


@pytest.fixture
def start() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    for process in starter.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def token(name: str) -> str:
    return f"{name}-{os.getpid()}-{time.monotonic_ns()}"


def test_a_stopped_root_and_its_group_are_killed_and_nobody_else(start: Starter) -> None:
    root = start(f"import os; os.fork(); {SLEEP}", start_new_session=True)
    other = start()
    os.kill(root.pid, signal.SIGSTOP)
    family = Family(token("none"), roots=frozenset({root}))
    assert len(family.members()) == 2
    family.kill()
    assert family.members() == set()
    assert not alive(root)
    assert alive(other)


def test_a_descendant_with_its_own_session_is_found(start: Starter) -> None:
    inner = f"[sys.executable, '-c', {SLEEP!r}]"
    root = start(f"import subprocess, sys; subprocess.run({inner}, start_new_session=True)")
    family = Family(token("none"), roots=frozenset({root}))
    [child] = [stat for stat in eventually(family.members) if stat.ident != root]
    assert child.session == child.ident.pid
    family.kill()
    assert not alive(child.ident)


def test_one_that_outlives_its_parent_is_waited_for(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its parent gone it is nobody's descendant, and in no session of the family."""
    inner = f"[sys.executable, '-c', {SLEEP!r}]"
    root = start(f"import subprocess, sys; subprocess.run({inner}, start_new_session=True)")
    family = Family(token("none"), roots=frozenset({root}))
    [child] = [stat for stat in eventually(family.members) if stat.ident != root]

    kills: list[Ident] = []

    def slow(ident: Ident, number: int) -> None:
        """As if the system took its time with the child: the first signal does nothing yet."""
        if number == signal.SIGKILL:
            kills.append(ident)
            if ident != root and kills.count(ident) == 1:
                return
        send_signal(ident, number)

    monkeypatch.setattr(processes, "send_signal", slow)
    family.kill()
    assert kills.count(child.ident) > 1
    assert not alive(child.ident)


def test_one_that_starts_more_and_more_is_ended_with_all_of_them(start: Starter) -> None:
    """A child made between the count and the kill would be nobody's: all are stopped first."""
    name = f"sp-{os.getpid()}".encode()
    root = start(
        "import ctypes, os, signal, time\n"
        f"ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"
        "print(flush=True)\n"
        "while True:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        signal.pause()\n"
        "    time.sleep(0.001)\n",
        start_new_session=True,
        env={},
    )
    family = Family(token("none"), roots=frozenset({root}))
    eventually(lambda: len(family.members()) > 5)
    try:
        family.kill()
        assert [stat for stat in scan().values() if stat.name == name and not stat.dead] == []
    finally:
        for stat in scan().values():
            if stat.name == name:
                send_signal(stat.ident, signal.SIGKILL)


def test_an_orphan_is_found_by_the_token(start: Starter) -> None:
    mark = token("orphan")
    start(DAEMON, env={**os.environ, TOKEN_VARIABLE: mark})
    start.started[0].wait()
    members = Family(mark).members()
    assert len(members) == 1, members
    [orphan] = members
    assert orphan.parent != os.getpid()
    Family(mark).kill()
    assert not alive(orphan.ident)


def test_a_mark_of_one_rank_is_not_that_of_another(start: Starter) -> None:
    mark = token("ranks")
    one, ten = (start(env={**os.environ, **marks(mark, rank)}) for rank in ("1.1", "1.10"))
    Family(mark, ranks=frozenset({"1.1"})).kill()
    assert not alive(one)
    assert alive(ten)
    Family(mark).kill()
    assert not alive(ten)


def test_those_to_be_spared_are_spared_with_what_they_started(start: Starter) -> None:
    mark = token("spared")
    spared, other = (start(env={**os.environ, TOKEN_VARIABLE: mark}) for _ in range(2))
    Family(mark, spare=frozenset({spared.pid})).kill()
    assert alive(spared)
    assert not alive(other)


def test_a_number_that_now_names_another_process_is_left_alone(start: Starter) -> None:
    """Numbers are used again: a kill that came late would hit a stranger."""
    stranger = start(start_new_session=True)
    stale = Ident(stranger.pid, stranger.started - 1)
    assert not send_signal(stale, signal.SIGKILL)
    Family(token("none"), roots=frozenset({stale})).kill()
    assert alive(stranger)


def test_a_kernel_without_pidfds_does_too(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pidfds(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", no_pidfds)
    victim = start()
    assert send_signal(victim, signal.SIGKILL)
    assert start.started[0].wait() == -signal.SIGKILL
    assert not send_signal(victim, signal.SIGKILL)


def test_what_survives_sigkill_is_named(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    root = start()
    monkeypatch.setattr(processes, "send_signal", lambda _ident, _number: True)
    with pytest.raises(SurvivorError, match=rf"still there: {root.pid} \(.*state S"):
        Family(token("none"), roots=frozenset({root})).kill(timeout=0.05)


def test_names_with_parentheses_are_read(start: Starter) -> None:
    root = start("import ctypes; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0);" + SLEEP)
    stat = read_stat(root.pid)
    assert stat is not None
    assert stat.name == b"a) R 1 (b"
    assert stat.parent == os.getpid()
