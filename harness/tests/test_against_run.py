"""Runs with ``--against``: each conclusion, what is reported of it, and the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.against_support import (
    CASE,
    GATHERED,
    LOCAL_ROWS,
    cells_of,
    commit,
    conclusions,
    dedent,
    git,
    state,
    write,
)
from tests.fleet_support import eventually
from tests.plugin_support import read_run

from shardproof.against.report import lines_of
from shardproof.fleet.processes import Ident, alive, identify

HARNESS = Path(__file__).resolve().parents[1]
INI = "[pytest]\npythonpath = .\nshardproof_subject = mine\n"

PARENT = dedent(LOCAL_ROWS) + dedent(
    """
        import os

        def scale(x):
            return x * 2

        def total(x):
            return x.sum()

        def count(x):
            return len(x) - 1

        def strict(x):
            raise ValueError("an empty shard")

        def asserts(x):
            assert x is None, "inside the subject"

        def dies(rank):
            if not rank.is_reference and rank.index == 1:
                os._exit(3)

        def reduces(rank, x):
            import torch.distributed as dist
            odd = not rank.is_reference and rank.index == 1
            dist.all_reduce(x, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)

        def summed(rank, x):
            return x
        """
)
CHECKOUT = dedent(GATHERED) + dedent(
    """
        def scale(x, by=2):
            return x * by

        def total(x):
            import torch.distributed as dist
            return x.sum() * dist.get_world_size()

        def count(x):
            return len(x)

        def strict(x):
            return x

        def asserts(x):
            pass

        def dies(rank):
            pass

        def reduces(rank, x):
            import torch.distributed as dist
            dist.all_reduce(x)

        def summed(rank, x):
            if not rank.is_reference:
                reduces(rank, x)
            return x

        def added(x):
            return x + 1
        """
)
CASES = """
    import pytest
    import torch
    import mine

    def values(rank):
        return torch.randn(11, 8, generator=rank.generator("x"), dtype=rank.dtype)

    @pytest.mark.parity("single", "cp2", fixes="#911")
    def test_gather(rank):
        rank.observe("hidden", mine.gather(rank, values(rank), rank.rows(11)))

    @pytest.mark.parity("cp2")
    def test_vacuous(rank):
        rank.observe("scaled", mine.scale(values(rank)))

    @pytest.mark.parity("cp2", fixes="#912")
    def test_must_be_caught(rank):
        rank.observe("scaled", mine.scale(values(rank)))

    @pytest.mark.parity("cp2")
    def test_asserts(rank):
        rank.observe("x", values(rank))
        assert mine.count([1, 2]) == 2

    @pytest.mark.parity("cp2")
    def test_dies(rank):
        mine.dies(rank)
        rank.observe("x", values(rank))

    @pytest.mark.parity("cp2")
    def test_mismatched(rank):
        mine.reduces(rank, torch.zeros(2))
        rank.observe("x", values(rank))

    @pytest.mark.parity("cp2")
    def test_sum(rank):
        x = values(rank)[rank.rows(11)]
        rank.observe("squares", mine.summed(rank, x.T @ x))

    @pytest.mark.parity("cp2")
    def test_attribute(rank):
        rank.observe("x", mine.added(values(rank)))

    @pytest.mark.parity("cp2")
    def test_argument_of_ranks(rank):
        x = values(rank)
        rank.observe("x", x * 3 if rank.is_reference else mine.scale(x, by=3))

    @pytest.mark.parity("cp2")
    def test_regression(rank):
        rank.observe("total", mine.total(values(rank)))

    @pytest.mark.parity("cp2")
    def test_both(rank):
        x = values(rank)
        rank.observe("x", x if rank.is_reference else mine.scale(x))

    @pytest.mark.parity("cp2")
    def test_error(rank):
        rank.observe("x", mine.strict(values(rank)))

    @pytest.mark.parity("cp2")
    def test_assertion_of_the_subject(rank):
        mine.asserts(rank)
        rank.observe("x", values(rank))

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize(
        "n", [pytest.param(1, marks=pytest.mark.parity(fixes="#913", fixes_raises=ValueError))]
    )
    def test_error_that_is_the_bug(rank, n):
        rank.observe("x", mine.strict(values(rank)))

    @pytest.mark.parity("cp2")
    def test_skipped(rank):
        pytest.skip("not today")

    def test_plain():
        raise RuntimeError("a control runs no plain tests")
