"""Rotary angles of each row at its own position; Megatron's own tables are float32 at best."""

from __future__ import annotations

import torch
from torch import Tensor

from subjects.trainer.precision import working_dtype


def angles(positions: Tensor, *, head_size: int, base: float, dtype: torch.dtype) -> Tensor:
    """Angles [p, 1, 1, head_size] of ``positions`` [p], in the form that Megatron rotates by.

    Pair i of a head turns by position / base^(2i / head_size) (RoFormer, equation 15); both halves
    of a head hold the same angles. Computed in the dtype of the run, but never below float32.
    """
    work = working_dtype(dtype)
    even = torch.arange(0, head_size, 2, device=positions.device).to(work)
    frequency = 1.0 / (base ** (even / head_size))
    half = positions.to(work)[:, None] * frequency
    return torch.cat((half, half), dim=-1)[:, None, None, :]
