"""Ranks that compute: torch after a fork, and collectives that never end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fleet_support import LIMIT, ends, eventually, messages, under

from shardproof.fleet import DEFAULT_PRELOAD, ForkServer, Message, make_scratch
from shardproof.fleet.processes import alive, read_stat

HARNESS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    root = tmp_path_factory.mktemp("scratch")
    with ForkServer(preload=DEFAULT_PRELOAD, scratch=make_scratch(root=root)) as server:
        yield server
    assert under(server.token) == set()
    assert list(root.iterdir()) == []


def test_ranks_have_torch_and_one_thread(server: ForkServer) -> None:
    fleet = server.fork(size=2, entry="tests.fleet_support:report", setup={}, label="x")
    for message in messages(fleet, 2):
        assert message.payload["modules"] == ["torch"]
        assert message.payload["threads"] == 1
    fleet.stop()


def test_the_default_preload_starts_no_thread(server: ForkServer) -> None:
    server.start()
    [stat] = [stat for stat in under(server.token) if stat.ident.pid == server.pid]
    assert len(list(Path(f"/proc/{stat.ident.pid}/task").iterdir())) == 1


def test_ranks_that_wait_in_a_collective(server: ForkServer, tmp_path: Path) -> None:
    """Stacks are seen from inside C++, and ranks are killed there."""
    fleet = server.fork(
        size=3,
        entry="tests.fleet_support:collective",
        setup={"store": str(tmp_path / "store")},
        label="x",
    )
    messages(fleet, 3)

    def waiting() -> dict[int, str] | None:
        stacks = fleet.stacks()
        there = all("in all_reduce" in stacks[rank] for rank in (0, 1))
        return stacks if there and "in receive" in stacks[2] else None

    stacks = eventually(waiting)
    assert "in collective" in stacks[0]
    assert "in all_reduce" not in stacks[2]
    os.kill(fleet.ranks[1].pid, signal.SIGSTOP)
    eventually(lambda: (stat := read_stat(fleet.ranks[1].pid)) and stat.state == "T")
    fleet.kill()
    assert not any(alive(rank.ident) for rank in fleet.ranks)
    assert {end.signal for end in fleet.exits.values()} == {signal.SIGKILL}


def test_the_root_is_the_earliest_when_peers_fail_of_it(server: ForkServer, tmp_path: Path) -> None:
    """Gloo fails on the peers of a rank that dies; they must not seem to have failed first."""
    fleet = server.fork(
        size=2,
        entry="tests.fleet_support:collective",
        setup={"store": str(tmp_path / "store")},
        label="x",
    )
    messages(fleet, 2)
    eventually(lambda: "in all_reduce" in fleet.stacks()[0])
    os.kill(fleet.ranks[1].pid, signal.SIGKILL)
    reported = sorted(ends(fleet).values(), key=lambda end: end.at)
    assert [end.rank for end in reported] == [1, 0]
    assert reported[1].code == 1
    assert "Connection closed by peer" in fleet.output(0).stderr


def test_a_worker_of_xdist_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, signal
            from shardproof.fleet import ForkServer, make_scratch
            from tests.fleet_support import messages

            def test_dies():
                here = pathlib.Path(__file__).parent
                server = ForkServer(preload=(), scratch=make_scratch(root=here / "root"))
                fleet = server.fork(
                    size=2, entry="tests.fleet_support:deaf", setup={}, label="x"
                )
                messages(fleet, 2)
                (here / "token").write_text(server.token)
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    root = tmp_path / "root"
    root.mkdir()
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n1",
            "-q",
            "-p",
            "no:shardproof",
            "--max-worker-restart=0",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HARNESS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "worker 'gw0' crashed" in result.stdout, result.stdout + result.stderr
    token = (tmp_path / "token").read_text()
    eventually(lambda: not under(token) and not list(root.iterdir()), within=5.0)


def test_warm_ranks_answer_again_and_again(server: ForkServer) -> None:
    fleet = server.fork(size=4, entry="tests.fleet_support:echo", setup={}, label="x")
    messages(fleet, 4)
    for number in range(100):
        fleet.send(None, {"type": "question", "number": number})
        answers = messages(fleet, 4)
        assert [answer.payload["number"] for answer in answers] == [number] * 4
        assert isinstance(answers[0], Message)
    assert {end.code for end in fleet.stop(LIMIT).values()} == {0}
