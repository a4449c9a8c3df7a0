"""The reference's files, and the finished reference as candidates read it.

Files in the reference directory: ``reference``, ``repeat`` and ``noise-<seed>``, each an index
(``.json``) and the tensors that it points to (``.bin``), then ``finish`` likewise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .compare import Yardstick
from .records import Measured
from .store import Reader, StoreError, read_index
from .values import dtype_of, real_dtype

FORMAT = 1
"""Version of the files: all runs of a reference are of one version."""


@dataclass(frozen=True)
class Store:
    """The finished reference, as a candidate reads it."""

    measured: dict[str, Measured]
    values: Reader
    floors: Reader

    def tensor(self, entry: Measured) -> torch.Tensor:
        """The reference's numbers (complex ones as pairs); shared memory, not to be written to."""
        return self.values.tensor(entry.values_at, real_dtype(entry.dtype), stored_shape(entry))

    def yardstick(self, entry: Measured) -> Yardstick:
        """What errors of rows are measured in."""
        shape = stored_shape(entry)
        floors = (
            None
            if entry.row_floors_at < 0
            else self.floors.tensor(entry.row_floors_at, torch.float64, shape[:1])
        )
        return Yardstick(
            unit=entry.unit,
            row_gate=entry.row_gate,
            row_floor=entry.row_floor,
            least=entry.unit * max(entry.floor, entry.unit * entry.norm),
            row_floors=floors,
        )


def stored_shape(entry: Measured) -> tuple[int, ...]:
    """Shape of the stored numbers: a complex number is a pair."""
    pair = (2,) if entry.dtype and dtype_of(entry.dtype).is_complex else ()
    return (*entry.shape, *pair)


def open_store(directory: Path) -> Store:
    """Open a finished reference.

    Raises:
        StoreError: it was not finished.
    """
    index = load_index(directory, "finish")
    measured = [Measured.of(content) for content in index["measured"]]
    return Store(
        {entry.name: entry for entry in measured},
        Reader(directory / "reference.bin"),
        Reader(directory / "finish.bin"),
    )


def read_reference(directory: Path) -> list[Measured]:
    """What the reference run observed.

    Raises:
        StoreError: it did not finish.
    """
    return [Measured.of(content) for content in load_index(directory, "reference")["entries"]]


def describe(kind: str, dtype: str, shape: Iterable[int]) -> str:
    """A value's form in words: ``float64[3, 4]``, ``None``, ``an empty container``."""
    if kind == "none":
        return "None"
    if kind == "empty":
        return "an empty container"
    return f"{dtype}[{', '.join(map(str, shape))}]"


def load_index(directory: Path, label: str) -> dict[str, Any]:
    """The index of one run.

    Raises:
        StoreError: the run did not finish, or another version wrote it.
    """
    content = read_index(directory / f"{label}.json")
    if content.get("format") != FORMAT:
        raise StoreError(
            f"{directory / label}.json is of format {content.get('format')!r}, expected {FORMAT}: "
            "it was written by another version"
        )
    return content
