"""Cells as a pytest user sees them: fixtures, output, selection, verdicts, state, results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LAYER = """
    import os
    import sys
    import pytest
    import torch
    import torch.distributed as dist

    def summed(rank, value, axis):
        if not rank.is_reference:
            dist.all_reduce(value, group=rank.group(axis))
        return value
"""


def read_run(pytester: pytest.Pytester) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (pytester.path / "reports/latest/run.jsonl").read_text("utf-8").splitlines()
    header, *cells = [json.loads(line) for line in lines]
    return header, cells


def outcomes(pytester: pytest.Pytester) -> dict[str, str]:
    return {
        f"{c['case'].partition('::')[2]} {c['topology']}": c["outcome"]
        for c in read_run(pytester)[1]
    }


def test_cases_pass_and_fail_by_verdict(pytester: pytest.Pytester) -> None:
    """A sum over shards passes; a missing or doubled all-reduce diverges with its factor named."""
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2", "dp2xcp2", "single")
    @pytest.mark.parametrize("bug", ["none", "missing", "twice"])
    def test_loss(rank, bug):
        weights = torch.randn(40, 8, generator=rank.generator("w"))
        inputs = torch.randn(40, 8, generator=rank.generator("x"))
        rows = rank.rows(40)
        value = (weights[rows] * inputs[rows]).sum(0)
        if bug != "missing":
            value = summed(rank, value, "cp")
        if bug == "twice":
            value = summed(rank, value, "cp")
        rank.observe("value", value)
        rank.observe("rows", weights[rows] * 2, rows=rows)

    def test_plain_beside():
        assert "RANK" not in os.environ
    """
    )
    result = pytester.runpytest("-v")
    result.assert_outcomes(passed=3 + 2 + 1, failed=4)
    assert outcomes(pytester) == {
        "test_loss[none] cp2": "passed",
        "test_loss[missing] cp2": "diverged",
        "test_loss[twice] cp2": "diverged",
        "test_loss[none] dp2xcp2": "passed",
        "test_loss[missing] dp2xcp2": "diverged",
        "test_loss[twice] dp2xcp2": "diverged",
        "test_loss[none] single": "passed",
        "test_loss[missing] single": "passed",
        "test_loss[twice] single": "passed",
    }
    text = result.stdout.str()
    assert "value" in text
    name = Path(__file__).stem and "test_cases_pass_and_fail_by_verdict.py"
    assert f"pytest '{name}::test_loss[cp2-twice]' --topology cp2" in text
    header, cells = read_run(pytester)
    assert header["schema"] == 1
    assert header["dtype"] == "float64"
    passed = next(cell for cell in cells if cell["outcome"] == "passed")
    assert {o["name"] for o in passed["observations"]} == {"value", "rows"}
    assert all(o["ratio"] <= o["gate"] for o in passed["observations"])
    failed = next(cell for cell in cells if cell["outcome"] == "diverged")
    assert "--topology cp2" in failed["reproduce"]
    assert len(failed["ranks"]) == 2


def test_fixtures_of_every_scope_live_once_per_rank_process(pytester: pytest.Pytester) -> None:
    pytester.mkpydir("sub")
    pytester.makeconftest(
        """
        import os, pytest

        LOG = os.environ["PARITY_LOG"]

        def log(text):
            with open(LOG, "a") as file:
                file.write(f"{os.getpid()} {os.environ.get('RANK', '-')} {text}\\n")

        @pytest.fixture(scope="session")
        def once():
            log("session up")
            yield 3
            log("session down")
        """
    )
    (pytester.path / "sub/conftest.py").write_text(
        "import pytest\n"
        "from conftest import log\n"
        "@pytest.fixture(scope='module')\n"
        "def module():\n"
        "    log('module up')\n"
        "    yield 4\n"
        "    log('module down')\n",
        encoding="utf-8",
    )
    body = (
        "import os, pytest, torch\n"
        "from conftest import log\n"
        "@pytest.fixture\n"
        "def each(rank):\n"
        "    log('each up')\n"
        "    yield 5\n"
        "    log('each down')\n"
        "class TestIt:\n"
        "    @pytest.fixture(scope='class', autouse=True)\n"
        "    def klass(self):\n"
        "        log('class up')\n"
        "        yield\n"
        "        log('class down')\n"
        "    @pytest.mark.parity('cp2')\n"
        "    @pytest.mark.parametrize('n', [1, 2])\n"
        "    def test_it(self, rank, once, module, each, n):\n"
        "        rank.observe('x', once + module + each + n)\n"
        "def test_plain(module, once):\n"
        "    pass\n"
    )
    for name in ("test_a.py", "test_b.py"):
        (pytester.path / "sub" / name).write_text(body, encoding="utf-8")
    log = pytester.path / "log"
    pytester.syspathinsert()
    pytester._monkeypatch.setenv("PARITY_LOG", str(log))
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=6)
    by_process: dict[tuple[str, str], list[str]] = {}
    for line in log.read_text("utf-8").splitlines():
        pid, rank, text = line.split(" ", 2)
        by_process.setdefault((pid, rank), []).append(text)
    module = ["class up", *["each up", "each down"] * 2, "class down", "module down"]
    # Two ranks of cp2, once each: session fixtures once, module fixtures once for each module.
    ranks = [steps for (pid, rank), steps in by_process.items() if steps.count("each up") == 4]
    assert len(ranks) >= 2
    for steps in ranks:
        assert steps.count("session up") == steps.count("session down") == 1
        assert steps[-1] == "session down"
        assert steps.count("module up") == steps.count("module down") == 2
        assert [
            step for step in steps if step not in ("session up", "session down", "module up")
        ] == module * 2
    # The controller ran the plain tests' fixtures alone, each module's ended in time.
    controller = next(steps for (_, rank), steps in by_process.items() if rank == "-")
    assert controller == [
        "session up",
        "module up",
        "module down",
        "module up",
        "module down",
        "session down",
    ]


