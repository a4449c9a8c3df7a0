"""What one rank writes down in one cell: a bounded ring of entries, and totals of all."""

from __future__ import annotations

import mmap
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch
from torch import distributed as dist

from shardproof.ledger import page
from shardproof.ledger.calls import Call, Group, Line, Place, PlaceKey, describe, encoded
from shardproof.ledger.operations import Operation, tensors
from shardproof.ledger.page import State
from shardproof.ledger.sites import CALLERS, SHOWN, Sites

_REMEMBERED: Final = 8192
_U64: Final = struct.Struct("<Q")
_COUNTS: Final = struct.Struct("<QQ")
_DOUBLE: Final = struct.Struct("<d")
# Looking a member of an enumeration up costs more than writing it.
_CALLED, _ISSUED, _WAITING, _ENDED, _REFUSED, _FAILED = (
    int(state)
    for state in (
        State.CALLED,
        State.ISSUED,
        State.WAITING,
        State.ENDED,
        State.REFUSED,
        State.FAILED,
    )
)


class Mark:
    """A handle on one entry, through which its state is kept up to date."""

    __slots__ = ("_at", "_book", "_chain", "_line", "_number", "_sequence", "place")

    def __init__(
        self, book: Book, number: int, at: int, call: Call, sequence: int, chain: int
    ) -> None:
        self.place = call.place
        self._book = book
        self._number = number
        self._at = at
        self._line = call.line
        self._sequence = sequence
        self._chain = chain

    def issued(self) -> None:
        """The call returned."""
        self._book.change(self._number, self._at, _ISSUED)

    def waiting(self) -> None:
        """A rank begins to wait for it."""
        self._book.change(self._number, self._at, _WAITING)

    def ended(self) -> None:
        """It is over."""
        self._book.change(self._number, self._at, _ENDED, monotonic())

    def failed(self) -> None:
        """Waiting for it raised."""
        self._book.change(self._number, self._at, _FAILED, monotonic())

    def refused(self) -> None:
        """The call raised: it is taken out of the order again."""
        self._book.undo(self._line, self._sequence, self._chain)
        self._book.change(self._number, self._at, _REFUSED, monotonic())


