"""What the controller reads in the ledgers of a run: mismatches, deadlocks, where ranks wait."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.ledger.compare import Difference, equal_ends, first_conflict, unequal_ends
from shardproof.ledger.deadlock import find_deadlock
from shardproof.ledger.page import Ledger, State, changes, page_file, read_page

if TYPE_CHECKING:
    from shardproof.controller.drive import Drive

# A run whose ledgers do not change is looked at this often.
INTERVAL = 1.0
# Ranks that wait for one another are given this many looks without any change.
_LOOKS = 2
_INSIDE_TORCH = re.compile(r'File "[^"]*/torch/(distributed|autograd|_ops|nn/parallel)')


class Watch:
    """Looks at the ledgers of a run now and then, and tells when no rank can go on."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        self._size = size
        self._seen: list[int] = []
        self._still = 0
        self._ledgers: list[Ledger] = []
        self._asked_with: set[int] | None = None

    def look(
        self, over: Collection[int], stacks: Callable[[], Mapping[int, str]]
    ) -> Difference | None:
        """Why the run can't go on, None while it may.

        Args:
            over: ranks whose part has ended.
            stacks: asks the ranks for their stacks; called once a standstill, and again where
                a rank's part ended since.
        """
        seen = [changes(page_file(self._directory, rank)) for rank in range(self._size)]
        if seen != self._seen:
            self._seen, self._still, self._asked_with = seen, 0, None
            return None
        self._still += 1
        if not any(seen):
            return None
        if self._still == 1:
            # What is read now holds until the next change.
            self._ledgers = read_all(self._directory, self._size)
            return first_conflict(self._ledgers)
        if self._still < _LOOKS:
            return None
        ledgers = self._ledgers
        found = find_deadlock(ledgers, over)
        ended = set(over)
        if found is None and self._asked_with != ended and any(map(_has_issued, ledgers)):
            # A rank may wait in C++, where the ledger does not see it.
            self._asked_with = ended
            inside = _inside_torch(stacks())
            if all(ledger.rank in inside or ledger.rank in over for ledger in ledgers):
                found = find_deadlock(ledgers, over, inside=inside)
        return found


def read_all(directory: Path, size: int) -> list[Ledger]:
    """The ledgers of all ranks as they are now."""
    return [read_page(directory, rank) for rank in range(size)]


def difference_at_end(drive: Drive) -> Difference | None:
    """How the ranks' collectives differ in a run that is over, by all that is known."""
    if not drive.run.ledger:
        return None
    directory, size = Path(drive.run.cell_dir), drive.fleet.size
    reports = _reports(drive)
    if len(reports) == size:
        if equal_ends(reports):
            return None
        if not any(trace.failed_body or trace.skipped_body for trace in drive.traces):
            return unequal_ends(reports, read_all(directory, size))
    return first_conflict(read_all(directory, size))


def collectives_of(drive: Drive) -> list[dict[str, Any]]:
    """Calls and bytes of all ranks by axis and operation, as run.jsonl has them.

    Of a rank that did not end what its file still holds is counted.
    """
    totals: dict[tuple[str, str], list[int]] = {}
    reports = _reports(drive)
    ledgers: Sequence[Ledger] = drive.ledgers
    for rank in range(drive.fleet.size):
        if rank in reports:
            lines = reports[rank]["totals"]
        else:
            entries = next((led.entries for led in ledgers if led.rank == rank), [])
            lines = [
                [e.axis, e.operation, 1, e.call["bytes"], int(e.call["backward"])] for e in entries
            ]
        for axis, operation, *counts in lines:
            total = totals.setdefault((axis, operation), [0, 0, 0])
            total[:] = [one + two for one, two in zip(total, counts, strict=True)]
    return [
        {"axis": axis, "operation": operation, "calls": calls, "bytes": size, "backward": backward}
        for (axis, operation), (calls, size, backward) in sorted(totals.items())
    ]


def _reports(drive: Drive) -> dict[int, Mapping[str, Any]]:
    """What the books of the ranks that ended said."""
    return {
        trace.rank: trace.done["ledger"]
        for trace in drive.traces
        if trace.done is not None and trace.done.get("ledger") is not None
    }


def _has_issued(ledger: Ledger) -> bool:
    return any(entry.state is State.ISSUED for entry in ledger.entries)


def _inside_torch(stacks: Mapping[int, str]) -> set[int]:
    """Ranks whose innermost Python frame is torch's."""
    return {rank for rank, text in stacks.items() if _in_torch(text)}


def _in_torch(text: str) -> bool:
    """Whether the innermost frame of the main thread, whose stack comes last, is torch's."""
    main = text.rpartition("(most recent call first)")[2]
    frames = [line for line in main.splitlines() if line.strip().startswith("File ")]
    return bool(frames) and bool(_INSIDE_TORCH.search(frames[0]))
