"""The faults of trainers, end to end: each fails, and its message names the cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.verdict_support import Body, Rank, World, numbers

ROWS, WIDTH = 16, 24
VALUE = numbers(ROWS, WIDTH)
Change = Callable[[torch.Tensor, Rank], torch.Tensor]


@pytest.fixture(params=["whole", "tp shard", "rows"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def case(kind: str, change: Change | None = None) -> Body:
    """A value that ranks hold as ``kind`` says, wrong on them where ``change`` is given."""

    def body(rank: Rank) -> None:
        candidate = rank.noise(VALUE)
        under_test = rank.recorder.judging
        if change is not None and under_test:
            candidate = change(VALUE.clone(), rank)
        cp, tp = rank.coordinates["cp"], rank.coordinates["tp"]
        if kind == "whole" or not under_test:
            rank.observe("x", candidate)
        elif kind == "tp shard":
            rank.observe("x", candidate.chunk(2, 1)[tp], shard={"tp": 1})
        else:
            positions = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
            mine = positions[:5] if cp == 0 else positions[5:]
            rank.observe("x", candidate[mine], rows=mine)

    return body


def swapped(value: torch.Tensor, _rank: Rank) -> torch.Tensor:
    value[[4, 11]] = value[[11, 4]]
    return value


def zeroed(value: torch.Tensor, _rank: Rank) -> torch.Tensor:
    value[9] = 0
    return value


def shifted(value: torch.Tensor, _rank: Rank) -> torch.Tensor:
    return value.roll(1, 0)


def permuted(value: torch.Tensor, _rank: Rank) -> torch.Tensor:
    value[[2, 5, 8]] = value[[5, 8, 2]]
    return value


def one_off(value: torch.Tensor, _rank: Rank) -> torch.Tensor:
    value[3, 7] *= 1 + 1e-6
    return value


def scaled(factor: float) -> Change:
    return lambda value, _rank: value * factor


FAULTS: dict[str, tuple[Change, str]] = {
    "two rows swapped": (swapped, "rows 4 and 11 are swapped"),
    "one row zeroed": (zeroed, "row 9 is zero"),
    "shifted by a row": (shifted, "each holds the reference's previous row"),
    "rows permuted": (permuted, "rows are permuted: row 2 holds the reference's row 5"),
    "one element": (one_off, "worst row 3, from element"),
    "summed over cp": (scaled(4), "α = cp = 4"),
    "divided by cp": (scaled(1 / 4), "α = 1/cp = 1/4"),
    "summed over tp": (scaled(2), "α = tp = 2"),
    "divided by tp": (scaled(1 / 2), "α = 1/tp = 1/2"),
    "summed over both": (scaled(8), "α = cp·tp = 8"),
    "divided by both": (scaled(1 / 8), "α = 1/(cp·tp) = 1/8"),
    "negated": (scaled(-1), "the sign is flipped"),
    "all zero": (scaled(0), "α = 0: the value is zero"),
    "scaled by 1.7": (scaled(1.7), "a scale that no axis explains"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(tmp_path: Path, kind: str, fault: str) -> None:
    change, words = FAULTS[fault]
    world = World(tmp_path)
    assert world.reference(case(kind))["failures"] == []
    assert world.one("tp2xcp4", case(kind))["outcome"] == "passed"
    verdict = world.one("tp2xcp4", case(kind, change))
    assert verdict["outcome"] == "diverged"
    assert max(float(verdict["ratio"]), float(verdict["row_ratio"])) > 1e6
    assert words in world.text
    assert "tp2xcp4, rank " in world.text
    assert "test_verdict_faults.py:" in world.text
    assert "reproduce: pytest -k this" in world.text


def test_the_message_tells_all_that_is_needed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(case("whole"))
    verdict = world.one("tp2xcp2", case("whole", one_off))
    details = verdict["details"]
    assert details["rank"] == 0
    assert details["coordinates"] == {"tp": 0, "cp": 0}
    assert (details["row"], details["column"]) == (3, 7)
    assert details["expected"] == details["actual"] == f"float64[{ROWS}, {WIDTH}]"
    expected, actual = float(details["expected_values"][0]), float(details["actual_values"][0])
    assert actual / expected == pytest.approx(1 + 1e-6, rel=1e-8)
    assert (details["failing_rows"], details["rows"]) == (1, [3])
    assert details["alpha"] == pytest.approx(1.0, abs=1e-6)
    for words in (
        "x: diverged:",
        "on tp2xcp2, rank 0 (tp=0, cp=0)",
        f"float64[{ROWS}, {WIDTH}]",
        "(gate 10)",
        f"1 of {ROWS} rows fail: 3",
    ):
        assert words in world.text


def test_a_wrong_rank_is_named_beside_those_that_are_right(tmp_path: Path) -> None:
    def only_rank_two(value: torch.Tensor, rank: Rank) -> torch.Tensor:
        wrong = rank.coordinates["cp"] == 1 and rank.coordinates["tp"] == 0
        return zeroed(value, rank) if wrong else value

    world = World(tmp_path)
    world.reference(case("whole"))
    verdict = world.one("tp2xcp2", case("whole", only_rank_two))
    assert verdict["details"]["rank"] == 2
    assert "wrong on rank 2 (tp=0, cp=1); right on rank 0 (tp=0, cp=0)" in world.text


@pytest.mark.parametrize("sizes", [(8, 8), (5, 11), (0, 16)])
def test_rank_local_rows_returned(tmp_path: Path, sizes: tuple[int, int]) -> None:
    def local(value: torch.Tensor, rank: Rank) -> torch.Tensor:
        return torch.split(value, list(sizes))[rank.coordinates["cp"]]

    world = World(tmp_path)
    world.reference(case("whole"))
    verdict = world.one("tp2xcp2", case("whole", local))
    assert verdict["outcome"] == "diverged"
    assert verdict["ratio"] == "inf"
    also = " or tp" if sizes == (8, 8) else ""
    assert (
        f"rank-local rows returned: the ranks along cp{also} hold {sizes[0]} + {sizes[1]} of 16"
    ) in world.text


def test_rows_gathered_twice(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(case("whole"))
    world.one("cp2", case("whole", lambda value, _rank: torch.cat([value, value])))
    assert "gathered over cp although every rank held the whole" in world.text


def share(rank: Rank) -> torch.Tensor:
    """This rank's share of VALUE along cp4: uneven ones, which add up to it."""
    parts = [numbers(ROWS, WIDTH, seed=seed) for seed in (11, 12, 13)]
    parts.append(VALUE - torch.stack(parts).sum(0))
    return parts[rank.coordinates["cp"]]