def test_assertions_output_and_tmp_path_on_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2")
    def test_rewritten(rank, tmp_path):
        print("printed by", rank.coordinates["cp"])
        os.write(2, b"written to descriptor 2\\n")
        values = [1, 2, 3]
        rank.observe("x", torch.ones(3))
        if not rank.is_reference:
            assert values == [1, 2, 4]

    @pytest.mark.parity("cp2")
    def test_shared_directory(rank, tmp_path, capsys):
        if rank.coordinates["cp"] == rank.size("cp") - 1:
            (tmp_path / "from_last").write_text("5")
        if not rank.is_reference:
            dist.barrier()
        rank.observe("x", int((tmp_path / "from_last").read_text()))
        assert len(list(tmp_path.iterdir())) == 1
        print("seen")
        assert capsys.readouterr().out == "seen\\n"
    """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*assert [[]1, 2, 3] == [[]1, 2, 4]",
            "*At index 2 diff: 3 != 4",
            "*rank 1: raised in call: *",
            "*reproduce: pytest *test_rewritten[[]cp2]* --topology cp2",
            "*Captured stdout rank 0*",
            "printed by 0",
            "*Captured stderr rank 0*",
            "written to descriptor 2",
            "*Captured stdout rank 1*",
            "printed by 1",
        ]
    )


def test_selection_options_stop_and_repeat(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("n", range(4))
    def test_n(rank, n):
        rank.observe("n", n)
        assert rank.is_reference or n not in (1, 2)
    """
    )
    result = pytester.runpytest("-x")
    result.assert_outcomes(passed=1, failed=1)
    result = pytester.runpytest("--maxfail=2")
    result.assert_outcomes(passed=1, failed=2)
    result = pytester.runpytest("--lf", "-v")
    result.assert_outcomes(failed=2)
    result = pytester.runpytest("--lf", "-k", "cp2-2", "--deselect", "nothing", "-W", "error")
    result.assert_outcomes(failed=1, deselected=1)


