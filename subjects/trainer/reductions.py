"""What is summed, averaged or left alone over which axis.

Model weights: each context-parallel rank holds the gradient of its own rows and each data-parallel
rank that of its own batch, so both sum. A weight that tensor parallelism replicates is summed over
it too, since each of its ranks saw its own rows or heads only; a slice is left alone. A parameter
of the caller's own saw the full sequence on every TP and CP rank, so there it averages.
``gradients.reducers`` says which rule each parameter follows.

Some functions take a group or name that they do not need: faults that re-create public bugs stand
in for them, and do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import ReduceOp, Value
from subjects.token_ids import shown
from subjects.trainer import agreement, collectives
from subjects.trainer.agreement import Fact
from subjects.trainer.precision import working_dtype


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank, by axis."""

    tp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup


def sum_over_tp(name: str, parameter: Tensor) -> bool:  # noqa: ARG001
    """Whether the gradient of a model weight is a partial sum on each tensor-parallel rank."""
    return bool(getattr(parameter, "sequence_parallel", False))


def reduce_weight(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    """Sum the gradient of a model weight over CP and DP, and over TP where it is replicated.

    Also for factors of adapters: ``over_tp`` for those that TP replicates. In place from float32
    up; half precisions sum in float32 and round once.
    """
    total = gradient.to(working_dtype(gradient.dtype))
    if over_tp:
        collectives.all_reduce(total, groups.tp)
    collectives.all_reduce(total, groups.cp)
    return collectives.all_reduce(total, groups.dp).to(gradient.dtype)


def reduce_custom(gradient: Tensor, groups: Groups) -> Tensor:
    """Average the gradient of a caller's parameter over CP and TP and sum it over DP.

    In place from float32 up; half precisions sum in float32 and round once.
    """
    total = gradient.to(working_dtype(gradient.dtype))
    collectives.all_reduce(total, groups.tp)
    collectives.all_reduce(total, groups.cp)
    total /= groups.tp.size() * groups.cp.size()
    return collectives.all_reduce(total, groups.dp).to(gradient.dtype)


def agree_on_presence(
    gradients: Sequence[Tensor | None], groups: Groups, *, device: torch.device
) -> list[bool]:
    """Which gradients any rank has.

    A data-parallel rank without a batch has none where its peers do; all must then take part in
    the reduction, and a gradient that nobody has stays None.
    """
    here = torch.tensor([g is not None for g in gradients], dtype=torch.int64, device=device)
    for group in (groups.tp, groups.cp, groups.dp):
        collectives.all_reduce(here, group, op="max")
    return [bool(there) for there in here.tolist()]


def dp_reduce(value: Value, op: ReduceOp, groups: Groups, *, device: torch.device) -> Value:
    """Reduce a number or tensor over the data-parallel ranks alone, without a gradient.

    What is wrong on one rank is raised on all of them: an int beside a float would be summed bit by
    bit, and shapes that differ would never return. A NaN on any rank gives NaN on all.

    Raises:
        TypeError: not an int, a float or a tensor of one of ``KINDS``.
        ValueError: an unknown operation, an int that has more than 64 bits, or a sum of integers
            that their dtype can't hold (64 bits for an int).
        DisagreementError: ranks that pass another kind of value or another operation.
    """
    made: list[Tensor] = []

    def facts() -> dict[str, Fact]:
        found = value_facts(value, op)
        made.append(carried(value, device))
        return found

    agreement.agree("dp_reduce", facts, agreement.data_parallel(groups, device))
    if made[0].is_floating_point():
        total = reduced_floats(made[0], op, groups.dp)
    else:
        kind = value.dtype if isinstance(value, Tensor) else torch.int64
        total = reduced_integers(made[0], op, groups.dp, kind)
    return total.to(value.device) if isinstance(value, Tensor) else type(value)(total.item())


KINDS = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""What ``dp_reduce`` takes: numbers that every backend can send, some of them as int64."""


def reduced_floats(value: Tensor, op: ReduceOp, group: ProcessGroup) -> Tensor:
    """``value`` of all ranks, in place for a sum.

    Whether a maximum passes a NaN on depends on the order of the ranks, so it goes beside the
    numbers.
    """
    if op == "sum":
        return collectives.all_reduce(value, group)
    least, there = (-math.inf, 1) if op == "max" else (math.inf, -1)
    nan = value.isnan()
    both = torch.stack((value.masked_fill(nan, least), nan.to(value.dtype) * there))
    found: Tensor = collectives.all_reduce(both, group, op=op)
    return found[0].masked_fill(found[1].bool(), math.nan)


def reduced_integers(value: Tensor, op: ReduceOp, group: ProcessGroup, kind: torch.dtype) -> Tensor:
    """``value``, int64, of all ranks as ``kind``; a sum travels as halves that never overflow.

    Raises:
        ValueError: on every rank: ``kind`` can't hold the sum.
    """
    if op != "sum":
        return collectives.all_reduce(value, group, op=op).to(kind)
    halves = collectives.all_reduce(torch.stack((value >> 32, value & LOW)), group)
    high, low = halves[0] + (halves[1] >> 32), halves[1] & LOW
    total, limits = high * 2**32 + low, torch.iinfo(kind)
    wrong = (high < -(2**31)) | (high >= 2**31) | (total < limits.min) | (total > limits.max)
    if wrong.any():
        raise ValueError(
            f"dp_reduce: the sum over the data-parallel ranks does not fit into {kind}, which "
            f"holds {limits.min} to {limits.max}; reduce value.to(torch.int64) or a float"
        )
    return total.to(kind)


LOW = 2**32 - 1


def carried(value: Value, device: torch.device) -> Tensor:
    """``value`` as a tensor that can be reduced in place: integers as int64.

    Raises:
        ValueError: an int that has more than 64 bits.
    """
    if isinstance(value, Tensor):
        kind = value.dtype if value.is_floating_point() else torch.int64
        return value.detach().to(device, kind, copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"dp_reduce: {shown(value)} does not fit into 64 bits")
    kind = torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=kind, device=device)


def value_facts(value: object, op: object) -> dict[str, Fact]:
    """What ranks that reduce ``value`` must share: its kind, and the operation.

    Raises:
        TypeError, ValueError: as ``dp_reduce``.
    """
    if not isinstance(op, str) or op not in ("sum", "max", "min"):
        raise ValueError(f"dp_reduce: op is {shown(op)}; expected sum, max or min")
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if value.dtype not in KINDS:
            known = ", ".join(str(one).removeprefix("torch.") for one in KINDS)
            raise TypeError(
                f"dp_reduce: got a tensor of {value.dtype}; expected one of {known} (convert with "
                "value.to, count booleans with value.sum())"
            )
        if value.is_meta:
            raise TypeError("dp_reduce: got a tensor on meta, which has no values; expected some")
        if value.is_nested:
            raise TypeError("dp_reduce: got a nested tensor; reduce its parts, or a padded one")
        if value.layout != torch.strided:
            raise TypeError(f"dp_reduce: got a tensor of {value.layout}; pass value.to_dense()")
        kind = f"a tensor of {value.dtype}, shape {list(value.shape)}"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"dp_reduce: got {kind}; expected an int, a float or a tensor")
    return {"value": Fact(kind.encode(), kind), "op": Fact(str(op).encode(), str(op))}
