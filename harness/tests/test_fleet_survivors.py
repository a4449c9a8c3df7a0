"""Nothing survives: whoever dies, in whatever way, while ranks wait in a collective."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fleet_support import eventually, under

from shardproof.fleet.cleanup import sweep
from shardproof.fleet.processes import Family, Ident, alive, identify, read_stat, scan

HARNESS = Path(__file__).resolve().parents[1]
PROMISED = 5.0  # seconds after a death in which everything must be gone
TORCH = "torch,torch.distributed"


class Controller:
    """A controller in a process of its own."""

    def __init__(self, root: Path, entry: str, preload: str, how: str) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fleet_controller", str(root), entry, preload, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HARNESS)},
            start_new_session=True,
        )
        line = self._line()
        self.told: dict[str, Any] = json.loads(line) if line else {}
        # What the entry `parent` tells: one of them bears no mark, so a search can't find it.
        self.started = {
            ident
            for message in self.told.get("messages", ())
            for pid in message.values()
            if isinstance(pid, int) and (ident := identify(pid))
        }

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def left(self) -> list[object]:
        """Return the processes and files that there are."""
        running = {ident for ident in self.started if alive(ident)}
        return [*running, *under(self.told["token"]), *self.root.iterdir()]

    def assert_nothing_left(self) -> None:
        """Everything is gone in the promised time."""
        deadline = time.monotonic() + PROMISED
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    def close(self) -> None:
        """Leave nothing, whatever the test found."""
        self.process.kill()
        self.process.communicate()
        if "token" in self.told:
            Family(self.told["token"], roots=frozenset(self.started)).kill()


Start = Callable[..., Controller]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Controller] = []

    def factory(*, entry: str = "deaf", preload: str = "", how: str = "pause") -> Controller:
        root = tmp_path / "scratch"
        root.mkdir(exist_ok=True)
        started.append(Controller(root, entry, preload, how))
        return started[-1]

    yield factory
    for controller in started:
        controller.close()


def test_the_search_for_leftovers_finds_what_runs(start: Start) -> None:
    """The other tests here would pass if it found nothing."""
    controller = start()
    pids = {stat.ident.pid for stat in under(controller.told["token"])}
    assert pids > {controller.told["server"], *controller.told["ranks"].values()}
    assert len(controller.left()) == len(pids) + 1


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("os._exit", 3)])
def test_after_an_end_of_the_controller(start: Start, how: str, code: int) -> None:
    controller = start(how=how)
    assert controller.process.wait() == code
    if how != "os._exit":
        assert controller.left() == []  # it cleaned up itself, before it ended
    controller.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_after_a_signal_to_the_controller(start: Start, number: int) -> None:
    controller = start()
    controller.end(number)
    controller.assert_nothing_left()


def test_after_ctrl_c_to_the_whole_group(start: Start) -> None:
    """A terminal sends SIGINT to the controller's group: ranks must not die of it first."""
    controller = start(how="poll")
    os.killpg(controller.process.pid, signal.SIGINT)
    out, error = controller.process.communicate()
    assert "KeyboardInterrupt" in error
    assert out == ""  # no rank's end was seen before
    controller.assert_nothing_left()


def test_after_sigkill_of_the_controller_while_ranks_wait_in_a_collective(start: Start) -> None:
    controller = start(entry="collective", preload=TORCH)
    controller.end(signal.SIGKILL)
    controller.assert_nothing_left()


def test_after_sigkill_of_the_server_while_ranks_wait_in_a_collective(start: Start) -> None:
    controller = start(entry="collective", preload=TORCH, how="poll")
    os.kill(controller.told["server"], signal.SIGKILL)
    out, _ = controller.process.communicate(timeout=PROMISED)
    assert "rank 0 killed by SIGKILL (9); the fork server was killed by signal 9" in out
    assert controller.process.returncode == 0
    controller.assert_nothing_left()


