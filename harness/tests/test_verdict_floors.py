"""Floors: noise errors, degrees of freedom, and how often a correct value would fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import Body, Rank, World, numbers

from shardproof.verdict.blocks import BLOCK
from shardproof.verdict.floors import freedom, noise_errors, row_freedom
from shardproof.verdict.gates import LEAST_GATE


@pytest.mark.parametrize(
    "shape", [(), (1,), (100,), (30, 4), (30, 50), (1, 3 * BLOCK + 7), (2 * BLOCK, 3), (BLOCK * 3,)]
)
def test_noise_errors_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    reference = numbers(*shape)
    value = reference + 1e-3 * numbers(*shape, seed=1)
    found = noise_errors(value, reference)
    error = (value - reference).square()
    rows = error.reshape(shape[0] if shape else 1, -1).sum(1)
    assert found.error_sq == pytest.approx(float(error.sum()))
    assert found.unlike == 0
    assert float(found.row_sq.max()) == pytest.approx(float(rows.max()))
    if rows.numel() <= 1 << 16:
        torch.testing.assert_close(found.row_sq, rows)
    else:
        # Short rows are kept by groups, each by its largest.
        group = math.ceil(rows.numel() / found.row_sq.numel())
        assert found.row_sq.numel() <= 1 << 16
        torch.testing.assert_close(found.row_sq[1], rows[group : 2 * group].max())
        assert float(found.row_sq[-1]) == pytest.approx(
            float(rows[(found.row_sq.numel() - 1) * group :].max())
        )


def test_what_turns_infinite_is_counted_apart() -> None:
    reference = torch.tensor([1.0, -math.inf, 2.0, math.inf, -1e30])
    same = torch.tensor([1.5, -math.inf, 2.0, math.inf, -1.0001e30])
    assert noise_errors(same, reference).unlike == 0
    assert noise_errors(same, reference).error_sq == 0.25
    for wild in (math.nan, math.inf, -math.inf, 1e30):
        value = same.clone()
        value[2] = wild
        assert noise_errors(value, reference).unlike > 0
    value = same.clone()
    value[3] = -math.inf
    assert noise_errors(value, reference).unlike > 0


def _sketches(errors: list[torch.Tensor]) -> list[torch.Tensor]:
    zero = torch.zeros_like(errors[0])
    return [noise_errors(error, zero).sketch for error in errors]


def test_freedom_of_independent_errors_is_large_and_of_one_direction_is_one() -> None:
    independent = _sketches([numbers(100, 64, seed=seed) for seed in range(3)])
    assert freedom(independent) > 100
    assert row_freedom(independent) > 15
    direction = numbers(100, 64, seed=9)
    line = _sketches([scale * direction for scale in (1.0, -0.3, 2.0)])
    assert freedom(line) == pytest.approx(1.0)
    # Rows that each move by a factor of their own: free as a whole, tied within a row.
    tied = _sketches([direction * numbers(100, 1, seed=seed) for seed in range(3)])
    assert freedom(tied) > 10
    assert row_freedom(tied) == pytest.approx(1.0)


def test_freedom_counts_equal_independent_components() -> None:
    basis = torch.linalg.qr(numbers(64, 3, seed=4))[0].T
    runs = [numbers(1, 3, seed=seed) @ basis for seed in range(60)]
    assert freedom(_sketches(runs)) == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize(("runs", "least"), [(3, 2.5), (8, 4.5)])
def test_rows_that_are_alike_have_the_freedom_that_they_share(runs: int, least: float) -> None:
    """Few runs err to the careful side: by the least row alone, three would say 1.2."""
    basis = torch.linalg.qr(numbers(64, 6, seed=4))[0].T
    alike = [numbers(200, 6, seed=seed) @ basis for seed in range(runs)]
    assert least < row_freedom(_sketches(alike)) < 7.5


def test_a_row_on_a_line_is_not_judged_by_the_mean_row() -> None:
    line = numbers(1, 64, seed=9)
    runs = [numbers(100, 64, seed=seed) for seed in range(8)]
    for seed, errors in enumerate(runs):
        errors[40] = line * numbers(1, seed=100 + seed)
    assert row_freedom(_sketches(runs)) < 1.2


def test_freedom_without_errors_is_unknown() -> None:
    assert freedom(_sketches([torch.zeros(4, 9)] * 3)) == math.inf
    assert row_freedom(_sketches([torch.zeros(4, 9)] * 3)) == math.inf


def _floors(world: World) -> dict[str, Any]:
    (line,) = world.reference(lambda rank: rank.observe("x", rank.noise(numbers(6, 20))))["floors"]
    found: dict[str, Any] = line
    return found


def test_the_floor_is_the_largest_error_of_the_noise_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    line = _floors(world)
    value = numbers(6, 20)
    errors = []
    for seed in range(3):
        rank = Rank(_Nothing(), {}, seed)  # type: ignore[arg-type]  # only its noise is used
        errors.append(float((rank.noise(value) - value).norm()))
    assert line["floor"] == pytest.approx(max(errors))
    assert line["norm"] == pytest.approx(float(value.norm()))
    assert line["gate"] == line["row_gate"] == LEAST_GATE


def noisy(value: torch.Tensor) -> Body:
    """A case whose value moves by rounding."""
    return lambda rank: rank.observe("x", rank.noise(value))


class _Nothing:
    def observe(self) -> None: ...


def _direction_body(scale: torch.Tensor | None) -> Any:
    value = numbers(40, 16)

    def body(rank: Rank) -> None:
        factor = rank.noise(torch.ones(1, dtype=torch.float64)) if scale is None else scale
        rank.observe("x", value * factor)

    return body


def test_errors_along_one_line_ask_for_more_runs_and_get_a_wider_gate(tmp_path: Path) -> None:
    few = World(tmp_path / "few").reference(_direction_body(None), runs=3)
    assert few["wanted"] == 8
    assert few["floors"][0]["freedom"] == pytest.approx(1.0, rel=1e-3)
    assert few["floors"][0]["gate"] > 400
    many = World(tmp_path / "many").reference(_direction_body(None), runs=8)
    assert many["wanted"] == 8
    assert 13 < many["floors"][0]["gate"] < 15


def _row_body(rank: Rank) -> None:
    """All rows move freely but one, which moves along itself."""
    value = numbers(40, 16)
    moved = rank.noise(value)
    moved[7] = value[7] * rank.noise(torch.ones(1, dtype=torch.float64))
    rank.observe("x", moved)


def test_one_row_along_a_line_asks_for_more_runs_and_widens_the_gate_of_rows(
    tmp_path: Path,
) -> None:
    few = World(tmp_path / "few").reference(_row_body, runs=3)
    assert few["wanted"] == 8
    assert few["floors"][0]["gate"] == LEAST_GATE < few["floors"][0]["row_gate"]
    (many,) = World(tmp_path / "many").reference(_row_body, runs=8)["floors"]
    assert many["gate"] == LEAST_GATE
    assert LEAST_GATE < many["row_gate"] < few["floors"][0]["row_gate"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1,), (3,), (4,), (50,), (4000,), (30, 3), (40, 8), (200, 64), (3, 1000)]
)
def test_another_draw_of_the_noise_passes(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Against false alarms: a candidate whose error is one more draw of the same noise."""
    world = World(tmp_path, dtype=dtype)
    value = numbers(*shape, dtype=dtype)

    def body(rank: Rank) -> None:
        rank.observe("x", rank.noise(value))

    world.reference(body, runs=8 if math.prod(shape) < 4 else 3)
    for seed in range(100, 140):
        noise = Rank(_Nothing(), {}, seed)  # type: ignore[arg-type]  # only its noise is used
        drawn = noise.noise(value)
        verdict = world.same("single", drawn)
        assert verdict["outcome"] == "passed"
        limit = 0.5 if math.prod(shape) < 4 else 0.4
        assert verdict["ratio"] <= limit * verdict["gate"]
        assert verdict["row_ratio"] <= limit * verdict["row_gate"]


