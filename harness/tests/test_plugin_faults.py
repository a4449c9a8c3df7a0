"""Ranks that die, raise, hang or disagree: the right outcome and root in time, and a case after."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardproof.controller.reports import failing_text
from shardproof.controller.traces import RankTrace
from shardproof.fleet.cleanup import _LOCK, scratch_root

PREAMBLE = """
    import os
    import signal
    import time
    import pytest
    import torch
    import torch.distributed as dist

    def wait_for_peers(rank):
        dist.all_reduce(torch.ones(2))
"""
TIMEOUT = 8.0

FAULTS = {
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "crashed",
        "killed by SIGKILL (9) during call",
    ),
    "aborts": ("os.abort()", "crashed", "killed by SIGABRT (6) during call"),
    "exits": ("os._exit(3)", "crashed", "exited with code 3 during call"),
    "raises": (
        "raise RuntimeError('the real cause')",
        "raised",
        "raised in call: RuntimeError: the real cause",
    ),
    "sleeps": ("time.sleep(10_000)", "hung", "still in call"),
    "skips": ("pytest.skip('only here')", "ranks disagree", "skipped in call: only here"),
}


@pytest.mark.parametrize("root", [0, 1])
def test_each_fault_of_one_rank_has_its_outcome(pytester: pytest.Pytester, root: int) -> None:
    """Killed, exited, raising, sleeping and skipping ranks, each with a passing case after it."""
    cases = "".join(
        f"""
    @pytest.mark.parity("cp2")
    def test_{fault}(rank):
        rank.observe("x", torch.ones(3))
        if rank.is_reference:
            return
        print("before {fault}")
        if rank.coordinates["cp"] == {root}:
            {code}
        wait_for_peers(rank)

    @pytest.mark.parity("cp2")
    def test_after_{fault}(rank):
        rank.observe("x", torch.ones(3))
        if not rank.is_reference:
            wait_for_peers(rank)
    """
        for fault, (code, _, _) in FAULTS.items()
    )
    pytester.makepyfile(PREAMBLE + cases)
    result = pytester.runpytest("--parity-timeout", str(TIMEOUT))
    result.assert_outcomes(failed=len(FAULTS), passed=len(FAULTS))
    lines = (pytester.path / "reports/latest/run.jsonl").read_text("utf-8").splitlines()
    cells = {cell["case"].partition("::")[2]: cell for cell in map(json.loads, lines[1:])}
    text = result.stdout.str()
    for fault, (_, outcome, words) in FAULTS.items():
        cell = cells[f"test_{fault}"]
        assert (cell["outcome"], cell["root"]) == (outcome, root), fault
        assert words in cell["ranks"][root], fault
        assert cell["seconds"] < (TIMEOUT + 2 if outcome == "hung" else 4), fault
        assert f"rank {root}" in cell["message"], fault
        assert f"before {fault}" in text
        assert f"reproduce: {cell['reproduce']}" in text
        if outcome != "crashed":
            # The rank that waits is shown with its stack, inside the collective.
            assert f"stack of rank {1 - root}" in cell["message"], fault
            stack = cell["message"].partition(f"stack of rank {1 - root}")[2]
            shown = stack.partition("of rank")[0]
            assert "all_reduce" in shown, fault
            assert "in wait_for_peers" in shown, fault
            assert "frames of pytest and shardproof" in shown, fault
            assert "pluggy" not in shown, fault
        assert cells[f"test_after_{fault}"]["outcome"] == "passed", fault
    # What the fault handler wrote as the rank died.
    crash = text.partition("Fatal Python error: Aborted")[2].partition("____ ")[0]
    assert "in test_aborts" in crash
    assert "frames of pytest and shardproof" in crash
    assert "pluggy" not in crash
    assert "Extension modules:" not in text


def test_a_rank_that_dies_in_setup_or_teardown(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        PREAMBLE
        + """
    @pytest.fixture
    def dies(request, rank):
        when = request.param
        if not rank.is_reference and rank.coordinates["cp"] == 1 and when == "setup":
            os._exit(4)
        yield
        if not rank.is_reference and rank.coordinates["cp"] == 1 and when == "teardown":
            os._exit(5)

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("dies", ["setup", "teardown", "never"], indirect=True)
    def test_it(rank, dies):
        if not rank.is_reference:
            wait_for_peers(rank)
        rank.observe("x", torch.ones(3))

    @pytest.fixture
    def raises_on_one(rank):
        yield
        if not rank.is_reference and rank.coordinates["cp"] == 1:
            raise RuntimeError("teardown of one rank")

    @pytest.mark.parity("cp2")
    def test_teardown(rank, raises_on_one):
        rank.observe("x", torch.ones(3))
    """
    )
    result = pytester.runpytest("--parity-timeout", "20")
    result.assert_outcomes(passed=3, errors=3)
    text = result.stdout.str()
    assert "exited with code 4 during setup" in text
    assert "exited with code 5 during teardown" in text
    assert "teardown failed on rank 1" in text
    assert "teardown of one rank" in text


def test_marker_timeout_and_a_loop_that_never_ends(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        PREAMBLE
        + """
    @pytest.mark.parity("cp2", timeout=3)
    def test_loop(rank):
        rank.observe("x", torch.ones(3))
        while not rank.is_reference and rank.coordinates["cp"] == 0:
            pass

    @pytest.mark.parity("cp2", timeout=3)
    def test_reference_hangs(rank):
        rank.observe("x", torch.ones(3))
        while rank.is_reference:
            pass

    @pytest.mark.parity("cp2")
    def test_after(rank):
        rank.observe("x", torch.ones(3))
    """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, failed=1, errors=1)
    lines = (pytester.path / "reports/latest/run.jsonl").read_text("utf-8").splitlines()
    loop, hangs = (json.loads(line) for line in lines[1:3])
    assert (loop["outcome"], loop["root"]) == ("hung", 0)
    assert 3 <= loop["seconds"] < 5
    assert "ended its body, waiting for the verdict" in loop["ranks"][1]
    assert hangs["outcome"] == "reference failed"


def test_ranks_that_go_different_ways_are_told_apart(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        PREAMBLE
        + """
    def other(rank, index=1):
        return not rank.is_reference and rank.coordinates["cp"] == index

    @pytest.mark.parity("cp2", timeout=4)
    def test_one_waits_alone(rank):
        rank.observe("x", torch.ones(3))
        if other(rank):
            dist.barrier()

    @pytest.mark.parity("cp2")
    def test_one_observes_less(rank):
        if not other(rank):
            rank.observe("only_on_one", torch.ones(3))
        rank.observe("both", torch.ones(3))

    @pytest.mark.parity("cp2")
    def test_one_expects_to_fail(rank):
        rank.observe("x", torch.ones(3) * (2 if other(rank, 0) else 1))
        if other(rank):
            pytest.xfail("known")

    @pytest.mark.parity("cp2")
    def test_a_forked_child_does_not_speak_for_its_rank(rank):
        x = torch.ones(3)
        if other(rank) and os.fork():
            x = x + 1  # the rank is wrong, its child is right
        rank.observe("x", x)

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("n", range(3))
    def test_after(rank, n):
        rank.observe("x", torch.ones(3))
    """
    )
    result = pytester.runpytest("--parity-timeout", "20")
    result.assert_outcomes(failed=4, passed=3)
    lines = (pytester.path / "reports/latest/run.jsonl").read_text("utf-8").splitlines()
    cells = {cell["case"].partition("::test_")[2]: cell for cell in map(json.loads, lines[1:])}
    alone = cells["one_waits_alone"]
    assert (alone["outcome"], alone["root"]) == ("mismatched collectives", 0)
    assert "rank 0 never called barrier" in alone["message"]
    less = cells["one_observes_less"]
    assert less["outcome"] == "ranks disagree"
    assert "only_on_one" in less["message"]
    assert "and not on rank 1" in less["message"]
    assert cells["one_expects_to_fail"]["outcome"] == "ranks disagree"
    assert cells["a_forked_child_does_not_speak_for_its_rank"]["outcome"] == "diverged"


def test_a_hang_at_import_on_ranks_ends(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks import test modules as they start: that has a limit too, and is not tried again."""
    monkeypatch.setattr("shardproof.controller.fleets._LEAST_START_LIMIT", 3.0)
    pytester.makepyfile(
        PREAMBLE
        + """
    if os.environ.get("RANK"):
        time.sleep(10_000)

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("n", range(3))
    def test_it(rank, n):
        rank.observe("x", 1)
    """
    )
    result = pytester.runpytest("--parity-timeout", "3")
    result.assert_outcomes(errors=3)
    text = result.stdout.str()
    assert "were not ready within 3 s" in text
    assert "time.sleep(10_000)" in text or "in <module>" in text
    assert "not tried again" in text
    assert "frames of pytest and shardproof" in text


