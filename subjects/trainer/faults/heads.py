"""The head: vocabulary-parallel softmax, entropy, top tokens, chunks, and what stays local."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import (
    admission,
    architecture,
    build,
    collectives,
    head_chunks,
    head_gradients,
    head_rows,
    heads,
    logprobs,
    plan,
)
from subjects.trainer.architecture import Architecture
from subjects.trainer.faults.fault import Fault
from subjects.trainer.head_gradients import Gradients
from subjects.trainer.head_rows import Asked, Chunk, HeadWeights, Place
from subjects.trainer.logprobs import Moments, VocabularySlice
from subjects.trainer.plan import LocalRows
from subjects.trainer.reductions import Groups
from subjects.types import IGNORED, ForwardInput, ForwardOutput, LocalLogits

_shared_sums = logprobs.shared_sums
_descending = logprobs.descending
_lowest_first = logprobs.lowest_first
_row_ranges = head_rows.row_ranges
_chunk_logits = head_rows.chunk_logits
_targets_for = plan.targets_for
_local_part = heads.local_part
_read_block = head_gradients.read_block
_add_product = head_gradients.add_product
_like = Gradients.like
_output_bytes = admission.output_bytes
_least = admission.least
_outputs = heads.outputs
_read_architecture = architecture.read_architecture


def _sums_of_slice(own: Moments, highest: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    del group
    below = own.highest - highest
    scale = below.exp()
    weighted = own.weighted
    if len(weighted):
        weighted = (weighted + own.total * below) * scale
    return own.total * scale, weighted


def _weighted_of_slice(own: Moments, highest: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    return _shared_sums(own, highest, group)[0], _sums_of_slice(own, highest, group)[1]


def _counted_by_all(own: Moments, highest: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    total, weighted = _shared_sums(own, highest, group)
    return total * group.size(), weighted * group.size()


def _own_maximum(highest: Tensor, group: ProcessGroup) -> Tensor:
    del group
    return highest


def _no_entropy_gradient(entropy: Tensor | None, gradient: Tensor | None, at: slice) -> None:
    del entropy, gradient, at


def _owners_share(gradient: Tensor, columns: Tensor) -> Tensor:
    return gradient.where(columns >= 0, 0.0).sum(dim=1)


def _with_padding(head: HeadWeights, part: VocabularySlice) -> HeadWeights:
    del part
    return head


def _candidates_of_slice(
    value: Tensor, token: Tensor, k: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    del group
    return value[:, :k], token[:, :k]


def _last_of_equals_first(values: Tensor) -> Tensor:
    return values.shape[1] - 1 - _descending(values.flip(1))


def _highest_id_first(values: Tensor, k: int) -> Tensor:
    return values.shape[1] - 1 - _lowest_first(values.flip(1), k)


def _full_chunks(rows: int, size: int) -> list[tuple[int, int]]:
    ranges = _row_ranges(rows, size)
    return [(start, stop) for start, stop in ranges if stop - start == size] or ranges[:1]


def _first_rows_again(hidden: Tensor, chunk: Chunk) -> Tensor:
    return hidden[: chunk.stop - chunk.start]


def _last_chunk_alone(total: Tensor, left: Tensor, right: Tensor) -> None:
    total.copy_(left @ right)


def _rounded_sum(total: Tensor, left: Tensor, right: Tensor) -> None:
    _add_product(total, left, right)
    total.copy_(total.to(torch.float32 if total.dtype == torch.float64 else torch.bfloat16))


def _adapter_forgotten(hidden: Tensor, head: HeadWeights, part: VocabularySlice) -> Tensor:
    # A task of the engine is at work in backward alone.
    if torch._C._current_graph_task_id() != -1:
        head = HeadWeights(head.weight)
    return _chunk_logits(hidden, head, part)


def _mean_of_rows(
    gradients: Gradients, hidden: Tensor, head: HeadWeights
) -> tuple[Tensor | None, ...]:
    found = _like(gradients, hidden, head)
    rows = torch.tensor(len(hidden), dtype=hidden.dtype, device=hidden.device)
    return tuple(None if value is None else value / rows for value in found)


def _summed_over_tp(full: Tensor, groups: Groups) -> None:
    collectives.all_reduce(full, groups.tp)


def _counted_twice(full: Tensor, positions: Tensor, part: VocabularySlice) -> Tensor:
    return 2 * _read_block(full, positions, part)


def _rolled(targets: Tensor, local: LocalRows) -> Tensor:
    return _targets_for(targets, local).roll(-1, 0)


def _rolled_in_plan_order(targets: Tensor, local: LocalRows) -> Tensor:
    own = _targets_for(targets, local)
    order = local.source_rows.argsort(stable=True)
    own[order] = own[order].roll(-1, 0)
    return own


def _last_left_out(targets: Tensor, local: LocalRows) -> Tensor:
    own = _targets_for(targets, local)
    own[-1:] = IGNORED
    return own


def _from_the_first_column(values: Tensor, place: Place) -> LocalLogits:
    return _local_part(values, place)._replace(first_token=0)


def _in_plan_order(values: Tensor, place: Place) -> LocalLogits:
    order = place.local.source_rows.argsort(stable=True)
    return _local_part(values, place)._replace(positions=place.local.sources[order])


def _with_targets_alone(asked: Asked) -> bool:
    return asked.targets is not None


def _whole(checkpoint: Path, *, layers: int | None = None) -> Architecture:
    del layers
    return _read_architecture(checkpoint)


def _admitted(request: ForwardInput, head: HeadWeights, place: Place, *, limit: int | None) -> None:
    del request, head, place, limit


def _own_limit(limit: int, place: Place, device: torch.device) -> int:
    del place, device
    return limit


def _least_over_cp(limit: int, place: Place, device: torch.device) -> int:
    groups = place.groups
    return _least(limit, replace(place, groups=replace(groups, tp=groups.cp)), device)


def _answers_flattened(
    request: ForwardInput, hidden: Tensor, head: HeadWeights, place: Place
) -> ForwardOutput:
    found = _outputs(request, hidden, head, place)
    answers = found.target_logprobs
    return found if answers is None else replace(found, target_logprobs=answers.flatten(1))


def _own_outputs_alone(request: ForwardInput, found: admission.Sizes) -> Mapping[str, int]:
    return _output_bytes(request, replace(found, total=found.answered))


FAULTS: dict[str, Fault] = {
    "normalizer of one slice of the vocabulary": Fault(
        module=logprobs,
        name="shared_sums",
        function=_sums_of_slice,
        axis="tp",
        case="test_outputs.test_target_logprobs",
        shows="*.logprobs",
        catalogue=(91,),
    ),
    "whole logits given to every slice's normalizer": Fault(
        module=logprobs,
        name="shared_sums",
        function=_counted_by_all,
        axis="tp",
        case="test_heads.test_consumers_of_one_normalizer",
        shows="*.logprobs",
        catalogue=(92,),
    ),
    "maximum of one slice of the vocabulary": Fault(
        module=logprobs,
        name="shared_maximum",
        function=_own_maximum,
        axis="tp",
        case="test_heads.test_entropy",
        shows="*.entropy",
        catalogue=(61,),
    ),
    "entropy of one slice of the vocabulary": Fault(
        module=logprobs,
        name="shared_sums",
        function=_weighted_of_slice,
        axis="tp",
        case="test_heads.test_entropy",
        shows="*.entropy",
        catalogue=(91,),
    ),
    "entropy without a gradient": Fault(
        module=head_gradients,
        name="entropy_gradient",
        function=_no_entropy_gradient,
        axis="any",
        case="test_heads.test_entropy",
        shows="grad.*",
        catalogue=(93,),
    ),
    "entropy's gradient lost beside another's": Fault(
        module=head_gradients,
        name="entropy_gradient",
        function=_no_entropy_gradient,
        axis="any",
        case="test_heads.test_consumers_of_one_normalizer",
        shows="grad.lm_head.weight",
        catalogue=(93,),
    ),
    "only a token's owner has a share in its normalizer": Fault(
        module=head_gradients,
        name="share_of_row",
        function=_owners_share,
        axis="tp",
        case="test_heads.test_consumers_of_one_normalizer",
        shows="grad.lm_head.weight",
        catalogue=(19,),
    ),
    "padding of the vocabulary in the normalizer": Fault(
        module=head_rows,
        name="real_columns",
        function=_with_padding,
        axis="tp",
        case="test_heads.test_entropy",
        shows="*.entropy",
    ),
    "top tokens of one slice of the vocabulary": Fault(
        module=logprobs,
        name="merge_candidates",
        function=_candidates_of_slice,
        axis="tp",
        case="test_outputs.test_top_k",
        shows="*.tokens",
    ),
    "of equal logits the higher id first": Fault(
        module=logprobs,
        name="lowest_first",
        function=_highest_id_first,
        axis="any",
        case="test_heads.test_equal_logits_in_the_order_of_their_ids",
        shows="*.tokens",
    ),
    "of equal logits the later slice's first": Fault(
        module=logprobs,
        name="descending",
        function=_last_of_equals_first,
        axis="tp",
        case="test_heads.test_equal_logits_in_the_order_of_their_ids",
        shows="*.tokens",
    ),
    "last ragged chunk dropped": Fault(
        module=head_rows,
        name="row_ranges",
        function=_full_chunks,
        axis="any",
        case="test_heads.test_chunks_of_any_size",
        shows="*.logits_differ",
    ),
    "chunks computed again from the first rows": Fault(
        module=head_rows,
        name="rows_again",
        function=_first_rows_again,
        axis="any",
        case="test_heads.test_chunks_of_any_size",
        shows="differ.lm_head.weight",
    ),
    "head gradient of the last chunk alone": Fault(
        module=head_gradients,
        name="add_product",
        function=_last_chunk_alone,
        axis="any",
        case="test_heads.test_chunks_of_any_size",
        shows="differ.lm_head.weight",
    ),
    "sums over chunks rounded to a lower precision": Fault(
        module=head_gradients,
        name="add_product",
        function=_rounded_sum,
        axis="any",
        case="test_heads.test_consumers_of_one_normalizer",
        shows="grad.lm_head.weight",
        catalogue=(108,),
    ),
    "a slot's head left out where a chunk is computed again": Fault(
        module=head_rows,
        name="chunk_logits",
        function=_adapter_forgotten,
        axis="any",
        case="test_slots.test_gradients_of_slots",
        shows="grad.*lm_head*",
        catalogue=(95,),
    ),
    "gradient of the head divided by the rows of its shard": Fault(
        module=Gradients,
        name="like",
        function=_mean_of_rows,
        axis="any",
        case="test_heads.test_empty_shard_of_the_head",
        shows="grad.*",
        catalogue=(27, 81),
    ),
    "full logits summed over the vocabulary alone": Fault(
        module=head_chunks,
        name="sum_blocks",
        function=_summed_over_tp,
        axis="cp",
        case="test_outputs.test_logits",
        shows="*.logits",
    ),
    "gradient of full logits counted twice": Fault(
        module=head_gradients,
        name="read_block",
        function=_counted_twice,
        axis="any",
        case="test_gradients.test_logits_gradients",
        shows="grad.*",
        catalogue=(16,),
    ),
    "labels rolled inside the shard": Fault(
        module=plan,
        name="targets_for",
        function=_rolled,
        axis="any",
        case="test_outputs.test_target_logprobs",
        shows="*.logprobs",
        catalogue=(67,),
    ),
    "labels rolled in the order of the plan": Fault(
        module=plan,
        name="targets_for",
        function=_rolled_in_plan_order,
        axis="any",
        case="test_outputs.test_targets_pick_from_their_own_logits",
        shows="*.logprob_off_its_own_logits",
        catalogue=(66,),
    ),
    "last position of a shard without a target": Fault(
        module=plan,
        name="targets_for",
        function=_last_left_out,
        axis="any",
        case="test_outputs.test_multi_target_logprobs",
        shows="*.logprobs",
        catalogue=(65, 68),
    ),
    "local logits said to begin at the first token": Fault(
        module=heads,
        name="local_part",
        function=_from_the_first_column,
        axis="tp",
        case="test_heads.test_local_logits",
        shows="*.loss",
    ),
    "local logits told in the order of the plan": Fault(
        module=heads,
        name="local_part",
        function=_in_plan_order,
        axis="cp",
        case="test_heads.test_local_logits",
        shows="*.logits",
    ),
    "outputs of the head come with targets alone": Fault(
        module=heads,
        name="found_by_head",
        function=_with_targets_alone,
        axis="any",
        case="test_combinations.test_combinations",
        shows="*.present",
    ),
    "all layers run where the first ones are asked for": Fault(
        module=build,
        name="read_architecture",
        function=_whole,
        axis="any",
        case="test_weights.test_the_first_layers_alone",
        shows="*.hidden_states",
    ),
    "nothing is refused for its memory": Fault(
        module=admission,
        name="admit",
        function=_admitted,
        axis="any",
        case="test_heads.test_what_does_not_fit_is_refused",
        shows="refused",
    ),
    "each rank goes by its own memory": Fault(
        module=admission,
        name="least",
        function=_own_limit,
        axis="cp",
        case="test_heads.test_the_least_memory_is_told_to_all",
        shows="allowed",
    ),
    "the least memory of the cp ranks alone": Fault(
        module=admission,
        name="least",
        function=_least_over_cp,
        axis="tp",
        case="test_heads.test_the_least_memory_is_told_to_all",
        shows="allowed",
    ),
    "answers to targets flattened by position": Fault(
        module=heads,
        name="outputs",
        function=_answers_flattened,
        axis="any",
        case="test_outputs.test_multi_target_logprobs",
        shows="second.logprobs",
    ),
    "gathered outputs counted as if they stayed on their shard": Fault(
        module=admission,
        name="output_bytes",
        function=_own_outputs_alone,
        axis="cp",
        case="test_heads.test_what_does_not_fit_is_refused",
        shows="refused",
    ),
}