"""
NEW_MODULE = """
    import pytest
    import torch
    from mine.new import thing

    @pytest.mark.parity("cp2")
    def test_import(rank):
        rank.observe("x", thing(torch.ones(3)))
"""


@pytest.fixture(autouse=True)
def no_worktree_is_left(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After each run in this process, whatever its end."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.rglob("tree-*"))


def test_every_conclusion_in_one_run(pytester: pytest.Pytester) -> None:
    """The parent returns rank-local rows, and much else; the checkout's changes are uncommitted."""
    commit(pytester.path, {"pytest.ini": INI, "mine/__init__.py": PARENT})
    write(
        pytester.path,
        {
            "mine/__init__.py": CHECKOUT,
            "mine/new.py": "def thing(x):\n    return x * 4",
            "test_it.py": CASES,
            "test_new.py": NEW_MODULE,
        },
    )
    before = state(pytester.path)
    result = pytester.runpytest("-p", "no:cacheprovider", "--against", "HEAD", "-v")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert state(pytester.path) == before
    assert conclusions(pytester.path) == {
        "test_gather single": "vacuous for this change",
        "test_gather cp2": "caught",
        "test_vacuous cp2": "vacuous for this change",
        "test_must_be_caught cp2": "vacuous for this change",
        "test_asserts cp2": "caught",
        "test_dies cp2": "caught",
        "test_mismatched cp2": "caught",
        "test_sum cp2": "caught",
        "test_attribute cp2": "not runnable there",
        "test_argument_of_ranks cp2": "not runnable there",
        "test_regression cp2": "regression",
        "test_both cp2": "fails on both",
        "test_error cp2": "error there",
        "test_assertion_of_the_subject cp2": "error there",
        "test_error_that_is_the_bug[1] cp2": "caught",
        "test_skipped cp2": "not judged",
        "test_import cp2": "not runnable there",
    }
    result.assert_outcomes(passed=13, failed=3, skipped=1, deselected=1)
    text = result.stdout.str()
    lines = [
        "shardproof: against HEAD (*) 'parent', subject: mine",
        "  what differs in the subject: 2 files (mine/__init__.py, mine/new.py)",
        "*the checkout as it is now, uncommitted changes included: 2 files (*, mine/new.py)",
        "*test_gather[[]cp2[]] CAUGHT*",
        "*test_vacuous[[]cp2[]] VACUOUS FOR THIS CHANGE*",
        "not caught: test_it.py::test_must_be_caught says fixes='#912', so it must fail at HEAD*",
        "  cp2: vacuous for this change",
        "*- against HEAD (*): regression -*",
        "*- against HEAD (*): fails on both -*",
        "there: HEAD (*); here: the checkout",
        "case *topology *there *here *conclusion",
        "*test_gather *cp2 *DIVERGED * 0.00 * caught (fixes #911)",
        "caught: test_it.py::test_gather, cp2",
        "  hidden: diverged: another shape: expected float64[[]11, 8[]], got float64[[]6, 8[]]",
        "  *rank-local rows returned: the ranks along cp hold 6 + 5 of 11 in dimension 0*",
        "caught: test_it.py::test_asserts, cp2",
        "  AssertionError: assert 1 == 2",
        "caught: test_it.py::test_sum, cp2",
        "  squares: diverged: *",
        "    8 of 8 rows fail: *",
        "    *: the all-reduce over cp is missing (or say partial=('cp',))",
        "not runnable there: test_it.py::test_attribute, cp2",
        "  AttributeError: module 'mine' has no attribute 'added'",
        "not runnable there: test_it.py::test_argument_of_ranks, cp2",
        "  TypeError: scale() got an unexpected keyword argument 'by'",
        "error there: test_it.py::test_error, cp2",
        "  ValueError: an empty shard",
        "not runnable there: test_new.py::test_import, cp2",
        "  ModuleNotFoundError: No module named 'mine.new'",
        "6 caught, 3 vacuous for this change, 1 regression, 3 not runnable there, 2 error there, *",
        "not caught: test_it.py::test_must_be_caught (fixes #912)",
    ]
    result.stdout.fnmatch_lines(lines)
    assert "a control runs no plain tests" not in text
    header, _ = read_run(pytester)
    assert header["against"] == {
        "text": "HEAD",
        "paths": ["mine"],
        "commit": git(pytester.path, "rev-parse", "HEAD"),
        "changed": ["mine/__init__.py", "mine/new.py"],
    }
    cells = cells_of(pytester.path)
    caught = cells["test_gather cp2"]
    assert (caught["outcome"], caught["against"]["there"]["outcome"]) == ("passed", "diverged")
    assert caught["against"]["there"]["how"] == "verdict"
    assert "--against HEAD" in caught["against"]["there"]["message"]
    assert cells["test_asserts cp2"]["against"]["there"]["how"] == "assertion"
    assert cells["test_dies cp2"]["against"]["there"]["outcome"] == "crashed"
    mismatched = cells["test_mismatched cp2"]["against"]["there"]
    assert (mismatched["outcome"], mismatched["how"]) == ("mismatched collectives", "verdict")
    assert cells["test_must_be_caught cp2"]["against"]["unmet"] is True
    # Files of the other side are named by its revision, since their folder is gone.
    inside = cells["test_assertion_of_the_subject cp2"]["against"]["there"]
    assert "HEAD:mine/__init__.py" in inside["message"]
    assert "unmet" not in caught["against"]
    assert cells["test_regression cp2"]["outcome"] == "diverged"
    # The failure here is shown, and run again, as any other.
    assert "--against" not in cells["test_regression cp2"]["reproduce"]


