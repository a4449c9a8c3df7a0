"""What ranks must agree on before they go on, so that no disagreement ends as a hang.

Ranks state what they are about to do in a row of fixed width, whatever they do: ranks that are out
of step then see that they are. Rows travel by one small gather for each axis. Only where something
is wrong do they tell one another in words, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import collectives

if TYPE_CHECKING:
    from subjects.trainer.reductions import Groups

WIDTH = 64
"""Numbers in a row: two about the call, the rest as it needs."""


class DisagreementError(ValueError):
    """Ranks that must do the same were told different things; every one of them raises this."""


class Fact(NamedTuple):
    """``value``: all that must be equal. ``text``: a few words that tell a reader what it is."""

    value: bytes
    text: str


@dataclass(frozen=True)
class Circle:
    """Ranks that must agree: those along ``axes``, the fastest first.

    ``within``: a smaller circle along the first of these axes, whose ranks may be about to do
    something by themselves; they are asked before all others.
    """

    axes: tuple[tuple[str, ProcessGroup], ...]
    device: torch.device
    name: str
    within: Circle | None = None

    @property
    def ranks(self) -> list[str]:
        """Each rank's place, in the order in which rows are gathered."""
        sizes = [(axis, group.size()) for axis, group in reversed(self.axes) if group.size() > 1]
        places = product(*(range(size) for _, size in sizes))
        named = [
            ", ".join(f"{axis}={at}" for (axis, _), at in zip(sizes, place, strict=True))
            for place in places
        ]
        return [name or "the one rank" for name in named]


def batch(groups: Groups, device: torch.device) -> Circle:
    """The TP and CP ranks of this rank's batch."""
    name = f"the batch of dp={groups.dp.rank()}" if groups.dp.size() > 1 else "the batch"
    return Circle((("tp", groups.tp), ("cp", groups.cp)), device, name)


def world(groups: Groups, device: torch.device) -> Circle:
    """All ranks."""
    axes = (("tp", groups.tp), ("cp", groups.cp), ("dp", groups.dp))
    return Circle(axes, device, "this trainer", within=batch(groups, device))


def data_parallel(groups: Groups, device: torch.device) -> Circle:
    """The ranks that differ from this one along DP only."""
    return Circle((("dp", groups.dp),), device, "one TP and CP coordinate")


def replicas(groups: Groups, device: torch.device) -> Circle:
    """The ranks that hold the same slice of what TP cuts: those of one TP coordinate."""
    axes = (("cp", groups.cp), ("dp", groups.dp))
    return Circle(axes, device, f"the slice of tp={groups.tp.rank()}")


def agree(call: str, facts: Callable[[], Mapping[str, Fact]], circle: Circle) -> None:
    """Raise on every rank of ``circle`` where one refuses or their facts differ.

    A collective: one gather of a small row for each axis. ``call`` says in a word what this rank is
    about to do. ``facts`` gives what all must be told alike, or raises what is wrong with it: that
    reaches the others before it is raised here.

    Raises:
        Exception: what ``facts`` raised, where all ranks refuse in the same words.
        DisagreementError: some ranks refuse, or facts differ, or ranks are out of step. Its text is
            the same on all ranks and names ranks and values.
    """
    known: Mapping[str, Fact] = {}
    refusal: BaseException | None = None
    try:
        known = facts()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told and then raised
        refusal = error
    row = [int(refusal is not None), *digest(known)]
    everyone = exchange(call, torch.tensor(row, dtype=torch.int64), circle)
    refused = any(everyone[:, 0].tolist())
    if not refused and same_rows(everyone):
        return
    notes = share_notes(
        {
            "refusal": None if refusal is None else f"{type(refusal).__name__}: {refusal}",
            "facts": {name: [_hash(fact.value), fact.text] for name, fact in known.items()},
        },
        circle,
    )
    if refused:
        texts = [note["refusal"] for note in notes]
        if refusal is not None and (len(set(texts)) == 1 or not isinstance(refusal, Exception)):
            raise refusal
        raise DisagreementError(refused_text(call, texts, circle)) from refusal
    raise DisagreementError(differing_text(call, [note["facts"] for note in notes], circle))


