"""Comparisons that could not fail are failures themselves; and what only looks like one is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import Rank, World, numbers


def verdict_on(world: World, value: Any, *, noise: float = 1.0, **options: Any) -> dict[str, Any]:
    """The verdict on a candidate equal to the reference, whose noise runs move by ``noise``."""

    def body(rank: Rank) -> None:
        moved = value
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            moved = value + noise * (rank.noise(torch.ones_like(value)) - 1)
        rank.observe("x", moved, **options)

    summary = world.reference(body, runs=8)
    assert summary["failures"] == []
    verdict = world.one("cp2", body)
    assert summary["vacuous"] == (["x"] if verdict["outcome"] == "vacuous" else [])
    return verdict


def test_a_zero_reference_is_vacuous(tmp_path: Path) -> None:
    world = World(tmp_path)
    verdict = verdict_on(world, torch.zeros(4, 9, dtype=torch.float64), noise=0.0)
    assert verdict["outcome"] == "vacuous"
    assert "also accept zeros" in verdict["message"]
    assert "zero=True" in world.text


def test_a_reference_within_its_floor_of_zero_is_vacuous(tmp_path: Path) -> None:
    world = World(tmp_path)
    verdict = verdict_on(world, 1e-18 * numbers(4, 9))
    assert (verdict["outcome"], "zeros" in verdict["message"]) == ("vacuous", True)


def test_a_reference_lost_in_noise_is_vacuous(tmp_path: Path) -> None:
    verdict = verdict_on(World(tmp_path), numbers(4, 9), noise=3e14)
    assert verdict["outcome"] == "vacuous"


def test_only_half_is_accepted(tmp_path: Path) -> None:
    # Norm 17 floors: zeros, twice and the negative are 17 and 34 away, half is 8.5.
    value = torch.ones(4, 9, dtype=torch.float64)
    verdict = verdict_on(World(tmp_path), value, noise=math.sqrt(3) / 17 / 2.3e-16)
    assert verdict["outcome"] == "vacuous"
    assert "accept half the value" in verdict["message"]


def test_the_value_shifted_by_a_row(tmp_path: Path) -> None:
    """Rows that differ by little more than rounding: a label shift would pass."""
    # A unit of rounding at 1000 is 1.1e-13.
    value = 1000 + numbers(1, 9) + torch.tensor([[0.0], [6e-13]] * 3, dtype=torch.float64)
    verdict = verdict_on(World(tmp_path), value)
    assert verdict["outcome"] == "vacuous"
    assert "shifted by a row" in verdict["message"]


@pytest.mark.parametrize(
    "value",
    [
        torch.full((6, 9), 3.0, dtype=torch.float64),  # the shifted value is the value
        (numbers(1, 9) * 3).expand(6, 9),
        torch.tensor(3.0, dtype=torch.float64),
        torch.tensor([[1.0] * 9], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 1e-3, 0.0], dtype=torch.float64),
        torch.tensor([-math.inf, 0.0, -math.inf], dtype=torch.float64),  # a mask tells itself
        torch.tensor([1.0, -1e30, 2.0, -3.0], dtype=torch.float64),
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(5, dtype=torch.bool),
        None,
        7,
        0,
        2.5,
    ],
)
def test_not_vacuous(tmp_path: Path, value: object) -> None:
    assert verdict_on(World(tmp_path), value, noise=0.0)["outcome"] == "passed"


def test_equal_rows_but_for_rounding_are_not_vacuous(tmp_path: Path) -> None:
    value = torch.full((6, 9), 1 / 3, dtype=torch.float64)
    value[::2] = torch.nextafter(value[::2], torch.ones_like(value[::2]))
    assert verdict_on(World(tmp_path), value)["outcome"] == "passed"


@pytest.mark.parametrize("value", [torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), [], {}])
def test_nothing_is_vacuous(tmp_path: Path, value: object) -> None:
    world = World(tmp_path / "plain")
    assert verdict_on(world, value)["outcome"] == "vacuous"
    assert "no elements" in world.text or "zero=True" in world.text
    assert verdict_on(World(tmp_path / "meant"), value, zero=True)["outcome"] == "passed"


def test_an_exact_floating_zero_is_vacuous_too(tmp_path: Path) -> None:
    zeros = torch.zeros(4, 9, dtype=torch.float64)
    assert verdict_on(World(tmp_path / "1"), zeros, noise=0, exact=True)["outcome"] == "vacuous"
    value = numbers(4, 9)
    assert verdict_on(World(tmp_path / "2"), value, noise=0, exact=True)["outcome"] == "passed"


def test_zero_true_passes_zero_and_fails_what_is_not(tmp_path: Path) -> None:
    zeros = torch.zeros(4, 9, dtype=torch.float64)
    world = World(tmp_path)
    assert verdict_on(world, zeros, noise=0.0, zero=True)["outcome"] == "passed"
    assert world.same("cp2", -zeros, zero=True)["outcome"] == ("passed")
    wrong = zeros.clone()
    wrong[1, 2] = 1e-300
    verdict = world.same("cp2", wrong, zero=True)
    assert verdict["outcome"] == "diverged"
    assert verdict["ratio"] == "inf"
    assert "expected 0" in world.text


def test_zero_true_allows_what_the_floor_of_the_reference_allows(tmp_path: Path) -> None:
    value = 1e-17 * numbers(4, 9)
    world = World(tmp_path)
    assert verdict_on(world, value, noise=1.0, zero=True)["outcome"] == "passed"
    for size, outcome in ((1e-16, "passed"), (1e-13, "diverged")):
        wrong = size * numbers(4, 9, seed=3)
        verdict = world.same("cp2", wrong, zero=True)
        assert verdict["outcome"] == outcome


def test_zero_true_on_a_reference_that_is_not_zero(tmp_path: Path) -> None:
    world = World(tmp_path)
    summary = world.reference(lambda rank: rank.observe("x", numbers(4, 9), zero=True))
    (failure,) = summary["failures"]
    assert failure["reason"] == "not zero"
    assert "drop zero=True" in failure["message"]


def test_a_wrong_value_is_diverged_although_its_reference_is_vacuous(tmp_path: Path) -> None:
    world = World(tmp_path)
    verdict_on(world, torch.zeros(4, 9, dtype=torch.float64), noise=0.0)
    assert world.same("cp2", numbers(4, 9))["outcome"] == "diverged"