def test_a_run_that_notices_nothing_says_so() -> None:
    """And not when some of it was no verdict on what differs."""
    cell = {"case": "test_it.py::test_it", "topology": "cp2"}
    passes = {**cell, "against": {"conclusion": "vacuous for this change", "there": {}}}
    lacks = {**cell, "against": {"conclusion": "not runnable there", "there": {}}}

    def said(*cells: dict[str, Any]) -> list[str]:
        return lines_of(cells, label="HEAD", shown=lambda _: "0.00", short=str)

    nothing = "no case of this run notices what differs: all pass there as they do here"
    assert nothing in said(passes, passes)
    assert nothing not in said(passes, lacks)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("fixes=911", "fixes must name what the change mends, '#911', got 911"),
        ("fixes_raises=ValueError", "there is no fixes"),
        ("fixes='#1', fixes_raises=[3]", "must be exceptions or their names, got 3"),
    ],
)
def test_marks_that_cannot_be_met_are_invalid(
    pytester: pytest.Pytester, args: str, says: str
) -> None:
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.parity("cp2", {args})
        def test_it(rank):
            raise RuntimeError("no rank may start")
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*{says.replace('[', '[[]')}*"])


class TestWrongCode:
    def test_a_subject_loaded_by_its_file_stops_the_run(self, pytester: pytest.Pytester) -> None:
        conftest = """
            import importlib.util, sys
            from pathlib import Path

            file = Path(__file__).parent / "mine" / "__init__.py"
            spec = importlib.util.spec_from_file_location("mine", file)
            sys.modules["mine"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["mine"])
        """
        commit(
            pytester.path,
            {"pytest.ini": INI, "mine/__init__.py": LOCAL_ROWS, "conftest.py": conftest},
        )
        case = CASE.format(module="mine")
        write(pytester.path, {"mine/__init__.py": GATHERED, "test_a.py": case, "test_b.py": case})
        result = pytester.runpytest("-p", "no:cacheprovider", "--against", "HEAD")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        file = pytester.path / "mine/__init__.py"
        result.stdout.fnmatch_lines(
            [
                "wrong code under test: there, on rank 0",
                f"  mine was imported from {file}, expected from HEAD:mine",
                "*! wrong code under test: there, on rank 0 !*",
            ]
        )
        assert conclusions(pytester.path) == {"test_gather cp2": "wrong code under test"}

    def test_an_installed_copy_here_stops_the_run(self, pytester: pytest.Pytester) -> None:
        """The checkout's changes would not be what runs here."""
        ini = INI.replace("pythonpath = .", "pythonpath = installed")
        commit(pytester.path, {"pytest.ini": ini, "mine/__init__.py": LOCAL_ROWS})
        write(
            pytester.path,
            {
                "mine/__init__.py": GATHERED,
                "installed/mine/__init__.py": GATHERED,
                "test_it.py": CASE.format(module="mine"),
            },
        )
        # Without the folder of the case before it on the import path.
        mode = "--import-mode=importlib"
        result = pytester.runpytest("-p", "no:cacheprovider", mode, "--against", "HEAD")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        copy = pytester.path / "installed/mine/__init__.py"
        place = pytester.path / "mine"
        result.stdout.fnmatch_lines(
            [
                "wrong code under test: here, on rank 0",
                f"  mine was imported from {copy}, expected from {place}",
            ]
        )

    def test_cases_that_import_nothing_of_it_prove_nothing(self, pytester: pytest.Pytester) -> None:
        case = """
            import pytest
            import torch

            @pytest.mark.parity("cp2")
            def test_it(rank):
                rank.observe("x", torch.arange(3))
        """
        commit(pytester.path, {"pytest.ini": INI, "mine/__init__.py": ""})
        write(pytester.path, {"mine/__init__.py": "x = 1", "test_it.py": case})
        result = pytester.runpytest("-p", "no:cacheprovider", "--against", "HEAD")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(
            ["wrong code under test: no rank imported a module of the subject (mine)*"]
        )


