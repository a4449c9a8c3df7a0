"""Gates: how far above its floor a correct value may land by chance.

Model. The error of a correct candidate and the errors of the ``runs`` noise runs are independent
draws of one distribution, each the length of a Gaussian vector with ``freedom`` degrees of freedom.
The floor is the largest of the noise errors, so a correct ratio exceeds ``g`` with probability

    P(g) = integral of f(x) G(x / g²)^runs dx,    f, G: density and distribution of chi² (freedom)

and the gate is the ``g`` with P(g) = 1e-8. The largest of the draws, not their mean square, because
its lower tail is lighter: one scalar with three runs has a gate of 433, with the mean square 604.
"""

from __future__ import annotations

import functools
import math

import torch

FALSE_ALARM = 1e-8
LEAST_GATE = 10.0
"""What the gate never falls below: the model has no room for a floor that is off by a factor."""

WIDE_GATE = 100.0
"""Where three noise runs give a wider gate than this, eight are worth their time."""

FEW_RUNS = 3
MANY_RUNS = 8
SMALL = 4
"""Tensors of fewer elements count as scalars: their floor takes eight runs."""

# From here on every gate is at its least value, so it need not be computed: with eight degrees of
# freedom and three runs a ratio of 7.4 is exceeded once in 1e14.
_PLENTY = 8.0
_MOST_COMPARISONS = 10**6
_STEPS_PER_FREEDOM = 8
_POINTS = 1201
_MOST_FREEDOM = 64.0
_MOST_RUNS = 1000
_NEAR = 1e-8


def exceedance(ratio: float, *, freedom: float, runs: int) -> float:
    """Probability that a correct candidate's ratio exceeds ``ratio``.

    The integral runs over the logarithm of x, by the trapezoidal rule: the integrand and all its
    derivatives vanish at both ends, where that rule converges geometrically.
    """
    log_x = torch.linspace(-60.0, 7.0, _POINTS, dtype=torch.float64)
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    x = log_x.exp()
    log_density = half * (x / 2).log() - x / 2 - torch.lgamma(half)
    below = torch.special.gammainc(half, x / (2 * ratio * ratio))
    return float(torch.trapezoid(log_density.exp() * below**runs, log_x))


@functools.lru_cache(maxsize=4096)
def _quantile(freedom: float, runs: int, log_alarm: int) -> float:
    alarm = 10.0**log_alarm
    if exceedance(LEAST_GATE, freedom=freedom, runs=runs) <= alarm:
        return LEAST_GATE

    # The logarithm of the probability falls with that of the ratio, for large ones along a line: by
    # regula falsi, with the far end drawn in at each step, a few values are enough.
    def above(log_ratio: float) -> float:
        found = exceedance(math.exp(log_ratio), freedom=freedom, runs=runs)
        return math.log(max(found, 1e-300) / alarm)

    low, high = math.log(LEAST_GATE), math.log(LEAST_GATE) + 1
    while (at_high := above(high)) > 0:
        low, high = high, 2 * high
    at_low = above(low)
    while high - low > _NEAR:
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        at = above(middle)
        if abs(at) < _NEAR:
            return math.exp(middle)
        if at > 0:
            low, at_low, at_high = middle, at, at_high / 2
        else:
            high, at_high, at_low = middle, at, at_low / 2
    return math.exp(high)


def gate(*, freedom: float, runs: int, comparisons: int = 1) -> float:
    """The ratio that a correct candidate exceeds once in 1e8, and at least ``LEAST_GATE``.

    ``freedom``: effective degrees of freedom of the error, at least 1; rounded down to an eighth.
    ``runs``: draws behind the floor. ``comparisons``: how many ratios share the one false alarm
    (rows that are judged against a common floor); rounded up to a power of ten.

    Raises:
        ValueError: fewer than one degree of freedom, run or comparison.
    """
    if freedom < 1 or runs < 1 or comparisons < 1:
        raise ValueError(
            "a gate needs at least one degree of freedom, one noise run and one comparison, got "
            f"freedom={freedom}, runs={runs}, comparisons={comparisons}"
        )
    if freedom >= _PLENTY and runs >= FEW_RUNS and comparisons <= _MOST_COMPARISONS:
        return LEAST_GATE
    steps = math.floor(min(freedom, _MOST_FREEDOM) * _STEPS_PER_FREEDOM)
    log_alarm = round(math.log10(FALSE_ALARM)) - math.ceil(math.log10(comparisons))
    return max(LEAST_GATE, _quantile(steps / _STEPS_PER_FREEDOM, min(runs, _MOST_RUNS), log_alarm))
