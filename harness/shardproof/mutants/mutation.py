"""A mutant at work on one rank: the operation runs, and other numbers are handed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from shardproof.ledger.operations import Operation, tensors
from shardproof.mutants import target as names
from shardproof.mutants.target import EXCHANGING, GATHERING, Mutant

Run = Callable[[], Any]
Key = tuple[str, str, str, str, bool]
_COARSE = torch.bfloat16


@dataclass
class Call:
    """One call whose result is true so far.

    ``given`` are copies of what was handed in, ``before`` of what the outputs held; ``chunks`` are
    the parts of the outputs by the rank that they came from.
    """

    operation: Operation
    group: Any
    given: list[Tensor]
    outputs: list[Tensor]
    chunks: list[list[Tensor]]
    before: list[Tensor]
    reduce_op: str
    root: int | None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return int(self.group.size())

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return int(self.group.rank())


class Mutation:
    """Changes what the calls of one target hand out, and counts in how many it did.

    ``reached`` are the calls of the target on this rank, ``changed`` those whose result has other
    bits than the true one.
    """

    def __init__(self, mutant: Mutant) -> None:
        self._kind = mutant.kind
        self._key = mutant.target.key
        self._reduce_op = mutant.target.reduce_op
        self._last: list[Tensor] | None = None
        self._problem = ""
        self.reached = 0
        self.changed = 0

    def report(self) -> list[Any]:
        """Calls that were reached and changed, and how the mutant itself failed, if it did."""
        return [self.reached, self.changed, self._problem]

    def at(self, key: Key) -> Mutation | None:
        """What changes the calls of a place: this, where they are the target's."""
        return self if key == self._key else None

    def run(self, operation: Operation, args: Sequence[Any], run: Run) -> Any:
        """Run the operation to its end, and change what it hands out."""
        result, call, true = _truly(operation, args, run, self._reduce_op)
        self.change(call, true)
        return _over(result, call.outputs)

    def change(self, call: Call, true: list[Tensor]) -> None:
        """Change the outputs of a call, of which ``true`` are copies."""
        self.reached += 1
        with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            try:
                self._change(call)
            except Exception as error:  # noqa: BLE001 - the mutant's own fault, told as such
                self._problem = f"{type(error).__name__}: {error}"
            self.changed += not all(map(_same, true, call.outputs))
            self._last = true

    def _change(self, call: Call) -> None:
        if self._kind == names.STALE:
            _stale(call, self._last)
            return
        _CHANGES[self._kind](call)


class Rehearsal:
    """What mutants would change in a run, which is handed what is true.

    For mutants that say nothing to other ranks: those whose kind is in ``REHEARSED``.
    """

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self._all = [Mutation(mutant) for mutant in mutants]
        self._places: dict[Key, _Place] = {}
        for mutant, mutation in zip(mutants, self._all, strict=True):
            place = _Place(mutant.target.reduce_op, [])
            self._places.setdefault(mutant.target.key, place).mutations.append(mutation)

    def report(self) -> list[list[Any]]:
        """For each mutant: calls that were reached, that it would change, and how it failed."""
        return [mutation.report() for mutation in self._all]

    def at(self, key: Key) -> _Place | None:
        """What looks at the calls of a place."""
        return self._places.get(key)


@dataclass
class _Place:
    """The mutants of one target."""

    reduce_op: str
    mutations: list[Mutation]

    def run(self, operation: Operation, args: Sequence[Any], run: Run) -> Any:
        """Run the operation to its end, and hand out what is true."""
        result, call, true = _truly(operation, args, run, self.reduce_op)
        for mutation in self.mutations:
            mutation.change(call, true)
            with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                for output, was in zip(call.outputs, true, strict=True):
                    output.copy_(was)
        return _over(result, call.outputs)


def _truly(
    operation: Operation, args: Sequence[Any], run: Run, reduce_op: str
) -> tuple[Any, Call, list[Tensor]]:
    """Run an operation to its end: what it returned, the call, and copies of its outputs."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        given = tensors(args, operation.inputs)
        outputs = [tensor.data for tensor in tensors(args, operation.outputs)]
        kept = [tensor.detach().clone() for tensor in given]
        before = [tensor.clone() for tensor in outputs]
    result = run()
    handle = result[-1] if isinstance(result, tuple | list) else result
    if not isinstance(handle, dist.Work):
        handle = dist.Work.unbox(handle)
    handle.wait()
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        group = dist.ProcessGroup.unbox(args[operation.group])
        chunks = _chunks(operation, args, group.size())
        root = None if operation.root is None else int(args[operation.root])
        call = Call(operation, group, kept, outputs, chunks, before, reduce_op, root)
        return result, call, [tensor.clone() for tensor in outputs]


def _over(result: Any, outputs: list[Tensor]) -> Any:
    """What the operation returned, with a handle that has nothing left to wait for.

    Gloo's own may copy the true result once more each time it is waited for.
    """
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(outputs)
    handle = _create_work_from_future(future).boxed()
    return (*result[:-1], handle) if isinstance(result, tuple | list) else handle


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN counting as one."""
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


def _chunks(operation: Operation, args: Sequence[Any], size: int) -> list[list[Tensor]]:
    """What each rank of the group contributed to the outputs, for operations that gather."""
    if operation.name not in GATHERING | EXCHANGING or operation.outputs is None:
        return []
    value = args[operation.outputs]
    found: list[list[Tensor]] = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, list):
            found.append([tensor.data for tensor in entry])
        elif isinstance(value, list) and operation.name == "all_to_all":
            return [[tensor.data for tensor in value]]
        elif entry.dim() and entry.shape[0] % size == 0:
            found.append(list(entry.data.chunk(size)))
    return found


