"""Putting a value together: from the comparisons of its parts to the numbers of a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .blocks import blocks
from .candidate import cut_reference, examine
from .compare import ratio_of
from .fingerprint import widen
from .pieces import Files, Region
from .records import Measured, Record, Stats
from .reference import Store, stored_shape


@dataclass
class Result:
    """Sums over the regions of one value, its worst row, and the rank to name for it."""

    stats: Stats = field(default_factory=Stats)
    ratio: float = 0.0
    rank: int = -1
    _worst: tuple[float, ...] = (-1.0,)

    def add(self, stats: Stats, rank: int) -> None:
        """Add a region that ``rank`` holds."""
        mine = self.stats
        mine.error_sq += stats.error_sq
        mine.dot += stats.dot
        mine.candidate_sq += stats.candidate_sq
        mine.reference_sq += stats.reference_sq
        mine.nan += stats.nan
        mine.infinite += stats.infinite
        mine.unequal += stats.unequal
        mine.failing += stats.failing
        mine.failing_rows = sorted({*mine.failing_rows, *stats.failing_rows})
        mine.zero_rows = sorted({*mine.zero_rows, *stats.zero_rows})
        mine.moved_rows = sorted({*mine.moved_rows, *stats.moved_rows})
        if self.rank < 0 or severity(stats) > self._worst:
            self._worst, self.rank = severity(stats), rank
            mine.sample = stats.sample
            mine.row_ratio, mine.worst_row = stats.row_ratio, stats.worst_row

    @property
    def severity(self) -> tuple[float, ...]:
        """Orders results, the worst last."""
        wild = self.stats.nan + self.stats.infinite + self.stats.unequal
        return (wild, self.ratio, self.stats.row_ratio)


def severity(stats: Stats) -> tuple[float, ...]:
    """Orders comparisons, the worst last."""
    return (stats.nan, stats.infinite, stats.unequal, stats.row_ratio, stats.error_sq)


def is_wrong(stats: Stats, entry: Measured) -> bool:
    """Whether one rank's numbers fail on their own, whatever the other parts of the value are."""
    error = ratio_of(math.sqrt(stats.error_sq), max(entry.floor, entry.unit * entry.norm))
    return bool(
        stats.nan
        or stats.infinite
        or stats.unequal
        or stats.row_ratio > entry.row_gate
        or error > entry.gate
    )


def put_together(
    regions: Sequence[Region],
    held: Mapping[int, Record],
    entry: Measured,
    store: Store,
    files: Files,
) -> Result:
    """The result for regions that cover the whole once; of replicas the worst counts."""
    total = Result()
    rows = (stored_shape(entry) or (1,))[0]
    row_errors: torch.Tensor | None = None
    for region in regions:
        stats, rank, errors = _region(region, held, entry, store, files)
        total.add(stats, rank)
        if errors is not None:
            if row_errors is None:
                row_errors = torch.zeros(rows, dtype=torch.float64)
            row_errors.index_add_(0, region.positions(files, rows), errors)
    if row_errors is not None and row_errors.numel():
        _judge_rows(total.stats, row_errors, entry, store)
    total.ratio = ratio_of(
        math.sqrt(total.stats.error_sq), max(entry.floor, entry.unit * entry.norm)
    )
    return total


def _region(
    region: Region, held: Mapping[int, Record], entry: Measured, store: Store, files: Files
) -> tuple[Stats, int, torch.Tensor | None]:
    """The worst of a region's replicas, with its rows' squared errors where rows are cut."""
    if region.deferred:
        return _compare_now(region, held, entry, store, files)
    compared = [
        (stats, rank)
        for ranks in region.holders.values()
        for rank in ranks
        if (stats := held[rank].stats) is not None
    ]
    stats, rank = max(compared, key=lambda item: severity(item[0]))
    record = held[rank]
    if record.row_errors_at < 0:
        return stats, rank, None
    count = record.shape[0] if record.shape else 1
    return stats, rank, files.tensor(rank, record.row_errors_at, torch.float64, (count,))


def _compare_now(
    region: Region, held: Mapping[int, Record], entry: Measured, store: Store, files: Files
) -> tuple[Stats, int, torch.Tensor | None]:
    # One rank for each part of a sum: that its replicas have the same bits is checked apart.
    ranks = [ranks[0] for ranks in region.holders.values()]
    record = held[ranks[0]]
    stats, errors = examine(
        [files.values(rank, held[rank]) for rank in ranks],
        cut_reference(store.tensor(entry), region.bounds, region.given_positions(files)),
        store.yardstick(entry),
        exact=entry.exact or record.exact or not entry.floating,
        dtype=entry.dtype,
        keep_rows=any(dim > 0 for dim in region.bounds),
    )
    return stats, ranks[0], errors


def _judge_rows(stats: Stats, row_errors: torch.Tensor, entry: Measured, store: Store) -> None:
    """Judge rows whose squared errors were added up over their slices."""
    reference, yardstick = store.tensor(entry), store.yardstick(entry)
    squares = torch.zeros_like(row_errors)
    for index in blocks(reference.shape):
        block = widen(reference[index]).to(torch.float64).square()
        squares[index[0]] += block.reshape(block.shape[0], -1).sum(1)
    # A row with infinite numbers has no norm; its errors are judged by its floor alone.
    squares = torch.where(squares.isfinite(), squares, 0.0)
    ratios = yardstick.ratios(torch.arange(row_errors.numel()), row_errors, squares)
    failing = ratios > yardstick.row_gate
    stats.worst_row = int(ratios.argmax())
    stats.row_ratio = float(ratios[stats.worst_row])
    stats.failing = int(failing.sum())
    stats.failing_rows = failing.nonzero().flatten()[:64].tolist()
