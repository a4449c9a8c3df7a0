"""What a campaign does not run: cells with nothing left to try, trials that could not end."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plugin_support import read_run

from shardproof.mutants import campaign
from shardproof.mutants.target import OTHER_REDUCTION, WORLD, Mutant

LEFT_ALONE = """
    from pathlib import Path

    import pytest
    import torch
    import torch.distributed as dist

    def count(name):
        with Path(__file__).with_name(name).open("a") as file:
            file.write("x")

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("wanted", ["first", "second", "wrong", "raises"])
    def test_it(rank, wanted):
        x = torch.arange(1.0, 5.0, dtype=rank.dtype)
        written = rank.case_dir / f"rank{rank.index}"
        assert not written.exists(), "as no run before found it"
        if rank.is_reference:
            count(wanted)
            x = 2 * x
        else:
            written.touch()
            count(f"{wanted}-rank{rank.index}")
            dist.all_reduce(x, group=rank.group("cp"))
        if wanted == "raises" and not rank.is_reference:
            raise ValueError("on ranks alone")
        rank.observe("x", x + (wanted == "wrong" and not rank.is_reference))

    @pytest.mark.parity("cp2")
    @pytest.mark.xfail(strict=True, reason="another number")
    def test_expected(rank):
        rank.observe("x", 1.0 if rank.is_reference else 2.0)
"""


def test_a_cell_where_nothing_can_be_tried_is_run_and_not_compared(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(LEFT_ALONE)
    run = pytester.runpytest("--mutants", "dropped", "-rs")
    run.assert_outcomes(passed=1, skipped=3, failed=1)
    _, cells = read_run(pytester)
    ended = {cell["case"].partition("::test_")[2]: cell for cell in cells}
    assert {name: cell["outcome"] for name, cell in ended.items()} == {
        "it[first]": "passed",
        "it[second]": "skipped",
        "it[wrong]": "skipped",
        "it[raises]": "raised",
        "expected": "skipped",
    }

    def runs(name: str) -> int:
        return len((pytester.path / name).read_text())

    # Once, once more, and under noise: where a mutant is tried. There ranks begin by looking, then
    # run to be compared, twice as new (with what they import beforehand), and with the mutant.
    assert runs("first") > 4
    assert runs("first-rank0") >= 4
    for name in ("second", "wrong", "raises"):
        assert runs(name) == runs(f"{name}-rank0") == 1, name
    left = ended["it[second]"]
    assert left["mutants"] == left["observations"] == []
    assert left["reason"].startswith("not compared: it ends well, and calls nothing of which a")
    assert [one["operation"] for one in left["collectives"]] == ["all_reduce"]
    assert "reference_seconds" not in left
    run.stdout.fnmatch_lines(
        [
            "*test_it[[]second[]]  not compared *",
            "1 of 5 cells passed, 1 comparisons; *",
            "3 of 5 cells were not compared: *",
            "SKIPPED*not compared: *",
        ]
    )


def test_every_cell_is_compared_without_mutants(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(LEFT_ALONE)
    pytester.runpytest().assert_outcomes(passed=2, failed=2, xfailed=1)


UNEVEN = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.parity("dp2xcp2", timeout=20)
    def test_some_ranks_alone(rank):
        x = torch.arange(1.0, 5.0, dtype=rank.dtype) / 3
        if not rank.is_reference:
            x = x / rank.size("cp")
            if rank.coordinates["dp"] == 0:
                dist.all_reduce(x, group=rank.group("cp"))
            else:
                x = x * rank.size("cp")
        rank.observe("x", x)
"""


def test_what_speaks_to_all_ranks_is_not_tried_where_only_some_call(
    pytester: pytest.Pytester,
) -> None:
    """The run without a mutant, which tells what mutants would change, has to end."""
    pytester.makepyfile(UNEVEN)
    pytester.runpytest("--mutants", "all")
    (cell,) = read_run(pytester)[1]
    results = {trial["kind"]: trial["result"] for trial in cell["mutants"]}
    assert {OTHER_REDUCTION, WORLD} < set(results)
    assert results.pop(WORLD) == "not judged"
    assert set(results.values()) == {"killed"}


OBSERVED = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.parity("cp2")
    @pytest.mark.parametrize("time", ["before", "during", "after"])
    def test_sum(rank, time):
        x = torch.arange(1.0, 5.0, dtype=rank.dtype) / 3
        if not rank.is_reference:
            x = x / 2
            dist.all_reduce(x, group=rank.group("cp"))
        rank.observe("x", x)
"""


def test_ctrl_c_among_mutants_loses_no_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell passed, and some of its mutants were tried: both are told before the end."""
    taken: list[str] = []
    take = campaign.Campaign.take

    def stopped(self: campaign.Campaign, mutant: Mutant, *place: Any) -> dict[str, Any]:
        taken.append(mutant.kind)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return take(self, mutant, *place)

    monkeypatch.setattr(campaign.Campaign, "take", stopped)
    pytester.makepyfile(OBSERVED)
    run = pytester.runpytest("--mutants", "all", no_reraise_ctrlc=True)
    assert run.ret == pytest.ExitCode.INTERRUPTED
    (cell,) = read_run(pytester)[1]
    assert cell["outcome"] == "passed"
    assert [trial["kind"] for trial in cell["mutants"]] == taken[:2]
    assert {trial["result"] for trial in cell["mutants"]} == {"killed"}
    run.stdout.fnmatch_lines(["2 of 3 cells did not run: *"])


SELDOM = """
    from pathlib import Path

    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.parity("cp2")
    def test_it(rank):
        x = torch.arange(1.0, 5.0, dtype=rank.dtype)
        if not rank.is_reference:
            runs = Path(__file__).with_name(f"runs{rank.index}")
            with runs.open("a") as file:
                file.write("x")
            # Once to see what it calls, and once to be compared.
            if len(runs.read_text()) <= 2:
                dist.all_reduce(x.clone(), group=rank.group("cp"))
        rank.observe("x", x)
"""


def test_what_a_run_does_not_call_again_is_not_reached(pytester: pytest.Pytester) -> None:
    """Neither killed nor survived: nothing was broken."""
    pytester.makepyfile(SELDOM)
    run = pytester.runpytest("--mutants", "all")
    (cell,) = read_run(pytester)[1]
    assert cell["outcome"] == "passed"
    assert {trial["result"] for trial in cell["mutants"]} == {"not reached"}
    assert {trial["calls"] for trial in cell["mutants"]} == {0}
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["not reached: dropped: all_reduce over cp in forward, *"])
