"""How the ranks' values make up the whole: regions, their replicas, and whether they cover it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardproof.topology import Topology

from .candidate import cuts
from .records import Record
from .store import Reader
from .values import real_dtype


class CoverageError(ValueError):
    """The ranks' values leave a hole in the whole, or fill a part of it twice."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Files:
    """The files that the ranks of a cell left in its shared directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._readers: dict[int, Reader] = {}

    def tensor(
        self, rank: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor from the file of ``rank``."""
        if rank not in self._readers:
            self._readers[rank] = Reader(rank_file(self._directory, rank))
        return self._readers[rank].tensor(offset, dtype, shape)

    def values(self, rank: int, record: Record) -> torch.Tensor:
        """The values that ``rank`` kept of an observation (complex numbers as pairs)."""
        dtype = real_dtype(record.dtype)
        return self.tensor(rank, record.values_at, dtype, local_shape(record))


def rank_file(directory: Path, rank: int) -> Path:
    """The one file of a rank."""
    return directory / f"rank-{rank}.bin"


def local_shape(record: Record) -> tuple[int, ...]:
    """Shape of the rank's numbers; a complex number is a pair."""
    return (*record.shape, 2) if "complex" in record.dtype else tuple(record.shape)


@dataclass
class Region:
    """A part of the whole and the ranks that hold it.

    ``bounds``: start and stop by sharded dimension. ``holders``: the ranks that hold the same
    numbers, by place along the partial axes (one place where nothing is partial); within a place
    they are replicas, and the sum over places is the region's value. ``deferred``: the owner
    compares it, from the ranks' files.
    """

    bounds: dict[int, tuple[int, int]]
    positions_of: tuple[int, int, int] | None
    holders: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    deferred: bool = False

    def given_positions(self, files: Files) -> torch.Tensor | None:
        """Source positions of the rows where the ranks gave them."""
        if self.positions_of is None:
            return None
        rank, offset, count = self.positions_of
        return files.tensor(rank, offset, torch.int64, (count,))

    def positions(self, files: Files, rows: int) -> torch.Tensor:
        """Source positions of the rows."""
        given = self.given_positions(files)
        return torch.arange(*self.bounds.get(0, (0, rows))) if given is None else given


def free_axes(record: Record, topology: Topology) -> tuple[str, ...]:
    """Data axes along which an observation need not exist everywhere."""
    bound = {axis for axis, _ in record.shard} | set(record.partial) | set(record.on)
    return tuple(
        axis.name for axis in topology.axes if axis.role == "data" and axis.name not in bound
    )


def place_along(rank: int, axes: Sequence[str], topology: Topology) -> tuple[int, ...]:
    """Coordinates of ``rank`` along ``axes``."""
    at = topology.coordinates(rank)
    return tuple(at[axis] for axis in axes)


def arrange(held: Mapping[int, Record], full: Sequence[int], topology: Topology) -> list[Region]:
    """Group the ranks' records by the part of the whole that they hold.

    Raises:
        CoverageError: slices of a sharded dimension don't add up to its size.
    """
    places = {
        rank: cuts(dict(record.shard), topology, topology.coordinates(rank))
        for rank, record in held.items()
    }
    uneven = any(record.status == "deferred" for record in held.values()) or any(
        local_shape(record)[dim] * count != full[dim]
        for rank, record in held.items()
        for dim, (_, count) in places[rank].items()
    )
    bounds = _bounds(held, places, full)
    found: dict[tuple[object, ...], Region] = {}
    for rank, record in held.items():
        mine = bounds[rank]
        key = (*sorted(mine.items()), record.positions_digest)
        of = (rank, record.positions_at, record.positions) if record.by_rows else None
        region = found.setdefault(key, Region(mine, of, deferred=uneven))
        along = place_along(rank, record.partial, topology)
        region.holders.setdefault(along, []).append(rank)
    if uneven:
        for rank, record in held.items():
            if record.values_at < 0:
                raise CoverageError(
                    "slices of different sizes along "
                    f"{dict(record.shard)}, too large to be put together afterwards: give the "
                    "source positions of each rank with rows=",
                    rank=rank,
                )
    return list(found.values())


