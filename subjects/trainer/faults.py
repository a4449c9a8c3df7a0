"""Faults to put into the trainer on purpose, so that a check can show that it would notice.

Each replaces one function that its caller looks up at call time. What they break is what public
bugs broke; a case named for a fault must fail while it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import ReduceOp, Value
from subjects.trainer import attention, collectives, gather, plan, reductions
from subjects.trainer.packing import RowIds
from subjects.trainer.plan import LocalRows
from subjects.trainer.reductions import Groups
from subjects.types import IGNORED


@dataclass(frozen=True)
class Fault:
    """``function`` stands in for ``module.name``; it shows where ``axis`` has several ranks."""

    module: ModuleType
    name: str
    function: Callable[..., object]
    axis: str


@contextmanager
def inject(fault: str) -> Iterator[None]:
    """Put the fault in for the duration of the block, backward passes included.

    Raises:
        KeyError: no fault of this name.
    """
    if fault not in FAULTS:
        raise KeyError(f"no fault {fault!r}; there are {', '.join(FAULTS)}")
    found = FAULTS[fault]
    original = getattr(found.module, found.name)
    setattr(found.module, found.name, found.function)
    try:
        yield
    finally:
        setattr(found.module, found.name, original)


def _local_rows(values: Tensor, local: LocalRows, group: ProcessGroup) -> Tensor:  # noqa: ARG001
    return values


_scatter_rows = gather.scatter_rows
_rows_of_gradient = gather.rows_of_gradient
_targets_for = plan.targets_for
_document_mask = attention.document_mask
_sum_over_tp = reductions.sum_over_tp
_reduce_probe = reductions.reduce_probe
_dp_reduce = reductions.dp_reduce


def _swapped(values: Tensor, sources: Tensor, total: int) -> Tensor:
    order = torch.arange(len(values), device=values.device)
    if len(values) > 1:
        order[:2] = order[:2].flip(0)
    return _scatter_rows(values[order], sources, total)


def _zeroed(values: Tensor, sources: Tensor, total: int) -> Tensor:
    kept = values.clone()
    kept[len(values) // 2 : len(values) // 2 + 1] = 0
    return _scatter_rows(kept, sources, total)


def _summed_over_cp(gradient: Tensor, sources: Tensor, group: ProcessGroup) -> Tensor:
    return _rows_of_gradient(collectives.all_reduce(gradient.clone(), group), sources, group)


def _divided_by_cp(gradient: Tensor, sources: Tensor, group: ProcessGroup) -> Tensor:
    return _rows_of_gradient(gradient, sources, group) / group.size()


def _shifted_labels(targets: Tensor, local: LocalRows) -> Tensor:
    own = _targets_for(targets, local)
    return torch.cat((own[1:], torch.full_like(own[:1], IGNORED)))


def _remote_unmasked(queries: RowIds, keys: RowIds, *, remote: bool) -> Tensor:
    mask = _document_mask(queries, keys, remote=remote)
    return torch.ones_like(mask) if remote else mask


def _restarted_positions(local: LocalRows) -> Tensor:
    return torch.arange(len(local.rows), device=local.rows.device)


def _probe_summed(gradient: Tensor, groups: Groups) -> Tensor:
    return _reduce_probe(gradient, groups) * groups.cp.size()


def _reduced_over_cp(value: Value, op: ReduceOp, groups: Groups, *, device: torch.device) -> Value:
    over_dp = _dp_reduce(value, op, groups, device=device)
    return _dp_reduce(over_dp, op, Groups(groups.tp, groups.cp, groups.cp), device=device)


def _qk_norm_left(name: str, parameter: Tensor) -> bool:
    return _sum_over_tp(name, parameter) and "q_layernorm" not in name and "k_layernorm" not in name


FAULTS: dict[str, Fault] = {
    "rank-local rows returned": Fault(gather, "gather_rows", _local_rows, "cp"),
    "two rows of a shard swapped": Fault(gather, "scatter_rows", _swapped, "any"),
    "one row zeroed": Fault(gather, "scatter_rows", _zeroed, "any"),
    "gather backward summed over cp": Fault(gather, "rows_of_gradient", _summed_over_cp, "cp"),
    "gather backward divided by cp": Fault(gather, "rows_of_gradient", _divided_by_cp, "cp"),
    "labels shifted inside the shard": Fault(plan, "targets_for", _shifted_labels, "any"),
    "document mask dropped for remote keys": Fault(
        attention, "document_mask", _remote_unmasked, "cp"
    ),
    "positions restarted per shard": Fault(plan, "positions_for", _restarted_positions, "any"),
    "probe gradient summed over cp": Fault(reductions, "reduce_probe", _probe_summed, "cp"),
    "dp_reduce including cp": Fault(reductions, "dp_reduce", _reduced_over_cp, "cp"),
    "q/k-norm gradient not summed over tp": Fault(reductions, "sum_over_tp", _qk_norm_left, "tp"),
}
"""By what is wrong. ``axis`` "any" shows on a single device too."""
