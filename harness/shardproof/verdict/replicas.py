"""Replicas of one value must have the same bits; where they don't, by how much they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .blocks import blocks
from .compare import show
from .pieces import Files
from .records import Record

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Two ranks whose replicas differ, and what is known of the difference."""

    one: int
    other: int
    headline: str
    evidence: str = ""


def find_difference(
    ranks: Sequence[int], held: Mapping[int, Record], files: Files
) -> Difference | None:
    """The first of ``ranks`` whose value differs from that of the first; None where all agree."""
    first = ranks[0]
    for rank in ranks[1:]:
        if held[rank].digest != held[first].digest:
            return _measure(first, rank, held, files)
    return None


def _measure(one: int, other: int, held: Mapping[int, Record], files: Files) -> Difference:
    if held[one].values_at < 0 or held[other].values_at < 0:
        return Difference(
            one, other, "replicas differ in bits (by how much is not known: the value is large)"
        )
    mine, theirs = files.values(one, held[one]), files.values(other, held[other])
    most, count, at, where = 0.0, 0, -1, 0
    pair: tuple[torch.Tensor, torch.Tensor] | None = None
    for index in blocks(mine.shape):
        gap = ulps(mine[index].reshape(-1), theirs[index].reshape(-1))
        count += int((gap != 0).sum())
        worst = int(gap.argmax())
        if float(gap[worst]) > most:
            most, at = float(gap[worst]), where + worst
            pair = (
                mine[index].reshape(-1)[worst : worst + 1],
                theirs[index].reshape(-1)[worst : worst + 1],
            )
        where += gap.numel()
    floating = held[one].floating
    amount = f"{most:.0f} ulp" if floating else f"{most:.0f}"
    if most >= 1e6:
        amount = f"{most:.1e} ulp" if floating else f"{most:.1e}"
    headline = f"replicas differ by {amount} in {count} of {mine.numel()} elements"
    if pair is None:
        return Difference(one, other, "replicas differ in bits")
    texts = [show(part.double() if floating else part, 17)[0] for part in pair]
    row = at // max(1, mine[0].numel()) if mine.dim() else 0
    return Difference(
        one, other, headline, f"worst in row {row}: {texts[0]} on {{}}, {texts[1]} on {{}}"
    )


def ulps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distances in units in the last place (float64); plain distances for integers.

    The bits of floating numbers, taken as signed integers with negative numbers mirrored, are
    in the order of the numbers, with steps of one for neighbours.
    """
    if not one.is_floating_point():
        return (one.to(torch.float64) - other.to(torch.float64)).abs()
    first, second = _ordered(one), _ordered(other)
    near = (first - second).to(torch.float64).abs()
    # Across the whole range the integers overflow; a float is exact enough there.
    far = (first.to(torch.float64) - second.to(torch.float64)).abs()
    return torch.where(far < 2.0**62, near, far)


def _ordered(value: torch.Tensor) -> torch.Tensor:
    bits = value.contiguous().view(_BITS[value.element_size()]).to(torch.int64)
    least = -(2 ** (8 * value.element_size() - 1))
    return torch.where(bits < 0, least - bits, bits)