def test_a_row_that_no_run_moved_does_not_fail_by_its_luck(tmp_path: Path) -> None:
    """A row may be right by luck in all runs: its floor is then the typical one for its size."""
    value = numbers(20, 12)

    def body(rank: Rank) -> None:
        moved = value * (1 + 1e3 * (rank.noise(torch.ones_like(value)) - 1))
        moved[7] = value[7]
        rank.observe("x", moved)

    world = World(tmp_path)
    world.reference(body)
    candidate = value.clone()
    candidate[7] *= 1 + 3e-13
    assert world.same("single", candidate)["outcome"] == "passed"
    candidate[7] *= 1 + 1e-11
    verdict = world.same("single", candidate)
    assert verdict["outcome"] == "diverged"
    assert verdict["details"]["row"] == 7


def test_a_row_has_its_own_floor_where_it_is_long_enough(tmp_path: Path) -> None:
    """A small row beside large ones: the tensor's norm and a pooled floor would not see it."""
    size = torch.tensor([1e8, 1.0, 1e8], dtype=torch.float64)
    for width, outcome in ((8, "diverged"), (7, "passed")):
        value = numbers(3, width) * size[:, None]
        world = World(tmp_path / str(width))
        world.reference(noisy(value))
        candidate = value.clone()
        candidate[1] += 1e-11
        verdict = world.same("single", candidate)
        assert verdict["outcome"] == outcome
        assert verdict["ratio"] < 1


def test_a_row_of_zeros_does_not_fail_over_what_no_arithmetic_sees(tmp_path: Path) -> None:
    value = numbers(5, 9)
    value[2] = 0
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)))
    for size, outcome in ((1e-40, "passed"), (1e-25, "diverged")):
        candidate = value.clone()
        candidate[2, 3] = size
        verdict = world.same("single", candidate)
        assert verdict["outcome"] == outcome


def test_short_rows_share_the_largest_floor(tmp_path: Path) -> None:
    """One ill-conditioned element must not fail over the floor of its neighbours."""
    value, size = numbers(20000).abs() + 1, torch.ones(20000, dtype=torch.float64)
    size[7] = 1e3

    def body(rank: Rank) -> None:
        rank.observe("x", value + size * (rank.noise(value) - value))

    world = World(tmp_path)
    world.reference(body, runs=8)
    noise = Rank(_Nothing(), {}, 100)  # type: ignore[arg-type]  # only its noise is used
    verdict = world.same("single", value + size * (noise.noise(value) - value))
    assert verdict["outcome"] == "passed"
    assert 0.01 < verdict["row_ratio"] < 3
