"""The vacuity test: whether a comparison would also accept what is plainly wrong."""

from __future__ import annotations

import torch

from .compare import Comparer, Part, Yardstick, ratio_of
from .records import Stats

SCALES = {"zeros": 0.0, "twice the value": 2.0, "half the value": 0.5, "the negative": -1.0}

ROUNDING = 4.0
"""Ratio up to which rows are taken for equal but for rounding: then the shift changes nothing."""


def is_zero(reference: torch.Tensor, yardstick: Yardstick, *, floor: float, gate: float) -> bool:
    """Whether zeros would pass for the reference (which holds no NaN)."""
    stats = _against(reference, yardstick, scale=0.0)
    return _accepts(stats, yardstick, floor=floor, gate=gate)


def also_accepted(
    reference: torch.Tensor, yardstick: Yardstick, *, floor: float, gate: float
) -> str:
    """The first wrong alternative that the comparison accepts, in words; empty where none.

    ``reference`` is floating and not zero. Half the value is the scaled alternative nearest to it
    in every row, so the others are tried only where it is accepted. ``floor`` and ``gate`` are
    those of the whole tensor. Alternatives equal to the reference don't count.
    """
    if _accepts(_against(reference, yardstick, scale=0.5), yardstick, floor=floor, gate=gate):
        accepted = [
            words
            for words, scale in SCALES.items()
            if _accepts(
                _against(reference, yardstick, scale=scale), yardstick, floor=floor, gate=gate
            )
        ]
        return ", ".join(accepted)
    if reference.dim() and reference.shape[0] > 1:
        positions = torch.arange(reference.shape[0]).roll(1)
        part = Part(reference, positions=positions)
        stats = Comparer([reference], part, yardstick, exact=False).run(until_failure=True)
        same = ratio_of(stats.error_sq**0.5, floor) <= ROUNDING and stats.row_ratio <= ROUNDING
        if not same and _accepts(stats, yardstick, floor=floor, gate=gate):
            return "the value shifted by a row"
    return ""


def _against(reference: torch.Tensor, yardstick: Yardstick, *, scale: float) -> Stats:
    comparer = Comparer([reference], Part(reference), yardstick, exact=False, scale=scale)
    return comparer.run(until_failure=True)


def _accepts(stats: Stats, yardstick: Yardstick, *, floor: float, gate: float) -> bool:
    if stats.nan or stats.infinite or stats.row_ratio > yardstick.row_gate:
        return False
    if stats.error_sq == 0.0:  # equal to the reference
        return False
    return ratio_of(stats.error_sq**0.5, floor) <= gate
