"""Units of rounding, and the pool that noise is read from.

Drawing a fresh random number for every element costs more than the arithmetic that it perturbs.
So a few million numbers are drawn once for each dtype, and an operation reads a window of them
at a random offset. Runs differ by their offsets, never by the pool.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

POOL_SIZE: Final = 1 << 20
"""Numbers in a pool: 4 MiB in float32, 8 MiB in float64."""

WINDOW: Final = 1 << 18
"""Most elements that one read covers. A window and what it perturbs stay in the cache."""

_POOL_SEED: Final = 0x5EED

UNITS: Final[dict[torch.dtype, float]] = {
    dtype: torch.finfo(dtype).eps / 2
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""The unit of rounding u = eps / 2 of each dtype that is perturbed (relative, round to nearest)."""


def coarser(new: torch.dtype, old: torch.dtype) -> bool:
    """Whether a conversion from ``old`` to ``new`` rounds: ``new`` has fewer significant bits."""
    return torch.finfo(new).eps > torch.finfo(old).eps


_MOVED: Final = POOL_SIZE // 8
"""Of the pool, one part in eight moves a value up and one in eight moves it down."""

_STEP: Final = 1.25
"""A move in units of rounding. Added to x, between 1.25 u and 2.5 u (in units of x's binade) rounds
to exactly the neighbour of x, whatever x's leading digits are."""


@functools.lru_cache(maxsize=16)
def pool(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Relative noise of ``dtype``, shape ``[POOL_SIZE]``, on ``device``.

    x + x * noise is x in three cases of four, else one of x's neighbours. That is the law of a
    random rounding of an exact result which lies anywhere around x (Parker 1997). Noise uniform in
    [-u, u] moves as much on average, but it never moves a value just above a power of two.

    It is drawn from a generator of its own: the caller's random numbers do not move.
    """
    generator = torch.Generator().manual_seed(_POOL_SEED)
    order = torch.randperm(POOL_SIZE, generator=generator)
    noise = torch.zeros(POOL_SIZE, dtype=dtype)
    # Exactly as many up as down: a pool with a mean would push all values the same way.
    noise[order[:_MOVED]] = _STEP * UNITS[dtype]
    noise[order[_MOVED : 2 * _MOVED]] = -_STEP * UNITS[dtype]
    return noise.to(device)
