"""Ranks that wait for one another, or for one that has ended its part: waits that never end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shardproof.ledger.compare import (
    Difference,
    collectives,
    ends_of,
    members,
    messages,
    missing_at,
    same_target,
    unpaired_at,
)
from shardproof.ledger.page import Entry, Ledger, State


def waiting_in(ledger: Ledger, *, inside: Collection[int] = ()) -> Entry | None:
    """The operation in which a rank waits, None where it is not known to wait.

    Args:
        ledger: what the rank recorded.
        inside: ranks that are known to be inside torch without computing, so that one that waits
            in C++ (DDP's reducer) is in the last operation that is not known to have ended.
    """
    waits = [entry for entry in ledger.entries if entry.state in (State.CALLED, State.WAITING)]
    if waits:
        return waits[-1]
    if ledger.rank in inside:
        issued = [entry for entry in ledger.entries if entry.state is State.ISSUED]
        return issued[-1] if issued else None
    return None


def find_deadlock(
    ledgers: Sequence[Ledger], over: Collection[int], *, inside: Collection[int] = ()
) -> Difference | None:
    """Why ranks wait for ever, None where a rank may still come.

    Args:
        ledgers: of all ranks, which did not change for a while.
        over: ranks whose part of the case has ended.
        inside: see :func:`waiting_in`.
    """
    waits = {ledger.rank: waiting_in(ledger, inside=inside) for ledger in ledgers}
    lacking: dict[int, list[int]] = {}
    for rank, entry in waits.items():
        if entry is not None and rank not in over:
            lacking[rank] = _lacking(rank, entry, ledgers)
    stuck = set(lacking)
    while True:
        # A rank goes on once all that it waits for may still come.
        freed = {rank for rank in stuck if not any(r in stuck or r in over for r in lacking[rank])}
        if not freed:
            break
        stuck -= freed
    if not stuck:
        return None
    rank = min(stuck, key=lambda number: _started(waits[number]))
    entry = waits[rank]
    if entry is None:
        raise RuntimeError(f"rank {rank} is stuck, but waits in nothing")
    missing = [other for other in lacking[rank] if other in stuck or other in over]
    # One that has ended its part is surely wrong; of several that wait, the first.
    guilty = min([other for other in missing if other in over] or missing)
    if entry.channel is None:
        return missing_at(entry.group, entry.sequence, ledgers, guilty)
    return unpaired_at(entry.channel, _ends(entry.channel, ledgers), guilty)


def _lacking(rank: int, entry: Entry, ledgers: Sequence[Ledger]) -> list[int]:
    """The ranks without which an operation cannot end."""
    if entry.channel is not None:
        return _lacking_partner(rank, entry, ledgers)
    found = []
    by_rank = {ledger.rank: ledger for ledger in ledgers}
    for other in members(entry.group):
        if other == rank or other not in by_rank:
            continue
        table = collectives(by_rank[other], entry.group)
        last = max(table, default=0)
        if last < entry.sequence or table.get(entry.sequence, entry).state is State.REFUSED:
            found.append(other)
    return found


def _lacking_partner(rank: int, entry: Entry, ledgers: Sequence[Ledger]) -> list[int]:
    channel = entry.channel or ""
    source, target = ends_of(channel)
    ends = _ends(channel, ledgers)
    if target == rank and entry.call["direction"] == "recv":
        if len(ends["send"]) >= entry.sequence:
            return []
        return [source] if source is not None else [r for r in members(entry.group) if r != rank]
    return [] if len(ends["recv"]) >= entry.sequence else [target]


def _ends(channel: str, ledgers: Sequence[Ledger]) -> Mapping[str, list[Entry]]:
    """Messages of a channel; what could be received from any source counts for both."""
    channels = messages(ledgers)
    ends = channels.get(channel, {"send": [], "recv": []})
    source, _ = ends_of(channel)
    for other, found in channels.items():
        if other != channel and same_target(channel, other):
            if source is None:
                ends = {"send": [*ends["send"], *found["send"]], "recv": ends["recv"]}
            elif ends_of(other)[0] is None:
                ends = {"send": ends["send"], "recv": [*ends["recv"], *found["recv"]]}
    return ends


def _started(entry: Entry | None) -> float:
    return entry.started if entry is not None else 0.0
