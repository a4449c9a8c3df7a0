"""Shared-memory files: one append-only file of raw tensors a process, with an index beside it.

Names of observations never become paths: a tensor is found by its extent, the offset and the shape
that the index holds. Directories are private (0700) and so are files (0600).
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import torch

from .blocks import blocks

_ALIGNMENT = 64
"""Bytes; frombuffer needs offsets that its dtype divides, and a cache line costs nothing."""


class StoreError(RuntimeError):
    """A file of the store is missing, unreadable or not what the index says."""


class Writer:
    """Appends tensors to one new file.

    Raises:
        OSError: the directory cannot be made or the device is full.
    """

    def __init__(self, path: Path) -> None:
        private_directory(path.parent)
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        self.path = path
        self.end = 0

    def append(self, value: torch.Tensor) -> int:
        """Write ``value`` (any device, strides and dtype but complex) and return its offset.

        Works in blocks, so no contiguous copy of the whole is made. A failed write (device full)
        leaves the file usable: the next tensor starts where this one did.
        """
        start = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self._file.seek(start)
        for index in blocks(value.shape):
            piece = value[index].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            # Through its address, since torch does not require numpy; `piece` outlives the view.
            left = memoryview((ctypes.c_char * piece.numel()).from_address(piece.data_ptr()))
            while left:
                left = left[self._file.write(left) :]
        self.end = start + value.numel() * value.element_size()
        return start

    def close(self) -> None:
        """Close the file; further appends fail."""
        self._file.close()


class Reader:
    """Maps one file and gives its tensors without copying them.

    Raises:
        StoreError: no such file.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                # Copy-on-write, since torch has no read-only tensors; nobody writes to them.
                self._map = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self._size else None
                )
        except FileNotFoundError:
            raise StoreError(
                f"expected tensors in {path}, found no such file: the run that writes it did not "
                "get that far, or its directory was removed"
            ) from None
        self.path = path

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor at ``offset``; shares the map's memory and must not be written to."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if self._map is None or offset + count * dtype.itemsize > self._size:
            raise StoreError(
                f"{self.path} ends at byte {self._size}, before the tensor at {offset} "
                f"({dtype}, shape {list(shape)}): it was cut short"
            )
        flat = torch.frombuffer(
            self._map, dtype=torch.uint8, offset=offset, count=count * dtype.itemsize
        )
        return flat.view(dtype).view(shape)


def private_directory(path: Path) -> None:
    """Make ``path`` with mode 0700 where it does not exist."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_index(path: Path, content: object) -> None:
    """Write JSON in one step: a reader sees the whole file or none."""
    private_directory(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False)
    part.replace(path)


def read_index(path: Path) -> dict[str, object]:
    """Read what ``write_index`` wrote.

    Raises:
        StoreError: no such file, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(
            f"expected {path}, found no such file: the run that writes it did not finish"
        ) from None
    if not isinstance(content, dict):
        raise StoreError(f"{path} holds {type(content).__name__}, expected an object")
    return content