def gradient(*, factor: float = 1.0, skip: int | None = None) -> Body:
    """A gradient that is a mean over cp ranks: partial sums, each divided by cp."""

    def body(rank: Rank) -> None:
        if not rank.recorder.judging:
            rank.observe("g", rank.noise(VALUE))
            return
        part = share(rank) * factor
        missing = rank.coordinates["cp"] == skip
        rank.observe("g", part * 0 if missing else part, partial=("cp",))

    return body


def test_partial_sums_add_up(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(gradient())
    verdict = world.one("tp2xcp4", gradient())
    assert (verdict["outcome"], verdict["kind"]) == ("passed", "partial")
    assert world.one("tp2xcp4", gradient(factor=4.0))["outcome"] == "diverged"
    assert "α = cp = 4: counted once for each rank of that axis" in world.text
    assert world.one("tp2xcp4", gradient(factor=0.25))["outcome"] == "diverged"
    assert "α = 1/cp = 1/4" in world.text
    assert world.one("tp2xcp4", gradient(skip=2))["outcome"] == "diverged"


def test_parts_of_a_sum_that_were_never_summed_are_named(tmp_path: Path) -> None:
    """Uneven shares of ranks, whose α looks like nothing, add up to the reference over one axis."""

    def unsummed(*, factor: float = 1.0) -> Body:
        def body(rank: Rank) -> None:
            if not rank.recorder.judging:
                rank.observe("g", rank.noise(VALUE))
                return
            rank.observe("g", share(rank) * factor)

        return body

    words = "the all-reduce over cp is missing (or say partial=('cp',))"
    world = World(tmp_path)
    world.reference(unsummed())
    assert world.one("tp2xcp4", unsummed())["outcome"] == "diverged"
    assert words in world.text
    assert "over tp is missing" not in world.text
    # Parts of something else say nothing.
    assert world.one("tp2xcp4", unsummed(factor=1.001))["outcome"] == "diverged"
    assert "is missing (or say" not in world.text


def test_what_was_seen_stands_before_a_guess_at_the_cause(tmp_path: Path) -> None:
    """Shares so equal that one of them looks like the whole, divided by the axis."""

    def body(rank: Rank) -> None:
        share = 0.25 + 1e-4 * (-1) ** rank.coordinates["cp"]
        rank.observe("g", VALUE * share if rank.recorder.judging else rank.noise(VALUE))

    world = World(tmp_path)
    world.reference(body)
    world.one("cp4", body)
    guess = world.text.index("divided by that axis once too often")
    for seen in ("the all-reduce over cp is missing", "ranks differ"):
        assert world.text.index(seen) < guess


def test_a_scale_that_is_only_near_an_axis_is_said_so(tmp_path: Path) -> None:
    """One rank's half of the tokens: α is near 1/cp and the rest of the error is not a scale."""
    rest = numbers(ROWS, WIDTH, seed=5)
    world = World(tmp_path)
    world.reference(case("whole"))
    world.one("cp2", case("whole", lambda value, _rank: value * 0.5 + 0.1 * rest))
    assert "α is near 1/cp = 1/2" in world.text


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity(tmp_path: Path, kind: str, number: float) -> None:
    def spoil(value: torch.Tensor, _rank: Rank) -> torch.Tensor:
        value[6, 2] = number
        return value

    world = World(tmp_path)
    world.reference(case(kind))
    verdict = world.one("tp2xcp2", case(kind, spoil))
    assert verdict["outcome"] == ("nan" if math.isnan(number) else "diverged")
    assert verdict["ratio"] == verdict["row_ratio"] == "inf"
    assert verdict["details"]["row"] == 6
    assert str(number) in verdict["details"]["actual_values"]


def test_infinities_of_the_reference_must_stand_in_the_same_places(tmp_path: Path) -> None:
    masked = VALUE.clone()
    masked[VALUE > 1] = -math.inf
    masked[VALUE < -2] = torch.finfo(torch.float64).min
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(masked)))
    assert world.same("cp2", masked)["outcome"] == "passed"
    row = int((masked == -math.inf).nonzero()[0, 0])
    for number in (0.0, math.inf, -1e9):
        wrong = masked.clone()
        wrong[row][masked[row] == -math.inf] = number
        assert world.same("cp2", wrong)["outcome"] == "diverged"
    # A mask must not hide what stands beside it.
    wrong = masked.clone()
    finite = int((masked[row].abs() < 10).nonzero()[0, 0])
    wrong[row, finite] += 1e-9
    verdict = world.same("cp2", wrong)
    assert (verdict["outcome"], verdict["details"]["row"]) == ("diverged", row)


