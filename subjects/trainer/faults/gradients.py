"""Gradients that are lost on their way back, counted twice, or kept where they must not be."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import gather, head_gradients, heads, logprobs
from subjects.trainer.faults.fault import Fault
from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.plan import LocalRows
from subjects.trainer.rank import TrainerRank
from subjects.types import ForwardInput, ForwardOutput

_gather_rows = gather.gather_rows
_forward = TrainerRank.forward
_freeze = TrainerRank.freeze
_zero_gradients = TrainerRank.zero_gradients
_reduce_gradients = TrainerRank.reduce_gradients


def _no_way_back(values: Tensor, local: LocalRows, group: ProcessGroup) -> Tensor:
    with torch.no_grad():
        gathered = _gather_rows(values, local, group)
    # What lies behind keeps a gradient, of zero, so that backward runs.
    return gathered + 0 * values.sum() if values.is_floating_point() else gathered


def _share_of_all(rows: Tensor, group: ProcessGroup) -> Tensor:
    del group
    return rows


def _share_alone(hidden: Tensor, group: ProcessGroup) -> Tensor:
    if group.size() > 1:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=group
        )
    return hidden[:, 0]


def _first_columns(full: Tensor, positions: Tensor, part: VocabularySlice) -> Tensor:
    return full.narrow(1, 0, part.columns).index_select(0, positions)


def _not_added(gradient: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    del gradient, rows, columns, values


def _last_of_equals(gradient: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Of values for one element the last is added alone."""
    mine = columns >= 0
    at = (rows[:, None] * gradient.shape[1] + columns)[mine]
    flat = gradient.view(-1)
    flat[at] = flat[at] + values[mine]


def _forgetful(trainer: TrainerRank, request: ForwardInput) -> ForwardOutput:
    _zero_gradients(trainer)
    return _forward(trainer, request)


def _zero_for_frozen(trainer: TrainerRank, part: Any) -> None:
    _freeze(trainer, part)
    for parameter in trainer.model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def _norm_frozen_too(trainer: TrainerRank, part: Any) -> None:
    _freeze(trainer, part)
    trainer.model.decoder.final_layernorm.weight.requires_grad_(False)


def _kept(trainer: TrainerRank) -> None:
    trainer.reduced = None


def _again(trainer: TrainerRank) -> None:
    trainer.reduced = None
    _reduce_gradients(trainer)


FAULTS: dict[str, Fault] = {
    "gathered outputs without a way back": Fault(
        module=gather,
        name="gather_rows",
        function=_no_way_back,
        axis="any",
        case="test_gradients.test_nonlinear_loss_across_items",
        shows="grad.model.layers.*",
        catalogue=(18,),
    ),
    "gradient of replicated states counted by every tp rank": Fault(
        module=heads,
        name="replicated_use",
        function=_share_of_all,
        axis="tp",
        case="test_gradients.test_masked_readout_gradients",
        shows="grad.model.*",
        catalogue=(22,),
    ),
    "share of the head's gradient taken for the whole": Fault(
        module=heads,
        name="gather_hidden",
        function=_share_alone,
        axis="tp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*",
        catalogue=(20, 21),
    ),
    "gradient of logits read from the first columns": Fault(
        module=head_gradients,
        name="read_block",
        function=_first_columns,
        axis="tp",
        case="test_gradients.test_logits_gradients",
        shows="grad.lm_head.weight",
    ),
    "logit that was picked left out of the gradient": Fault(
        module=logprobs,
        name="add_at",
        function=_not_added,
        axis="any",
        case="test_gradients.test_top_k_value_gradients",
        shows="grad.lm_head.weight",
        catalogue=(19, 92),
    ),
    "gradients of equal documents written over one another": Fault(
        module=logprobs,
        name="add_at",
        function=_last_of_equals,
        axis="any",
        case="test_gradients.test_equal_documents_with_equal_targets",
        shows="grad.lm_head.weight",
        params={"sharing": "full"},
        topology=("cp2", "tp2xcp2"),
    ),
    "gradients of equal targets written over one another": Fault(
        module=logprobs,
        name="add_at",
        function=_last_of_equals,
        axis="any",
        case="test_gradients.test_a_token_asked_for_twice",
        shows="grad.lm_head.weight",
        topology=("cp2", "tp2xcp2"),
    ),
    "a forward forgets earlier gradients": Fault(
        module=TrainerRank,
        name="forward",
        function=_forgetful,
        axis="any",
        case="test_gradients.test_gradients_accumulate",
        shows="grad.*",
    ),
    "a frozen part has gradients of zero": Fault(
        module=TrainerRank,
        name="freeze",
        function=_zero_for_frozen,
        axis="any",
        case="test_gradients.test_frozen_decoder",
        shows="grad.model.*",
    ),
    "freezing the head freezes the norm below": Fault(
        module=TrainerRank,
        name="freeze",
        function=_norm_frozen_too,
        axis="any",
        case="test_gradients.test_frozen_head",
        shows="grad.model.norm.weight",
    ),
    "zeroing keeps what was reduced": Fault(
        module=TrainerRank,
        name="zero_gradients",
        function=_kept,
        axis="any",
        case="test_gradients.test_gradients_after_zeroing",
        shows="step1.*",
    ),
    "gradients reduced again by every reading": Fault(
        module=TrainerRank,
        name="reduce_gradients",
        function=_again,
        axis="cp",
        case="test_gradients.test_gradients_are_reduced_once",
        shows="again.*",
    ),
}