WAITS = """
    import os
    import time
    from pathlib import Path

    import pytest
    import torch
    import mine

    @pytest.mark.parity("cp2")
    def test_it(rank):
        rank.observe("x", torch.ones(3))
        if mine.THERE and not rank.is_reference:
            Path(os.environ["STARTED"], str(os.getpid())).touch()
            time.sleep(1000)
"""


class TestEnds:
    """A run that is ended while a case is in its body on the other side."""

    @pytest.fixture
    def temporary(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("temporary")

    def waiting(
        self, root: Path, temporary: Path, base: Path
    ) -> tuple[subprocess.Popen[str], list[Ident]]:
        """A run in a process group of its own, and its ranks that are in the body there."""
        started = Path(tempfile.mkdtemp(dir=base))
        # Where these tests run in the background of a shell, SIGINT is ignored, and that is
        # inherited.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "pytest"]
        command += ["-p", "no:cacheprovider", "--basetemp", str(started / "base")]
        env = {"TMPDIR": str(temporary), "PYTHONPATH": str(HARNESS), "STARTED": str(started)}
        process = subprocess.Popen(
            [*command, "--against", "HEAD"],
            cwd=root,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

        def ranks() -> list[Ident]:
            names = [path.name for path in started.iterdir() if path.name.isdigit()]
            return [ident for ident in map(identify, map(int, names)) if ident is not None]

        if not eventually(lambda: len(ranks()) == 2, within=200):
            process.kill()
            raise AssertionError(process.communicate()[0])
        return process, ranks()

    def test_a_killed_run_is_cleaned_up_by_the_next_and_ctrl_c_leaves_nothing(
        self, pytester: pytest.Pytester, temporary: Path, tmp_path: Path
    ) -> None:
        """Neither worktrees, nor what git notes of them, nor ranks."""
        root = pytester.path
        commit(root, {"pytest.ini": INI, "mine/__init__.py": "THERE = True"})
        write(root, {"mine/__init__.py": "THERE = False", "test_it.py": WAITS})
        before = state(root)

        process, ranks = self.waiting(root, temporary, tmp_path)
        process.kill()
        process.wait()
        assert eventually(lambda: not any(map(alive, ranks)), within=60)
        (left,) = temporary.glob("shardproof-*")
        assert str(left) in git(root, "worktree", "list")

        process, ranks = self.waiting(root, temporary, tmp_path)
        try:
            (own,) = temporary.glob("shardproof-*")
            assert own != left
            listed = git(root, "worktree", "list")
            assert str(own) in listed
            assert str(left) not in listed
            # The whole group, as a terminal does it.
            os.killpg(process.pid, signal.SIGINT)
            text = process.communicate(timeout=60)[0]
        finally:
            process.kill()
            process.wait()
        assert process.returncode == pytest.ExitCode.INTERRUPTED, text
        assert not any(map(alive, ranks)), text
        assert not list(temporary.glob("*shardproof-*")), text
        assert state(root) == before
