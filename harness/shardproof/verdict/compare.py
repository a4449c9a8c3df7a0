"""Comparing a rank's numbers with their part of the reference, block by block.

Everything is computed in float64 on the device where the numbers live; no temporary is larger than
a block, whatever the size of the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .blocks import BLOCK, blocks
from .fingerprint import Fingerprint, widen
from .records import Sample, Stats

HUGE = 2.0**60
"""From here on a number is taken out of the norms and compared by itself: it stands for a mask, and
one such number in an L2 norm would hide every other. Squares of what is left cannot overflow."""

_SLACK_UNITS, _SLACK_MOST = 1024.0, 2.0**-6
"""How far two such numbers may lie apart, relative to one of them: units of rounding, and a cap."""

SMALLEST = 5e-324
"""The smallest positive float64."""

MOST_ROWS = 64
"""How many failing rows are kept by position."""

SHOWN = 4
"""How many numbers of the worst row are shown."""


@dataclass(frozen=True)
class Yardstick:
    """What errors are measured in: a floor for each row of the whole value.

    ``row_floors``: float64 by source position, or None where all rows share ``row_floor``.
    ``least``: an absolute floor for rows, far below any rounding of the whole: a row of zeros must
    not fail over a number that no arithmetic of this precision can see.
    """

    unit: float
    row_gate: float
    row_floor: float
    least: float
    row_floors: torch.Tensor | None = None

    def rows(self, positions: torch.Tensor, reference_sq: torch.Tensor) -> torch.Tensor:
        """Denominators of rows at ``positions`` whose squared reference norms are given."""
        own = (
            torch.full_like(reference_sq, self.row_floor)
            if self.row_floors is None
            else self.row_floors[positions.cpu()].to(reference_sq.device)
        )
        return torch.maximum(own, self.unit * reference_sq.sqrt()).clamp_min(self.least)

    def ratios(
        self, positions: torch.Tensor, error_sq: torch.Tensor, reference_sq: torch.Tensor
    ) -> torch.Tensor:
        """Errors of rows over their floors; no error scores 0, also over a floor of 0."""
        errors = error_sq.sqrt()
        return torch.where(errors == 0, 0.0, errors / self.rows(positions, reference_sq))


@dataclass
class Part:
    """A rank's part of the reference.

    ``reference`` has all rows of the whole, with the other dimensions cut as the rank's value is (a
    view). The rank's row i is row ``first`` + i of it, or row ``positions[i]``.
    """

    reference: torch.Tensor
    first: int = 0
    positions: torch.Tensor | None = None

    def rows(self, rows: slice) -> torch.Tensor:
        """Source positions of some of the rank's rows."""
        if self.positions is None:
            return torch.arange(rows.start, rows.stop) + self.first
        return self.positions[rows]

    def block(self, index: tuple[slice, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference numbers of a block of the rank's value, and its rows' positions."""
        if not index:
            return self.reference, torch.zeros(1, dtype=torch.int64)
        chosen = self.rows(index[0])
        if self.positions is None:
            rows = slice(index[0].start + self.first, index[0].stop + self.first)
            return self.reference[(rows, *index[1:])], chosen
        return self.reference[(slice(None), *index[1:])][chosen], chosen


def ratio_of(error: float, floor: float) -> float:
    """``error / floor``, where no error scores 0 and any error over no floor is infinite."""
    if error == 0.0:
        return 0.0
    return math.inf if floor == 0.0 else error / floor


def add(parts: Sequence[torch.Tensor], index: tuple[slice, ...]) -> torch.Tensor:
    """A block of the sum of ``parts``, as float64 or int64."""
    total = widen(parts[0][index])
    for part in parts[1:]:
        total = total + widen(part[index])
    return total


class Comparer:
    """One comparison: walks the blocks and gathers what the verdict needs.

    ``parts`` are summed and multiplied by ``scale``. ``row_errors``: squared errors of the rank's
    rows where ``keep_rows`` asked for them (rows that are cut over ranks are judged by the owner,
    who adds them up), else None; a row with a number that no norm can take has an infinite error.
    ``worst`` and ``failing``: the rank's rows, by its own count. ``digest`` takes the fingerprint.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        part: Part,
        yardstick: Yardstick,
        *,
        exact: bool,
        keep_rows: bool = False,
        scale: float = 1.0,
        digest: Fingerprint | None = None,
    ) -> None:
        self._parts = parts
        self._scale = scale
        self._digest = digest
        self.worst = -1
        self.failing: list[int] = []
        self._part = part
        self._yardstick = yardstick
        self._exact = exact
        self._shape = parts[0].shape
        rows = self._shape[0] if self._shape else 1
        # Where a block holds whole rows they are judged at once, and nothing grows with their
        # number; rows longer than a block are few.
        self._whole = math.prod(self._shape[1:]) <= BLOCK
        self._keep = keep_rows
        kept = rows if keep_rows or not self._whole else 0
        self._errors = torch.zeros(kept, dtype=torch.float64)
        self._references = torch.zeros(kept, dtype=torch.float64)
        self.stats = Stats(rows_cut=keep_rows)
        self.row_errors = self._errors if keep_rows else None

    def run(self, *, until_failure: bool = False) -> Stats:
        """Compare everything, or up to the first block with a row over its gate."""
        for index in blocks(self._shape):
            self._block(index)
            if until_failure and self.stats.failing:
                return self.stats
        if self._errors.numel():
            self._judge(slice(0, self._errors.numel()), self._errors, self._references)
        return self.stats

    def _block(self, index: tuple[slice, ...]) -> None:
        stats = self.stats
        actual = add(self._parts, index)
        if self._digest is not None:
            self._digest.update(actual)
        expected = widen(self._part.block(index)[0].to(actual.device))
        bad: torch.Tensor | None = None
        if self._exact:
            bad = actual != expected
            stats.unequal += int(bad.sum())
        actual, expected = _vector(actual), _vector(expected)
        if self._scale != 1.0:
            actual = actual * self._scale
        products = _products(actual, expected)
        # A sum of squares below HUGE² holds nothing that is not finite, nor anything huge.
        if not (products[0] < HUGE * HUGE and products[1] < HUGE * HUGE):
            actual, expected, wrong = self._without_masks(actual, expected)
            bad = wrong if bad is None else bad.reshape(-1) | wrong
            products = _products(actual, expected)
        stats.candidate_sq += products[0]
        stats.reference_sq += products[1]
        stats.dot += products[2]
        rows = index[0] if index else slice(0, 1)
        table = (rows.stop - rows.start, -1)
        error_sq = (actual - expected).square_()
        errors = error_sq.view(table).sum(1)
        total = float(errors.sum())
        if total == 0.0:
            # The square of a tiny difference is 0, but over a floor of 0 it must not pass.
            error_sq = (actual != expected).to(torch.float64) * SMALLEST
            errors = error_sq.view(table).sum(1)
            total = float(errors.sum())
        stats.error_sq += total
        if bad is not None:
            errors = errors.masked_fill(bad.view(table).any(1), math.inf)
        errors, references = errors.cpu(), expected.square().view(table).sum(1).cpu()
        if self._errors.numel():
            self._errors[rows] += errors
            self._references[rows] += references
        if self._whole and not self._keep:
            self._judge(rows, errors, references)

    def _without_masks(
        self, actual: torch.Tensor, expected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zeros for what no norm can take, counted, and where the two sides are not alike in it."""
        wild = masks(actual) | masks(expected)
        absent = actual.isnan()
        # Two masks, or two numbers out of a norm's range: infinite both, or as equal as rounding
        # leaves them. That neither is small does not make them the same number.
        slack = min(_SLACK_UNITS * self._yardstick.unit, _SLACK_MOST)
        near = (actual - expected).abs() <= slack * expected.abs()
        alike = (actual == expected) | (near & masks(expected) & ~expected.isinf())
        wrong = wild & ~alike
        self.stats.nan += int(absent.sum())
        self.stats.infinite += int((wrong & ~absent).sum())
        return actual.masked_fill(wild, 0.0), expected.masked_fill(wild, 0.0), wrong

    def _judge(self, rows: slice, errors: torch.Tensor, references: torch.Tensor) -> None:
        stats, positions = self.stats, self._part.rows(rows)
        ratios = self._yardstick.ratios(positions, errors, references)
        worst = int(ratios.argmax())
        if stats.worst_row < 0 or float(ratios[worst]) > stats.row_ratio:
            stats.row_ratio = float(ratios[worst])
            stats.worst_row = int(positions[worst])
            self.worst = rows.start + worst
        failing = (ratios > self._yardstick.row_gate).nonzero().flatten()
        stats.failing += failing.numel()
        room = MOST_ROWS - len(stats.failing_rows)
        stats.failing_rows += positions[failing[:room]].tolist()
        self.failing += (failing[:room] + rows.start).tolist()


def _vector(block: torch.Tensor) -> torch.Tensor:
    return block.to(torch.float64).reshape(-1)


def _products(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float]:
    """Inner products: of the candidate, of the reference, of both."""
    return (
        float(torch.dot(actual, actual)),
        float(torch.dot(expected, expected)),
        float(torch.dot(actual, expected)),
    )


def masks(block: torch.Tensor) -> torch.Tensor:
    """Where a block holds what no norm can take: NaN, infinities, numbers that stand for them."""
    return ~(block.abs() < HUGE)


def sample_at(
    parts: Sequence[torch.Tensor], part: Part, row: int, *, dtype: torch.dtype
) -> Sample | None:
    """The numbers from the worst element of row ``row`` (the rank's count) on; None if empty."""
    shape = parts[0].shape
    first = (slice(row, row + 1),) if shape else ()
    best: tuple[float, int, torch.Tensor, torch.Tensor] | None = None
    column = 0
    for rest in blocks(shape[1:]):
        index = (*first, *rest)
        actual = add(parts, index).reshape(-1).cpu()
        expected = widen(part.block(index)[0]).reshape(-1).cpu()
        gaps = (actual.to(torch.float64) - expected.to(torch.float64)).abs()
        # NaN on one side is the worst of all; equal infinities are no gap.
        gaps = torch.where(actual == expected, 0.0, gaps.nan_to_num(math.inf, math.inf))
        at = int(gaps.argmax())
        if best is None or float(gaps[at]) > best[0]:
            shown = slice(at, at + SHOWN)
            best = (float(gaps[at]), column + at, expected[shown], actual[shown])
        column += actual.numel()
    if best is None:
        return None
    gap, column, expected, actual = best
    digits = digits_for(gap, float(expected[0].abs()), dtype=dtype)
    source = int(part.block(first)[1][0])
    return Sample(source, column, show(expected, digits), show(actual, digits))


def digits_for(gap: float, size: float, *, dtype: torch.dtype) -> int:
    """Significant digits that show a difference of ``gap`` in numbers of ``size``, and three more.

    At least 6, at most those that ``dtype`` has.
    """
    digits = {8: 17, 4: 9}.get(dtype.to_real().itemsize, 6)
    if gap > 0.0 and math.isfinite(gap) and 0.0 < size < math.inf:
        digits = min(digits, max(6, 4 - math.floor(math.log10(min(1.0, gap / size)))))
    return digits


def show(numbers: torch.Tensor, digits: int) -> list[str]:
    """Numbers as text; ``digits`` significant ones for floats."""
    if not numbers.is_floating_point():
        return [str(number) for number in numbers.tolist()]
    return [f"{number:.{digits}g}" for number in numbers.tolist()]