class Book:
    """The ledger of one rank in one cell.

    Args:
        directory: private folder of the cell; the file is made with the first entry.
        rank: number of this rank.
        axis_of: what a group of these ranks is called.
        sites: finds call sites.
        callers: a call site is told apart by its callers too.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        axis_of: Callable[[tuple[int, ...]], str],
        sites: Sites,
        *,
        callers: bool = False,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._axis_of = axis_of
        self._sites = sites
        self._callers = callers
        self._frames = CALLERS if callers else SHOWN
        self._most = None if callers else page.LONGEST_PART
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._groups: dict[str, Group] = {}
        self._channels: dict[tuple[str, str], Line] = {}
        self._calls: dict[Any, Call] = {}
        self._totals: dict[tuple[str, str], list[int]] = {}
        self._places: dict[PlaceKey, Place] = {}
        self._recorded = 0
        self._changes = 0
        self.messages = 0

    def open(self, operation: Operation, args: Sequence[Any], frame: Any) -> tuple[Mark, list[Any]]:
        """Write down that ``operation`` is called with ``args``; also its output tensors."""
        with torch._C.DisableTorchFunction():
            outputs = tensors(args, operation.outputs)
            handed_out = tuple([(t.shape, t.dtype) for t in outputs])
            handed_in = handed_out
            if operation.inputs != operation.outputs:
                inputs = tensors(args, operation.inputs)
                handed_in = tuple([(t.shape, t.dtype) for t in inputs])
        site = self._sites.path(frame, self._frames, one_folder=self._callers)
        backward = torch._C._current_graph_task_id() != -1
        process_group = dist.ProcessGroup.unbox(args[operation.group])
        name = process_group.group_name
        reduced = -1 if operation.reduce_op is None else args[operation.reduce_op].op()
        numbers = tuple([args[position] for position in operation.numbers])
        # By identity, which is cheaper to look up than by the hash of code.
        place = tuple([(id(code), line) for code, line in site])
        key = (name, operation.schema, reduced, numbers, handed_out, handed_in, place, backward)
        with self._lock:
            call = self._calls.get(key)
            if call is None:
                group = self._groups.get(name) or self._meet(name, process_group)
                described = describe(
                    operation,
                    group,
                    self._rank,
                    args,
                    handed_out=handed_out,
                    handed_in=handed_in,
                    reduced=reduced,
                    site=self._sites.path_text(site, most=self._most),
                    backward=backward,
                )
                call = self._learn(key, described, group, site)
            if operation.is_message:
                self.messages += 1
            return self._write(call, backward=backward), outputs

    def change(self, number: int, at: int, state: int, ended: float = 0.0) -> None:
        """Set the state of an entry that the ring still holds."""
        memory = self._memory
        if memory is None or _U64.unpack_from(memory, at)[0] != number:
            return
        if ended:
            _DOUBLE.pack_into(memory, at + page.ENDED_AT, ended)
        memory[at + page.STATE_AT] = state
        self._changes += 1
        _U64.pack_into(memory, page.CHANGES_AT, self._changes)

    def undo(self, line: Line, sequence: int, chain: int) -> None:
        """Take the last operation of a group or channel back, unless another followed."""
        with self._lock:
            if line.sequence == sequence + 1:
                line.sequence, line.chain = sequence, chain
                if self._memory is not None and line.at:
                    page.GROUP.pack_into(self._memory, line.at, line.crc, chain, sequence)

    def close(self) -> dict[str, Any]:
        """End the cell; its totals and the digests by which ranks are compared.

        Returns:
            ``totals``: ``[axis, operation, calls, bytes, calls in backward]`` of each.
            ``groups``: number of collectives and digest by group, ``{"1@0-1": [n, digest]}``.
            ``places``: ``[[axis, operation, reduce operation, site, backward], ranks of the
            group, calls]`` of each line of code that calls.
            ``channels``: the same for messages sent and received,
            ``{"1@0-1|0>1|7": {"send": [n, digest], ...}}``.
        """
        with self._lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                memory.close()
            channels: dict[str, dict[str, list[int]]] = {}
            for (name, direction), line in self._channels.items():
                channels.setdefault(name, {})[direction] = [line.sequence, line.chain]
            groups = self._groups.values()
            return {
                "totals": [[*key, *total] for key, total in sorted(self._totals.items())],
                "groups": {group.key: [group.line.sequence, group.line.chain] for group in groups},
                "channels": channels,
                "places": [[one.key, one.size, one.calls] for one in self._places.values()],
            }

    # Under the lock ---------------------------------------------------------------------------

    def _meet(self, name: str, process_group: dist.ProcessGroup) -> Group:
        """Take down a group at its first operation."""
        ranks = _members(process_group)
        key = f"{name}@{'-'.join(map(str, ranks))}"
        row = len(self._groups)
        at = page.GROUPS_AT + row * page.GROUP.size if row < page.GROUPS else 0
        group = Group(key, self._axis_of(ranks), ranks, Line(at=at, crc=zlib.crc32(key.encode())))
        self._groups[name] = group
        return group

    def _learn(self, key: Any, described: dict[str, Any], group: Group, site: Any) -> Call:
        """Remember a call that is made for the first time, and what its key names by identity."""
        if len(self._calls) >= _REMEMBERED:
            self._calls.clear()
        line = group.line
        if "channel" in described:
            channel = described["channel"], described["direction"]
            line = self._channels.setdefault(channel, Line())
        total = self._totals.setdefault((group.axis, described["operation"]), [0, 0, 0])
        where: PlaceKey = (
            group.axis,
            described["operation"],
            described.get("reduce_op", ""),
            described["site"],
            described["backward"],
        )
        place = self._places.setdefault(where, Place(where, len(group.ranks)))
        call = self._calls[key] = encoded(described, line=line, total=total, place=place, site=site)
        return call

    def _write(self, call: Call, *, backward: bool) -> Mark:
        memory = self._memory
        if memory is None:
            memory = self._memory = self._make()
        line, text, total = call.line, call.text, call.total
        before, chain = line.sequence, line.chain
        line.sequence = sequence = before + 1
        line.chain = zlib.crc32(call.digest, chain)
        total[0] += 1
        total[1] += call.size
        total[2] += backward
        call.place.calls += 1
        self._recorded = number = self._recorded + 1
        self._changes += 1
        at = page.SLOTS_AT + (number - 1) % page.SLOTS * page.SLOT_SIZE
        # Its number comes last: until then the slot reads as empty.
        page.SLOT.pack_into(
            memory, at, 0, sequence, monotonic(), 0.0, line.chain, len(text), _CALLED, 0
        )
        begin = at + page.SLOT.size
        memory[begin : begin + len(text)] = text
        _U64.pack_into(memory, at, number)
        if line.at:
            page.GROUP.pack_into(memory, line.at, line.crc, line.chain, sequence)
        _COUNTS.pack_into(memory, page.ENTRIES_AT, number, self._changes)
        return Mark(self, number, at, call, before, chain)

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
