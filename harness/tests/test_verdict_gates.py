"""Gates against literals that scipy gave, and against draws."""

from __future__ import annotations

import pytest
import torch

from shardproof.verdict.gates import LEAST_GATE, exceedance, gate

# Quantiles at 1e-8 of |X| over the largest of `runs` |Y|, each the length of a Gaussian vector of
# `freedom` dimensions: scipy 1.17, chi2.logpdf and chi2.logcdf under scipy.integrate.quad.
SCIPY = {
    (1, 3): 432.77470400937824,
    (1.5, 3): 70.69958759739795,
    (2, 3): 29.0074655996024,
    (3, 3): 12.0494593930167,
    (4, 3): 7.772696506373022,
    (8, 3): 3.9046865125212973,
    (16, 3): 2.590060700661313,
    (1, 8): 14.17024293708096,
    (1.5, 8): 7.79550230294937,
    (2, 8): 5.76309578385737,
}


@pytest.mark.parametrize(("freedom", "runs"), SCIPY)
def test_exceedance_is_one_in_1e8_at_the_quantiles_of_scipy(freedom: float, runs: int) -> None:
    found = exceedance(SCIPY[freedom, runs], freedom=freedom, runs=runs)
    assert found == pytest.approx(1e-8, rel=1e-6)


@pytest.mark.parametrize(("freedom", "runs"), SCIPY)
def test_the_gate_is_the_quantile_and_at_least_ten(freedom: float, runs: int) -> None:
    expected = max(LEAST_GATE, SCIPY[freedom, runs])
    assert gate(freedom=freedom, runs=runs) == pytest.approx(expected, rel=1e-6)


def test_scalars_need_eight_runs() -> None:
    assert gate(freedom=1, runs=3) > 400
    assert 13 < gate(freedom=1, runs=8) < 15
    assert gate(freedom=4, runs=3) == LEAST_GATE


@pytest.mark.parametrize(("freedom", "runs", "ratio"), [(1, 8, 2.0), (1, 3, 4.0), (3, 3, 1.5)])
def test_exceedance_matches_draws(freedom: int, runs: int, ratio: float) -> None:
    generator = torch.Generator().manual_seed(1)
    count = 400_000
    drawn = torch.randn(runs + 1, count, freedom, generator=generator).norm(dim=2)
    frequency = float((drawn[0] > ratio * drawn[1:].amax(0)).double().mean())
    expected = exceedance(ratio, freedom=freedom, runs=runs)
    assert frequency == pytest.approx(expected, rel=0.05)


def test_many_rows_share_one_false_alarm() -> None:
    alone = gate(freedom=2, runs=3)
    assert gate(freedom=2, runs=3, comparisons=1000) > 2 * alone
    # Rows of eight elements keep the least gate, however many there are of them.
    assert gate(freedom=8, runs=3, comparisons=10**6) == LEAST_GATE


def test_a_freedom_between_steps_is_rounded_down() -> None:
    assert gate(freedom=1.2, runs=3) == gate(freedom=1.125, runs=3) > gate(freedom=1.25, runs=3)


@pytest.mark.parametrize(("freedom", "runs", "comparisons"), [(0.5, 3, 1), (1, 0, 1), (1, 3, 0)])
def test_no_gate_without_runs_or_freedom(freedom: float, runs: int, comparisons: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        gate(freedom=freedom, runs=runs, comparisons=comparisons)
