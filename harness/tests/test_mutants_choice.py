"""Which mutants there are, which of them are tried, and which may survive."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardproof.ledger.operations import OPERATIONS
from shardproof.mutants.campaign import Campaign, Result, Trial
from shardproof.mutants.choice import ChoiceError, read_choice
from shardproof.mutants.matrix import lines_of, problems_of, telling
from shardproof.mutants.survivors import REASONS, SurvivorsError, read_survivors
from shardproof.mutants.target import (
    DIVIDED,
    DROPPED,
    KINDS,
    MULTIPLIED,
    MUTABLE,
    OTHER_REDUCTION,
    STALE,
    WORLD,
    Mutant,
    Target,
    is_the_cases_own,
    mutants_of,
    targets_of,
)


def target(operation: str = "all_reduce", **other: Any) -> Target:
    fields: dict[str, Any] = {
        "site": "trainer.py:7 in reduce < trainer.py:31 in step",
        "operation": operation,
        "axis": "cp",
        "reduce_op": "SUM" if operation == "all_reduce" else "",
        "backward": False,
        "size": 2,
        "whole": False,
        "repeated": True,
    }
    return Target(**fields | other)


def kinds_of(one: Target) -> set[str]:
    return {mutant.kind for mutant in mutants_of(one)}


def test_every_operation_that_hands_out_numbers_can_be_broken() -> None:
    collectives = {one.name for one in OPERATIONS if not one.is_message and one.outputs is not None}
    assert collectives == MUTABLE
    for kind, operations in KINDS.items():
        assert operations <= MUTABLE, kind
    for operation in MUTABLE:
        assert len(kinds_of(target(operation))) >= 4


def test_a_mutant_that_could_change_nothing_is_none() -> None:
    assert {WORLD, OTHER_REDUCTION, MULTIPLIED, DIVIDED} <= kinds_of(target())
    assert WORLD not in kinds_of(target(whole=True))
    assert STALE in kinds_of(target()) - kinds_of(target(repeated=False))
    assert not {OTHER_REDUCTION, MULTIPLIED, DIVIDED} & kinds_of(target(reduce_op="MIN"))
    assert OTHER_REDUCTION in kinds_of(target(reduce_op="MAX"))
    assert kinds_of(target("broadcast")) < kinds_of(
        target("all_gather"),
    ) | {DROPPED}


def test_a_name_outlives_its_line_and_its_topology() -> None:
    here = Mutant(target(), DROPPED)
    moved = Mutant(target(site="trainer.py:9 in reduce < trainer.py:40 in step", size=4), DROPPED)
    assert here.name == moved.name
    assert here.name == (
        "dropped: all_reduce over cp (forward) trainer.py in reduce < trainer.py in step"
    )
    others = [target(backward=True), target(axis="dp"), target(site="trainer.py:7 in other")]
    assert len({Mutant(one, DROPPED).name for one in [target(), *others]}) == 4
    assert Mutant.of(here.message()) == here


def test_targets_are_calls_between_ranks_that_hand_out_something() -> None:
    def place(operation: str, size: int, calls: int = 1) -> list[Any]:
        return [["cp", operation, "", "here", False], size, calls]

    both = [place("all_gather", 2), place("all_gather", 2)]
    found = targets_of([*both, place("barrier", 2), place("send", 2), place("broadcast", 1)], 4)
    assert [(one.operation, one.size, one.whole) for one in found] == [("all_gather", 2, False)]
    assert targets_of(both, 2)[0].whole
    # A rank that calls it again is enough.
    assert not found[0].repeated
    (one,) = targets_of([*both, place("all_gather", 2, calls=2), *both], 4)
    assert one.repeated


def test_collectives_of_cases_are_none_of_the_subjects() -> None:
    root = Path("/repo")
    subject = (root / "src/trainer",)
    for site, own in {
        "tests/test_a.py:3 in f < tests/test_a.py:9 in g": True,
        "src/other.py:3 in f": True,
        "/repo/src/other.py:3 in f": True,
        "src/trainer/reduce.py:3 in f": False,
        ".venv/lib/python3.11/site-packages/megatron/core/mappings.py:3 in f": False,
        "/opt/megatron/core/mappings.py:3 in f": False,
        "/repo/my env/lib/site-packages/megatron/mappings.py:3 in f": False,
        "a thread without user code": False,
    }.items():
        assert is_the_cases_own(site, subject, root) is own, site
        assert not is_the_cases_own(site, (), root)


def test_a_name_does_not_say_where_libraries_are() -> None:
    folder = "{0}/site-packages/megatron/core"
    site = f"{folder}/mappings.py:3 in f < {folder}/layers.py:4 in g"
    here, there = (site.format(path) for path in (".venv/lib/python3.11", "/my lib"))
    assert Mutant(target(site=here), DROPPED).name == Mutant(target(site=there), DROPPED).name
    assert "(forward) megatron/core/mappings.py in f" in Mutant(target(site=here), DROPPED).name


def test_choices() -> None:
    every = [mutant for operation in MUTABLE for mutant in mutants_of(target(operation))]
    assert all(read_choice("all").takes(mutant) for mutant in every)
    some = [mutant for mutant in every if read_choice("Dropped").takes(mutant)]
    assert {mutant.kind for mutant in some} == {DROPPED}
    in_step = read_choice("all_reduce*in step")
    assert [mutant for mutant in every if in_step.takes(mutant)] == []
    assert any(read_choice("*all_reduce*in step").takes(mutant) for mutant in every)


def test_a_sample_is_a_share_that_the_seed_draws() -> None:
    every = [
        mutant
        for operation in MUTABLE
        for axis in ("cp", "tp", "dp", "dp+cp")
        for mutant in mutants_of(target(operation, axis=axis))
    ]
    drawn = [{m for m in every if read_choice(f"sample:{seed}:0.25").takes(m)} for seed in range(9)]
    for found in drawn:
        assert 0.1 * len(every) < len(found) < 0.4 * len(every)
    assert drawn[0] != drawn[1]
    assert len(set().union(*drawn)) > 0.8 * len(every)
    assert drawn[3] == {m for m in every if read_choice("sample:3:0.25").takes(m)}


@pytest.mark.parametrize("text", ["", "  ", "sample", "sample:", "sample:1:0", "sample:1:x"])
def test_choices_without_meaning_are_refused(text: str) -> None:
    with pytest.raises(ChoiceError, match="expected all, sample:SEED"):
        read_choice(text)


@pytest.mark.parametrize(
    ("results", "is_open"),
    [
        ([], True),
        (["killed"], False),
        (["survived", "survived"], True),
        (["survived", "survived", "survived"], False),
        (["refused"], True),
        (["refused", "survived"], True),
        (["survived", "survived", "refused", "survived"], False),
        (["refused"] * 5, True),
        (["refused"] * 6, False),
        (["not judged", "refused"], True),
        (["not judged", "not judged"], False),
        (["survived", "survived", "not judged", *["refused"] * 5], True),
        (["refused", "equivalent", "survived"], True),
        (["equivalent", "equivalent"], True),
        (["equivalent", "equivalent", "equivalent"], False),
    ],
)
def test_how_often_a_mutant_is_tried(results: list[Result], is_open: bool) -> None:
    mutant = Mutant(target(), DROPPED)
    campaign = Campaign(read_choice("dropped"), Path("/repo"))
    campaign.trials[mutant.name, mutant.target.site] = [
        Trial(mutant, f"t.py::test_{number}", "cp2", result, "", 1, 1, None, 0.0)
        for number, result in enumerate(results)
    ]
    done = {"ledger": {"places": [[mutant.target.key, 2, 2]]}}
    drive: Any = SimpleNamespace(traces=[SimpleNamespace(done=done)], fleet=SimpleNamespace(size=4))
    assert campaign.open_on(drive, "t.py::test_other") == ([mutant] if is_open else [])


def cell(*trials: tuple[str, str], case: str = "t.py::test_a") -> dict[str, Any]:
    records = [
        {
            "mutant": f"{kind}: all_reduce over cp (forward) t.py in {kind}",
            "kind": kind,
            "operation": "all_reduce",
            "axis": "cp",
            "backward": False,
            "site": "t.py:3 in step",
            "result": result,
            "ratio": 5e8 if result == "killed" else None,
            "by": ["loss"],
        }
        for kind, result in trials
    ]
    seen = [
        {"name": "loss", "ratio": 0.7, "row_ratio": None},
        {"name": "states", "ratio": 0.9, "row_ratio": 2.5},
    ]
    return {"case": case, "topology": "cp2", "mutants": records, "observations": seen}


def test_clean_runs_and_killed_mutants_must_be_far_apart() -> None:
    one = cell((DROPPED, "killed"), (WORLD, "killed"))
    assert "at most 2.5, of killed mutants at least 5e+08: 2e+08 times" in "\n".join(
        lines_of([one], [])
    )
    assert problems_of([one], []) == []
    one["mutants"][1]["ratio"] = 240.0
    (problem,) = problems_of([one], [])
    assert problem.startswith(
        "clean runs and killed mutants are 96 times apart, expected 100: states"
    )
    assert "over the whole world: all_reduce" in problem
    one["mutants"][1]["ratio"] = 260.0
    assert problems_of([one], []) == []
    # What failed, or was to fail, says nothing of clean runs.
    failed = cell((DROPPED, "killed"), case="t.py::test_b") | {"outcome": "diverged"}
    failed["observations"][0]["ratio"] = 1e9
    assert problems_of([one, failed], []) == []
    # A difference of shape has no ratio.
    one["mutants"] = one["mutants"][:1]
    one["mutants"][0]["ratio"] = None
    assert problems_of([one], []) == []


def test_the_best_of_several_cells_counts() -> None:
    first = cell((DROPPED, "survived"), (WORLD, "equivalent"), (MULTIPLIED, "refused"))
    second = cell((DROPPED, "killed"), (WORLD, "survived"), case="t.py::test_b")
    results = {trial["kind"]: trial["result"] for trial in telling([first, second])}
    assert results == {DROPPED: "killed", WORLD: "survived", MULTIPLIED: "refused"}
    lines = lines_of([first, second], [])
    (row,) = [line for line in lines if line.startswith("all ")]
    assert row.split() == ["all", "1", "1", "1", "-", "-", "-"]
    assert any(line.startswith("1 of 3 mutants that change a number are killed") for line in lines)
    (line,) = [line for line in lines if line.startswith("survived: over")]
    assert (
        "t.py:3 in step: no case that was tried observes what changes here (test_b on cp2)" in line
    )


def test_a_survivor_needs_a_reason_and_a_reason_a_survivor(tmp_path: Path) -> None:
    cells = [cell((DROPPED, "survived"), (WORLD, "killed"))]
    (problem,) = problems_of(cells, [])
    assert "survived without a reason" in problem
    # All that a line needs is said: who installed the plugin has nothing else to read.
    assert "as lines 'reason | name':\n  dropped: all_reduce over cp" in problem
    assert all(f"{reason}: {meaning}" in problem for reason, meaning in REASONS.items())
    assert "docs/" not in problem
    path = tmp_path / "survivors.txt"
    path.write_text("# what may survive\n\nown part | dropped: all_reduce over cp*\n")
    listed = read_survivors(path)
    assert problems_of(cells, listed) == []
    assert any(REASONS["own part"] in line for line in lines_of(cells, listed))
    path.write_text("reported | over the whole world*\ncompared | dropped*\n")
    listed = read_survivors(path)
    assert problems_of(cells, listed) == []
    hint = lines_of(cells, listed)[-1]
    assert hint.startswith("line 1 of shardproof_survivors is about mutants that were killed here")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("own part", ["2 of the 3 that make a difference are killed or refused (66.7 %); 1 *"]),
        ("reported", []),
    ],
)
def test_what_makes_no_difference_need_not_be_noticed(
    tmp_path: Path, reason: str, said: list[str]
) -> None:
    results = ("survived", "killed", "refused", "not judged", "equivalent")
    cells = [cell(*zip(KINDS, results, strict=False))]
    path = tmp_path / "survivors.txt"
    path.write_text(f"{reason} | {next(iter(KINDS))}*\n")
    lines = lines_of(cells, read_survivors(path))
    assert "1 of 4 mutants that change a number are killed (25.0 %), 1 more refused (50.0 %)" in (
        line.partition(";")[0] for line in lines
    )
    found = [line for line in lines if "make a difference" in line]
    assert len(found) == len(said)
    assert all(map(fnmatchcase, found, said))


def test_a_run_without_mutants_is_no_success() -> None:
    nothing = [{"case": "a", "topology": "cp2"}]
    assert "no mutant was tried" in problems_of(nothing, [])[0]
    assert problems_of(nothing, [], sampled=True) == []


@pytest.mark.parametrize("result", ["not judged", "equivalent", "not reached"])
def test_a_run_in_which_nothing_was_judged_is_no_success(result: str) -> None:
    cells = [cell((DROPPED, result))]
    assert problems_of(cells, []) == ["none of 1 mutants was judged by an observation"]
    assert problems_of(cells, [], sampled=True) == []


def test_a_run_in_which_much_was_not_judged_is_no_success() -> None:
    kinds = list(KINDS)
    cells = [cell((kinds[0], "not judged"), *((kind, "killed") for kind in kinds[1:]))]
    assert problems_of(cells, []) == []
    cells = [cell(*((kind, "not judged") for kind in kinds[:2]), (kinds[2], "killed"))]
    (problem,) = problems_of(cells, [])
    assert problem.startswith("2 of 3 mutants were not judged, expected at most 10%")
    assert lines_of(cells, [])[-1].startswith("the run fails by its mutants")
    assert problems_of(cells, [], sampled=True) == []


def test_two_lines_of_one_function_are_two_call_sites() -> None:
    first, second = cell((DROPPED, "killed")), cell((DROPPED, "survived"))
    second["mutants"][0]["site"] = "t.py:4 in step"
    assert [trial["result"] for trial in telling([first, second])] == ["killed", "survived"]
    assert problems_of([first, second], [])


@pytest.mark.parametrize("line", ["dropped*", "because | dropped*", "own part |", "| dropped"])
def test_lines_without_a_reason_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "survivors.txt"
    path.write_text(f"\n{line}\n")
    with pytest.raises(SurvivorsError, match=r"survivors.txt:2: expected 'reason \| name"):
        read_survivors(path)


def test_a_list_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SurvivorsError, match="cannot read"):
        read_survivors(tmp_path / "none.txt")
