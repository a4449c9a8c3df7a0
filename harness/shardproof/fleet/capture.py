"""What a rank writes to its file descriptors 1 and 2, from birth, also out of C++ code.

They are files, not pipes: a rank never blocks on them, and what it wrote last survives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .processes import libc

OUTPUT_LIMIT: Final = 2**20
"""Bytes of a stream that `Capture.read` returns at most: the beginning and the end of it."""

KEPT_LIMIT: Final = 64 * 2**20
"""Bytes of a stream that are kept at most; beyond that the middle is given back."""

_PUNCH_HOLE_KEEP_SIZE: Final = 0x3
_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Output:
    """What one rank has written since the last mark."""

    stdout: str
    stderr: str


class StreamFile:
    """The file behind one stream of one rank, as the controller sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = 0

    def mark(self) -> None:
        """Start anew: what has been written so far is no longer shown."""
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
            if size > OUTPUT_LIMIT:
                # The rank appends, so its next write lands at the new end, not behind a gap.
                os.truncate(self.path, 0)
                size = 0
            self._mark = size

    def read(self, *, limit: int = OUTPUT_LIMIT) -> str:
        """Return the text since the mark, its middle left out (and so noted) over ``limit``.

        At most twice OUTPUT_LIMIT is returned, since `trim` may have freed what is between.
        """
        limit = min(limit, 2 * OUTPUT_LIMIT)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                total = size - self._mark
                file.seek(self._mark)
                if total <= limit:
                    return _text(file.read(total))
                head = file.read(limit // 2)
                file.seek(size - limit // 2)
                tail = file.read(limit // 2)
        except FileNotFoundError:
            return ""
        left_out = total - len(head) - len(tail)
        return f"{_text(head)}\n[... {left_out:,} bytes left out ...]\n{_text(tail)}"

    def trim(self) -> None:
        """Give back the middle of a stream that grew over KEPT_LIMIT (the file system permitting).

        Only what `read` leaves out is freed, and the file's length stays, so the writer notices
        nothing. A rank that prints for ever in a case would else fill the shared memory.
        """
        try:
            size = self.path.stat().st_size
            if size - self._mark <= KEPT_LIMIT:
                return
            first = -(-(self._mark + OUTPUT_LIMIT) // _PAGE) * _PAGE
            last = (size - OUTPUT_LIMIT) // _PAGE * _PAGE
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            libc.fallocate(
                fd,
                _PUNCH_HOLE_KEEP_SIZE,
                ctypes.c_int64(first),
                ctypes.c_int64(last - first),
            )
        finally:
            os.close(fd)


class Capture:
    """Both streams of one rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.stdout = StreamFile(directory / f"rank{rank}.out")
        self.stderr = StreamFile(directory / f"rank{rank}.err")

    def mark(self) -> None:
        """Start anew: `read` shows only what is written from now on."""
        self.stdout.mark()
        self.stderr.mark()

    def read(self, *, limit: int = OUTPUT_LIMIT) -> Output:
        """Return what was written since the last mark, each stream cut to ``limit`` bytes."""
        return Output(self.stdout.read(limit=limit), self.stderr.read(limit=limit))

    def trim(self) -> None:
        """Keep streams from growing without end; see `StreamFile.trim`."""
        self.stdout.trim()
        self.stderr.trim()


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
