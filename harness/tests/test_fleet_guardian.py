from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from shardproof.fleet.guardian import _wait_for_end
from shardproof.fleet.processes import Ident, identify


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], Ident]]:
    process = subprocess.Popen(["sleep", "1000"])
    ident = identify(process.pid)
    assert ident is not None
    yield process, ident
    process.kill()
    process.wait()


@pytest.fixture(params=[True, False], ids=["pidfds", "no pidfds"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without what kernels before 5.3 and some containers lack."""

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    if not request.param:
        monkeypatch.setattr(os, "pidfd_open", refuse)


def test_a_wait_lasts_until_the_first_has_ended(
    sleeper: tuple[subprocess.Popen[bytes], Ident], pidfds: None
) -> None:
    process, ident = sleeper
    me = identify(os.getpid())
    assert me is not None
    returned = threading.Event()

    def wait() -> None:
        _wait_for_end((me, ident), timeout=None)
        returned.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not returned.wait(0.3)
    process.send_signal(signal.SIGKILL)  # it stays a zombie, as a controller's does
    assert returned.wait(5.0)


def test_a_wait_for_one_that_is_gone_ends_at_once(
    sleeper: tuple[subprocess.Popen[bytes], Ident], pidfds: None
) -> None:
    """Its number may name another process by now."""
    _, ident = sleeper
    _wait_for_end((Ident(ident.pid, ident.started - 1),), timeout=None)


def test_a_wait_ends_in_time(sleeper: tuple[subprocess.Popen[bytes], Ident], pidfds: None) -> None:
    start = time.monotonic()
    _wait_for_end((sleeper[1],), timeout=0.05)
    assert time.monotonic() - start >= 0.05