def lead(call: str, work: Callable[[], None], circle: Circle) -> None:
    """What the first rank does for all of ``circle``, before any goes on; a collective.

    Raises:
        TypeError, ValueError: on every rank, in the same words: what ``work`` raised on the first;
            other errors than these two come as a ValueError with their name.
        DisagreementError: ``work`` made a call for which it needs the others, who are here.
    """
    refusal: BaseException | None = None
    if all(group.rank() == 0 for _, group in circle.axes):
        try:
            work()
        except DisagreementError:
            # The others have it already.
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told and then raised
            refusal = error
    row = torch.tensor([int(refusal is not None)], dtype=torch.int64)
    if not exchange(call, row, circle)[:, 0].any():
        return
    told = {"type": isinstance(refusal, TypeError), "text": _in_words(refusal)}
    first = share_notes(told, circle)[0]
    alone = len(circle.ranks) == 1
    by = "" if alone else f"{call} failed on the first rank, which does it for all: "
    if not (refusal is None or isinstance(refusal, Exception)):
        raise refusal
    raise (TypeError if first["type"] else ValueError)(f"{by}{first['text']}") from refusal


def _in_words(error: BaseException | None) -> str:
    """An error that is raised again as a TypeError or a ValueError."""
    named = isinstance(error, TypeError | ValueError)
    return str(error) if named else f"{type(error).__name__}: {error}"


def agree_on_values(
    call: str,
    facts: Callable[[], Mapping[str, Fact]],
    values: Callable[[], Mapping[str, tuple[Tensor, bool]]],
    groups: Groups,
    device: torch.device,
) -> None:
    """As ``agree`` of all ranks, and on values of which TP ranks may hold slices.

    ``values`` are asked for once all ranks have agreed on ``facts``: each tensor, and whether TP
    cuts it, of which slices are compared over CP and DP alone.

    Raises:
        Exception: as ``agree``, on every rank, whichever of them differ.
    """
    everyone = world(groups, device)
    agree(call, facts, everyone)
    found: dict[str, tuple[Fact, bool]] = {}
    apart: Exception | None = None

    def slices() -> dict[str, Fact]:
        for name, (value, cut) in values().items():
            found[name] = of_values(value), cut
        return {name: fact for name, (fact, is_cut) in found.items() if is_cut}

    try:
        agree(f"{call}, slices", slices, replicas(groups, device))
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks hear of it below
        apart = error

    def whole() -> dict[str, Fact]:
        # What only some slices differ in is refused by the ranks of all.
        if apart is not None:
            raise apart
        return {name: fact for name, (fact, is_cut) in found.items() if not is_cut}

    agree(f"{call}, values", whole, everyone)


def of_values(value: Tensor) -> Fact:
    """Every bit of a tensor, its dtype and its shape."""
    plain = value.detach().resolve_conj().resolve_neg()
    raw = plain.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return Fact(text.encode() + hashlib.blake2b(raw, digest_size=32).digest(), text)


def exchange(call: str, payload: Tensor, circle: Circle) -> Tensor:
    """The payloads of all ranks, int64 [ranks, WIDTH - 2], filled up with zeros.

    ``payload`` is int64 [at most WIDTH - 2] on any device.

    Raises:
        DisagreementError: another rank is about to do something else.
    """
    row = torch.zeros(WIDTH, dtype=torch.int64, device=circle.device)
    row[0], row[1] = _number(call.encode()), len(circle.axes)
    row[2 : 2 + len(payload)] = payload
    inner = circle.within
    if inner is None:
        everyone = gather(row, circle)
    else:
        everyone = gather(row, inner)
        # Whoever goes no further than the smaller circle would never answer along the last axes.
        if (everyone[:, 1] != len(circle.axes)).any():
            check_step(call, everyone, inner)
        everyone = _along(everyone, circle.axes[len(inner.axes) :])
    everyone = everyone.cpu()
    check_step(call, everyone, circle)
    return everyone[:, 2:]