def _bounds(
    held: Mapping[int, Record],
    places: Mapping[int, Mapping[int, tuple[int, int]]],
    full: Sequence[int],
) -> dict[int, dict[int, tuple[int, int]]]:
    """Start and stop of each rank's slice in each cut dimension, from the sizes of all slices."""
    sizes: dict[int, dict[int, tuple[int, int]]] = {}
    counts: dict[int, int] = {}
    for rank, record in held.items():
        for dim, (at, count) in places[rank].items():
            counts[dim] = count
            size = local_shape(record)[dim]
            known = sizes.setdefault(dim, {}).setdefault(at, (size, rank))
            if known[0] != size:
                raise CoverageError(
                    f"ranks {known[1]} and {rank} hold the same slice of dimension {dim} with "
                    f"{known[0]} and {size} elements",
                    rank=rank,
                )
    starts: dict[int, list[int]] = {}
    for dim, found in sizes.items():
        ends = [0]
        for at in range(counts[dim]):
            ends.append(ends[-1] + found[at][0])
        if ends[-1] != full[dim]:
            listed = " + ".join(str(found[at][0]) for at in range(counts[dim]))
            whole = all(size == full[dim] for size, _ in found.values())
            raise CoverageError(
                f"slices of dimension {dim} add up to {listed} = {ends[-1]}, expected {full[dim]}"
                + (": every rank gave the whole, so it is not sharded" if whole else ""),
                rank=found[0][1],
            )
        starts[dim] = ends
    return {
        rank: {
            dim: (starts[dim][at], starts[dim][at + 1])
            for dim, (at, count) in places[rank].items()
            if count > 1
        }
        for rank in held
    }


def ensembles(
    regions: Sequence[Region],
    record: Record,
    full: Sequence[int],
    topology: Topology,
    files: Files,
) -> list[list[Region]]:
    """Sets of regions that each cover the whole once.

    There is one, but for rows that data-parallel ranks hold in full each in their own order.

    Raises:
        CoverageError: rows are missing, or held twice.
    """
    if not record.by_rows:
        return [list(regions)]
    free = free_axes(record, topology)
    by_place: dict[tuple[int, ...], list[Region]] = {}
    for region in regions:
        ranks = [rank for ranks in region.holders.values() for rank in ranks]
        for place in {place_along(rank, free, topology) for rank in ranks}:
            by_place.setdefault(place, []).append(region)
    alone = [list(found) for found in by_place.values()]
    if all(_hole(found, full[0], files) is None for found in alone):
        return alone
    hole = _hole(regions, full[0], files)
    if hole is None:
        return [list(regions)]
    raise CoverageError(
        f"the rows of all ranks together must be each of 0 to {full[0] - 1} once: {hole[0]}",
        rank=hole[1],
    )


def _hole(regions: Sequence[Region], rows: int, files: Files) -> tuple[str, int] | None:
    """What is missing or held twice, and a rank to name; None where rows are covered once."""
    by_cut: dict[tuple[object, ...], list[Region]] = {}
    for region in regions:
        by_cut.setdefault(tuple(sorted(region.bounds.items())), []).append(region)
    for found in by_cut.values():
        counts = torch.zeros(rows, dtype=torch.int64)
        for region in found:
            counts += torch.bincount(region.positions(files, rows), minlength=rows)
        missing = (counts == 0).nonzero().flatten().tolist()
        twice = (counts > 1).nonzero().flatten().tolist()
        ranks = sorted(
            rank for region in found for held in region.holders.values() for rank in held
        )
        words = [
            f"{_rows(wrong)} {'is' if len(wrong) == 1 else 'are'} {what} (on ranks {ranks})"
            for wrong, what in ((missing, "missing"), (twice, "held more than once"))
            if wrong
        ]
        if words:
            return "; ".join(words), ranks[0]
    return None


def _rows(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:6])) + (", ..." if len(rows) > 6 else "")
    return f"row {shown}" if len(rows) == 1 else f"{len(rows)} rows ({shown})"
