"""Outputs that are asked for in one way and answered in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import forward, gather, head_chunks, logprobs, packing, plan
from subjects.trainer.faults.fault import Fault
from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.packing import PackedRows, Sharing
from subjects.trainer.plan import LocalRows

_pack = packing.pack
_scatter_rows = gather.scatter_rows
_gather_rows = gather.gather_rows
_targets_for = plan.targets_for
_top_candidates = logprobs.top_candidates


def _reversed(documents: Sequence[Tensor], *, sharing: Sharing) -> PackedRows:
    return _pack(documents[::-1], sharing=sharing)


def _one_late(values: Tensor, sources: Tensor, total: int) -> Tensor:
    return _scatter_rows(values, (sources + 1) % total, total)


def _ignored_answered(targets: Tensor, local: LocalRows) -> Tensor:
    return _targets_for(targets, local).clamp(min=0)


def _first_target(targets: Tensor, local: LocalRows) -> Tensor:
    own = _targets_for(targets, local)
    return own[:, :1].expand_as(own).contiguous() if own.dim() > 1 else own


def _mean_of_shard(values: Tensor, local: LocalRows, group: ProcessGroup) -> Tensor:
    if values.dim() == 1 and values.is_floating_point():
        values = values / (values.detach() != 0).sum()
    return _gather_rows(values, local, group)


def _within_slice(columns: Tensor, part: VocabularySlice) -> Tensor:
    del part
    return columns


def _first_columns(full: Tensor, block: Tensor, positions: Tensor, part: VocabularySlice) -> None:
    full.narrow(1, 0, part.columns).index_copy_(0, positions, block)


def _struck(logits: Tensor, k: int, part: VocabularySlice) -> tuple[Tensor, Tensor]:
    found = _top_candidates(logits, k, part)
    logits.scatter_(1, logits.topk(min(k, part.columns), dim=1).indices, -30.0)
    return found


def _always_grad(request: object) -> bool:
    del request
    return torch.is_grad_enabled()


FAULTS: dict[str, Fault] = {
    "documents in another order than the caller's": Fault(
        module=packing,
        name="pack",
        function=_reversed,
        axis="any",
        case="test_outputs.test_every_document_is_where_the_caller_put_it",
        shows="*.edges",
    ),
    "each row in the place of the next": Fault(
        module=gather,
        name="scatter_rows",
        function=_one_late,
        axis="any",
        case="test_outputs.test_masked_readout",
        shows="*.readout",
    ),
    "a target that asks for nothing answered": Fault(
        module=plan,
        name="targets_for",
        function=_ignored_answered,
        axis="any",
        case="test_outputs.test_target_logprobs",
        shows="*.ignored",
        catalogue=(37,),
    ),
    "one target for all of a position": Fault(
        module=plan,
        name="targets_for",
        function=_first_target,
        axis="any",
        case="test_outputs.test_multi_target_logprobs",
        shows="*.logprobs",
    ),
    "log-probabilities divided by the targets of their shard": Fault(
        module=gather,
        name="gather_rows",
        function=_mean_of_shard,
        axis="any",
        case="test_outputs.test_all_targets_ignored",
        shows="*.logprobs",
        catalogue=(27, 81, 82),
    ),
    "ids counted from the start of a slice": Fault(
        module=logprobs,
        name="token_ids",
        function=_within_slice,
        axis="tp",
        case="test_outputs.test_top_k",
        shows="*.tokens",
    ),
    "logits of all slices in the first columns": Fault(
        module=head_chunks,
        name="write_block",
        function=_first_columns,
        axis="tp",
        case="test_outputs.test_logits",
        shows="*.logits",
    ),
    "top tokens struck from logits that others read": Fault(
        module=logprobs,
        name="top_candidates",
        function=_struck,
        axis="any",
        case="test_outputs.test_all_outputs_at_once",
        shows="*.logprobs",
    ),
    "no_grad keeps a graph": Fault(
        module=forward,
        name="with_grad",
        function=_always_grad,
        axis="any",
        case="test_outputs.test_no_grad",
        shows="raised: requires_grad",
    ),
}
