"""The reference side: what each of its runs keeps of an observation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .fingerprint import fingerprint
from .floors import noise_errors
from .placement import PlacementError, Resolved
from .records import Measured, Record, plain
from .reference import FORMAT, read_reference
from .store import Reader, Writer, write_index
from .values import Leaf, real_dtype, unit_roundoff


class Run(Protocol):
    """One run of the reference."""

    def take(self, record: Record, leaf: Leaf, placed: Resolved) -> None:
        """Keep what this run needs of an observation.

        Raises:
            PlacementError: the rows are not all rows of the value.
            OSError: no room for it.
        """

    def finish(self, problems: Sequence[Record]) -> None:
        """Write the run's index."""


def in_source_order(leaf: Leaf, placed: Resolved) -> torch.Tensor | None:
    """The whole value with its rows in source order: a copy only where they are not.

    Raises:
        PlacementError: one device holds all rows, and these positions are not each of them once.
    """
    tensor, rows = leaf.tensor, placed.rows
    if tensor is None or rows is None:
        return tensor
    counts = torch.bincount(rows, minlength=tensor.shape[0])
    wrong = (counts != 1).nonzero().flatten().tolist()
    if wrong:
        shown = ", ".join(map(str, wrong[:6])) + (", ..." if len(wrong) > 6 else "")
        raise PlacementError(
            f"on one device rows must hold each of 0 to {tensor.shape[0] - 1} once; missing, held "
            f"twice or out of range: {shown}"
        )
    if bool((rows[1:] > rows[:-1]).all()):
        return tensor
    whole = torch.empty_like(tensor)
    whole[rows.to(tensor.device)] = tensor
    return whole


class ReferenceRun:
    """Keeps every value."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._directory = directory
        self._unit = unit_roundoff(dtype)
        self._writer = Writer(directory / "reference.bin")
        self._entries: list[Measured] = []
        self._digests: dict[str, str] = {}

    def take(self, record: Record, leaf: Leaf, placed: Resolved) -> None:
        """Write the value."""
        tensor = in_source_order(leaf, placed)
        entry = Measured(
            record.name,
            leaf.kind,
            leaf.dtype,
            list(leaf.shape),
            floating=leaf.floating,
            exact=record.exact,
            zero=record.zero,
            source=record.source,
            unit=self._unit if leaf.floating and not record.exact else 0.0,
        )
        if tensor is not None:
            entry.numel = math.prod(leaf.shape)
            entry.values_at = self._writer.append(tensor)
            self._digests[record.name] = fingerprint(tensor)
        self._entries.append(entry)

    def finish(self, problems: Sequence[Record]) -> None:
        """Write the index."""
        self._writer.close()
        _write(self._directory, "reference", self._entries, problems, {"digests": self._digests})


class RepeatRun:
    """Keeps a digest of every value."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: list[dict[str, Any]] = []

    def take(self, record: Record, leaf: Leaf, placed: Resolved) -> None:
        """Note the digest."""
        tensor = in_source_order(leaf, placed)
        self._entries.append(_form(record, "" if tensor is None else fingerprint(tensor)))

    def finish(self, problems: Sequence[Record]) -> None:
        """Write the index."""
        _write(self._directory, "repeat", self._entries, problems, {})


class NoiseRun:
    """Keeps how far each floating value moved, and a digest of each that must not move.

    Raises:
        StoreError: the reference run did not finish.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._label = f"noise-{int(seed)}"
        self._writer = Writer(directory / f"{self._label}.bin")
        self._reference = {entry.name: entry for entry in read_reference(directory)}
        self._values = Reader(directory / "reference.bin")
        self._entries: list[dict[str, Any]] = []

    def take(self, record: Record, leaf: Leaf, placed: Resolved) -> None:
        """Compare with the reference at once."""
        tensor = in_source_order(leaf, placed)
        form = _form(record, "")
        self._entries.append(form)
        entry = self._reference.get(record.name)
        alike = entry is not None and (leaf.kind, leaf.dtype, list(leaf.shape)) == (
            entry.kind,
            entry.dtype,
            entry.shape,
        )
        if tensor is None or entry is None or not alike or tensor.numel() == 0:
            return
        if entry.exact or not entry.floating:
            form["digest"] = fingerprint(tensor)
            return
        shape = tuple(tensor.shape)
        reference = self._values.tensor(entry.values_at, real_dtype(entry.dtype), shape)
        errors = noise_errors(tensor, reference)
        form |= {
            "error_sq": errors.error_sq,
            "unlike": errors.unlike,
            "rows": errors.row_sq.numel(),
            "rows_at": self._writer.append(errors.row_sq),
            "sketch_shape": list(errors.sketch.shape),
            "sketch_at": self._writer.append(errors.sketch),
        }

    def finish(self, problems: Sequence[Record]) -> None:
        """Write the index."""
        self._writer.close()
        _write(self._directory, self._label, self._entries, problems, {})


def _form(record: Record, digest: str) -> dict[str, Any]:
    return {
        "name": record.name,
        "kind": record.kind,
        "dtype": record.dtype,
        "shape": record.shape,
        "digest": digest,
    }


def _write(
    directory: Path,
    label: str,
    entries: Sequence[object],
    problems: Sequence[Record],
    more: dict[str, object],
) -> None:
    notes = [
        {"name": record.name, "problem": record.problem, "source": record.source}
        for record in problems
    ]
    write_index(
        directory / f"{label}.json",
        {"format": FORMAT, "entries": plain(list(entries)), "problems": notes, **more},
    )
