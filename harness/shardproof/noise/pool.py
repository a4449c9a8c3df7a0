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


@functools.lru_cache(maxsize=16)
def pool(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uniform relative noise in [-u, u] of ``dtype``, shape ``[POOL_SIZE]``, on ``device``.

    It is drawn from a generator of its own: the caller's random numbers do not move.
    """
    generator = torch.Generator().manual_seed(_POOL_SEED)
    uniform = torch.rand(POOL_SIZE, generator=generator, dtype=torch.float64)
    uniform.mul_(2).sub_(1)
    # Without this the mean of the pool would push every value the same way.
    uniform.sub_(uniform.mean())
    return uniform.mul_(UNITS[dtype]).to(dtype).to(device)
