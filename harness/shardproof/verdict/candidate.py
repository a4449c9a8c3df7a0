"""One rank's side of a topology under test: its values against their parts of the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from shardproof.topology import Topology

from .compare import Comparer, Part, Yardstick, sample_at
from .diagnosis import RowFinder
from .fingerprint import Fingerprint, fingerprint
from .placement import Resolved
from .records import Measured, Record, Stats
from .reference import Store, stored_shape
from .store import Writer
from .values import Leaf, real_dtype

KEPT_VALUE = 16 << 20
"""Bytes up to which a value is kept for the owner, who can then say by how much replicas differ."""

KEPT_IN_ALL = 256 << 20
"""Bytes of such values that one rank keeps."""


def comparable(record: Record, entry: Measured) -> bool:
    """Whether two values are of one kind and dtype; a Python number matches by its class alone."""
    if record.kind in ("none", "empty") or entry.kind in ("none", "empty"):
        return record.kind == entry.kind
    if record.floating != entry.floating:
        return False
    if "scalar" in (record.kind, entry.kind):
        return ("complex" in record.dtype) == ("complex" in entry.dtype) and (
            (record.dtype == "bool") == (entry.dtype == "bool")
        )
    return record.dtype == entry.dtype


def cuts(
    shard: Mapping[str, int], topology: Topology, coordinates: Mapping[str, int]
) -> dict[int, tuple[int, int]]:
    """For each sharded dimension, this rank's place in it and how many places there are.

    Axes that share a dimension cut it in the order given, the first outermost.
    """
    found: dict[int, tuple[int, int]] = {}
    for axis, dim in shard.items():
        at, count = found.get(dim, (0, 1))
        size = topology.sizes[axis]
        found[dim] = (at * size + coordinates[axis], count * size)
    return found


def cut_reference(
    reference: torch.Tensor, bounds: Mapping[int, tuple[int, int]], positions: torch.Tensor | None
) -> Part:
    """The part of the reference within ``bounds`` (start and stop by dimension)."""
    for dim, (start, stop) in bounds.items():
        if dim > 0:
            reference = reference.narrow(dim, start, stop - start)
    first = bounds[0][0] if 0 in bounds else 0
    return Part(reference, first=first, positions=positions)


def examine(
    parts: Sequence[torch.Tensor],
    part: Part,
    yardstick: Yardstick,
    *,
    exact: bool,
    dtype: str,
    keep_rows: bool = False,
    digest: Fingerprint | None = None,
) -> tuple[Stats, torch.Tensor | None]:
    """Compare numbers (summed over ``parts``) and, where they look wrong, say how.

    Returns the statistics and, where rows are cut, their squared errors.
    """
    comparer = Comparer(parts, part, yardstick, exact=exact, keep_rows=keep_rows, digest=digest)
    stats = comparer.run()
    if comparer.worst >= 0 and (stats.error_sq > 0 or stats.nan or stats.infinite or stats.unequal):
        stats.sample = sample_at(parts, part, comparer.worst, dtype=real_dtype(dtype))
        if stats.failing:
            finder = RowFinder(parts, part, yardstick, exact)
            stats.zero_rows, stats.moved_rows = finder.find(comparer.failing)
    return stats, comparer.row_errors


class Candidate:
    """Compares this rank's values as they are observed, and keeps what the owner will need."""

    def __init__(self, store: Store, writer: Writer, topology: Topology, rank: int) -> None:
        self._store = store
        self._writer = writer
        self._topology = topology
        self._coordinates = topology.coordinates(rank)
        self._kept = 0

    def compare(self, record: Record, leaf: Leaf, placed: Resolved) -> None:
        """Fill in ``record``; ``leaf`` may change afterwards."""
        tensor = leaf.tensor
        if placed.rows is not None:
            record.positions = placed.rows.numel()
            record.positions_at = self._writer.append(placed.rows)
            record.positions_digest = fingerprint(placed.rows)
        if tensor is None:
            return
        entry = self._store.measured.get(record.name)
        if entry is None or not comparable(record, entry):
            return
        full = stored_shape(entry)
        rows = placed.rows
        if rows is not None and rows.numel() and full and int(rows.max()) >= full[0]:
            record.problem = (
                f"rows places a row at {int(rows.max())}, the whole has rows 0 to {full[0] - 1}"
            )
            return
        if not self._fits(tensor.shape, full, placed):
            return
        summed = math.prod(self._topology.sizes[axis] for axis in placed.partial) > 1
        bounds = self._bounds(tensor.shape, full, placed)
        if summed or bounds is None:
            record.status = "deferred"
            record.values_at = self._writer.append(tensor)
            record.digest = fingerprint(tensor)
            return
        record.status = "compared"
        digest = Fingerprint()
        part = cut_reference(self._store.tensor(entry), bounds, placed.rows)
        record.stats, row_errors = examine(
            [tensor],
            part,
            self._store.yardstick(entry),
            exact=entry.exact or record.exact or not entry.floating,
            dtype=entry.dtype,
            keep_rows=any(dim > 0 for dim in bounds),
            digest=digest,
        )
        record.digest = digest.hex()
        if row_errors is not None:
            record.row_errors_at = self._writer.append(row_errors)
        self._keep(record, tensor)

    def _fits(self, shape: Sequence[int], full: Sequence[int], placed: Resolved) -> bool:
        """Whether the dimensions that are not cut have their full size."""
        if len(shape) != len(full):
            return False
        free = set(placed.shard.values()) | ({0} if placed.rows is not None else set())
        return all(
            size <= whole if dim in free else size == whole
            for dim, (size, whole) in enumerate(zip(shape, full, strict=True))
        )

    def _bounds(
        self, shape: Sequence[int], full: Sequence[int], placed: Resolved
    ) -> dict[int, tuple[int, int]] | None:
        """Start and stop by sharded dimension; None where the slices are not all of one size."""
        bounds: dict[int, tuple[int, int]] = {}
        for dim, (at, count) in cuts(placed.shard, self._topology, self._coordinates).items():
            if shape[dim] * count != full[dim]:
                return None
            if count > 1:
                bounds[dim] = (at * shape[dim], (at + 1) * shape[dim])
        return bounds

    def _keep(self, record: Record, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        alone = self._topology.world_size == 1
        if alone or size > KEPT_VALUE or self._kept + size > KEPT_IN_ALL:
            return
        self._kept += size
        record.values_at = self._writer.append(tensor)
