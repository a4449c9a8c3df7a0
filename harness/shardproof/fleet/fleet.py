"""A fleet: the ranks of one world, as the controller holds them."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .capture import OUTPUT_LIMIT, Capture, Output
from .channel import Channel
from .cleanup import remove_tree
from .codec import encode
from .errors import FleetError
from .events import STOP, Event, Exited, Message, exited
from .processes import Family, Ident, send_signal
from .stacks import collect_stacks

_TERM_GRACE = 1.0  # seconds between SIGTERM and SIGKILL
_REPORT_GRACE = 2.0  # seconds for the fork server to report ranks that are dead
_PUMP_LIMIT = 1.0  # seconds of waiting after which streams are looked at for their size


class Pump(Protocol):
    """Whatever moves bytes and delivers events to fleets: the fork server."""

    def pump(self, timeout: float | None) -> None:
        """Wait for something to happen to any fleet, at most ``timeout`` seconds, and take it."""

    def forget(self, fleet: Fleet) -> None:
        """Take no further notice of a fleet that has ended."""


class RankProcess:
    """One rank of a fleet."""

    def __init__(self, *, index: int, ident: Ident, channel: Channel, directory: Path) -> None:
        self.index = index
        self.ident = ident
        self.exited: Exited | None = None
        self.fault = ""
        self.channel = channel
        self.capture = Capture(directory, index)

    @property
    def pid(self) -> int:
        """The process number; also that of its process group and session."""
        return self.ident.pid

    @property
    def alive(self) -> bool:
        """Whether its end has not been reported yet."""
        return self.exited is None

    def __repr__(self) -> str:
        state = "alive" if self.exited is None else str(self.exited)
        return f"<RankProcess {self.index} pid {self.pid}: {state}>"


class Fleet:
    """Ranks 0 to ``size`` - 1. Not safe for use by several threads."""

    def __init__(
        self,
        *,
        number: int,
        label: str,
        token: str,
        directory: Path,
        ranks: Sequence[RankProcess],
        server: Pump,
    ) -> None:
        self.label = label
        self.directory = directory
        self.ranks = list(ranks)
        self._number = number
        self._token = token
        self._server = server
        self._events: deque[Event] = deque()

    @property
    def size(self) -> int:
        """Number of ranks, dead ones included."""
        return len(self.ranks)

    @property
    def live(self) -> list[int]:
        """The ranks whose end has not been reported."""
        return [rank.index for rank in self.ranks if rank.alive]

    @property
    def exits(self) -> dict[int, Exited]:
        """How the other ranks ended, whether or not `poll` has returned that yet."""
        return {rank.index: rank.exited for rank in self.ranks if rank.exited is not None}

    # Messages ---------------------------------------------------------------------------------

    def send(self, rank: int | None, message: Mapping[str, object]) -> None:
        """Send to one rank, or with None to all.

        Never blocks: what a rank does not take now goes out during later calls of `poll`. What is
        sent to a dead rank is dropped. Raises MessageError, with nothing sent, for what cannot be
        sent.
        """
        if rank is None:
            encode(message)
        for target in self.ranks if rank is None else [self._rank(rank)]:
            if target.alive:
                target.channel.post(message)

    def poll(self, timeout: float | None) -> list[Event]:
        """Return the events that have come, waiting at most ``timeout`` seconds for the first.

        None waits without end. Events are ordered by when they happened as far as that is known,
        and those of one rank always; `Exited` is its last. Returns an empty list when time is up,
        and at once when all ranks have ended and all was returned.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._server.pump(0.0)
        while not self._events and self.live:
            left = _PUMP_LIMIT
            if deadline is not None:
                left = min(left, deadline - time.monotonic())
                if left <= 0:
                    break
            self._server.pump(left)
        events = list(self._events)
        self._events.clear()
        return events

    # Watching ---------------------------------------------------------------------------------

    def stacks(self, timeout: float = 2.0) -> dict[int, str]:
        """Return every rank's Python stacks (all threads), also of ranks inside C++ code.

        A rank that cannot answer, being dead, stopped or stuck in the kernel, has a text that
        says so.
        """
        texts = {rank: f"(no stack: {end})" for rank, end in self.exits.items()}
        asked = {rank.index: rank.ident for rank in self.ranks if rank.alive}
        texts.update(collect_stacks(asked, self.directory, timeout=timeout))
        return dict(sorted(texts.items()))

    def output(self, rank: int, *, limit: int = OUTPUT_LIMIT) -> Output:
        """Return what a rank wrote to descriptors 1 and 2 since the last `mark`.

        Also after its death. Over ``limit`` bytes the middle of a stream is left out, which the
        text says.
        """
        return self._rank(rank).capture.read(limit=limit)

    def mark(self) -> None:
        """Let `output` of every rank start anew from here."""
        for rank in self.ranks:
            rank.capture.mark()

    # Ending -----------------------------------------------------------------------------------

    def stop(self, timeout: float = 5.0) -> dict[int, Exited]:
        """End the ranks in good order, or else by force.

        They are asked with the STOP message and the end of their channels, sent SIGTERM after
        ``timeout`` seconds, and killed after another second.

        Returns how each rank ended. Messages that come meanwhile are there for `poll`.
        """
        for rank in self.ranks:
            if rank.alive:
                rank.channel.post(STOP)
                rank.channel.finish()
        self._await_ends(timeout)
        for rank in self.ranks:
            if rank.alive:
                send_signal(rank.ident, signal.SIGTERM)
        if self.live:
            self._await_ends(_TERM_GRACE)
        self.kill()
        return self.exits

    def kill(self) -> None:
        """Kill the ranks and all that they started; return when none is left.

        Works on ranks that are stopped, blocked in C++ or ignore signals, and without the fork
        server's help. May be called again. Raises SurvivorError where the kernel won't let go.
        """
        if self.live:
            Family(
                self._token,
                roots=frozenset(rank.ident for rank in self.ranks if rank.alive),
                ranks=frozenset(f"{self._number}.{rank.index}" for rank in self.ranks),
            ).kill()
            self._await_ends(_REPORT_GRACE)
        now = time.monotonic()
        for rank in self.ranks:
            if rank.alive:
                self._end(
                    rank,
                    Exited(
                        rank.index,
                        None,
                        signal.SIGKILL,
                        now,
                        "killed by the controller; the fork server did not report it",
                    ),
                    self._events,
                )
        self._server.forget(self)

    def discard(self) -> None:
        """Kill what is left, and remove the files that the ranks' output and stacks are in."""
        self.kill()
        remove_tree(self.directory)

    # For the fork server ----------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The fork server's number of this fleet."""
        return self._number

    def take(self, readable: Iterable[int], ends: Iterable[Exited]) -> None:
        """Read what the ranks ``readable`` sent and note ``ends``."""
        batch: deque[Event] = deque()
        for rank in readable:
            self._drain(self.ranks[rank], batch)
        for end in ends:
            self._end(self.ranks[end.rank], end, batch)
        # Each rank's own events are in order already, and the sort is stable.
        self._events.extend(sorted(batch, key=lambda event: event.at))

    def trim(self) -> None:
        """Bound the space that the ranks' output takes."""
        for rank in self.ranks:
            rank.capture.trim()

    # ------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankProcess:
        if not 0 <= rank < self.size:
            raise FleetError(f"fleet {self.label!r} has ranks 0 to {self.size - 1}, not {rank}")
        return self.ranks[rank]

    def _drain(self, rank: RankProcess, batch: deque[Event]) -> None:
        received = rank.channel.drain()
        batch.extend(Message(rank.index, message.payload, message.at) for message in received)
        if rank.channel.error is not None and not rank.fault:
            rank.fault = f"killed, since what it sent is no message: {rank.channel.error}"
            send_signal(rank.ident, signal.SIGKILL)

    def _end(self, rank: RankProcess, end: Exited, batch: deque[Event]) -> None:
        """Note a rank's end, after all that it sent before."""
        if rank.exited is not None:
            return
        self._drain(rank, batch)
        note = rank.fault
        if not note and rank.channel.unfinished:
            note = f"its last message was cut short after {rank.channel.unfinished} bytes"
        if note:
            both = f"{end.note}; {note}" if end.note else note
            end = Exited(end.rank, end.code, end.signal, end.at, both)
        rank.channel.close()
        rank.exited = end
        batch.append(end)

    def _await_ends(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.live and (left := deadline - time.monotonic()) > 0:
            self._server.pump(min(left, _PUMP_LIMIT))


def wait(fleets: Sequence[Fleet], timeout: float | None) -> list[tuple[Fleet, Event]]:
    """Poll several fleets of one fork server at once; see `Fleet.poll`."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        events = [(fleet, event) for fleet in fleets for event in fleet.poll(0.0)]
        live = [fleet for fleet in fleets if fleet.live]
        if events or not live:
            return sorted(events, key=lambda pair: pair[1].at)
        left = _PUMP_LIMIT
        if deadline is not None:
            left = min(left, deadline - time.monotonic())
            if left <= 0:
                return []
        live[0]._server.pump(left)


__all__ = ["Fleet", "RankProcess", "exited", "wait"]
