"""Replicas of one value must have the same bits; where they don't, by how much they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .blocks import blocks
from .compare import digits_for, show
from .pieces import Files, Region
from .records import Record
from .values import real_dtype

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Two ranks whose replicas differ, and what is known of the difference.

    ``row``: source position of the row with the element that differs most, None where the value has
    no rows. ``kinds``: what that element is, as text, with the ranks that hold it; empty where the
    value was not kept.
    """

    one: int
    other: int
    headline: str
    row: int | None = None
    kinds: dict[str, list[int]] = field(default_factory=dict)


def find_difference(
    region: Region, held: Mapping[int, Record], files: Files, *, rows: int
) -> Difference | None:
    """Where the replicas of a region differ, of a whole with ``rows``; None where all agree."""
    for ranks in region.holders.values():
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            alike.setdefault(held[rank].digest, []).append(rank)
        if len(alike) > 1:
            return _measure(list(alike.values()), region, held, files, rows)
    return None


def _measure(
    alike: list[list[int]],
    region: Region,
    held: Mapping[int, Record],
    files: Files,
    rows: int,
) -> Difference:
    one = alike[0][0]
    if any(held[ranks[0]].values_at < 0 for ranks in alike):
        words = "replicas differ in bits (by how much is not known: the value is large)"
        return Difference(one, alike[1][0], words)
    values = [files.values(ranks[0], held[ranks[0]]) for ranks in alike]
    mine, other = values[0], alike[1][0]
    most, count, at = 0.0, 0, -1
    for theirs, ranks in zip(values[1:], alike[1:], strict=True):
        where = differing = 0
        for index in blocks(mine.shape):
            gap = ulps(mine[index].reshape(-1), theirs[index].reshape(-1))
            differing += int((gap != 0).sum())
            worst = int(gap.argmax())
            if float(gap[worst]) > most:
                most, at, other = float(gap[worst]), where + worst, ranks[0]
            where += gap.numel()
        count = max(count, differing)
    floating = held[one].floating
    amount = f"{most:.0f} ulp" if floating else f"{most:.0f}"
    if most >= 1e6:
        amount = f"{most:.1e} ulp" if floating else f"{most:.1e}"
    if at < 0:
        return Difference(one, other, "replicas differ in bits")
    row = None
    if held[one].shape:
        row = int(region.positions(files, rows)[at // max(1, mine[0].numel())])
    kinds: dict[str, list[int]] = {}
    texts = _texts([value.reshape(-1)[at] for value in values], held[one])
    for text, ranks in zip(texts, alike, strict=True):
        kinds.setdefault(text, []).extend(ranks)
    headline = f"replicas differ by {amount} in {count} of {mine.numel()} elements"
    return Difference(one, other, headline, row, kinds)


def _texts(numbers: list[torch.Tensor], record: Record) -> list[str]:
    """Numbers with as many digits as tell them apart."""
    together = torch.stack(numbers)
    if not record.floating:
        return show(together, 0)
    together = together.double()
    gaps = (together[:, None] - together).abs()
    gaps = gaps[gaps > 0]
    gap = float(gaps.min()) if gaps.numel() else 0.0
    size = float(together.abs().max())
    return show(together, digits_for(gap, size, dtype=real_dtype(record.dtype)))


def ulps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distances in units in the last place (float64); plain distances for integers.

    The bits of floating numbers, taken as signed integers with negative numbers mirrored, are
    in the order of the numbers, with steps of one for neighbours.
    """
    if one.is_floating_point():
        first, second = _ordered(one), _ordered(other)
    else:
        first, second = one.to(torch.int64), other.to(torch.int64)
    near = (first - second).to(torch.float64).abs()
    # Across the whole range the integers overflow; a float is exact enough there.
    far = (first.to(torch.float64) - second.to(torch.float64)).abs()
    return torch.where(far < 2.0**62, near, far)


def _ordered(value: torch.Tensor) -> torch.Tensor:
    bits = value.contiguous().view(_BITS[value.element_size()]).to(torch.int64)
    least = -(2 ** (8 * value.element_size() - 1))
    return torch.where(bits < 0, least - bits, bits)
