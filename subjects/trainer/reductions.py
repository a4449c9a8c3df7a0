"""What is summed, averaged or left alone over which axis.

Model weights: each context-parallel rank holds the gradient of its own rows and each data-parallel
rank that of its own batch, so both sum. A weight that tensor parallelism replicates is summed over
it too, since each of its ranks saw its own rows or heads only; a slice is left alone. A parameter
of the caller's own saw the full sequence on every TP and CP rank, so there it averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import ReduceOp, Value
from subjects.trainer import collectives


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
    """Sum the gradient of a model weight over CP and DP, and over TP where it is replicated."""
    if over_tp:
        collectives.all_reduce(gradient, groups.tp)
    collectives.all_reduce(gradient, groups.cp)
    return collectives.all_reduce(gradient, groups.dp)


def reduce_probe(gradient: Tensor, groups: Groups) -> Tensor:
    """Average the gradient of a caller's parameter over CP and TP and sum it over DP."""
    collectives.all_reduce(gradient, groups.tp)
    collectives.all_reduce(gradient, groups.cp)
    gradient /= groups.tp.size() * groups.cp.size()
    return collectives.all_reduce(gradient, groups.dp)


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

    Raises:
        TypeError: not an int, a float or a tensor of numbers.
        ValueError: an unknown operation.
    """
    if op not in ("sum", "max", "min"):
        raise ValueError(f"dp_reduce: op is {op!r}; expected sum, max or min")
    if isinstance(value, Tensor):
        return collectives.all_reduce(value.detach().clone(), groups.dp, op=op)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"dp_reduce: got {type(value).__name__}; expected an int, a float or a tensor"
        )
    kind = torch.int64 if isinstance(value, int) else torch.float64
    carried = torch.tensor(value, dtype=kind, device=device)
    return type(value)(collectives.all_reduce(carried, groups.dp, op=op).item())
