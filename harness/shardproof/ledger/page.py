"""The file that a rank writes its ledger to: a ring of entries that others can read at any time.

The file is mapped into memory, so what a rank wrote is there for the controller however the rank
goes on: inside C++, stopped or dead. Layout, little endian: a header, a table of groups, and slots
of fixed size, of which entry ``n`` (from 1) takes number ``(n - 1) % slots``. The number of a slot
is written last, so a slot that is being written reads as empty.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

HEADER: Final = struct.Struct("<8sIIIIQQ")
"""Magic, slots, size of a slot, rows of groups, unused, entries so far, changes so far."""
GROUP: Final = struct.Struct("<IIQ")
"""CRC of the group's key, chained CRC of its operations so far, how many they are."""
SLOT: Final = struct.Struct("<QQddIHBB")
"""Number, sequence, started, ended, chain, length of the text, state, unused; then the text."""

MAGIC: Final = b"sp-ledgr"
SLOTS: Final = 1024
SLOT_SIZE: Final = 512
GROUPS: Final = 64
TEXT_LIMIT: Final = SLOT_SIZE - SLOT.size
LONGEST_PART: Final = 240
"""Characters of one part of a call, such as its shapes; fewer where all of them do not fit."""
GROUPS_AT: Final = 64
SLOTS_AT: Final = GROUPS_AT + GROUPS * GROUP.size
FILE_SIZE: Final = SLOTS_AT + SLOTS * SLOT_SIZE
ENTRIES_AT: Final = 24
CHANGES_AT: Final = 32
STATE_AT: Final = 38
ENDED_AT: Final = 24


class State(IntEnum):
    """How far an operation is."""

    CALLED = 1
    """Its call has not returned."""
    ISSUED = 2
    """The call returned; nobody waited for it in a way that can be seen."""
    WAITING = 3
    """A rank waits for it."""
    ENDED = 4
    REFUSED = 5
    """The call raised: it takes no part in the order of operations."""
    FAILED = 6
    """Waiting for it raised."""


@dataclass(frozen=True)
class Entry:
    """One operation of one rank.

    ``sequence`` counts from 1: collectives of a group, or messages on one channel (sender,
    receiver and tag). ``match`` is equal on all ranks that called the same thing. Times are
    seconds of the monotonic clock, ``ended`` None where it is not known. ``call`` is what it was
    called with: ``group`` (key), ``axis``, ``operation``, ``reduce_op``, ``shapes``, ``dtypes``,
    ``bytes``, ``backward``, ``site`` (the line and its callers, innermost first, joined by ``<``),
    and for messages ``source``, ``target``, ``tag``.
    """

    number: int
    sequence: int
    started: float
    ended: float | None
    chain: int
    state: State
    call: Mapping[str, Any]

    @property
    def group(self) -> str:
        """The group's name and ranks, ``name@0-1``."""
        return str(self.call["group"])

    @property
    def axis(self) -> str:
        """What the group is called in messages."""
        return str(self.call["axis"])

    @property
    def operation(self) -> str:
        """The operation's public name."""
        return str(self.call["operation"])

    @property
    def match(self) -> int:
        """Equal on ranks that called the same."""
        return int(self.call["match"])

    @property
    def channel(self) -> str | None:
        """The channel of a message, None for a collective."""
        found = self.call.get("channel")
        return None if found is None else str(found)

    @property
    def pending(self) -> bool:
        """Whether it is not known to have ended."""
        return self.state in (State.CALLED, State.ISSUED, State.WAITING)


@dataclass(frozen=True)
class Ledger:
    """What one rank recorded in one cell; entries beyond the ring's size are gone."""

    rank: int
    entries: list[Entry] = field(default_factory=list)
    counts: Mapping[int, int] = field(default_factory=dict)
    """Collectives so far by the CRC of a group's key."""
    recorded: int = 0
    changes: int = 0

    @property
    def whole(self) -> bool:
        """Whether no entry is gone."""
        return self.recorded == len(self.entries)


def page_file(directory: Path, rank: int) -> Path:
    """Where a rank writes its ledger of the cell whose private folder is ``directory``."""
    return directory / f"ledger-{rank}"


def changes(path: Path) -> int:
    """How often this ledger changed so far; 0 where there is none."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
    except OSError:
        return 0
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        return 0
    return int(HEADER.unpack(head)[6])


def read_page(directory: Path, rank: int) -> Ledger:
    """What a rank has recorded so far, nothing where it has no file.

    Slots that are being written are left out.
    """
    try:
        data = page_file(directory, rank).read_bytes()
    except OSError:
        return Ledger(rank)
    if len(data) != FILE_SIZE or not data.startswith(MAGIC):
        return Ledger(rank)
    recorded, changed = HEADER.unpack_from(data)[5:7]
    counts = {}
    for row in range(GROUPS):
        crc, _, count = GROUP.unpack_from(data, GROUPS_AT + row * GROUP.size)
        if crc or count:
            counts[crc] = count
    entries = [_entry(data, SLOTS_AT + slot * SLOT_SIZE) for slot in range(min(recorded, SLOTS))]
    found = sorted((entry for entry in entries if entry), key=lambda entry: entry.number)
    return Ledger(rank, found, counts, recorded, changed)


def _entry(data: bytes, at: int) -> Entry | None:
    number, sequence, started, ended, chain, length, state, _ = SLOT.unpack_from(data, at)
    if number == 0:
        return None
    try:
        call = _decode_call(data[at + SLOT.size : at + SLOT.size + length])
        return Entry(number, sequence, started, ended or None, chain, State(state), call)
    except ValueError:  # torn: the rank is writing it
        return None


@lru_cache(maxsize=SLOTS)
def _decode_call(text: bytes) -> Mapping[str, Any]:
    """The call in a slot; most calls are made again and again, and nobody changes one."""
    call: dict[str, Any] = json.loads(text)
    return MappingProxyType(call)


def encode_call(call: dict[str, Any]) -> bytes:
    """A call as the text of a slot: long parts are shortened in the middle until it fits."""
    limit = LONGEST_PART
    while True:
        shown = {key: _shorten(value, limit) for key, value in call.items()}
        text = json.dumps(shown, separators=(",", ":"), ensure_ascii=True).encode("ascii")
        if len(text) <= TEXT_LIMIT:
            return text
        limit = limit * 3 // 4


def _shorten(value: object, limit: int) -> object:
    if not isinstance(value, str) or len(value) <= limit:
        return value
    kept = max(limit - 3, 2) // 2
    return f"{value[:kept]}...{value[-kept:]}"