def test_a_crash_at_import_on_ranks_is_shown_without_what_ran_it(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        PREAMBLE
        + """
    if os.environ.get("RANK"):
        os.abort()

    @pytest.mark.parity("cp2")
    def test_it(rank):
        rank.observe("x", 1)
    """
    )
    result = pytester.runpytest("--parity-timeout", "20")
    result.assert_outcomes(errors=1)
    text = result.stdout.str()
    assert "killed by SIGABRT (6) at start" in text
    assert "in <module>" in text
    assert "frames of pytest and shardproof" in text
    assert "pluggy" not in text.partition("Fatal Python error: Aborted")[2]


@pytest.mark.parametrize("place", ["stack", "stderr"])
def test_a_reference_that_hangs_or_crashes_is_shown_without_what_ran_it(place: str) -> None:
    stack = f'Thread 0x1 (most recent call first):\n  File "/x/case.py", line 3 in f\n{_OURS}'
    trace = RankTrace(0)
    setattr(trace, place, stack)
    text = failing_text(trace)
    assert text.splitlines()[-2:] == [
        '  File "/x/case.py", line 3 in f',
        "  ... 1 frame of pytest and shardproof",
    ]


_OURS = f'  File "{failing_text.__code__.co_filename}", line 1 in failing_text\n'