def _dropped(call: Call) -> None:
    """As if nothing had been said: what is this rank's own stays, the rest is nothing."""
    name, rank = call.operation.name, call.rank
    if name in ("all_reduce", "all_reduce_coalesced", "reduce", "broadcast"):
        # They work in place: what was handed in is what was there before.
        for output, was in zip(call.outputs, call.before, strict=True):
            output.copy_(was)
        return
    if name in GATHERING:
        for chunks in call.chunks:
            for at, chunk in enumerate(chunks):
                if at != rank:
                    chunk.zero_()
        return
    for at, output in enumerate(call.outputs):
        own = call.given[at] if at < len(call.given) else None
        if own is not None and own.numel() == output.numel():
            output.copy_(own.view_as(output))
        elif own is not None and own.numel() == call.size * output.numel():
            output.copy_(own.reshape(call.size, -1)[rank].view_as(output))
        else:
            output.zero_()


def _scaled(factor: Callable[[int], float]) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        for output in call.outputs:
            if output.dtype is not torch.bool:
                output.copy_(output * factor(call.size))

    return change


def _other_reduction(call: Call) -> None:
    other = dist.ReduceOp.MAX if call.reduce_op == "SUM" else dist.ReduceOp.SUM
    _reduced_again(call, call.group, other)


def _over_the_world(call: Call) -> None:
    """The reduction over all ranks. Groups may have values of other sizes: the rest is left out."""
    own = getattr(dist.ReduceOp, call.reduce_op)
    world = dist.group.WORLD
    sizes = torch.tensor([given.numel() for given in call.given])
    _all_reduce(world, sizes, dist.ReduceOp.MAX)
    # What changes nothing in a sum changes a maximum of negative numbers: no harm, in a mutant.
    for output, given, size in zip(call.outputs, call.given, sizes.tolist(), strict=True):
        wide = given.new_zeros(size)
        wide[: given.numel()] = given.reshape(-1)
        _all_reduce(world, wide, own)
        output.copy_(wide[: given.numel()].view_as(output))


def _reduced_again(call: Call, group: Any, reduce_op: Any) -> None:
    for output, given in zip(call.outputs, call.given, strict=True):
        again = given.clone()
        _all_reduce(group, again, reduce_op)
        output.copy_(again)


def _all_reduce(group: Any, tensor: Tensor, reduce_op: Any) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = reduce_op
    group.allreduce([tensor], options).wait()


def _rotated(call: Call) -> None:
    for chunks in call.chunks:
        if len({tuple(chunk.shape) for chunk in chunks}) == 1:
            moved = [chunk.clone() for chunk in chunks]
            for at, chunk in enumerate(chunks):
                chunk.copy_(moved[at - 1])


def _repeated(call: Call) -> None:
    for chunks in call.chunks:
        if chunks and len({tuple(chunk.shape) for chunk in chunks}) == 1:
            own = chunks[call.rank].clone()
            for chunk in chunks:
                chunk.copy_(own)


def _stale(call: Call, last: list[Tensor] | None) -> None:
    """The true result of the call before, where that has the same form."""
    if last is None or [one.shape for one in last] != [one.shape for one in call.outputs]:
        return
    for output, old in zip(call.outputs, last, strict=True):
        if output.dtype == old.dtype:
            output.copy_(old)


def _rounded(call: Call) -> None:
    for output in call.outputs:
        if output.is_floating_point() or output.is_complex():
            coarse = torch.view_as_real(output) if output.is_complex() else output
            coarse.copy_(coarse.to(_COARSE))


def _one_element(call: Call) -> None:
    """The largest element, twice as large, on the last rank of the group; never padding.

    Of whole numbers, which may be flags or digests, the middle one is off by one. Where only the
    root is handed anything, it is wrong on the root.
    """
    at_root = call.operation.name in ("reduce", "gather") and call.root is not None
    if call.rank != (call.root if at_root else call.size - 1):
        return
    for output in call.outputs:
        if output.numel() == 0:
            continue
        floating = output.is_floating_point() or output.is_complex()
        sizes = output.abs().nan_to_num(0.0, 0.0, 0.0).reshape(-1) if floating else None
        at = output.numel() // 2 if sizes is None else int(sizes.argmax())
        chosen = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
        chosen.view(-1)[at] = True
        if sizes is not None:
            output.copy_(torch.where(chosen, output + (float(sizes[at]) or 1.0), output))
        elif output.dtype is torch.bool:
            output.copy_(output ^ chosen)
        elif output.dtype is torch.uint8:
            # Bytes of something else: one alone may be the last digit of a number.
            chosen.view(-1)[at:][:8] = True
            output.copy_(torch.where(chosen, output ^ 0x10, output))
        else:
            output.copy_(torch.where(chosen, output + 1, output))


_CHANGES: dict[str, Callable[[Call], None]] = {
    names.DROPPED: _dropped,
    names.MULTIPLIED: _scaled(float),
    names.DIVIDED: _scaled(lambda size: 1 / size),
    names.OTHER_REDUCTION: _other_reduction,
    names.WORLD: _over_the_world,
    names.ROTATED: _rotated,
    names.REPEATED: _repeated,
    names.ROUNDED: _rounded,
    names.ELEMENT: _one_element,
}
