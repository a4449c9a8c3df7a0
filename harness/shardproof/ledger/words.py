"""Ledgers in words: where a rank waits, its last operations, two ranks side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from shardproof.ledger.compare import Difference, members
from shardproof.ledger.deadlock import waiting_in
from shardproof.ledger.page import Entry, Ledger, State
from shardproof.ledger.sites import JOINED

_SHOWN = 3


def name_of(entry: Entry) -> str:
    """``all_reduce(cp) #17``; messages say with whom: ``recv(cp) #2 from rank 0``."""
    name = f"{entry.operation}({entry.axis}) #{entry.sequence}"
    if entry.channel is None:
        return name
    source, _, target = entry.channel.split("|")[1].partition(">")
    if entry.call["direction"] == "send":
        return f"{name} to rank {target}"
    return name if source == "*" else f"{name} from rank {source}"


def details_of(entry: Entry) -> str:
    """``SUM float64 [4, 8]``, as far as the operation has these."""
    parts = [str(entry.call.get("reduce_op", "")), entry.call["dtypes"], entry.call["shapes"]]
    if "root" in entry.call:
        parts.append(f"root {entry.call['root']}")
    if entry.call["backward"]:
        parts.append("in backward")
    return " ".join(str(part) for part in parts if part)


def place_of(entry: Entry) -> str:
    """``at file:line in function``: the innermost frame of user code."""
    return f"at {_frames_of(entry)[0]}"


def _frames_of(entry: Entry) -> list[str]:
    """The call site and its callers, as many as the ledger has."""
    return str(entry.call["site"]).split(JOINED)


def describe_rank(ledger: Ledger) -> str:
    """What a rank is doing now as its ledger tells, in one line; empty where it tells nothing."""
    entry = waiting_in(ledger)
    if entry is not None:
        return f"waiting in {name_of(entry)} {place_of(entry)}"
    if not ledger.entries:
        return ""
    last = ledger.entries[-1]
    verb = "begun" if last.state is State.ISSUED else "ended"
    return f"waiting in no collective; last {verb} {name_of(last)} {place_of(last)}"


def last_entries(ledger: Ledger) -> list[str]:
    """The last operations of a rank, one a line, the newest last."""
    return [
        f"  {name_of(entry)} {details_of(entry)}".rstrip()
        + f" at {JOINED.join(_frames_of(entry))}: {_STATES[entry.state]}"
        for entry in ledger.entries[-_SHOWN:]
    ]


_STATES: Mapping[State, str] = {
    State.CALLED: "waiting",
    State.ISSUED: "begun",
    State.WAITING: "waiting",
    State.ENDED: "ended",
    State.REFUSED: "raised",
    State.FAILED: "raised",
}


def headline(difference: Difference) -> str:
    """One line: which ranks differ, where and how."""
    ranks = members(difference.key)
    where = f"{difference.axis} (ranks {', '.join(map(str, ranks))})"
    odd, other = difference.odd, difference.other
    theirs, its = difference.entries.get(other), difference.entries.get(odd)
    if difference.what == "message":
        return _message_headline(difference)
    if difference.what == "missing" and theirs is not None:
        return (
            f"rank {odd} never called {name_of(theirs)}, which rank {other} called "
            f"{place_of(theirs)}"
        )
    if difference.what == "earlier" or theirs is None or its is None:
        return (
            f"ranks {other} and {odd} of {where} differ before collective "
            f"#{difference.sequence}, which is further back than the ledger goes"
        )
    return (
        f"ranks {other} and {odd} of {where} differ at collective #{difference.sequence} in its "
        f"{difference.what}: {_call(theirs)} against {_call(its)}"
    )


def _message_headline(difference: Difference) -> str:
    odd, other = difference.odd, difference.other
    theirs, its = difference.entries.get(other), difference.entries.get(odd)
    if theirs is None:
        return f"messages between ranks {other} and {odd} of {difference.axis} do not pair up"
    if its is None:
        done = "received" if theirs.call["direction"] == "send" else "sent"
        missing = f"rank {odd} {done} nothing for it" if odd != other else "nobody sent anything"
        return f"rank {other} called {name_of(theirs)} {place_of(theirs)}, but {missing}"
    return (
        f"rank {other} called {name_of(theirs)} {details_of(theirs)}, but rank {odd} "
        f"{name_of(its)} {details_of(its)}"
    )


def _call(entry: Entry) -> str:
    return f"{entry.operation} {details_of(entry)}".rstrip()


def columns(difference: Difference) -> list[str]:
    """The two ranks side by side, up to the first place where they differ."""
    left, right = sorted((difference.other, difference.odd))
    if left == right:
        entry = difference.entries.get(left)
        return [f"rank {left}:", *_cell(entry)] if entry is not None else []
    rows: list[tuple[str, list[str], list[str]]] = [("", [f"rank {left}"], [f"rank {right}"])]
    before = {
        rank: {e.sequence: e for e in difference.before.get(rank, [])} for rank in (left, right)
    }
    rows += [
        (f"  #{number}", _cell(before[left].get(number)), _cell(before[right].get(number)))
        for number in sorted({*before[left], *before[right]})
    ]
    ends = difference.entries
    rows.append((f"> #{difference.sequence}", _cell(ends.get(left)), _cell(ends.get(right))))
    width = max(len(line) for _, cell, _ in rows for line in cell)
    mark = max(len(text) for text, _, _ in rows)
    lines = []
    for text, one, two in rows:
        for at, (here, there) in enumerate(zip_longest(one, two, fillvalue="")):
            shown = text if at == 0 else ""
            lines.append(f"{shown:<{mark}}  {here:<{width}}  {there}".rstrip())
    return lines


def _cell(entry: Entry | None) -> list[str]:
    if entry is None:
        return ["(nothing)"]
    called = [f"    called at {frame}" for frame in _frames_of(entry)[1:]]
    return [_call(entry), f"  {place_of(entry)}", *called]


def tails(ledgers: Sequence[Ledger]) -> list[str]:
    """The last operations of every rank that has some."""
    lines = []
    for ledger in ledgers:
        if ledger.entries:
            lines += [f"last collectives of rank {ledger.rank}:", *last_entries(ledger)]
    return lines
