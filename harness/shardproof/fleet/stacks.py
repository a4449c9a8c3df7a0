"""Python stacks of running ranks, also of ones that are stuck inside C++ code.

The interpreter's fault handler writes them from a signal handler, without taking any lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

from .processes import Ident, read_stat, send_signal

STACK_SIGNAL: Final = signal.SIGRTMIN + 8
"""A real-time signal: programs that users bring along own SIGUSR1 and SIGUSR2."""

_QUIET: Final = 0.05  # seconds without growth after which a dump is taken for complete

_STATES: Final = {
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    "D": "it is in uninterruptible sleep in the kernel",
    "R": "it is running, but does not react to the signal",
    "S": "it is asleep, but does not react to the signal",
}


def stack_file(directory: Path, rank: int) -> Path:
    """Return the file that a rank dumps its stacks to."""
    return directory / f"rank{rank}.stacks"


def enable_stacks(path: Path) -> None:
    """Dump this process's stacks into ``path`` whenever STACK_SIGNAL arrives."""
    # The handler writes to this descriptor for the rest of the process's life, so nobody may own
    # and close it.
    fd = path.open("ab", buffering=0)
    _register(fd)
    _kept_open.append(fd)


@contextlib.contextmanager
def stacks_of(child: int) -> Iterator[None]:
    """Whoever asks this process for its stacks gets those of a forked ``child`` meanwhile."""

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    faulthandler.unregister(STACK_SIGNAL)
    signal.signal(STACK_SIGNAL, pass_on)
    try:
        yield
    finally:
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        if _kept_open:
            _register(_kept_open[-1])


def _register(fd: FileIO) -> None:
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


_kept_open: list[FileIO] = []


def collect_stacks(
    ranks: Mapping[int, Ident], directory: Path, *, timeout: float = 2.0
) -> dict[int, str]:
    """Ask every given rank for its stacks and return the texts, by rank.

    A rank that does not answer within ``timeout`` seconds gets a text that says why.
    """
    deadline = time.monotonic() + timeout
    waiting: dict[int, tuple[int, int, float]] = {}  # rank -> start, size last seen, seen when
    texts: dict[int, str] = {}
    for rank, ident in ranks.items():
        size = _size(stack_file(directory, rank))
        stat = read_stat(ident.pid)
        if stat is not None and stat.ident == ident and stat.state in "Tt":
            texts[rank] = f"(no stack: rank {rank}, process {ident.pid}: {_STATES[stat.state]})"
        elif send_signal(ident, STACK_SIGNAL):
            waiting[rank] = (size, size, time.monotonic())
        else:
            texts[rank] = f"(no stack: rank {rank}, process {ident.pid}, is gone)"
    while waiting:
        time.sleep(0.01)
        now = time.monotonic()
        for rank, (start, seen, since) in list(waiting.items()):
            path = stack_file(directory, rank)
            size = _size(path)
            if size != seen:
                waiting[rank] = (start, size, now)
            elif size > start and now - since >= _QUIET:
                texts[rank] = _read(path, start)
                del waiting[rank]
            elif now > deadline:
                texts[rank] = _read(path, start) or _silence(rank, ranks[rank], timeout)
                del waiting[rank]
    return dict(sorted(texts.items()))


def shortened(text: str) -> str:
    """Stacks of the fault handler without the frames that run a case; other text as it is.

    ``text`` is what ``collect_stacks`` returns, or what a rank wrote to stderr, where a crash
    leaves a stack; tracebacks of exceptions stay whole. A line says how many frames are left out.
    Of a thread that has no others the innermost stays. The list of extension modules below a
    crash's stack is left out.
    """
    lines: list[str] = []
    thread: list[str] | None = None
    for line in text.split("\n"):
        if thread is not None and _FRAME.match(line):
            thread.append(line)
            continue
        lines += _without_ours(thread or ())
        thread = [] if line.endswith(_HEAD) else None
        if not _EXTENSIONS.fullmatch(line):
            lines.append(line)
    return "\n".join([*lines, *_without_ours(thread or ())])


def _without_ours(thread: Sequence[str]) -> list[str]:
    groups = [(ours, list(frames)) for ours, frames in itertools.groupby(thread, _is_ours)]
    if len(groups) == 1 and groups[0][0]:
        groups = [(False, groups[0][1][:1]), (True, groups[0][1][1:])]
    lines: list[str] = []
    for ours, frames in groups:
        if not ours:
            lines += frames
        elif frames:
            word = "frame" if len(frames) == 1 else "frames"
            lines.append(f"  ... {len(frames)} {word} of pytest and shardproof")
    return lines


def _is_ours(frame: str) -> bool:
    found = _FRAME.match(frame)
    return found is not None and found[1].startswith(_our_folders())


@functools.cache
def _our_folders() -> tuple[str, ...]:
    specs = [importlib.util.find_spec(name) for name in ("_pytest", "pytest", "pluggy", _PACKAGE)]
    folders = [place for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return ("<frozen runpy>", *(folder + os.sep for folder in folders))


_HEAD: Final = "(most recent call first):"
_EXTENSIONS: Final = re.compile(r"Extension modules: .* \(total: \d+\)")
_FRAME: Final = re.compile(r'  File "(.*)", line ')
_PACKAGE: Final = __name__.partition(".")[0]


def _silence(rank: int, ident: Ident, timeout: float) -> str:
    stat = read_stat(ident.pid)
    if stat is None or stat.ident != ident or stat.dead:
        return f"(no stack: rank {rank}, process {ident.pid}, is gone)"
    state = _STATES.get(stat.state, f"it is in state {stat.state}")
    return f"(no stack within {timeout:g} s: rank {rank}, process {ident.pid}: {state})"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
