"""Scratch directories that don't outlive their owner.

Each run has one private directory, in shared memory where there is room, and holds a lock in it.
The lock goes away with its holder however it dies, so that a later run can tell a dead run's
directory, and remove it together with whatever still runs under that run's tokens.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from .errors import SurvivorError
from .processes import Family, Ident, alive, identify

_PREFIX: Final = "shardproof-"
_NEW_PREFIX: Final = ".new-shardproof-"
_LOCK: Final = ".owner"
_TOKENS: Final = ".tokens"
_NEW_AGE: Final = 600.0  # seconds after which a directory that never got its name is a dead run's
_ROOM: Final = 2**30

_locks: dict[Path, tuple[int, int]] = {}  # directory -> (owner pid, descriptor of the lock)


def scratch_root(*, room: int = _ROOM) -> Path:
    """Return where scratch directories go: shared memory, or else the temporary directory.

    The latter where shared memory has less than ``room`` bytes free: containers often have 64 MiB
    of it, and a file mapped from a full one kills its reader with SIGBUS.
    """
    shared = Path("/dev/shm")
    with contextlib.suppress(OSError):
        usage = os.statvfs(shared)
        if usage.f_bavail * usage.f_frsize >= room and os.access(shared, os.W_OK | os.X_OK):
            return shared
    return Path(tempfile.gettempdir())


def make_scratch(*, root: Path | None = None) -> Path:
    """Make this run's private directory (mode 0700) under ``root`` and return its path.

    Directories that dead runs left under ``root`` are removed first. The new one is removed by
    `remove_scratch`, at the latest when this process exits normally.
    """
    root = scratch_root() if root is None else root
    sweep(root)
    token = secrets.token_hex(8)
    unnamed = root / f"{_NEW_PREFIX}{os.getuid()}-{token}"
    unnamed.mkdir(mode=0o700)
    lock = os.open(unnamed / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # no locks here: `_dead` falls back to what is written
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    me = identify(os.getpid())
    os.write(
        lock,
        json.dumps(
            {"pid": os.getpid(), "started": me.started if me else 0, "boot": _boot()}
        ).encode(),
    )
    # It gets the name that sweeps look for when it is locked, never before.
    path = root / f"{_PREFIX}{os.getuid()}-{token}"
    unnamed.rename(path)
    _locks[path] = (os.getpid(), lock)
    # Anew each time: a process that was forked from one with this module may have no such entry.
    atexit.unregister(_remove_all)
    atexit.register(_remove_all)
    return path


def remove_scratch(path: Path) -> None:
    """Remove a scratch directory and give up its lock. May be called again.

    In a process that was forked from the owner it does nothing.
    """
    owner, lock = _locks.get(path, (os.getpid(), -1))
    if owner != os.getpid():
        return
    remove_tree(path)
    _locks.pop(path, None)
    if lock >= 0:
        os.close(lock)


def remove_tree(path: Path) -> None:
    """Remove a directory tree that others may be removing, or writing into, at the same time."""
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.01)
        for directory, _, _ in os.walk(path):  # tests make directories that can't be listed
            with contextlib.suppress(OSError):
                Path(directory).chmod(0o700)


def record_token(scratch: Path, token: str) -> None:
    """Note in a scratch directory that processes under ``token`` belong to this run."""
    with (scratch / _TOKENS).open("a", encoding="ascii") as file:
        file.write(token + "\n")


def record_ranks(scratch: Path, token: str, ranks: Iterable[Ident]) -> None:
    """Note which ranks a fork server has at present, for whoever cleans up after it."""
    path = _ranks_file(scratch, token)
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):  # the directory is going away, and the ranks with it
        new.write_text("".join(f"{rank.pid} {rank.started}\n" for rank in ranks), encoding="ascii")
        new.replace(path)


def recorded_ranks(scratch: Path, token: str) -> frozenset[Ident]:
    """Return what `record_ranks` noted last. Numbers are used again: act on it soon."""
    try:
        lines = _ranks_file(scratch, token).read_text(encoding="ascii").splitlines()
    except OSError:
        return frozenset()
    return frozenset(Ident(*map(int, line.split())) for line in lines)


def _ranks_file(scratch: Path, token: str) -> Path:
    return scratch / f".ranks-{token[:8]}"


def sweep(root: Path) -> list[Path]:
    """Remove the directories of this user's dead runs under ``root``, with their processes.

    Returns what was removed. Whatever can't be judged or removed is left alone.
    """
    removed = []
    for path in _candidates(root):
        with contextlib.suppress(OSError, SurvivorError):
            if not _dead(path):
                continue
            with contextlib.suppress(FileNotFoundError):
                for token in (path / _TOKENS).read_text(encoding="ascii").split():
                    Family(token).kill(timeout=2.0)
            remove_tree(path)
            removed.append(path)
    return removed


def _candidates(root: Path) -> Iterator[Path]:
    for prefix in (_PREFIX, _NEW_PREFIX):
        for path in sorted(root.glob(f"{prefix}{os.getuid()}-*")):
            with contextlib.suppress(OSError):
                info = path.lstat()  # others may write to the root: no links, only what is ours
                if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                    yield path


def _dead(path: Path) -> bool:
    """Whether the run that made ``path`` is over."""
    if path in _locks and _locks[path][0] == os.getpid():
        return False
    if path.name.startswith(_NEW_PREFIX):
        return time.time() - path.lstat().st_mtime > _NEW_AGE
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True  # a removal that was cut short
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            return not _owner_alive(os.read(lock, 4096))  # a file system without locks
        return True
    finally:
        os.close(lock)


def _owner_alive(written: bytes) -> bool:
    try:
        owner = json.loads(written)
        return owner["boot"] == _boot() and alive(Ident(owner["pid"], owner["started"]))
    except (ValueError, KeyError, TypeError):
        return False


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _remove_all() -> None:
    for path in list(_locks):
        remove_scratch(path)