def check_step(call: str, rows: Tensor, circle: Circle) -> None:
    """Raise on every rank of ``circle`` where their ``rows`` are of different calls."""
    if same_rows(rows[:, :2]):
        return
    calls = share_notes({"call": call}, circle)
    listed = _by_rank([f"{note['call']}" for note in calls], circle)
    raise DisagreementError(
        f"the ranks of {circle.name} are out of step: {listed}; make the same calls in the "
        "same order on all of them"
    )


def gather(row: Tensor, circle: Circle) -> Tensor:
    """``row`` [n] of this rank -> [ranks, n] of all, the last axis of the circle slowest."""
    return _along(row[None], circle.axes)


def _along(rows: Tensor, axes: Sequence[tuple[str, ProcessGroup]]) -> Tensor:
    """``rows`` [m, n] of this rank -> [ranks * m, n] of all along ``axes``, the last slowest."""
    for _, group in axes:
        rows = collectives.all_gather_rows(rows, [len(rows)] * group.size(), group)
    return rows


def same_rows(rows: Tensor) -> bool:
    """Whether all rows of int64 [ranks, n] are equal."""
    return bool((rows == rows[:1]).all())


def share_notes(note: Mapping[str, object], circle: Circle) -> list[dict[str, Any]]:
    """What each rank has to say, in the order of ``circle.ranks``; a collective."""
    written = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
    length = torch.tensor([len(written)], dtype=torch.int64, device=circle.device)
    lengths = gather(length, circle)[:, 0].tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=circle.device)
    padded[: len(written)] = written
    rows = gather(padded, circle).cpu()
    return [
        json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, lengths, strict=True)
    ]


def digest(facts: Mapping[str, Fact]) -> list[int]:
    """Four int64 that stand for all facts and their names, in their order."""
    hashed = hashlib.blake2b(digest_size=32)
    for name, fact in facts.items():
        for part in (name.encode(), fact.value):
            hashed.update(len(part).to_bytes(8, "little") + part)
    whole = hashed.digest()
    return [int.from_bytes(whole[at : at + 8], "little", signed=True) for at in (0, 8, 16, 24)]


def refused_text(call: str, texts: Sequence[str | None], circle: Circle) -> str:
    """Which ranks refuse, in their own words, and which don't."""
    ranks = circle.ranks
    said = "; ".join(f"{rank}: {text}" for rank, text in zip(ranks, texts, strict=True) if text)
    content = [rank for rank, text in zip(ranks, texts, strict=True) if text is None]
    others = f" Nothing was wrong on {' | '.join(content)}." if content else ""
    return (
        f"{call} was refused by some ranks of {circle.name}, so none goes on: {said}.{others} "
        "All of these ranks must be given the same"
    )


def differing_text(call: str, facts: Sequence[Mapping[str, Sequence[str]]], circle: Circle) -> str:
    """Which facts differ, and what each rank has."""
    names = dict.fromkeys(name for one in facts for name in one)
    missing = ["", "nothing"]
    found = []
    for name in names:
        here = [one.get(name, missing) for one in facts]
        if len({(one[0], one[1]) for one in here}) > 1:
            # Equal words for different contents would only confuse: show the digests too.
            alike = len({one[1] for one in here}) == 1
            words = [f"{one[1]} (digest {one[0]})" if alike else one[1] for one in here]
            found.append(f"{name} is {_by_rank(words, circle)}")
    shown = "; ".join(found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    order = "" if found else "the same things in another order"
    return (
        f"{call} was given different things on the ranks of {circle.name}: {shown}{more}{order}. "
        "All of these ranks must be given the same"
    )


_SHOWN = 4


def _by_rank(words: Sequence[str], circle: Circle) -> str:
    """Each different word with the ranks that hold it."""
    held: dict[str, list[str]] = {}
    for rank, word in zip(circle.ranks, words, strict=True):
        held.setdefault(word, []).append(rank)
    return ", ".join(f"{word} on {' | '.join(ranks)}" for word, ranks in held.items())


def _hash(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=8).hexdigest()


def _number(value: bytes) -> int:
    hashed = hashlib.blake2b(value, digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)