def _marked(token: str) -> list[int]:
    """Processes whose environment holds ``token``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if token.encode() in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL", "SIGKILL a worker"])
def test_nothing_survives_the_session(pytester: pytest.Pytester, how: str) -> None:
    """Ranks wait in a collective that never ends; the controller ends; within 5 s all is gone."""
    pytester.makepyfile(
        PREAMBLE
        + """
    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("n", [0, 1])
    def test_waits(rank, n):
        rank.observe("x", torch.ones(3))
        if not rank.is_reference:
            if rank.coordinates["cp"] == 0:
                open(f"waiting{os.environ.get('PYTEST_XDIST_WORKER', '')}", "w").close()
                wait_for_peers(rank)
            time.sleep(10_000)
    """
    )
    token = f"parity-leftovers-{os.getpid()}-{how.replace(' ', '-')}"
    args = ["-n", "2", "--dist", "load"] if how.endswith("worker") else []
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=pytester.path,
        env={**os.environ, "PARITY_TOKEN": token},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        workers = 2 if args else 1
        _until(lambda: len(list(pytester.path.glob("waiting*"))) == workers, 90)
        scratch = _scratch_of({process.pid, *_children(process.pid)})
        assert len(scratch) == workers
        if how == "SIGINT":
            os.kill(process.pid, signal.SIGINT)
        elif how == "SIGKILL":
            os.kill(process.pid, signal.SIGKILL)
        else:
            for pid in _children(process.pid):
                os.kill(pid, signal.SIGKILL)
            os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        _until(lambda: not _marked(token), 5)
        _until(lambda: not any(path.exists() for path in scratch), 5)
    finally:
        for pid in _marked(token):
            os.kill(pid, signal.SIGKILL)


def _scratch_of(pids: set[int]) -> list[Path]:
    """The private directories of controllers; other runs on this machine have theirs beside."""
    found = []
    for lock in scratch_root().glob(f"shardproof-*/{_LOCK}"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(lock.read_text())["pid"] in pids:
                found.append(lock.parent)
    return found


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def _until(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