def test_skip_and_xfail_hold_on_all_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    def wrong(rank):
        rank.observe("x", torch.ones(5) * (1 if rank.is_reference else 2))

    @pytest.mark.parity("cp2")
    @pytest.mark.xfail(strict=True, reason="a known bug")
    def test_strict_on_a_verdict(rank):
        wrong(rank)

    @pytest.mark.parity("cp2")
    @pytest.mark.xfail(strict=True, reason="fixed long ago")
    def test_strict_passes(rank):
        rank.observe("x", torch.ones(5))

    @pytest.mark.parity("cp2")
    @pytest.mark.xfail(reason="may pass")
    def test_loose_passes(rank):
        rank.observe("x", torch.ones(5))

    @pytest.mark.parity("cp2")
    def test_xfail_in_body(rank):
        pytest.xfail("not written yet")

    @pytest.mark.parity("cp2")
    @pytest.mark.xfail(reason="of topologies")
    def test_reference_raises(rank):
        assert not rank.is_reference, "an oracle is never expected to fail"

    @pytest.mark.parity("cp2")
    def test_skip_in_body(rank):
        pytest.skip("nothing to see")

    @pytest.mark.parity("cp2")
    def test_skip_on_ranks(rank):
        rank.observe("x", torch.ones(5))
        if not rank.is_reference:
            pytest.skip("ranks have nothing to see")

    @pytest.mark.parity("cp2")
    def test_skip_on_one_rank(rank):
        if rank.coordinates["cp"] == 1:
            pytest.skip("only here")
        rank.observe("x", torch.ones(5))
    """
    )
    result = pytester.runpytest("-rsx")
    result.assert_outcomes(xfailed=2, failed=2, xpassed=1, skipped=2, errors=1)
    assert outcomes(pytester) == {
        "test_strict_on_a_verdict cp2": "xfailed",
        "test_strict_passes cp2": "raised",
        "test_loose_passes cp2": "xpassed",
        "test_xfail_in_body cp2": "xfailed",
        "test_reference_raises cp2": "reference failed",
        "test_skip_in_body cp2": "skipped",
        "test_skip_on_ranks cp2": "skipped",
        "test_skip_on_one_rank cp2": "ranks disagree",
    }
    text = result.stdout.str()
    assert "XPASS(strict)" in text
    assert "the reference skipped: nothing to see" in text
    assert "rank 1 skipped, rank 0 went on; a skip must be the same on all ranks" in text


def test_state_of_a_case_ends_with_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2")
    def test_changes_everything(rank):
        os.environ["LEAK"] = "1"
        os.chdir("/")
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        torch.set_default_device("meta")
        sys.path.append("/leak")
        if not rank.is_reference:
            dist.new_group([0, 1])
        rank.observe("x", 1.5)

    @pytest.mark.parity("cp2")
    def test_finds_it_clean(rank):
        assert "LEAK" not in os.environ
        assert os.getcwd() != "/"
        assert torch.get_default_dtype() is torch.float64
        assert torch.is_grad_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1
        assert torch.ones(1).device.type == "cpu"
        assert "/leak" not in sys.path
        rank.observe("random", torch.rand(3))
        groups = dist.distributed_c10d._world.pg_map
        assert len(groups) <= 3
    """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=2)


def test_groups_are_kept_only_while_provably_clean(pytester: pytest.Pytester) -> None:
    """An orphan send must not reach a later case; an unequal count of operations neither."""
    pytester.makepyfile(
        LAYER
        + """
    SEEN = []

    def world(rank, name):
        if not rank.is_reference:
            SEEN.append(dist.group.WORLD)
        rank.observe(name, torch.ones(2))

    @pytest.mark.parity("cp2")
    def test_1_first(rank):
        world(rank, "x")

    @pytest.mark.parity("cp2")
    def test_2_kept(rank):
        world(rank, "x")
        assert rank.is_reference or SEEN[-1] is SEEN[-2]
        if rank.coordinates["cp"] == 0 and not rank.is_reference:
            dist.isend(torch.full((2,), 666.0), 1)

    @pytest.mark.parity("cp2")
    def test_3_new_after_an_orphan_send(rank):
        world(rank, "x")
        assert rank.is_reference or SEEN[-1] is not SEEN[-2]
        if not rank.is_reference:
            value = torch.zeros(2)
            if rank.coordinates["cp"] == 0:
                dist.send(torch.ones(2), 1)
            else:
                dist.recv(value, 0)
                assert value[0] == 1

    @pytest.mark.parity("cp2")
    def test_4_new_after_point_to_point(rank):
        world(rank, "x")
        assert rank.is_reference or SEEN[-1] is not SEEN[-2]
        if not rank.is_reference:
            dist.destroy_process_group()

    @pytest.mark.parity("cp2")
    def test_5_new_after_destruction(rank):
        world(rank, "x")
        if not rank.is_reference:
            dist.all_reduce(torch.ones(1))
    """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=5)


def test_preload_that_raises_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        broken_preload="raise ImportError('libnothing.so is missing')",
        test_it="""
            import pytest

            @pytest.mark.parity("cp2")
            def test_it(rank): ...
            """,
    )
    pytester.syspathinsert()
    result = pytester.runpytest("-o", "shardproof_preload=broken_preload")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert "broken_preload" in text
    assert "libnothing.so is missing" in text


def test_a_preload_that_starts_threads_is_left_to_the_ranks(pytester: pytest.Pytester) -> None:
    """A process with threads can't be forked safely, and some libraries start one on import."""
    pytester.makepyfile(
        threaded_preload="""
            import threading, time

            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            """,
        test_it="""
            import pytest
            import threaded_preload

            @pytest.mark.parity("cp2")
            def test_it(rank):
                rank.observe("x", 1)
            """,
    )
    pytester.syspathinsert()
    result = pytester.runpytest("-o", "shardproof_preload=threaded_preload")
    result.assert_outcomes(passed=1, warnings=1)
    assert "threaded_preload starts threads when it is imported" in result.stdout.str()


