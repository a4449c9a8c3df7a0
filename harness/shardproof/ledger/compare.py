"""Whether the ranks of each group called the same operations in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardproof.ledger.page import Entry, Ledger, State

_NONE = (0, 0)
"""Number and digest of no operation."""


@dataclass(frozen=True)
class Difference:
    """The first place where ranks of a group (or the ends of a channel) differ.

    ``what`` is ``operation``, ``reduce op``, ``root``, ``shape``, ``dtype``, ``missing`` (some
    ranks never called it), ``message`` (no partner, or another size), or ``earlier`` (the ring no
    longer holds the place). ``entries`` are the ranks' calls there, None where there is none;
    ``odd`` is the rank that the difference is put down to, ``other`` one that it is compared with.
    """

    what: str
    key: str
    axis: str
    sequence: int
    entries: Mapping[int, Entry | None]
    odd: int
    other: int
    before: Mapping[int, list[Entry]] = field(default_factory=dict)


def members(key: str) -> list[int]:
    """Global ranks in the key of a group."""
    ranks = key.rpartition("@")[2]
    return [int(rank) for rank in ranks.split("-")] if ranks else []


def collectives(ledger: Ledger, key: str) -> dict[int, Entry]:
    """A rank's collectives of a group by number; a refused call gives way to a later one."""
    found: dict[int, Entry] = {}
    for entry in ledger.entries:
        if entry.group == key and entry.channel is None:
            kept = found.get(entry.sequence)
            if kept is None or kept.state == State.REFUSED or entry.state != State.REFUSED:
                found[entry.sequence] = entry
    return found


def group_keys(ledgers: Iterable[Ledger]) -> list[str]:
    """Every group that any rank has a collective of, in order of first use."""
    keys: dict[str, None] = {}
    for ledger in ledgers:
        for entry in ledger.entries:
            if entry.channel is None:
                keys[entry.group] = None
    return list(keys)


def first_conflict(ledgers: Sequence[Ledger]) -> Difference | None:
    """The earliest collective that ranks of one group called differently, if there is one.

    A rank that has not come to it yet is no conflict.
    """
    found: list[Difference] = []
    for key in group_keys(ledgers):
        conflict = _conflict_of(key, ledgers)
        if conflict is not None:
            found.append(conflict)
    found += _message_conflicts(ledgers)
    return min(found, key=_when) if found else None


def _conflict_of(key: str, ledgers: Sequence[Ledger]) -> Difference | None:
    tables = {ledger.rank: collectives(ledger, key) for ledger in ledgers}
    tables = {rank: table for rank, table in tables.items() if table}
    numbers = sorted(set().union(*tables.values()))
    for number in numbers:
        here = {rank: table[number] for rank, table in tables.items() if number in table}
        if len(here) < 2:
            continue
        kinds: dict[tuple[int, int], list[int]] = {}
        for rank, entry in here.items():
            kinds.setdefault((entry.match, entry.chain), []).append(rank)
        if len(kinds) == 1:
            continue
        odd, other = _odd_one(list(kinds.values()))
        what = _what_differs(here[other], here[odd])
        if what is None:
            what = "earlier"
        before = {rank: _before(tables[rank], number) for rank in (odd, other)}
        entries: dict[int, Entry | None] = dict(here)
        return Difference(what, key, here[odd].axis, number, entries, odd, other, before)
    return None


def missing_at(key: str, number: int, ledgers: Sequence[Ledger], lacking: int) -> Difference:
    """The difference that ``lacking`` never called collective ``number`` of a group."""
    tables = {ledger.rank: collectives(ledger, key) for ledger in ledgers}
    entries = {rank: tables[rank].get(number) for rank in members(key) if rank in tables}
    entries[lacking] = None
    other = min(rank for rank, entry in entries.items() if entry is not None)
    here = entries[other]
    axis = here.axis if here is not None else ""
    before = {rank: _before(tables[rank], number) for rank in (lacking, other)}
    return Difference("missing", key, axis, number, entries, lacking, other, before)


def unequal_ends(
    reports: Mapping[int, Mapping[str, Any]], ledgers: Sequence[Ledger]
) -> Difference | None:
    """What differs between ranks that all ended, by their digests; places come from the ring.

    Args:
        reports: what each rank's book said when it was closed.
        ledgers: the rings, read only where digests differ.
    """
    for key in dict.fromkeys(key for report in reports.values() for key in report["groups"]):
        ends = {
            rank: tuple(reports[rank]["groups"].get(key, _NONE))
            for rank in members(key)
            if rank in reports
        }
        if len(set(ends.values())) > 1:
            return _where(key, ends, ledgers)
    return _unpaired(reports, ledgers)


