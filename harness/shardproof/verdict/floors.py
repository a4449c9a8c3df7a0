"""Floors from noise runs: what a noise run leaves behind, and how runs are combined.

A noise run compares its value with the reference at once and keeps squared errors of rows (by
blocks of rows where those are short) and a sketch of the errors. The sketch tells how many degrees
of freedom the error has: rounding errors are correlated (one bad sum may scale a whole tensor), and
the fewer there are, the further a correct value may land by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .blocks import BLOCK, blocks
from .compare import masks
from .fingerprint import widen

OWN_ROW = 8
"""Elements from which a row has a floor of its own: that of a few numbers is too noisy."""

MOST_SHORT_ROWS = 1 << 16
"""Rows that share a floor are kept one by one up to this many, then by the largest of a group."""

_SKETCH_ROWS = 256
_SKETCH_WIDTH = 32
_SKETCH_FLAT = 4096


def pooled(shape: Sequence[int]) -> bool:
    """Whether rows of this shape share a floor."""
    return math.prod(shape[1:]) < OWN_ROW


@dataclass
class NoiseErrors:
    """How far one noise run moved one value.

    ``row_sq``: squared errors of rows, or the largest of each group of rows. ``sketch``: errors of
    some rows, at most 32 numbers a row (float32, [rows, width]). ``unlike``: numbers that are
    finite in one run and not in the other.
    """

    error_sq: float
    row_sq: torch.Tensor
    sketch: torch.Tensor
    unlike: int


def noise_errors(value: torch.Tensor, reference: torch.Tensor) -> NoiseErrors:
    """Compare a noise run's value with the reference; both of one shape, floating."""
    shape = value.shape
    rows = shape[0] if shape else 1
    group = -(-rows // MOST_SHORT_ROWS) if pooled(shape) else 1
    row_sq = torch.zeros(-(-rows // group) if rows else 0, dtype=torch.float64)
    total, unlike = 0.0, 0
    step = max(1, BLOCK // group) * group  # keeps whole groups in one block of short rows
    for index in blocks(shape) if group == 1 else _strips(rows, step):
        actual, expected = _pair(value, reference, index)
        wild = masks(actual) | masks(expected)
        if bool(wild.any()):
            unlike += int((masks(actual) ^ masks(expected)).sum())
            unlike += int((wild & (actual.sign() != expected.sign())).sum())
        squares = (actual - expected).masked_fill(wild, 0.0).square()
        total += float(squares.sum())
        at = index[0] if index else slice(0, 1)
        sums = squares.reshape(at.stop - at.start, -1).sum(1).cpu()
        if group > 1:
            sums = _largest(sums, group)
            at = slice(at.start // group, at.start // group + sums.numel())
        row_sq[at] += sums
    return NoiseErrors(total, row_sq, _sketch(value, reference), unlike)


def _pair(
    value: torch.Tensor, reference: torch.Tensor, index: tuple[slice, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    actual = widen(value[index])
    return actual, widen(reference[index].to(actual.device))


def _strips(rows: int, step: int) -> list[tuple[slice, ...]]:
    return [(slice(start, min(rows, start + step)),) for start in range(0, rows, step)]


def _largest(sums: torch.Tensor, group: int) -> torch.Tensor:
    short = -sums.numel() % group
    return torch.nn.functional.pad(sums, (0, short)).view(-1, group).amax(1)


def _sketch(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Errors of evenly spaced rows; long rows are folded to 32 numbers with random signs.

    Folding with signs keeps inner products of two runs' errors in expectation (a count sketch).
    """
    if value.numel() == 0:
        return torch.zeros(0, 1, dtype=torch.float32)
    inner = math.prod(value.shape[1:])
    most = _SKETCH_ROWS if inner >= OWN_ROW else _SKETCH_FLAT // max(1, inner)
    rows = value.shape[0] if value.dim() else 1
    # Few rows of a wide value, so that the sketch never costs more than a block.
    count = min(rows, most, max(1, BLOCK // inner))
    chosen = torch.linspace(0, rows - 1, count, dtype=torch.float64).long()
    if chosen.numel() == 1 and value.dim():  # a slice: the one row may be huge
        row = int(chosen)
        value, reference = value[row : row + 1], reference[row : row + 1]
    elif value.dim():
        value, reference = value[chosen.to(value.device)], reference[chosen]
    sketch = torch.zeros(chosen.numel(), min(inner, _SKETCH_WIDTH), dtype=torch.float64)
    flat_value = value.reshape(chosen.numel(), -1)
    flat_reference = reference.reshape(chosen.numel(), -1)
    generator = torch.Generator().manual_seed(inner)
    for start in range(0, inner, BLOCK):
        piece = (slice(None), slice(start, start + BLOCK))
        actual, expected = (part.cpu() for part in _pair(flat_value, flat_reference, piece))
        error = (actual - expected).masked_fill(masks(actual) | masks(expected), 0.0)
        if inner > _SKETCH_WIDTH:
            signs = torch.randint(0, 2, (error.shape[1],), generator=generator) * 2 - 1
            error = torch.nn.functional.pad(error * signs, (0, -error.shape[1] % _SKETCH_WIDTH))
            error = error.view(chosen.numel(), -1, _SKETCH_WIDTH).sum(1)
        sketch += error
    # Scaled, so that float32 can hold it: only directions matter.
    return (sketch / sketch.abs().max().clamp_min(1e-300)).float()


def freedom(sketches: Sequence[torch.Tensor]) -> float:
    """Effective degrees of freedom of whole errors, from their sketches in several runs.

    For independent Gaussian errors of covariance C, E<a, b>² / E|a|²|b|² = tr C² / (tr C)², whose
    inverse is the number of equal independent components with the same spread; 1 where all runs
    move along one line. Infinite where there are not two runs with an error.
    """
    flat = [sketch.double().flatten() for sketch in sketches]
    return _freedom([unit for vector in flat if (unit := _unit(vector)) is not None])


def _freedom(units: Sequence[torch.Tensor]) -> float:
    squares = [
        float(torch.dot(one, other)) ** 2
        for at, one in enumerate(units)
        for other in units[at + 1 :]
    ]
    mean = math.fsum(squares) / len(squares) if squares else 0.0
    return math.inf if mean == 0.0 else max(1.0, 1.0 / mean)


def _unit(vector: torch.Tensor) -> torch.Tensor | None:
    norm = vector.norm()
    return None if float(norm) == 0.0 else vector / norm


def row_freedom(sketches: Sequence[torch.Tensor]) -> float:
    """The same within a row, for the row with the fewest: rows must not be judged by the mean row.

    Each sketched row has a mean of cos² over pairs of runs, and few pairs. So rows are drawn
    towards the mean of all by the part of their scatter that chance explains: rows that are alike
    keep their common value, and those that truly differ their own.
    """
    units = []
    for sketch in sketches:
        rows = sketch.double()
        norms = rows.norm(dim=1, keepdim=True)
        units.append((rows / norms.where(norms > 0, 1.0), norms.squeeze(1) > 0))
    pairs = [
        ((one * other).sum(1).square(), some & others)
        for at, (one, some) in enumerate(units)
        for other, others in units[at + 1 :]
    ]
    if not pairs:
        return math.inf
    squares = torch.stack([square.where(both, 0.0) for square, both in pairs]).sum(0)
    counts = torch.stack([both for _, both in pairs]).sum(0)
    squares, counts = squares[counts > 0] / counts[counts > 0], counts[counts > 0].double()
    mean = float((squares * counts).sum() / counts.sum()) if counts.numel() else 0.0
    if mean == 0.0:
        return math.inf
    chance = _chance(1.0 / mean) / counts
    scatter = float(squares.var()) if squares.numel() > 1 else 0.0
    true = max(0.0, scatter - float(chance.mean()))
    own = mean + (squares - mean) * true / (true + chance).clamp_min(1e-300)
    return max(1.0, 1.0 / float(own.max()))


def _chance(freedom: float) -> float:
    """Variance of cos² between two Gaussian vectors of so many degrees of freedom."""
    freedom = max(1.0, freedom)
    return 2 * (freedom - 1) / (freedom * freedom * (freedom + 2))
