"""What one rank writes down in one cell: a bounded ring of entries, and totals of all."""

from __future__ import annotations

import mmap
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import distributed as dist

from shardproof.ledger import page
from shardproof.ledger.operations import Operation, argument, flat
from shardproof.ledger.page import State
from shardproof.ledger.sites import Sites

_REMEMBERED: Final = 8192
_REDUCE_OPS: Final = {
    int(cast("Any", member)): name for name, member in dist.ReduceOp.RedOpType.__members__.items()
}
_U64: Final = struct.Struct("<Q")
_DOUBLE: Final = struct.Struct("<d")


@dataclass
class _Group:
    """A process group in this cell: how many collectives it saw, and a digest of their order."""

    key: str
    axis: str
    ranks: tuple[int, ...]
    row: int
    crc: int
    sequence: int = 0
    chain: int = 0


@dataclass
class _Channel:
    """Messages from one rank to another under one tag."""

    sequence: int = 0
    chain: int = 0


@dataclass(frozen=True)
class _Call:
    """What does not change from one call to the next of the same shape at the same place."""

    text: bytes
    match: int
    bytes: int
    total: list[int]


class Mark:
    """A handle on one entry, through which its state is kept up to date."""

    __slots__ = ("_at", "_book", "_number", "_undo")

    def __init__(
        self, book: Book, number: int, at: int, undo: tuple[_Group | _Channel, int, int]
    ) -> None:
        self._book = book
        self._number = number
        self._at = at
        self._undo = undo

    def issued(self) -> None:
        """The call returned."""
        self._book.change(self._number, self._at, State.ISSUED, 0.0)

    def waiting(self) -> None:
        """A rank begins to wait for it."""
        self._book.change(self._number, self._at, State.WAITING, 0.0)

    def ended(self) -> None:
        """It is over."""
        self._book.change(self._number, self._at, State.ENDED, time.monotonic())

    def failed(self) -> None:
        """Waiting for it raised."""
        self._book.change(self._number, self._at, State.FAILED, time.monotonic())

    def refused(self) -> None:
        """The call raised: it is taken out of the order again."""
        self._book.undo(*self._undo)
        self._book.change(self._number, self._at, State.REFUSED, time.monotonic())


