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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import ReduceOp, Value
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
    bit, and shapes that differ would never return.

    Raises:
        TypeError: not an int, a float or a tensor of real numbers.
        ValueError: an unknown operation, or an int that has more than 64 bits.
        DisagreementError: ranks that pass another kind of value or another operation.
    """
    made: list[Tensor] = []

    def facts() -> dict[str, Fact]:
        found = value_facts(value, op)
        made.append(carried(value, device))
        return found

    agreement.agree("dp_reduce", facts, agreement.data_parallel(groups, device))
    total = collectives.all_reduce(made[0], groups.dp, op=op)
    return total if isinstance(value, Tensor) else type(value)(total.item())


def carried(value: Value, device: torch.device) -> Tensor:
    """``value`` as a tensor that can be reduced in place.

    Raises:
        ValueError: an int that has more than 64 bits.
    """
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"dp_reduce: {value} does not fit into 64 bits")
    kind = torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=kind, device=device)


def value_facts(value: object, op: object) -> dict[str, Fact]:
    """What ranks that reduce ``value`` must share: its kind, and the operation.

    Raises:
        TypeError, ValueError: as ``dp_reduce``.
    """
    if op not in ("sum", "max", "min"):
        raise ValueError(f"dp_reduce: op is {op!r}; expected sum, max or min")
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(
                f"dp_reduce: got a tensor of {value.dtype}; expected real numbers (count booleans "
                "with value.sum())"
            )
        if value.layout != torch.strided:
            raise TypeError(f"dp_reduce: got a tensor of {value.layout}; pass value.to_dense()")
        kind = f"a tensor of {value.dtype}, shape {list(value.shape)}"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"dp_reduce: got {kind}; expected an int, a float or a tensor")
    return {"value": Fact(kind.encode(), kind), "op": Fact(str(op).encode(), str(op))}
