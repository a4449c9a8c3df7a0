"""The text of a failure, the outcome of a case, and verdicts as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import Rank, World, numbers

from shardproof.topology import parse_topology
from shardproof.verdict import failed, outcome, render
from shardproof.verdict.diagnosis import Scale, fit_scale, row_hints, scale_hint
from shardproof.verdict.message import SHOWN_IN_SHORT

SHIFTED = "rows are shifted by one: each holds the reference's"


def layers(count: int, *, wrong_from: int, vacuous: int = -1) -> Any:
    """Values of layers, wrong from one on; one of them may be zero."""

    def body(rank: Rank) -> None:
        for layer in range(count):
            value = rank.noise(numbers(6, 9, seed=layer))
            if layer == vacuous:
                value = value * 0
            elif layer >= wrong_from and rank.recorder.judging:
                value = value * 2
            rank.observe(f"layer{layer}", value)

    return body


def test_the_first_failures_in_order_and_the_rest_in_a_line_each(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(layers(60, wrong_from=99, vacuous=1))
    verdicts = world.cell("cp2", layers(60, wrong_from=4, vacuous=1))
    lines = world.text.splitlines()
    assert lines[0] == "57 of 60 observations failed on cp2."
    blocks = [line.partition(":")[0] for line in lines if line.startswith("layer")]
    # What is vacuous gives way to what is wrong.
    assert blocks == ["layer4", "layer5", "layer6"]
    short = [line for line in lines if line.startswith("  layer")]
    assert len(short) == SHOWN_IN_SHORT
    assert short[0].startswith("  layer7: diverged: ratio ")
    assert lines[-3] == f"  ... and {57 - 3 - SHOWN_IN_SHORT} more"
    assert lines[-1] == "reproduce: pytest -k this"
    assert max(map(len, lines)) < 200
    assert outcome(verdicts) == "diverged"


def test_a_case_that_observes_nothing_has_failed() -> None:
    assert failed([])
    assert outcome([]) == "vacuous"
    text = render([], reproduce="pytest x", topology=parse_topology("cp2"))
    assert "observed nothing on cp2" in text
    assert text.endswith("reproduce: pytest x")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "vacuous"], "vacuous"),
        (["vacuous", "invalid"], "invalid"),
        (["invalid", "ranks disagree", "vacuous"], "ranks disagree"),
        (["ranks disagree", "diverged"], "diverged"),
        (["missing", "passed"], "diverged"),
        (["extra"], "diverged"),
        (["nan"], "diverged"),
        (["replicas differ", "vacuous"], "diverged"),
        (["coverage"], "diverged"),
    ],
)
def test_outcomes_of_a_case(outcomes: list[str], expected: str) -> None:
    verdicts = [{"outcome": word} for word in outcomes]
    assert outcome(verdicts) == expected
    assert failed(verdicts) == (expected != "passed")


def test_a_name_that_cannot_be_printed_is_escaped(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("a\x1b[31m\n\ud800", 1))
    world.cell("cp2", lambda rank: rank.observe("a\x1b[31m\n\ud800", 2))
    assert "'a\\x1b[31m\\n\\ud800': diverged" in world.text
    assert "\x1b" not in world.text
    world.text.encode()


def test_a_verdict_is_plain_data(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(numbers(6, 9))))
    verdict = world.same("cp2", numbers(6, 9) * torch.inf)
    assert json.loads(json.dumps(verdict, allow_nan=False)) == verdict
    assert verdict["ratio"] == "inf"
    wanted = {"name", "kind", "numel", "ratio", "row_ratio", "gate", "floor", "norm", "outcome"}
    assert wanted <= verdict.keys()


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2.0, ["  α = cp = 2: counted once for each rank of that axis"]),
        (1.0076, []),
    ],
)
def test_one_number_has_a_scale_only_where_an_axis_has_it(
    tmp_path: Path, factor: float, said: list[str]
) -> None:
    world = World(tmp_path)
    loss = numbers(1).abs()[0] + 1
    world.reference(lambda rank: rank.observe("loss", rank.noise(loss)))
    world.cell("cp2", lambda rank: rank.observe("loss", rank.noise(loss) * factor))
    found = [line for line in world.text.splitlines() if "α" in line]
    assert [line.partition(" (")[0] for line in found] == said
    assert all(line.endswith("; one number may be so by chance") for line in found)
    # What both have in common is not told as a difference.
    assert "  got float64[] as expected" in world.text


@pytest.mark.parametrize(
    ("topology", "placed", "said"),
    [
        ("cp2", {"rows": {"cp": [[4, 0, 6], [1, 2, 3, 5]]}}, "3 of its 7 rows (float64[3, 4])"),
        ("cp2", {"shard": {"cp": 0}}, "4 of its 7 rows (float64[4, 4])"),
        ("tp2", {"shard": {"tp": 1}}, "2 of its 4 in dimension 1 (float64[7, 2])"),
        (
            "tp2xcp2",
            {"shard": {"cp": 0, "tp": 1}},
            "4 of its 7 rows and 2 of its 4 in dimension 1 (float64[4, 2])",
        ),
    ],
)
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_rank_that_holds_a_part_is_not_said_to_have_another_shape(
    tmp_path: Path, topology: str, placed: dict[str, Any], said: str, factor: float
) -> None:
    """Neither where the value is wrong (times 2) nor where the comparison is vacuous (zero)."""
    value = numbers(7, 4) * bool(factor)

    def body(rank: Rank) -> None:
        wrong = rank.recorder.judging and not any(rank.coordinates.values())
        mine, options = value * factor if wrong else value, dict(placed)
        for axis, dim in placed.get("shard", {}).items():
            mine = mine.chunk(2, dim)[rank.coordinates[axis]]
        for axis, rows in placed.get("rows", {}).items():
            options["rows"] = rows[rank.coordinates[axis]]
            mine = mine[options["rows"]]
        rank.observe("x", mine, **options)

    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)))
    assert world.one(topology, body)["outcome"] == ("diverged" if factor else "vacuous")
    assert f"  expected float64[7, 4], got {said}" in world.text.splitlines()


@pytest.mark.parametrize(
    ("factor", "noise", "said"),
    [
        # Nearly all of the error, though no axis has the scale; half of it; half where one has it.
        (1.7, 0.01, True),
        (1.7, 0.1, False),
        (1.7, 0.7, False),
        (2.0, 0.9, True),
    ],
)
def test_a_scale_is_told_where_it_says_something(
    tmp_path: Path, factor: float, noise: float, said: bool
) -> None:
    value, other = numbers(60, 9), numbers(60, 9, seed=1)
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)))
    details = world.same("cp2", value * factor + other * noise)["details"]
    assert ("scale α = " in world.text) == said
    # The record has it always.
    assert details["alpha"] == pytest.approx(factor, abs=0.1)
    assert details["explained"] > 0.4


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_the_worst_row_is_told_where_there_are_rows(tmp_path: Path, shape: tuple[int, ...]) -> None:
    value = numbers(*shape) + 3
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)))
    world.same("cp2", value * 3)
    (line,) = (line for line in world.text.splitlines() if line.startswith("  ratio "))
    assert line.count("gate") == (2 if shape else 1)
    assert ("worst row" in line) == bool(shape)


def test_a_mapping_gives_a_verdict_for_each_item(tmp_path: Path) -> None:
    world = World(tmp_path)

    def body(rank: Rank, *, lacking: bool = False) -> None:
        out: dict[str, object] = {"a": rank.noise(numbers(6, 9)), "b": [1, None]}
        if lacking:
            del out["a"]
        rank.observe("out", out)

    world.reference(body)
    verdicts = world.cell("cp2", lambda rank: body(rank, lacking=True))
    assert [(one["name"], one["outcome"]) for one in verdicts] == [
        ("out.a", "missing"),
        ("out.b.0", "passed"),
        ("out.b.1", "passed"),
    ]


def test_the_fit_of_a_scale() -> None:
    reference, other = numbers(100), numbers(100, seed=1)
    other = other - other @ reference / (reference @ reference) * reference

    def fit(candidate: torch.Tensor) -> Scale:
        found = fit_scale(
            dot=float(candidate @ reference),
            candidate_sq=float(candidate @ candidate),
            reference_sq=float(reference @ reference),
        )
        assert found is not None
        return found

    pure = fit(2 * reference)
    assert pure.alpha == pytest.approx(2)
    assert pure.explained == pytest.approx(1)
    mixed = fit(2 * reference + other)
    error, rest = float((reference + other).square().sum()), float(other.square().sum())
    assert mixed.alpha == pytest.approx(2)
    assert mixed.explained == pytest.approx(1 - rest / error)
    assert fit_scale(dot=0.0, candidate_sq=1.0, reference_sq=0.0) is None


@pytest.mark.parametrize(
    ("topology", "alpha", "words"),
    [
        ("cp4", 4, "α = cp = 4: counted once"),
        ("dp2xcp4", 8, "α = cp·dp = 8"),
        ("dp2xcp4", 1 / 8, "α = 1/(cp·dp) = 1/8: divided"),
        ("dp2xcp2", 2, "α = cp = 2 or dp = 2"),
        ("cp2", 4, "α = cp² = 4"),
        ("cp2", 1 / 4, "α = 1/cp² = 1/4"),
        ("tp8xcp3", 1 / 3, "α = 1/cp = 1/3"),
        ("tp8xcp3", 5, "no axis explains"),
        ("single", 2, "no axis explains"),
        ("cp2", 1, ""),
    ],
)
def test_what_a_scale_suggests(topology: str, alpha: float, words: str) -> None:
    hint = scale_hint(Scale(alpha, 1.0), parse_topology(topology))
    assert words in hint if words else hint == ""


def test_a_scale_that_explains_little_suggests_nothing() -> None:
    assert scale_hint(Scale(2.0, 0.3), parse_topology("cp2")) == ""


@pytest.mark.parametrize(
    ("zeros", "moved", "words"),
    [
        ([], [], []),
        ([3], [], ["row 3 is zero"]),
        (range(8), [], ["rows 0, 1, 2, 3, 4, 5, ... are zero"]),
        ([], [(1, 5), (5, 1)], ["rows 1 and 5 are swapped"]),
        ([], [(0, 1), (1, 2), (2, 3)], [f"{SHIFTED} next row"]),
        ([], [(0, 9), (1, 0), (2, 1)], [f"{SHIFTED} previous row"]),
        ([], [(2, 9)], ["row 2 holds the reference's row 9"]),
        ([4], [(2, 9)], ["row 4 is zero", "row 2 holds the reference's row 9"]),
    ],
)
def test_rows_in_words(zeros: Any, moved: Any, words: list[str]) -> None:
    assert row_hints(list(zeros), moved) == words
