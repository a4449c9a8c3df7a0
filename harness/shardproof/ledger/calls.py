"""What does not change from one call of an operation to the next: described once, then counted."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import distributed as dist

from shardproof.ledger import page
from shardproof.ledger.operations import Operation

PlaceKey = tuple[str, str, str, str, bool]
Handed = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and dtypes of tensors that a rank hands in or is handed out."""

_REDUCE_OPS: Final = {
    int(cast("Any", member)): name for name, member in dist.ReduceOp.RedOpType.__members__.items()
}


class Line:
    """Operations in an order of their own: how many there were, and a digest of their order.

    ``at`` is where the file has both of them, 0 where it has not.
    """

    __slots__ = ("at", "chain", "crc", "sequence")

    def __init__(self, *, at: int = 0, crc: int = 0) -> None:
        self.at = at
        self.crc = crc
        self.sequence = 0
        self.chain = 0


@dataclass(frozen=True)
class Group:
    """A process group in a cell, and the order of its collectives."""

    key: str
    axis: str
    ranks: tuple[int, ...]
    line: Line


class Place:
    """Where calls are made: one line of user code, one operation, one axis, one pass.

    ``key`` is (axis, operation, reduce operation, site, backward).
    """

    __slots__ = ("calls", "key", "size")

    def __init__(self, key: PlaceKey, size: int) -> None:
        self.key = key
        self.size = size
        self.calls = 0


class Call:
    """A call as an entry says it, the order that it joins, and the totals that it adds to.

    ``site`` is kept for as long as the call is remembered.
    """

    __slots__ = ("digest", "line", "place", "site", "size", "text", "total")

    def __init__(
        self,
        text: bytes,
        match: int,
        size: int,
        *,
        line: Line,
        total: list[int],
        place: Place,
        site: object,
    ) -> None:
        self.text = text
        self.digest = match.to_bytes(8, "little")
        self.size = size
        self.line = line
        self.total = total
        self.place = place
        self.site = site


def describe(
    operation: Operation,
    group: Group,
    rank: int,
    args: Sequence[Any],
    *,
    handed_out: Handed,
    handed_in: Handed,
    reduced: int,
    site: str,
    backward: bool,
) -> dict[str, Any]:
    """The call of an entry, see :class:`shardproof.ledger.page.Entry`.

    Args:
        operation: what is called.
        group: on which group.
        rank: global number of this rank.
        args: of the operation, by position.
        handed_out: what the call fills.
        handed_in: what it is given.
        reduced: number of its reduce operation, -1 where it has none.
        site: where user code called it.
        backward: whether that is in a backward pass.
    """
    matched = handed_out if operation.matched == "outputs" else handed_in
    shapes, dtypes = _shapes_text(matched), _dtypes_text(matched)
    reduce_op = _REDUCE_OPS.get(reduced, "") if reduced >= 0 else ""
    root = None if operation.root is None else args[operation.root]
    if operation.is_message:
        # A message may be received in another shape; what is sent must be what is received.
        match_text = f"{sum(shape.numel() for shape, _ in matched)}|{dtypes}"
    else:
        must_match = {
            "inputs": (shapes, dtypes),
            "outputs": (shapes, dtypes),
            "dtype": ("", dtypes),
            "nothing": ("", ""),
        }[operation.matched]
        match_text = "|".join((operation.name, reduce_op, str(root), *must_match))
    call: dict[str, Any] = {
        "group": group.key,
        "axis": group.axis,
        "operation": operation.name,
        "match": zlib.crc32(match_text.encode()),
        "shapes": shapes,
        "dtypes": dtypes,
        "bytes": max(_bytes_of(handed_out), _bytes_of(handed_in)),
        "backward": backward,
        "site": site,
    }
    if reduce_op:
        call["reduce_op"] = reduce_op
    if root is not None:
        call["root"] = root
    if operation.is_message:
        call["channel"], call["direction"] = _channel(group, operation, rank, args)
    return call


def encoded(
    call: dict[str, Any], *, line: Line, total: list[int], place: Place, site: object
) -> Call:
    """A call as it is written, again and again."""
    text = page.encode_call(call)
    return Call(text, call["match"], call["bytes"], line=line, total=total, place=place, site=site)


def _channel(group: Group, operation: Operation, rank: int, args: Sequence[Any]) -> tuple[str, str]:
    """Name of a channel by global ranks, ``group|0>1|tag``, and the direction seen from here."""
    other = "*"
    if operation.peer is not None:
        peer = args[operation.peer]
        other = str(group.ranks[peer] if 0 <= peer < len(group.ranks) else peer)
    tag = None if operation.tag is None else args[operation.tag]
    if operation.name == "send":
        return f"{group.key}|{rank}>{other}|{tag}", "send"
    return f"{group.key}|{other}>{rank}|{tag}", "recv"


def _bytes_of(handed: Handed) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in handed)


def _shapes_text(handed: Handed) -> str:
    texts = [f"[{', '.join(map(str, shape))}]" for shape, _ in handed]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} x {texts[0]}"
    return " ".join(texts)


def _dtypes_text(handed: Handed) -> str:
    return " ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for _, dtype in handed))