def test_after_sigkill_of_the_server_of_a_controller_that_does_not_look(start: Start) -> None:
    """What ranks started, and the kernel does not end with them, is the guardian's."""
    controller = start(entry="parent")
    assert len(controller.started) == 10
    os.kill(controller.told["server"], signal.SIGKILL)
    eventually(lambda: not any(map(alive, controller.started)), within=PROMISED)
    assert not set(controller.told["ranks"].values()) & _living()
    assert Path(controller.told["scratch"]).exists()  # the controller still needs it
    controller.end(signal.SIGKILL)
    controller.assert_nothing_left()


def test_after_sigkill_of_the_controller_with_a_stopped_server(start: Start) -> None:
    controller = start(entry="parent")
    os.kill(controller.told["server"], signal.SIGSTOP)
    controller.end(signal.SIGKILL)
    controller.assert_nothing_left()


def test_after_sigkill_of_the_controller_with_stopped_ranks(start: Start) -> None:
    controller = start(entry="parent")
    for pid in controller.told["ranks"].values():
        os.kill(pid, signal.SIGSTOP)
    controller.end(signal.SIGKILL)
    controller.assert_nothing_left()


def test_after_sigkill_of_the_controller_while_the_server_imports(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is deaf then: a large import takes longer than was promised."""
    (tmp_path / "fleet_slow_import.py").write_text("import time; time.sleep(1000)")
    monkeypatch.chdir(tmp_path)  # the first entry of the path of `python -m`
    controller = start(preload="fleet_slow_import", how="die while importing")
    scratch = Path(controller.told["scratch"])
    [token] = eventually(lambda: _tokens(scratch))
    controller.told["token"] = token
    eventually(lambda: len(under(token)) == 2)
    controller.end(signal.SIGKILL)
    controller.assert_nothing_left()


def test_after_sigkill_of_controller_server_and_guardian_at_once(start: Start) -> None:
    """Then the next run that starts does it."""
    controller = start(entry="parent")
    token, ranks = controller.told["token"], set(controller.told["ranks"].values())
    minders = {
        stat.ident.pid for stat in under(token) if stat.name in (b"sp:server", b"sp:guardian")
    }
    assert len(minders) == 2
    for pid in minders:
        os.kill(pid, signal.SIGSTOP)
    for pid in (controller.process.pid, *minders):
        os.kill(pid, signal.SIGKILL)
    controller.process.wait()
    eventually(lambda: not ranks & _living(), within=PROMISED)
    assert under(token)  # children of the ranks, and nobody is left to end them
    # One that was given another environment bears no mark: the one kind that is not found.
    unmarked = {message["no environment"] for message in controller.told["messages"]}
    assert sweep(controller.root) == [Path(controller.told["scratch"])]
    left = controller.left()
    assert {ident.pid for ident in left if isinstance(ident, Ident)} == unmarked
    assert len(left) == 2


def test_after_sigkill_of_the_guardian(start: Start) -> None:
    controller = start()
    [guardian] = [stat for stat in under(controller.told["token"]) if stat.name == b"sp:guardian"]
    os.kill(guardian.ident.pid, signal.SIGKILL)
    controller.end(signal.SIGKILL)
    controller.assert_nothing_left()


def test_after_sigkill_of_a_rank_that_is_a_controller_itself(start: Start) -> None:
    """A test of the plugin runs pytest in a rank: fleets nest."""
    controller = start(entry="nested")
    inner = [message["token"] for message in controller.told["messages"]]
    assert all(under(token) for token in inner)
    for pid in controller.told["ranks"].values():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(under(token) for token in inner), within=PROMISED)
    controller.end(signal.SIGINT)
    sweep(controller.root)
    controller.assert_nothing_left()


def _living() -> set[int]:
    return {pid for pid, stat in scan().items() if not stat.dead}


def _tokens(scratch: Path) -> list[str]:
    path = scratch / ".tokens"
    return path.read_text().split() if path.exists() else []


def test_a_dead_process_is_not_taken_for_a_living_one() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    stat = eventually(lambda: (found := read_stat(child)) and found.dead and found)
    assert child not in _living()
    os.waitpid(child, 0)
    assert stat
