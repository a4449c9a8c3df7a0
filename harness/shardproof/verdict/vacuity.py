"""The vacuity test: whether a comparison would also accept what is plainly wrong."""

from __future__ import annotations

import torch

from .compare import Comparer, Part, Yardstick, ratio_of
from .records import Stats

ZEROS = "zeros"

SCALES = {ZEROS: 0.0, "twice the value": 2.0, "half the value": 0.5, "the negative": -1.0}

SHIFTED = "the value shifted by a row"

ROUNDING = 4.0
"""Ratio up to which rows are taken for equal but for rounding: then the shift changes nothing."""


def also_accepted(
    reference: torch.Tensor, yardstick: Yardstick, *, floor: float, gate: float
) -> list[str]:
    """The wrong alternatives that the comparison accepts, in words; empty where there is none.

    ``reference`` is floating and holds no NaN. ``floor`` and ``gate`` are those of the whole
    tensor. Half the value is the scaled alternative nearest to it in every row, so the others,
    zeros among them, are tried only where it is accepted. Alternatives equal to the reference
    don't count.
    """

    def accepts(stats: Stats) -> bool:
        if stats.nan or stats.infinite or stats.row_ratio > yardstick.row_gate:
            return False
        return stats.error_sq > 0.0 and ratio_of(stats.error_sq**0.5, floor) <= gate

    def scaled(factor: float) -> Stats:
        comparer = Comparer([reference], Part(reference), yardstick, exact=False, scale=factor)
        return comparer.run(until_failure=True)

    if accepts(scaled(SCALES["half the value"])):
        return [words for words, factor in SCALES.items() if accepts(scaled(factor))]
    if reference.dim() and reference.shape[0] > 1:
        part = Part(reference, positions=torch.arange(reference.shape[0]).roll(1))
        stats = Comparer([reference], part, yardstick, exact=False).run(until_failure=True)
        same = ratio_of(stats.error_sq**0.5, floor) <= ROUNDING and stats.row_ratio <= ROUNDING
        if accepts(stats) and not same:
            return [SHIFTED]
    return []