def test_none_and_zero_are_not_one_another(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", None))
    assert world.same("cp2", None)["outcome"] == "passed"
    verdict = world.same("cp2", torch.zeros(3))
    assert verdict["outcome"] == "diverged"
    assert "expected None, got float32[3]; None is not zero" in verdict["message"]
    other = World(tmp_path / "2")
    other.reference(case("whole"))
    verdict = other.same("cp2", None)
    assert "got None; None is not zero" in verdict["message"]


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        (VALUE, VALUE.float(), "another dtype: expected float64[16, 24], got float32[16, 24]"),
        (VALUE, VALUE[:, :-1], "another shape: expected float64[16, 24], got float64[16, 23]"),
        (VALUE, VALUE.flatten(), "another shape"),
        (VALUE, VALUE[None], "another shape"),
        (VALUE, [VALUE], None),
        (torch.arange(4), torch.arange(4).int(), "another dtype: expected int64[4]"),
        (torch.tensor([True]), torch.tensor([1]), "another dtype: expected bool[1]"),
        (3, 3.0, "another dtype"),
        (1, True, "another dtype"),
        ([], torch.ones(3), "another kind of value: expected an empty container"),
    ],
)
def test_forms_must_match(
    tmp_path: Path, reference: object, candidate: object, words: str | None
) -> None:
    world = World(tmp_path)
    assert world.reference(lambda rank: rank.observe("x", reference), runs=8)["failures"] == []
    verdicts = world.cell("cp2", lambda rank: rank.observe("x", candidate))
    assert verdicts[0]["outcome"] == ("missing" if words is None else "diverged")
    assert words is None or words in verdicts[0]["message"]