def equal_ends(reports: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether all ranks called the same; no file is read."""
    for report in reports.values():
        for key, end in report["groups"].items():
            for rank in members(key):
                if rank in reports and list(reports[rank]["groups"].get(key, _NONE)) != list(end):
                    return False
    return not _unpaired_channels(reports)


def _where(key: str, ends: Mapping[int, tuple[int, ...]], ledgers: Sequence[Ledger]) -> Difference:
    conflict = _conflict_of(key, ledgers)
    if conflict is not None:
        return conflict
    least = min(ends, key=lambda rank: ends[rank][0])
    return missing_at(key, ends[least][0] + 1, ledgers, least)


# Messages -------------------------------------------------------------------------------------


def messages(ledgers: Sequence[Ledger]) -> dict[str, dict[str, list[Entry]]]:
    """Channel to its messages sent and received, in order."""
    found: dict[str, dict[str, list[Entry]]] = {}
    for ledger in ledgers:
        for entry in ledger.entries:
            if entry.channel is not None and entry.state != State.REFUSED:
                ends = found.setdefault(entry.channel, {"send": [], "recv": []})
                ends[str(entry.call["direction"])].append(entry)
    return found


def ends_of(channel: str) -> tuple[int | None, int]:
    """Sender (None for any) and receiver of a channel."""
    source, _, target = channel.split("|")[1].partition(">")
    return (None if source == "*" else int(source)), int(target)


def same_target(channel: str, other: str) -> bool:
    """Whether messages of both channels may be received by a receive from any source."""
    group, ends, tag = channel.split("|")
    return (group, ends.partition(">")[2], tag) == (
        other.split("|", maxsplit=1)[0],
        other.split("|")[1].partition(">")[2],
        other.split("|")[2],
    )


def _message_conflicts(ledgers: Sequence[Ledger]) -> list[Difference]:
    """Messages that are received as another size or dtype than they were sent."""
    found: list[Difference] = []
    channels = messages(ledgers)
    if not all(ledger.whole for ledger in ledgers):
        return found
    for channel, ends in channels.items():
        source, target = ends_of(channel)
        open_ended = any(
            other != channel and same_target(channel, other) and ends_of(other)[0] is None
            for other in channels
        )
        if source is None or open_ended:
            continue
        for sent, received in zip(ends["send"], ends["recv"], strict=False):
            if sent.match != received.match:
                entries: dict[int, Entry | None] = {source: sent, target: received}
                found.append(
                    Difference(
                        "message", sent.group, sent.axis, sent.sequence, entries, target, source
                    )
                )
                break
    return found


def _unpaired_channels(reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Channels whose ends do not count the same messages; any-source receives count together."""
    sent: dict[str, tuple[int, ...]] = {}
    received: dict[str, tuple[int, ...]] = {}
    for report in reports.values():
        for channel, ends in report["channels"].items():
            for direction, table in (("send", sent), ("recv", received)):
                if direction in ends:
                    table[channel] = tuple(ends[direction])
    wild = [channel for channel in received if ends_of(channel)[0] is None]
    bad = []
    for channel in dict.fromkeys([*sent, *received]):
        if any(same_target(channel, other) for other in wild):
            total = sum(end[0] for name, end in sent.items() if same_target(name, channel))
            taken = sum(end[0] for name, end in received.items() if same_target(name, channel))
            if total != taken:
                bad.append(channel)
        elif sent.get(channel, _NONE) != received.get(channel, _NONE):
            bad.append(channel)
    return bad


def _unpaired(
    reports: Mapping[int, Mapping[str, Any]], ledgers: Sequence[Ledger]
) -> Difference | None:
    bad = _unpaired_channels(reports)
    if not bad:
        return None
    conflicts = _message_conflicts(ledgers)
    if conflicts:
        return min(conflicts, key=_when)
    channel = bad[0]
    source, target = ends_of(channel)
    ends = messages(ledgers).get(channel, {"send": [], "recv": []})
    return unpaired_at(channel, ends, target if source is None else source)


def unpaired_at(channel: str, ends: Mapping[str, list[Entry]], partner: int) -> Difference:
    """The difference that a message of a channel has no partner; ``partner`` should have one."""
    sent, received = len(ends["send"]), len(ends["recv"])
    longer = "send" if sent > received else "recv"
    number = min(sent, received)
    _, target = ends_of(channel)
    entry = ends[longer][number] if number < len(ends[longer]) else None
    alone = target if longer == "recv" else (ends_of(channel)[0] or 0)
    lonely = partner if longer == "recv" else target
    group = channel.split("|", maxsplit=1)[0]
    axis = entry.axis if entry is not None else group
    entries: dict[int, Entry | None] = {alone: entry}
    if lonely != alone:
        entries[lonely] = None
    return Difference("message", group, axis, number + 1, entries, lonely, alone)


# ----------------------------------------------------------------------------------------------


def _odd_one(kinds: list[list[int]]) -> tuple[int, int]:
    """The rank that differs (of the smaller party, else the later), and one it differs from."""
    most = max(kinds, key=lambda ranks: (len(ranks), -min(ranks)))
    rest = [ranks for ranks in kinds if ranks is not most]
    return min(min(ranks) for ranks in rest), min(most)


def _what_differs(one: Entry, two: Entry) -> str | None:
    """Which part of two calls is not the same, None when they are alike."""
    if one.match == two.match:
        return None
    for part, name in (
        ("operation", "operation"),
        ("reduce_op", "reduce op"),
        ("root", "root"),
        ("dtypes", "dtype"),
        ("shapes", "shape"),
    ):
        if one.call.get(part) != two.call.get(part):
            return name
    return "shape"  # shortened in the middle, where they differ


def _before(table: Mapping[int, Entry], number: int) -> list[Entry]:
    return [table[at] for at in (number - 2, number - 1) if at in table]


def _when(difference: Difference) -> float:
    return min(entry.started for entry in difference.entries.values() if entry is not None)
