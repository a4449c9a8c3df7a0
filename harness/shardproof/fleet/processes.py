"""Finding and ending processes, whatever they did to get away.

A rank is the leader of its own session, so its children are usually found by that. One
that called setsid itself is found as a descendant; one whose parent has died as well is found by
its marks: the environment that the fork server was started with, which every process forked from
it shows in /proc, and the name (of forked processes) or environment (of executed ones) that says
which rank it came from.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Never

from .errors import SurvivorError

libc: Final = ctypes.CDLL(None, use_errno=True)

TOKEN_VARIABLE: Final = "SHARDPROOF_FLEET"
"""Environment variable that holds a fork server's token in it and in all that comes from it."""

RANK_VARIABLE: Final = "SHARDPROOF_FLEET_RANK"
"""Environment variable that tells which rank a program was started by: token.fleet.rank."""

_STOP_ROUNDS: Final = 20
_PR_SET_NAME: Final = 15
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Ident:
    """A process, told from a later one of the same number by its start time (clock ticks)."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says."""

    ident: Ident
    name: bytes
    state: str
    parent: int
    session: int

    @property
    def dead(self) -> bool:
        """Whether it is a zombie: it holds nothing but its number."""
        return self.state in "ZX"


def read_stat(pid: int) -> Stat | None:
    """Return the state of a process, None where there is none of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name stands in parentheses and may itself hold parentheses and blanks.
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    return Stat(
        ident=Ident(pid, int(fields[19])),
        name=head.partition(b"(")[2],
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
    )


def identify(pid: int) -> Ident | None:
    """Return the identity of a process that exists now, zombies included."""
    stat = read_stat(pid)
    return None if stat is None else stat.ident


def scan() -> dict[int, Stat]:
    """Return every process of the system that can be seen, by number."""
    found: dict[int, Stat] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = read_stat(int(entry.name))
            if stat is not None:
                found[stat.ident.pid] = stat
    return found


def alive(ident: Ident) -> bool:
    """Whether the process runs, or could (zombies don't count)."""
    return _living(ident) is not None


def _living(ident: Ident) -> Stat | None:
    stat = read_stat(ident.pid)
    return stat if stat is not None and stat.ident == ident and not stat.dead else None


def send_signal(ident: Ident, number: int) -> bool:
    """Signal exactly this process; False where it is gone or not ours to signal."""
    try:
        handle = os.pidfd_open(ident.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel before 5.3: a small race is left
        handle = -1
    try:
        if identify(ident.pid) != ident:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(ident.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def environment(pid: int) -> list[bytes]:
    """Return the environment that a process's program was started with; empty if unreadable."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@dataclass(frozen=True)
class Family:
    """Processes that belong together: roots, their sessions and descendants, and marks.

    ``token`` alone takes in everything that came from the fork server of that token, and the
    server. With ``ranks`` (texts ``fleet.rank``), it takes in only what bears one of these marks.
    Roots are leaders of sessions, which belong to the family as a whole.
    ``below`` are processes whose descendants belong to the family although they don't; ``spare``
    are those that stay out in any case.
    """

    token: str
    roots: frozenset[Ident] = frozenset()
    ranks: frozenset[str] | None = None
    below: frozenset[int] = frozenset()
    spare: frozenset[int] = field(default_factory=lambda: frozenset({os.getpid()}))

    def members(self) -> set[Stat]:
        """Return the members that are alive now, without those that are spared."""
        seen = scan()
        leaders = {
            root.pid for root in self.roots if root.pid not in seen or seen[root.pid].ident == root
        }
        found = {
            pid
            for pid, stat in seen.items()
            if (pid in leaders or stat.session in leaders) or self._marked(stat)
        }
        children: dict[int, list[int]] = {}
        for pid, stat in seen.items():
            children.setdefault(stat.parent, []).append(pid)
        queue = [*self.below, *(found - self.spare)]
        while queue:
            for child in children.get(queue.pop(), ()):
                if child not in found and child not in self.spare:
                    found.add(child)
                    queue.append(child)
        return {seen[pid] for pid in found - self.spare if not seen[pid].dead}

    def _marked(self, stat: Stat) -> bool:
        variables = environment(stat.ident.pid)
        if f"{TOKEN_VARIABLE}={self.token}".encode() not in variables:
            return False
        if self.ranks is None:
            return True
        return any(
            stat.name == process_name(rank)
            or f"{RANK_VARIABLE}={self.token}.{rank}".encode() in variables
            for rank in self.ranks
        )

    def kill(self, *, timeout: float = 10.0) -> None:
        """End every member with SIGKILL and return when none is left.

        All are stopped first, so that none can start another while they are being counted.
        Raises SurvivorError when some are still there after ``timeout`` seconds (processes in
        uninterruptible sleep, or of another user).
        """
        deadline = time.monotonic() + timeout
        known: set[Ident] = set()
        stopped: set[Ident] = set()
        rounds = 0
        pause = 0.0005
        # Whose parent was the first to end is nobody's descendant any more, and still there.
        while members := self.members() | set(filter(None, map(_living, known))):
            known |= {stat.ident for stat in members}
            fresh = known - stopped
            if fresh and rounds < _STOP_ROUNDS:
                rounds += 1
                for ident in fresh:
                    send_signal(ident, signal.SIGSTOP)
                stopped |= fresh
                continue
            for stat in members:
                send_signal(stat.ident, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise SurvivorError(
                    f"after SIGKILL and {timeout:g} s these processes are still there: "
                    + ", ".join(sorted(describe(stat) for stat in members))
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


def process_name(rank: str) -> bytes:
    """Return the name (at most 15 bytes) that a rank's process goes by, from ``fleet.rank``."""
    return f"sp:{rank}".encode()[:15]


def describe(stat: Stat) -> str:
    """Name a process for a message."""
    name = stat.name.decode(errors="replace")
    return f"{stat.ident.pid} ({name}, state {stat.state}, parent {stat.parent})"


def idents(pairs: Iterable[tuple[int, int]]) -> frozenset[Ident]:
    """Build identities from (pid, start time) pairs."""
    return frozenset(Ident(pid, started) for pid, started in pairs)


def marks(token: str, rank: str) -> Mapping[str, str]:
    """Return the variables that a rank puts in its environment, for programs that it starts."""
    return {TOKEN_VARIABLE: token, RANK_VARIABLE: f"{token}.{rank}"}


def other_threads() -> list[str]:
    """Return the system's names of this process's threads but the main one.

    Those that Python knows nothing of are included.
    """
    names = []
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text().strip())
    return names


def die_with(parent: int) -> None:
    """Have this process killed when ``parent``, which forked it, ends; at once if it has ended."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above took effect


def leave(status: int) -> Never:
    """Leave a forked process with what was printed, and without an interpreter shutdown.

    Destructors of process groups and of torch's thread pools are known to abort there now and then,
    when peers have left before.
    """
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def open_fds() -> set[int]:
    """Return the descriptors that this process has open."""
    with os.scandir("/proc/self/fd") as entries:
        found = {int(entry.name) for entry in entries}
    return {fd for fd in found if os.path.lexists(f"/proc/self/fd/{fd}")}


def set_process_name(name: bytes) -> None:
    """Set the name that tools show for this process (15 bytes)."""
    libc.prctl(_PR_SET_NAME, name[:15], 0, 0, 0)
