"""Puts the ledger below every operation of every process group of this process.

The process groups stay what they are. Each ``c10d::`` operation gets a kernel of its own in torch's
dispatcher, above those of the backends, which writes the call down and dispatches it on. So it does
not matter who calls (Python, DDP's C++ reducer, functional collectives, compiled code) or how the
group was made, and a group's type, backend, name, store, options, sequence numbers and errors are
its own. When a call ends is seen where Python waits (``Work.wait``) and where functional
collectives wait (``wait_tensor``); DDP's reducer waits in C++, where nobody sees it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed as dist

from shardproof.ledger.book import Book, Mark
from shardproof.ledger.operations import (
    LOCAL,
    OPERATIONS,
    SILENT_METHODS,
    Operation,
    argument,
    recorded_methods,
)
from shardproof.ledger.sites import Sites
from shardproof.mutants.mutation import Mutation, Rehearsal

OFF: Final = "--parity-ledger off"
# Every call passes this key, right above the backends and below autograd and all modes; no
# operation of process groups has a kernel there.
_KEY: Final = "BackendSelect"
_AWAITED: Final = 1024


class LedgerError(RuntimeError):
    """This torch has something that the ledger can't record, or lacks what it needs."""


class _Thread(threading.local):
    """The entry that the innermost call of a process group's method made on this thread."""

    mark: Mark | None = None


@dataclass
class _State:
    """What is installed in this process, and the book that is open."""

    book: Book | None = None
    mutation: Mutation | Rehearsal | None = None
    libraries: list[Any] = field(default_factory=list)
    sites: Sites = field(default_factory=Sites)
    library_sites: Sites = field(default_factory=lambda: Sites(libraries=True))
    works: dict[int, tuple[Any, Mark]] = field(default_factory=dict)
    tensors: OrderedDict[int, Mark] = field(default_factory=OrderedDict)
    installed: bool = False


_state = _State()
_thread = _Thread()


def begin(
    directory: Path,
    rank: int,
    axis_of: Callable[[tuple[int, ...]], str],
    mutation: Mutation | Rehearsal | None = None,
    *,
    callers: bool = False,
    root: Path | None = None,
) -> None:
    """Open the book of a cell, in which ``mutation`` is at work.

    With ``callers`` a call site is told apart by its callers too, and may lie in a library. Its
    paths are relative to ``root``, the working directory by default.

    Raises:
        LedgerError: torch has operations that the ledger does not know.
    """
    install()
    sites = _state.library_sites if callers else _state.sites
    sites.begin(root)
    _state.book = Book(directory, rank, axis_of, sites, callers=callers)
    _state.mutation = mutation


def end() -> tuple[dict[str, Any], int] | None:
    """Close the book: its totals and digests, and how many messages were sent or received."""
    book, _state.book = _state.book, None
    _state.mutation = None
    _state.works.clear()
    _state.tensors.clear()
    _thread.mark = None
    return None if book is None else (book.close(), book.messages)


def install() -> None:
    """Replace the kernels, once per process; without an open book they only pass calls on.

    Raises:
        LedgerError: torch has operations or methods that the ledger does not know.
    """
    if _state.installed:
        return
    names = operation_names()
    check_known(names, dir(dist.ProcessGroup))
    library = torch.library.Library("c10d", "IMPL")
    functional = torch.library.Library("_c10d_functional", "IMPL")
    _state.libraries = [library, functional]
    for operation in OPERATIONS:
        if operation.schema in names:
            run = _onwards(getattr(torch.ops.c10d, operation.schema).default)
            library.impl(operation.schema, _recording(operation, run), _KEY, with_keyset=True)
    run = _onwards(torch.ops._c10d_functional.wait_tensor.default)
    functional.impl("wait_tensor", _seen_waiting(run), _KEY, with_keyset=True)
    for method in recorded_methods():
        if hasattr(dist.ProcessGroup, method):
            setattr(dist.ProcessGroup, method, _binding(getattr(dist.ProcessGroup, method)))
    dist.Work.wait = _waiting(dist.Work.wait)  # type: ignore[method-assign]
    # A child that a case forks must not write into the rank's ledger.
    os.register_at_fork(after_in_child=_forget)
    _state.installed = True


