"""Evidence for a failure: where, with which values, and what the numbers suggest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardproof.topology import Topology

from .diagnosis import fit_scale, row_hints, scale_hint
from .records import Measured, Record, Stats
from .replicas import Difference
from .results import Result, is_wrong

_NEAR = {"float64": 1e-8, "complex128": 1e-8, "float32": 1e-4, "complex64": 1e-4}
"""How far from one the sum of shares may be, by dtype; 1e-2 for others."""


def place(rank: int, topology: Topology) -> str:
    """A rank and where it stands: ``rank 1 (cp=1)``."""
    at = topology.coordinates(rank)
    words = ", ".join(
        f"{axis.name}={at[axis.name]}" for axis in topology.axes if topology.sizes[axis.name] > 1
    )
    return f"rank {rank} ({words})" if words else f"rank {rank}"


def places(ranks: Sequence[int], topology: Topology) -> str:
    """Ranks and where they stand; at most four."""
    shown = "; ".join(place(rank, topology) for rank in ranks[:4])
    return shown if len(ranks) <= 4 else f"{shown}; and {len(ranks) - 4} more"


def part_of(record: Record, full: Sequence[int]) -> str:
    """What a rank rightly holds of a value of shape ``full``; empty where that is all of it.

    ``4 of its 7 rows``, ``3 of its 8 in dimension 1``; empty too where the shape fits no placement.
    """
    if record.status not in ("compared", "deferred"):
        return ""
    return " and ".join(
        f"{size} of its {whole} {f'in dimension {dim}' if dim else 'rows'}"
        for dim, (size, whole) in enumerate(zip(record.shape, full, strict=True))
        if size != whole
    )


def of_replicas(difference: Difference, topology: Topology) -> str:
    """Which ranks hold what, where they should hold the same; at most four values."""
    if not difference.kinds:
        one, other = place(difference.one, topology), place(difference.other, topology)
        return f"ranks differ: {one} and {other} hold other bits"
    shown = [f"{text} on {places(at, topology)}" for text, at in difference.kinds.items()][:4]
    if len(shown) < len(difference.kinds):
        shown.append(f"and {len(difference.kinds) - len(shown)} more values")
    row = "" if difference.row is None else f", worst in row {difference.row}"
    return f"ranks differ{row}: {', '.join(shown)}"


def of_numbers(
    result: Result,
    held: Mapping[int, Record],
    entry: Measured,
    topology: Topology,
    difference: Difference | None,
) -> dict[str, object]:
    """What a verdict's details say of wrong numbers; ``difference`` is that of replicas, if any."""
    stats = result.stats
    hints = row_hints(stats.zero_rows, stats.moved_rows)
    hints += _parts_of_a_sum(held, entry, topology) + _wrong_and_right(held, entry, topology)
    if difference is not None:
        hints.append(of_replicas(difference, topology))
    found: dict[str, object] = {"hints": hints}
    if stats.sample is not None:
        found |= {
            "row": stats.sample.row,
            "column": stats.sample.column,
            "expected_values": stats.sample.expected,
            "actual_values": stats.sample.actual,
        }
    if stats.failing and entry.shape:
        found |= {"failing_rows": stats.failing, "rows": stats.failing_rows[:8]}
    scale = fit_scale(
        dot=stats.dot, candidate_sq=stats.candidate_sq, reference_sq=stats.reference_sq
    )
    if scale is not None and not stats.nan:
        found |= {
            "alpha": scale.alpha,
            "explained": scale.explained,
            "alpha_hint": scale_hint(scale, topology),
        }
    return found


def _wrong_and_right(held: Mapping[int, Record], entry: Measured, topology: Topology) -> list[str]:
    """Which ranks are wrong where others that were compared are right."""
    stats = {rank: record.stats for rank, record in held.items() if record.stats is not None}
    wrong = [rank for rank, found in stats.items() if is_wrong(found, entry)]
    right = [rank for rank in stats if rank not in wrong]
    if not (wrong and right):
        return []
    return [f"wrong on {places(wrong, topology)}; right on {places(right, topology)}"]


def _parts_of_a_sum(held: Mapping[int, Record], entry: Measured, topology: Topology) -> list[str]:
    """Whether what ranks hold along an axis adds up to the reference, though no rank is right.

    Judged by the projections on the reference, which every rank has measured: of values that have
    nothing to do with one another they don't add up to one. Equal ones are left to α.
    """
    stats = {rank: record.stats for rank, record in held.items() if record.stats is not None}
    found = []
    for axis in topology.axes:
        lines = {tuple(topology.peers(rank, axis.name)) for rank in stats}
        if topology.sizes[axis.name] == 1 or not lines:
            continue
        if all(_adds_up([stats.get(rank) for rank in line], entry) for line in lines):
            found.append(
                f"the ranks along {axis.name} hold parts of a sum that together are what is "
                f"expected: the all-reduce over {axis.name} is missing (or say "
                f"partial=({axis.name!r},))"
            )
    return found


def _adds_up(line: Sequence[Stats | None], entry: Measured) -> bool:
    shares = [
        one.dot / one.reference_sq
        for one in line
        if one is not None and one.reference_sq > 0 and is_wrong(one, entry)
    ]
    if len(shares) < len(line) or not all(map(math.isfinite, shares)):
        return False
    near = _NEAR.get(entry.dtype, 1e-2)
    return max(shares) - min(shares) > near and abs(sum(shares) - 1) < near


def of_shapes(held: Mapping[int, Record], full: Sequence[int], topology: Topology) -> list[str]:
    """What sizes along one axis say of a wrong shape."""
    anyone = next(iter(held))
    parts: dict[tuple[int, str], list[str]] = {}
    for axis in sorted(topology.axes, key=lambda axis: axis.name != "cp"):
        size = topology.sizes[axis.name]
        peers = topology.peers(anyone, axis.name)
        shapes = [held[peer].shape for peer in peers if peer in held]
        if size == 1 or len(shapes) < size or any(len(s) != len(full) for s in shapes):
            continue
        for dim, whole in enumerate(full):
            sizes = [shape[dim] for shape in shapes]
            if sum(sizes) == whole:
                listed = " + ".join(map(str, sizes))
                parts.setdefault((dim, listed), []).append(axis.name)
            elif all(one == whole * size for one in sizes):
                text = (
                    f"dimension {dim} is {size} times as long as expected: gathered over "
                    f"{axis.name} although every rank held the whole"
                )
                return [text]
    return [_local_hint(dim, listed, full[dim], axes) for (dim, listed), axes in parts.items()]


def _local_hint(dim: int, listed: str, whole: int, axes: Sequence[str]) -> str:
    what = "rows" if dim == 0 else "slice"
    remedy = "rows=positions" if dim == 0 else f"shard={{'{axes[0]}': {dim}}}"
    return (
        f"rank-local {what} returned: the ranks along {' or '.join(axes)} hold {listed} of {whole} "
        f"in dimension {dim}; gather them in source order, or say {remedy}"
    )
