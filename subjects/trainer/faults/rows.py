"""Rows, targets, positions and masks: what goes to the wrong place, or sees what it must not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import collectives, gather, masks, plan
from subjects.trainer.faults.fault import Fault
from subjects.trainer.packing import RowIds
from subjects.trainer.plan import LocalRows
from subjects.types import IGNORED

EVERYWHERE = ("cp2", "cp4", "dp2xcp2", "tp2xcp2")
"""The topologies of the gate; the first faults are shown on all of them."""

_scatter_rows = gather.scatter_rows
_rows_of_gradient = gather.rows_of_gradient
_targets_for = plan.targets_for
_document_mask = masks.document_mask


def _local_rows(values: Tensor, local: LocalRows, group: ProcessGroup) -> Tensor:  # noqa: ARG001
    return values


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


FAULTS: dict[str, Fault] = {
    "rank-local rows returned": Fault(
        module=gather,
        name="gather_rows",
        function=_local_rows,
        axis="cp",
        case="test_outputs.test_hidden_states",
        shows="*.hidden_states",
        topology=EVERYWHERE,
    ),
    "two rows of a shard swapped": Fault(
        module=gather,
        name="scatter_rows",
        function=_swapped,
        axis="any",
        case="test_outputs.test_hidden_states",
        shows="*.hidden_states",
        topology=EVERYWHERE,
    ),
    "one row zeroed": Fault(
        module=gather,
        name="scatter_rows",
        function=_zeroed,
        axis="any",
        case="test_outputs.test_hidden_states",
        shows="*.hidden_states",
        topology=EVERYWHERE,
    ),
    "gather backward summed over cp": Fault(
        module=gather,
        name="rows_of_gradient",
        function=_summed_over_cp,
        axis="cp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*",
        catalogue=(16, 35),
        topology=EVERYWHERE,
    ),
    "gather backward divided by cp": Fault(
        module=gather,
        name="rows_of_gradient",
        function=_divided_by_cp,
        axis="cp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*",
        catalogue=(14, 16, 28),
        topology=EVERYWHERE,
    ),
    "labels shifted inside the shard": Fault(
        module=plan,
        name="targets_for",
        function=_shifted_labels,
        axis="any",
        case="test_outputs.test_targets_pick_from_their_own_logits",
        shows="*.logprob_off_its_own_logits",
        catalogue=(65, 66, 67),
        topology=EVERYWHERE,
    ),
    "document mask dropped for remote keys": Fault(
        module=masks,
        name="document_mask",
        function=_remote_unmasked,
        axis="cp",
        case="test_outputs.test_documents_do_not_see_each_other",
        shows="*.leak_of_document_*",
        catalogue=(38, 39),
        topology=EVERYWHERE,
    ),
    "positions restarted per shard": Fault(
        module=plan,
        name="positions_for",
        function=_restarted_positions,
        axis="any",
        case="test_outputs.test_a_document_is_the_same_wherever_it_lies",
        shows="*.twin_differs",
        catalogue=(73,),
        topology=EVERYWHERE,
    ),
}