def operation_names() -> list[str]:
    """All ``c10d::`` operations of this torch, without the namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name[6:].partition(".")[0] for name in names if name.startswith("c10d::"))


def check_known(operations: list[str], methods: list[str]) -> None:
    """Refuse what could communicate without being recorded.

    Raises:
        LedgerError: names what is not known.
    """
    known = {operation.schema for operation in OPERATIONS} | LOCAL
    calls = set(recorded_methods()) | SILENT_METHODS
    strange = [f"c10d::{name}" for name in operations if name not in known]
    strange += [
        f"ProcessGroup.{name}"
        for name in methods
        if name not in calls and not (name.startswith("__") and name.endswith("__"))
    ]
    if strange:
        raise LedgerError(
            f"the ledger does not know {', '.join(strange)} of torch {torch.__version__}, so it "
            f"can't tell what ranks say to each other; run with {OFF}, or add the operation to "
            "shardproof.ledger.operations"
        )


def _forget() -> None:
    _state.book = _state.mutation = None


def _onwards(operation: Any) -> Callable[..., Any]:
    """Dispatches a call to the backend, without Python's global lock.

    Gloo's threads may want that lock while they hold one of Gloo's own.
    """
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = operation._handle.redispatch_boxed

    def run(keys: Any, *args: Any) -> Any:
        return redispatch(keys & below, *args)

    return run


def _recording(operation: Operation, run: Callable[..., Any]) -> Callable[..., Any]:
    """The entry in the book, and then the operation."""
    position = operation.asynchronous
    meta = torch._C.DispatchKey.Meta

    def record(keys: Any, *args: Any) -> Any:
        book = _state.book
        if book is None or keys.has(meta):  # nobody says anything with shapes alone
            return run(keys, *args)
        mark, outputs = book.open(operation, args, sys._getframe().f_back)
        _thread.mark = mark
        try:
            mutation = _state.mutation
            changes = None if mutation is None else mutation.at(mark.place.key)
            if changes is None:
                result = run(keys, *args)
            else:
                result = changes.run(operation, args, lambda: run(keys, *args))
        except BaseException:
            mark.refused()
            raise
        if position is None and not operation.is_message:
            mark.ended()
            return result
        mark.issued()
        if position is not None and argument(args, position, default=True):
            _await_tensors(outputs, mark)
        return result

    return record


def _await_tensors(outputs: list[Any], mark: Mark) -> None:
    """Functional collectives wait for a tensor, which is known by its storage."""
    awaited = _state.tensors
    with torch._C.DisableTorchFunction():
        for tensor in outputs:
            if tensor.layout is torch.strided:
                awaited[tensor.untyped_storage()._cdata] = mark
    while len(awaited) > _AWAITED:
        awaited.popitem(last=False)


def _seen_waiting(run: Callable[..., Any]) -> Callable[..., Any]:
    def wait_tensor(keys: Any, tensor: torch.Tensor) -> Any:
        mark = None
        if _state.book is not None and _state.tensors:
            with torch._C.DisableTorchFunction():
                mark = _state.tensors.pop(tensor.untyped_storage()._cdata, None)
        if mark is None:
            return run(keys, tensor)
        return _watched(mark, run, keys, tensor)

    return wait_tensor


def _binding(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ProcessGroup that ties the handle it returns to the entry of its call."""

    @functools.wraps(method)
    def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if _state.book is None:
            return method(self, *args, **kwargs)
        _thread.mark = None
        work = method(self, *args, **kwargs)
        mark, _thread.mark = _thread.mark, None
        if mark is not None and work is not None:
            key = id(work)
            _state.works[key] = weakref.ref(work, lambda _: _state.works.pop(key, None)), mark
        return work

    return call


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        found = _state.works.pop(id(self), None) if _state.works else None
        if found is None:
            return method(self, *args, **kwargs)
        return _watched(found[1], method, self, *args, **kwargs)

    return wait


def _watched(mark: Mark, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mark.waiting()
    try:
        result = run(*args, **kwargs)
    except BaseException:
        mark.failed()
        raise
    mark.ended()
    return result