def test_a_python_number_may_be_a_tensor_on_the_other_side(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", 2.5), runs=8)
    assert world.same("cp2", torch.tensor(2.5, dtype=torch.float64))["outcome"] == "passed"
    assert world.same("cp2", 2.5 * (1 + 1e-13))["outcome"] == "diverged"


def test_integers_are_exact(tmp_path: Path) -> None:
    ids = torch.randint(0, 1000, (ROWS, 3), generator=torch.Generator().manual_seed(1))
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", ids))
    verdict = world.same("cp2", ids)
    assert (verdict["outcome"], verdict["value"], verdict["ratio"]) == ("passed", "exact", 0.0)
    wrong = ids.clone()
    wrong[5, 1] += 1
    verdict = world.same("cp2", wrong)
    assert (verdict["outcome"], verdict["ratio"]) == ("diverged", "inf")
    assert "1 of 48 differ, expected equality" in verdict["message"]
    assert verdict["details"]["row"] == 5
    assert f"expected {ids[5, 1]}" in world.text
    world.same("cp2", ids.roll(-1, 0))
    assert "each holds the reference's next row" in world.text
    world.same("cp2", ids * 2)
    assert "α = cp = 2" in world.text


def test_exact_floats(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", VALUE, exact=True))
    near = VALUE.clone()
    near[3, 3] = torch.nextafter(near[3, 3], near[0, 0])
    assert world.same("cp2", near, exact=True)["outcome"] == "diverged"
    assert world.same("cp2", VALUE, exact=True)["outcome"] == "passed"
    signed = World(tmp_path / "zero")
    signed.reference(lambda rank: rank.observe("x", torch.tensor([0.0, 1.0]), exact=True))
    assert signed.same("cp2", torch.tensor([-0.0, 1.0]), exact=True)["outcome"] == "passed"


def test_a_partial_sum_of_counts(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("n", torch.tensor([7, 3])))

    def counts(rank: Rank, *, twice: bool = False) -> None:
        part = torch.tensor([5, 1]) if rank.coordinates["cp"] == 0 else torch.tensor([2, 2])
        rank.observe("n", torch.tensor([7, 3]) if twice else part, partial=("cp",))

    assert world.one("tp2xcp2", counts)["outcome"] == "passed"
    verdict = world.one("cp2", lambda rank: counts(rank, twice=True))
    assert verdict["outcome"] == "diverged"
    assert "α = cp = 2" in world.text


@pytest.mark.parametrize("size", [(3 * (1 << 19) + 5,), (3, 1 << 20), (40000, 40)])
def test_values_larger_than_a_block(tmp_path: Path, size: tuple[int, ...]) -> None:
    value = numbers(*size, dtype=torch.float32)
    world = World(tmp_path, dtype=torch.float32)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)))
    assert world.same("single", value)["outcome"] == "passed"
    wrong = value.clone()
    wrong[-1 if len(size) == 1 else (size[0] - 1, size[1] - 2)] += 1.0
    verdict = world.same("single", wrong)
    assert (verdict["outcome"], verdict["details"]["row"]) == ("diverged", size[0] - 1)
    assert verdict["details"]["column"] == (0 if len(size) == 1 else size[1] - 2)


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (numbers(5, 5).abs().add(1) * 1e19, numbers(5, 5).abs().add(1) * 2e19),
        (numbers(5, 5).abs().add(1) * 1e150, numbers(5, 5).abs().add(1) * 2e150),
        (torch.tensor([3e18, 1.0]), torch.tensor([float("inf"), 1.0])),
        (torch.tensor([-float("inf"), 1.0]), torch.tensor([-1e300, 1.0], dtype=torch.float64)),
        (torch.tensor([3e18]), torch.tensor([9e30])),
    ],
)
def test_numbers_beyond_every_norm_are_not_all_alike(
    tmp_path: Path, reference: torch.Tensor, candidate: torch.Tensor
) -> None:
    """A mask is out of a norm's range, but not every number out of it is the same mask."""
    reference, candidate = reference.double(), candidate.double()
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("huge", rank.noise(reference)))
    assert world.one("cp2", lambda rank: rank.observe("huge", reference))["outcome"] == "passed"
    assert world.one("cp2", lambda rank: rank.observe("huge", candidate))["outcome"] == "diverged"
