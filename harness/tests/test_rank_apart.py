"""Runs in a process of their own leave nothing, and end their parent as they end themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
from tests.plugin_support import read_run


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    lead = "import os, signal, sys, time\nfrom shardproof.rank.apart import run_apart\n"
    return subprocess.run(
        [sys.executable, "-c", lead + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_what_a_run_does_is_gone_with_it() -> None:
    ended = run_script(
        """
        seen = []
        def run():
            seen.append(1)
            print("ran", seen, os.getpid() != parent)
        parent = os.getpid()
        run_apart(run)
        run_apart(run)
        print("here", seen)
        """
    )
    assert ended.stdout.splitlines() == ["ran [1] True", "ran [1] True", "here []"]
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("os._exit(7)", 7, ""),
        ("os._exit(0)", 0, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_its_parent_ends_as_it_does(body: str, code: int, said: str) -> None:
    ended = run_script(
        f"""
        def run():
            {body}
        run_apart(run)
        print("went on")
        """
    )
    assert ended.returncode == code
    assert said in ended.stderr
    assert ended.stdout == ""


def test_whoever_asks_the_parent_for_a_stack_gets_that_of_the_run(tmp_path: object) -> None:
    ended = run_script(
        f"""
        from pathlib import Path
        from shardproof.fleet.stacks import STACK_SIGNAL, enable_stacks
        path = Path({str(tmp_path)!r}) / "stacks"
        enable_stacks(path)
        def deep_in_the_run():
            os.kill(parent, STACK_SIGNAL)
            until = time.monotonic() + 10
            while "in deep_in_the_run" not in path.read_text() and time.monotonic() < until:
                time.sleep(0.01)
        parent = os.getpid()
        run_apart(deep_in_the_run)
        print(path.read_text())
        os.kill(parent, STACK_SIGNAL)
        print("again", path.read_text().count("most recent call first"))
        """
    )
    assert ended.stderr == ""
    assert "in deep_in_the_run" in ended.stdout
    assert "again 2" in ended.stdout


WITH_THREADS = """
    import threading
    import pytest
    import torch
    import torch.distributed as dist

    {start}
    KEPT = []

    @pytest.mark.parity("cp2")
    def test_it(rank):
        assert not KEPT, "ranks that ran before"
        KEPT.append(1)
        x = torch.arange(1.0, 5.0, dtype=rank.dtype) / 3
        if rank.is_reference:
            KEPT.clear()
            x = 2 * x
        else:
            dist.all_reduce(x, group=rank.group("cp"))
        rank.observe("x", x)
"""


@pytest.mark.parametrize(
    "start", ["", "threading.Thread(target=threading.Event().wait, daemon=True).start()"]
)
def test_mutants_run_on_untouched_ranks_with_and_without_threads(
    pytester: pytest.Pytester, start: str
) -> None:
    """A process with threads can't be forked, so each run has ranks of its own."""
    pytester.makepyfile(WITH_THREADS.format(start=start))
    run = pytester.runpytest_subprocess("--mutants", "all", "--parity-fresh")
    _, (cell,) = read_run(pytester)
    assert cell["outcome"] == "passed"
    assert {trial["result"] for trial in cell["mutants"]} == {"killed"}
    assert len(cell["mutants"]) > 4
    assert run.ret == 0