class Book:
    """The ledger of one rank in one cell.

    Args:
        directory: private folder of the cell; the file is made with the first entry.
        rank: number of this rank.
        axis_of: what a group of these ranks is called.
        sites: finds call sites.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        axis_of: Callable[[tuple[int, ...]], str],
        sites: Sites,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._axis_of = axis_of
        self._sites = sites
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._groups: dict[str, _Group] = {}
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._calls: dict[Any, _Call] = {}
        self._totals: dict[tuple[str, str], list[int]] = {}
        self._recorded = 0
        self._changes = 0
        self.messages = 0

    def open(self, operation: Operation, args: Sequence[Any], frame: Any) -> tuple[Mark, list[Any]]:
        """Write down that ``operation`` is called with ``args``; also its output tensors."""
        with torch._C.DisableTorchFunction():
            outputs = flat(argument(args, operation.outputs), torch.is_tensor)
            inputs = flat(argument(args, operation.inputs), torch.is_tensor)
            shapes = tuple([t.shape for t in outputs]), tuple([t.shape for t in inputs])
            dtypes = tuple([t.dtype for t in outputs]), tuple([t.dtype for t in inputs])
        site = self._sites.find(frame)
        backward = torch._C._current_graph_task_id() != -1
        process_group = dist.ProcessGroup.unbox(args[operation.group])
        name = process_group.group_name
        reduce_op = argument(args, operation.reduce_op)
        reduced = reduce_op.op() if reduce_op is not None else -1
        root, peer = argument(args, operation.root), argument(args, operation.peer)
        tag = argument(args, operation.tag)
        key = (name, operation.schema, reduced, root, peer, tag, shapes, dtypes, site, backward)
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                group = self._meet(name, process_group)
            call = self._calls.get(key)
            if call is None:
                if len(self._calls) >= _REMEMBERED:
                    self._calls.clear()
                call = self._describe(
                    operation, group, shapes, dtypes, reduced, root, peer, tag, site, backward
                )
                self._calls[key] = call
            line: _Group | _Channel = group
            if operation.is_message:
                self.messages += 1
                line = self._channel(group, operation, peer, tag)
            before = line.sequence, line.chain
            line.sequence += 1
            line.chain = zlib.crc32(_U64.pack(call.match), line.chain)
            call.total[0] += 1
            call.total[1] += call.bytes
            call.total[2] += backward
            mark = self._write(call, line, before)
        return mark, outputs

    def change(self, number: int, at: int, state: State, ended: float) -> None:
        """Set the state of an entry that the ring still holds."""
        memory = self._memory
        if memory is None or _U64.unpack_from(memory, at)[0] != number:
            return
        if ended:
            _DOUBLE.pack_into(memory, at + page.ENDED_AT, ended)
        memory[at + page.STATE_AT] = state
        self._changes += 1
        _U64.pack_into(memory, page.CHANGES_AT, self._changes)

    def undo(self, line: _Group | _Channel, sequence: int, chain: int) -> None:
        """Take the last operation of a group or channel back, unless another followed."""
        with self._lock:
            if line.sequence == sequence + 1:
                line.sequence, line.chain = sequence, chain
                if isinstance(line, _Group):
                    self._write_group(line)

    def close(self) -> dict[str, Any]:
        """End the cell; its totals and the digests by which ranks are compared.

        Returns:
            ``totals``: ``[axis, operation, calls, bytes, calls in backward]`` of each.
            ``groups``: number of collectives and digest by group, ``{"1@0-1": [n, digest]}``.
            ``channels``: the same for messages sent and received,
            ``{"1@0-1|0>1|7": {"send": [n, digest], ...}}``.
        """
        with self._lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                memory.close()
            channels: dict[str, dict[str, list[int]]] = {}
            for (name, direction), channel in self._channels.items():
                channels.setdefault(name, {})[direction] = [channel.sequence, channel.chain]
            return {
                "totals": [[*key, *total] for key, total in sorted(self._totals.items())],
                "groups": {g.key: [g.sequence, g.chain] for g in self._groups.values()},
                "channels": channels,
            }

    # Under the lock ---------------------------------------------------------------------------

    def _meet(self, name: str, process_group: dist.ProcessGroup) -> _Group:
        """Take down a group at its first operation."""
        ranks = _members(process_group)
        key = f"{name}@{'-'.join(map(str, ranks))}"
        row = len(self._groups)
        group = _Group(key, self._axis_of(ranks), ranks, row, zlib.crc32(key.encode()))
        self._groups[name] = group
        return group

    def _channel(
        self, group: _Group, operation: Operation, peer: int | None, tag: int | None
    ) -> _Channel:
        name, direction = _channel_name(group, operation, self._rank, peer, tag)
        return self._channels.setdefault((name, direction), _Channel())

    def _describe(
        self,
        operation: Operation,
        group: _Group,
        shapes: tuple[tuple[torch.Size, ...], tuple[torch.Size, ...]],
        dtypes: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]],
        reduced: int,
        root: int | None,
        peer: int | None,
        tag: int | None,
        site: Any,
        backward: bool,  # noqa: FBT001 - called at one place, in the order of the key
    ) -> _Call:
        handed_out, handed_in = (
            sum(
                shape.numel() * dtype.itemsize
                for shape, dtype in zip(shapes[side], dtypes[side], strict=True)
            )
            for side in (0, 1)
        )
        size = max(handed_out, handed_in)
        side = 0 if operation.matched == "outputs" else 1
        shown_shapes = _shapes_text(shapes[side])
        shown_dtypes = _dtypes_text(dtypes[side])
        reduce_op = _REDUCE_OPS.get(reduced, "") if reduced >= 0 else ""
        must_match = {
            "inputs": (shown_shapes, shown_dtypes),
            "outputs": (shown_shapes, shown_dtypes),
            "dtype": ("", shown_dtypes),
            "nothing": ("", ""),
        }[operation.matched]
        if operation.is_message:
            # A message may be received in another shape; what is sent must be what is received.
            match_text = f"{sum(shape.numel() for shape in shapes[side])}|{shown_dtypes}"
        else:
            match_text = "|".join((operation.name, reduce_op, str(root), *must_match))
        call: dict[str, Any] = {
            "group": group.key,
            "axis": group.axis,
            "operation": operation.name,
            "match": zlib.crc32(match_text.encode()),
            "shapes": shown_shapes,
            "dtypes": shown_dtypes,
            "bytes": size,
            "backward": backward,
            "site": self._sites.text(site),
        }
        if reduce_op:
            call["reduce_op"] = reduce_op
        if root is not None:
            call["root"] = root
        if operation.is_message:
            call["channel"], call["direction"] = _channel_name(
                group, operation, self._rank, peer, tag
            )
        total = self._totals.setdefault((group.axis, operation.name), [0, 0, 0])
        return _Call(page.encode_call(call), call["match"], size, total)

    def _write(self, call: _Call, line: _Group | _Channel, before: tuple[int, int]) -> Mark:
        memory = self._memory
        if memory is None:
            memory = self._memory = self._make()
        self._recorded += 1
        self._changes += 1
        at = page.SLOTS_AT + (self._recorded - 1) % page.SLOTS * page.SLOT_SIZE
        _U64.pack_into(memory, at, 0)
        text = call.text
        memory[at + page.SLOT.size : at + page.SLOT.size + len(text)] = text
        page.SLOT.pack_into(
            memory,
            at,
            self._recorded,
            line.sequence,
            time.monotonic(),
            0.0,
            line.chain,
            len(text),
            State.CALLED,
            0,
        )
        if isinstance(line, _Group):
            self._write_group(line)
        struct.pack_into("<QQ", memory, page.ENTRIES_AT, self._recorded, self._changes)
        return Mark(self, self._recorded, at, (line, *before))

    def _write_group(self, group: _Group) -> None:
        if self._memory is not None and group.row < page.GROUPS:
            at = page.GROUPS_AT + group.row * page.GROUP.size
            page.GROUP.pack_into(self._memory, at, group.crc, group.chain, group.sequence)

    def _make(self) -> mmap.mmap:
        path = page.page_file(self._directory, self._rank)
        with path.open("wb+") as file:
            file.truncate(page.FILE_SIZE)
            memory = mmap.mmap(file.fileno(), page.FILE_SIZE)
        page.HEADER.pack_into(
            memory, 0, page.MAGIC, page.SLOTS, page.SLOT_SIZE, page.GROUPS, 0, 0, 0
        )
        return memory


def _members(process_group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of a group, also of one that torch's Python side does not know (yet)."""
    known: Mapping[Any, Mapping[int, int]] = dist.distributed_c10d._world.pg_group_ranks
    if process_group in known:
        return tuple(known[process_group])
    backend: Any = process_group._get_backend(torch.device("cpu"))
    return tuple(getattr(backend.options, "global_ranks_in_group", ()))


def _channel_name(
    group: _Group, operation: Operation, rank: int, peer: int | None, tag: int | None
) -> tuple[str, str]:
    """Name of a channel by global ranks, ``group|0>1|tag``, and the direction seen from here."""

    def number(at: int | None) -> str:
        if at is None:
            return "*"
        return str(group.ranks[at] if 0 <= at < len(group.ranks) else at)

    if operation.name == "send":
        return f"{group.key}|{rank}>{number(peer)}|{tag}", "send"
    return f"{group.key}|{number(peer)}>{rank}|{tag}", "recv"


def _shapes_text(shapes: tuple[torch.Size, ...]) -> str:
    texts = [f"[{', '.join(map(str, shape))}]" for shape in shapes]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} x {texts[0]}"
    return " ".join(texts)


def _dtypes_text(dtypes: tuple[torch.dtype, ...]) -> str:
    return " ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
