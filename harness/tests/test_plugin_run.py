"""Cells as a pytest user sees them: fixtures, output, selection, verdicts, results."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.plugin_support import LAYER, outcomes, read_run


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
    result = pytester.runpytest("--maxfail=2")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "1 of 3 cells passed, *",
            "* s on ranks, * s in references",
            "1 of 4 cells did not run: the run was stopped before them",
        ]
    )
    result = pytester.runpytest("--lf", "-x", "-v")
    result.assert_outcomes(failed=1)
    result = pytester.runpytest("--lf", "-k", "cp2-2", "--deselect", "nothing", "-W", "error")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.no_fnmatch_line("*did not run*")


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


def test_parameters_that_differ_between_processes(pytester: pytest.Pytester) -> None:
    """Ranks collect for themselves: an id that no other process has can't be sent to them."""
    pytester.makepyfile(
        LAYER
        + """
    class Unsendable:
        def __reduce__(self):
            raise TypeError("never leaves its process")

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("x", [os.urandom(4).hex()])
    def test_random(rank, x):
        rank.observe("x", 1)

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("x", [Unsendable()])
    def test_unsendable_value(rank, x):
        rank.observe("x", 1)
    """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1, passed=1)
    text = result.stdout.str()
    assert "did not collect" in text
    assert "parametrize over ordered, reproducible values" in text


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


def test_a_reference_serves_all_topologies_of_its_parameters(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    @pytest.fixture(params=["a", "b"])
    def way(request):
        return request.param

    @pytest.mark.parity("cp2", "dp2", reference_ignores=["way"])
    @pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
    def test_sizes(rank, size, way):
        if rank.is_reference:
            with open(f"runs{size}", "a") as file:
                file.write("x")
        x = torch.rand(64, generator=rank.generator("x"), dtype=rank.dtype)
        rank.observe("x", x * size)
    """
    )
    pytester.runpytest("-k", "cp2-a-2").assert_outcomes(passed=1, deselected=19)
    once = (pytester.path / "runs2").read_text()
    for path in pytester.path.glob("runs*"):
        path.unlink()
    result = pytester.runpytest()
    result.assert_outcomes(passed=20)
    assert [(pytester.path / f"runs{size}").read_text() for size in range(2, 7)] == [once] * 5
    order = [cell["case"].rpartition("-")[2] for cell in read_run(pytester)[1]]
    assert order == [f"{size}]" for size in range(2, 7) for _ in range(4)]


def test_several_seeds_are_cells_of_their_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        LAYER
        + """
    @pytest.mark.parity("cp2", "dp2")
    @pytest.mark.parametrize("size", [2, 3])
    def test_seeds(rank, size):
        x = torch.rand(size, generator=rank.generator("x"), dtype=rank.dtype)
        # Seed 5 alone is wrong, on one topology.
        wrong = rank.seed == 5 and rank.topology.name == "dp2"
        rank.observe("x", x * 2 if wrong else x)
    """
    )
    result = pytester.runpytest("--parity-seed", "4:6", "-k", "not 3")
    result.assert_outcomes(passed=3, failed=1, deselected=4)
    header, cells = read_run(pytester)
    assert header["seed"] == 4
    assert [
        (cell["case"].partition("::")[2], cell["topology"], cell["seed"]) for cell in cells
    ] == [
        ("test_seeds[seed4-2]", "cp2", 4),
        ("test_seeds[seed4-2]", "dp2", 4),
        ("test_seeds[seed5-2]", "cp2", 5),
        ("test_seeds[seed5-2]", "dp2", 5),
    ]
    assert [cell["outcome"] for cell in cells] == ["passed", "passed", "passed", "diverged"]
    floors = {cell["seed"]: cell["observations"][0]["norm"] for cell in cells}
    assert len(set(floors.values())) == 2
    reproduce = cells[-1]["reproduce"]
    assert "test_seeds[dp2-2]" in reproduce
    assert reproduce.endswith("--topology dp2 --parity-seed 5")
    result.stdout.fnmatch_lines(["shardproof: *, seeds 4 to 5", "*3 of 4 cells passed*"])
    again = pytester.runpytest(*shlex.split(reproduce)[1:])
    again.assert_outcomes(failed=1)
    _, (cell,) = read_run(pytester)
    assert (cell["outcome"], cell["seed"]) == ("diverged", 5)


def test_a_group_that_is_made_twice_is_told_in_few_lines(pytester: pytest.Pytester) -> None:
    """What a newcomer tries first, in the body or in what it calls."""
    pytester.makepyfile(
        """
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.parity("cp2")
        def test_it(rank):
            dist.init_process_group("gloo")

        @pytest.mark.parity("cp2")
        def test_of_torch(rank):
            torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))
            rank.observe("x", torch.ones(3))
        """
    )
    text = pytester.runpytest().stdout.str()
    made, other = text.split("test_of_torch", 1)[0], text
    assert "take groups from rank.group(axis) or rank.mesh" in text
    assert 'dist.init_process_group("gloo")' in made
    assert "Initialize the default distributed process group." not in other
    full = pytester.runpytest("--fulltrace", "-k", "test_it").stdout.str()
    assert "Initialize the default distributed process group." in full
