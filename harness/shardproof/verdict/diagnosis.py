"""What a failure looks like: scales, zero rows, swapped, permuted and shifted rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardproof.topology import Topology

from .blocks import BLOCK, blocks
from .compare import Part, Yardstick, add
from .fingerprint import widen

MOST_EXAMINED = 8
"""How many failing rows are looked up among the reference's."""

_MOST_SEARCHED = 1 << 25
"""Elements of the reference up to which all its rows are searched; beyond, only neighbours."""

_PURE = 1e-4
"""Share of the error that may remain for a scale to explain it all."""

UNEXPLAINED = "a scale that no axis explains"


@dataclass(frozen=True)
class Scale:
    """The fit candidate = alpha · reference.

    ``explained``: the share of the squared error that goes away with it.
    """

    alpha: float
    explained: float


def fit_scale(*, dot: float, candidate_sq: float, reference_sq: float) -> Scale | None:
    """Least-squares scale from inner products; None where the reference is zero."""
    if reference_sq <= 0.0 or not math.isfinite(candidate_sq + reference_sq):
        return None
    alpha = dot / reference_sq
    error = candidate_sq - 2 * dot + reference_sq
    # Both differences cancel; what they lose is far below the shares that are told apart here.
    left = max(0.0, candidate_sq - alpha * dot)
    explained = 1.0 - left / error if error > 0.0 else 0.0
    return Scale(alpha, max(0.0, min(1.0, explained)))


def scale_hint(scale: Scale, topology: Topology) -> str:
    """What α suggests on this topology; empty where it suggests nothing."""
    pure = scale.explained >= 1.0 - _PURE
    if abs(scale.alpha - 1.0) < (1e-6 if pure else 0.05) or scale.explained < 0.5:
        return ""
    tolerance = 0.002 if pure else 0.05
    if pure and abs(scale.alpha + 1.0) < tolerance:
        return "α = -1: the sign is flipped"
    if pure and abs(scale.alpha) < tolerance:
        return "α = 0: the value is zero"
    found = [
        words for words, factor in _factors(topology) if abs(scale.alpha / factor - 1.0) < tolerance
    ]
    # A square is the reading of last resort: cp4 beside tp2 would be tp² too.
    found = [words for words in found if "²" not in words] or found
    if not found:
        return UNEXPLAINED if pure else ""
    near = "=" if pure else "is near"
    names = " or ".join(found)
    if scale.alpha > 1.0:
        return (
            f"α {near} {names}: counted once for each rank of that axis (summed where it should be "
            "averaged or taken once, or divided by a count of one rank's own)"
        )
    return (
        f"α {near} {names}: divided by that axis once too often, or one rank's part of a sum "
        "(averaged where it should be summed, or the reduction is missing)"
    )


def _factors(topology: Topology) -> list[tuple[str, float]]:
    """Sizes of axes, their products and quotients, simplest first, and their inverses."""
    axes = [(axis.name, topology.sizes[axis.name]) for axis in topology.axes]
    axes = [(name, size) for name, size in axes if size > 1]
    order = {"cp": 0, "tp": 1, "dp": 2}
    axes.sort(key=lambda item: order.get(item[0], 3))
    found: list[tuple[str, float]] = []
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            words = "·".join(name for name, _ in chosen)
            size = math.prod(size for _, size in chosen)
            found.append((f"{words} = {size}", float(size)))
            inverse = words if count == 1 else f"({words})"
            found.append((f"1/{inverse} = 1/{size}", 1.0 / size))
            if count == 1:
                found.append((f"{words}² = {size * size}", float(size * size)))
                found.append((f"1/{words}² = 1/{size * size}", 1.0 / (size * size)))
    return found


@dataclass
class RowFinder:
    """Looks failing rows up among the reference's rows."""

    parts: Sequence[torch.Tensor]
    part: Part
    yardstick: Yardstick
    exact: bool

    def find(self, rows: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """What failing rows (the rank's own count) hold instead; only the first few are looked at.

        Returns the source positions of rows that are zero though the reference's are not, and
        pairs of a row's source position and that of the row which it holds.
        """
        shape = self.parts[0].shape
        if not shape or math.prod(shape[1:]) > BLOCK:
            return [], []
        zeros: list[int] = []
        moved: list[tuple[int, int]] = []
        rows = list(rows[:MOST_EXAMINED])
        sources = [int(self.part.rows(slice(row, row + 1))[0]) for row in rows]
        for row, source in zip(rows, sources, strict=True):
            actual = add(self.parts, (slice(row, row + 1),)).reshape(-1)
            if not bool(actual.any()):
                if bool(widen(self.part.reference[source]).any()):
                    zeros.append(source)
                continue
            found = self._look_up(actual, source, sources)
            if found is not None:
                moved.append((source, found))
        return zeros, moved

    def _look_up(self, actual: torch.Tensor, source: int, failing: Sequence[int]) -> int | None:
        reference = self.part.reference
        count, inner = reference.shape[0], actual.numel()
        first = [source - 1, source + 1, *failing]
        near = torch.tensor([row for row in dict.fromkeys(first) if 0 <= row < count])
        found = self._equal(actual, near)
        if found is None and inner > 1 and reference.numel() <= _MOST_SEARCHED:
            for index in blocks(reference.shape):
                found = self._equal(actual, torch.arange(index[0].start, index[0].stop))
                if found is not None:
                    break
        return None if found == source else found

    def _equal(self, actual: torch.Tensor, rows: torch.Tensor) -> int | None:
        """The first of ``rows`` of the reference as which ``actual`` would pass."""
        expected = widen(self.part.reference[rows].to(actual.device))
        expected = expected.reshape(rows.numel(), -1)
        if self.exact:
            same = (expected == actual).all(1)
        else:
            errors = (expected - actual).square().sum(1).cpu()
            ratios = self.yardstick.ratios(rows, errors, expected.square().sum(1).cpu())
            same = ratios <= self.yardstick.row_gate
        hits = same.nonzero().flatten()
        return int(rows[hits[0].cpu()]) if hits.numel() else None


def row_hints(zeros: Sequence[int], moved: Sequence[tuple[int, int]]) -> list[str]:
    """Zero and moved rows in words; ``moved`` pairs a position with that of the row held there."""
    words: list[str] = []
    if zeros:
        one = len(zeros) == 1
        shown = ", ".join(map(str, zeros[:6])) + (", ..." if len(zeros) > 6 else "")
        words.append(f"{'row' if one else 'rows'} {shown} {'is' if one else 'are'} zero")
    steps = [held - row for row, held in moved]
    for step, which in ((1, "next"), (-1, "previous")):
        # One row may differ: the row that wrapped around.
        if steps.count(step) >= max(2, len(steps) - 1):
            return [*words, f"rows are shifted by one: each holds the reference's {which} row"]
    return words + _moved_words(dict(moved))


def _moved_words(moved: Mapping[int, int]) -> list[str]:
    if not moved:
        return []
    words: list[str] = []
    swapped: set[int] = set()
    for row, held in moved.items():
        if row in swapped:
            continue
        if moved.get(held) == row:
            words.append(f"rows {min(row, held)} and {max(row, held)} are swapped")
            swapped |= {row, held}
        else:
            words.append(f"row {row} holds the reference's row {held}")
    cycle = len(moved) > len(swapped) and set(moved) == set(moved.values())
    return [("rows are permuted: " if cycle else "") + "; ".join(words[:4])]