def test_bad_observations_fail_at_once_on_all_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2")
    def test_nothing(rank): ...

    @pytest.mark.parity("cp2")
    def test_type(rank):
        rank.observe("x", object())

    @pytest.mark.parity("cp2")
    def test_twice(rank):
        rank.observe("x", 1)
        rank.observe("x", 2)

    @pytest.mark.parity("cp2")
    def test_hole(rank):
        rows = rank.rows(9)
        rows = rows if rank.is_reference else rows[:-1]
        rank.observe("x", torch.ones(len(rows), 2), rows=rows)

    @pytest.mark.parity("cp2")
    def test_missing(rank):
        rank.observe("y", 1)
        if rank.is_reference:
            rank.observe("x", 1)

    @pytest.mark.parity("cp2")
    def test_extra(rank):
        rank.observe("y", 1)
        if not rank.is_reference:
            rank.observe("x", 1)

    @pytest.mark.parity("cp2")
    def test_one_rank_alone(rank):
        rank.observe("y", 1)
        if rank.coordinates["cp"] == 0:
            rank.observe("x", 1)

    @pytest.mark.parity("cp2")
    def test_vacuous(rank):
        rank.observe("x", torch.zeros(4))
    """
    )
    result = pytester.runpytest("--parity-timeout", "20")
    counts = result.parseoutcomes()
    assert counts.get("failed", 0) + counts.get("errors", 0) == 8
    assert "passed" not in counts
    assert set(outcomes(pytester).values()).isdisjoint({"passed", "hung"})
    assert outcomes(pytester)["test_vacuous cp2"] == "vacuous"
    assert "observes nothing" in result.stdout.str()


def test_reference_failures_are_not_the_topologys_fault(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    import random

    @pytest.mark.parity("cp2")
    def test_raises(rank):
        rank.observe("x", torch.ones(3))
        assert not rank.is_reference, "the oracle is broken"

    @pytest.mark.parity("cp2")
    def test_not_deterministic(rank):
        noise = int.from_bytes(os.urandom(4), "little") if rank.is_reference else 0
        rank.observe("x", torch.ones(3) * noise)

    @pytest.mark.parity("cp2")
    def test_asserts_what_rounding_breaks(rank):
        x = torch.randn(50, generator=rank.generator("x"))
        total = (x * 3).sum()
        rank.observe("x", total)
        once = rank.case_dir / "once"
        if rank.is_reference and once.exists():
            assert once.read_text() == repr(total.item())
        once.write_text(repr(total.item()))

    @pytest.mark.parity("cp2", full_precision=True)
    def test_falls(rank):
        x = torch.randn(50, generator=rank.generator("x"))
        rank.observe("x", (x * 3).float().double())

    @pytest.mark.parity("cp2")
    def test_falls_too(rank):
        x = torch.randn(50, generator=rank.generator("x"))
        rank.observe("x", (x * 3).float())
    """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=4, passed=1)
    assert list(outcomes(pytester).values()) == ["reference failed"] * 4 + ["passed"]
    text = result.stdout.str()
    assert "the oracle is broken" in text
    assert "noise run 0 of the reference" in text or "noise run" in text
    assert "note: the reference fell to a lower precision" in text


def test_fresh_ranks_for_every_case(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    SEEN = []

    @pytest.fixture(scope="session")
    def broken_end():
        yield
        raise RuntimeError("session fixture fails at its end")

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("n", [1, 2])
    def test_n(rank, n):
        SEEN.append(n)
        assert rank.is_reference or SEEN == [n]
        rank.observe("n", n)

    @pytest.mark.parity("cp2")
    def test_end(rank, broken_end):
        rank.observe("n", 1)
    """
    )
    result = pytester.runpytest("--parity-fresh")
    result.assert_outcomes(passed=3, errors=1)
    assert "session fixture fails at its end" in result.stdout.str()


@pytest.mark.parametrize("by", ["option", "ini"])
def test_xdist_workers_have_fleets_of_their_own(pytester: pytest.Pytester, by: str) -> None:
    """Ranks get the same options and ini as their worker, and must not distribute themselves."""
    pytester.mkpydir("plain")
    (pytester.path / "plain/test_plain.py").write_text(
        "def test_plain(tmp_path):\n    assert tmp_path.exists()\n", encoding="utf-8"
    )
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2", "single")
    @pytest.mark.parametrize("n", range(3))
    def test_n(rank, n):
        rank.observe("n", torch.ones(4) * (n + 1))
        assert n < 2 or rank.is_reference
    """
    )
    if by == "ini":
        pytester.makeini("[pytest]\naddopts = -n 2\n")
    result = pytester.runpytest_subprocess(*(["-n", "2"] if by == "option" else []))
    result.assert_outcomes(passed=5, failed=2)
    header, cells = read_run(pytester)
    assert len(cells) == 6
    assert header["schema"] == 1
    result.stdout.fnmatch_lines(["*shardproof*", "*4 of 6 cells passed*"])
