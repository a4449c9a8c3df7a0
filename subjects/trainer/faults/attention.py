"""Attention, its exchange of keys and values, packing and plans: what is lost, or seen wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import allgather, attention, blocks, collectives, masks, packing, plan, ring
from subjects.trainer.attention import AttentionRows, ContextParallelAttention
from subjects.trainer.blocks import Partial
from subjects.trainer.faults.fault import Fault
from subjects.trainer.masks import VisibleBlocks
from subjects.trainer.packing import PackedRows, RowIds, Sharing
from subjects.trainer.plan import LocalRows, Plan

Seen = tuple[VisibleBlocks, ...]

_attend = blocks.attend
_by_group = blocks.by_group
_masked_scores = blocks.masked_scores
_visible_blocks = masks.visible_blocks
_document_mask = masks.document_mask
_ring_forward = ring.forward
_ring_backward = ring.backward
_pack = packing.pack
_local_rows = plan.local_rows
_everyones = allgather.everyones
_sum_to_owner = allgather.sum_to_owner
_core_attention = ContextParallelAttention.forward


def _own_shard_alone(queries: RowIds, keys: RowIds, *, remote: bool, size: int) -> VisibleBlocks:
    seen = _visible_blocks(queries, keys, remote=remote, size=size)
    return replace(seen, blocks=()) if remote else seen


def _last_step_left_out(
    query: Tensor, keys_values: Tensor, seen: Seen, group: ProcessGroup, *, scale: float
) -> Partial:
    last = ring.owner(group, group.size() - 1)
    blind = tuple(replace(one, blocks=()) if at == last else one for at, one in enumerate(seen))
    return _ring_forward(query, keys_values, blind, group, scale=scale)


def _own_shard_twice(
    query: Tensor, keys_values: Tensor, seen: Seen, group: ProcessGroup, *, scale: float
) -> Partial:
    once = _ring_forward(query, keys_values, seen, group, scale=scale)
    own = seen[group.rank()]
    again = _attend(query, keys_values[:, 0], keys_values[:, 1], own, scale=scale)
    return blocks.merge(once, again)


def _merged_unscaled(one: Partial, other: Partial) -> Partial:
    """Each partial counts alike, whatever share of the weights it has."""
    highest = torch.maximum(one.highest, other.highest)
    counts = [(part.total > 0).to(part.out.dtype)[..., None] for part in (one, other)]
    out = (counts[0] * one.out + counts[1] * other.out) / (counts[0] + counts[1]).clamp(min=1)
    return Partial(out, highest, one.total + other.total)


def _merged_by_exponentials(one: Partial, other: Partial) -> Partial:
    mine, theirs = one.lse.exp(), other.lse.exp()
    total = mine + theirs
    out = (mine[..., None] * one.out + theirs[..., None] * other.out) / total[..., None]
    lse = total.log()
    return Partial(out, lse, torch.ones_like(lse))


def _rounded_to(dtype: torch.dtype) -> Callable[..., Partial]:
    def attend(*args: Any, **kwargs: Any) -> Partial:
        part = _attend(*args, **kwargs)
        return part._replace(out=part.out.to(dtype).to(part.out.dtype))

    return attend


def _query_gradient_halved(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    d_query, d_keys_values = _ring_backward(*args, **kwargs)
    return d_query / 2, d_keys_values


def _left_with_the_rank_before(d_held: Tensor, seen: Seen, group: ProcessGroup) -> Tensor:
    """As many rows as are wanted, so that nothing but the numbers is wrong."""
    rows = len(seen[group.rank()].keys)
    filled = d_held.new_zeros((max(rows, len(d_held)), *d_held.shape[1:]))
    filled[: len(d_held)] = d_held
    return filled[:rows]


def _along_the_heads(keys_values: Tensor, seen: Seen, group: ProcessGroup) -> Tensor:
    """Rows and heads change places, and the shape is right again."""
    everyone = _everyones(keys_values, seen, group)
    return everyone.transpose(0, 2).reshape(everyone.shape)


def _not_summed(gradient: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    own: Tensor = gradient.split(sizes)[group.rank()]
    return own


def _averaged(gradient: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    return _sum_to_owner(gradient, sizes, group) / group.size()


def _padding_left_in(value: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    """A padded gather, read by the offsets of shards without padding."""
    padded = value.new_zeros((max(sizes), *value.shape[1:]))
    padded[: len(value)] = value
    return _all_gather_rows(padded, [max(sizes)] * len(sizes), group)[: sum(sizes)]


_all_gather_rows = collectives.all_gather_rows


def _width_of_own_rows(keys_values: Tensor) -> int:
    return keys_values[:1].numel()


def _no_row_products(gradient: Tensor, out: Tensor) -> Tensor:  # noqa: ARG001
    return torch.zeros_like(out[..., 0])


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _unscaled(query: Tensor, key: Tensor, mask: Tensor, *, scale: float) -> Tensor:  # noqa: ARG001
    return _masked_scores(query, key, mask, scale=1.0)


def _interleaved_heads(rows: Tensor, groups: int) -> Tensor:
    heads = torch.arange(rows.shape[1], device=rows.device).view(-1, groups).T.flatten()
    return _by_group(rows[:, heads], groups)


def _not_itself(queries: RowIds, keys: RowIds, *, remote: bool) -> Tensor:
    itself = queries.enter[:, None] == keys.enter[None, :]
    return _document_mask(queries, keys, remote=remote) & (
        ~itself | (queries.positions == 0)[:, None]
    )


def _second_layer_unmasked(
    module: Any, *args: Any, packed_seq_params: AttentionRows, **kwargs: Any
) -> Tensor:
    rows = packed_seq_params
    if module.layer_number == 2:
        causal = [
            _visible_blocks(_one_chain(one.queries), _one_chain(one.keys), remote=False, size=512)
            for one in rows.seen
        ]
        rows = replace(rows, seen=tuple(causal))
    return _core_attention(module, *args, packed_seq_params=rows, **kwargs)


def _one_chain(ids: RowIds) -> RowIds:
    """All rows in one document, in the order of their positions."""
    end = torch.full_like(ids.positions, 2**40)
    return RowIds(positions=ids.positions, enter=ids.positions, leave=end)


def _one_level(documents: Sequence[Tensor], *, sharing: Sharing) -> PackedRows:
    """Rows between the first branch and the last are seen by their own run alone."""
    packed = _pack(documents, sharing=sharing)
    leave, positions = packed.leave.tolist(), packed.positions.tolist()
    starts = [
        row
        for row in range(len(leave))
        if row == 0 or leave[row] != leave[row - 1] or positions[row] != positions[row - 1] + 1
    ]
    found = list(leave)
    for start, end in pairwise([*starts, len(leave)]):
        if positions[start] > 0 and leave[start] != end:
            found[start:end] = [end] * (end - start)
    return replace(packed, leave=torch.tensor(found))


def _one_document_a_row(packed: PackedRows, plan: Plan, *, cp_rank: int, tp: int) -> LocalRows:
    local = _local_rows(packed, plan, cp_rank=cp_rank, tp=tp)
    rows = local.source_rows.tolist()
    first = [at for at, row in enumerate(rows) if row not in rows[:at]]
    return replace(local, sources=local.sources[first], source_rows=local.source_rows[first])


def _zigzag_undone(packed: PackedRows, plan: Plan, *, cp_rank: int, tp: int) -> LocalRows:
    """Rows put back as if the second half of each shard had come in reverse."""
    local = _local_rows(packed, plan, cp_rank=cp_rank, tp=tp)
    half = len(local.source_rows) // 2
    order = torch.cat((local.source_rows[:half], local.source_rows[half:].flip(0)))
    return replace(local, source_rows=order)


_EXCHANGES = "test_attention.test_exchanges"
_RING = {"attention": "ring"}
_GATHER = {"attention": "gather"}


FAULTS: dict[str, Fault] = {
    "each rank attends to its own shard alone": Fault(
        module=masks,
        name="visible_blocks",
        function=_own_shard_alone,
        axis="cp",
        case=_EXCHANGES,
        shows="*.hidden_states",
        catalogue=(40,),
        params=_RING,
    ),
    "last step of the ring left out": Fault(
        module=ring,
        name="forward",
        function=_last_step_left_out,
        axis="cp",
        case=_EXCHANGES,
        shows="*.hidden_states",
        params=_RING,
        topology="cp4",
    ),
    "own shard counted twice in the ring": Fault(
        module=ring,
        name="forward",
        function=_own_shard_twice,
        axis="cp",
        case=_EXCHANGES,
        shows="*.hidden_states",
        params=_RING,
    ),
    "partials merged without their log-sum-exp": Fault(
        module=blocks,
        name="merge",
        function=_merged_unscaled,
        axis="any",
        case=_EXCHANGES,
        shows="*.hidden_states",
        params=_RING,
    ),
    "partials merged by exp of their log-sum-exp": Fault(
        module=blocks,
        name="merge",
        function=_merged_by_exponentials,
        axis="any",
        case="test_attention.test_large_logits",
        shows="*.hidden_states",
        catalogue=(61,),
        params=_RING,
    ),
    "partials rounded to bfloat16 before they are merged": Fault(
        module=blocks,
        name="attend",
        function=_rounded_to(torch.bfloat16),
        axis="any",
        case=_EXCHANGES,
        shows="*.hidden_states",
        catalogue=(62,),
        params=_RING,
    ),
    "partials rounded to float32 before they are merged": Fault(
        module=blocks,
        name="attend",
        function=_rounded_to(torch.float32),
        axis="any",
        case=_EXCHANGES,
        shows="*.hidden_states",
        catalogue=(62,),
        params=_GATHER,
    ),
    "query gradient of the ring halved": Fault(
        module=ring,
        name="backward",
        function=_query_gradient_halved,
        axis="cp",
        case=_EXCHANGES,
        shows="grad.model.layers.*.q_proj.weight",
        params=_RING,
    ),
    "key gradients left with the rank before their owner": Fault(
        module=ring,
        name="bring_home",
        function=_left_with_the_rank_before,
        axis="cp",
        case=_EXCHANGES,
        shows="grad.model.layers.*.k_proj.weight",
        params=_RING,
    ),
    "keys and values gathered along the heads": Fault(
        module=allgather,
        name="everyones",
        function=_along_the_heads,
        axis="cp",
        case=_EXCHANGES,
        shows="*.hidden_states",
        catalogue=(44,),
        params=_GATHER,
    ),
    "key gradients not summed over cp": Fault(
        module=allgather,
        name="sum_to_owner",
        function=_not_summed,
        axis="cp",
        case=_EXCHANGES,
        shows="grad.model.layers.*.k_proj.weight",
        catalogue=(17, 26, 63),
        params=_GATHER,
    ),
    "key gradients averaged over cp": Fault(
        module=allgather,
        name="sum_to_owner",
        function=_averaged,
        axis="cp",
        case=_EXCHANGES,
        shows="grad.model.layers.*.v_proj.weight",
        catalogue=(16,),
        params=_GATHER,
    ),
    "padded gather read without its padding": Fault(
        module=collectives,
        name="all_gather_rows",
        function=_padding_left_in,
        axis="cp",
        case=_EXCHANGES,
        shows="*.hidden_states",
        catalogue=(70, 75, 84),
        params=_GATHER,
        topology="cp4",
    ),
    "a rank without rows gathers where others take the ring": Fault(
        module=attention,
        name="width_of",
        function=_width_of_own_rows,
        axis="cp",
        case="test_attention.test_empty_shard_in_a_ring",
        shows="raised: differ at collective",
        params={"attention": "auto"},
    ),
    "backward of attention without the products of rows": Fault(
        module=blocks,
        name="row_products",
        function=_no_row_products,
        axis="any",
        case=_EXCHANGES,
        shows="grad.model.layers.*.k_proj.weight",
        params=_RING,
    ),
    "a query that sees nothing of a shard divides by zero": Fault(
        module=blocks,
        name="positive",
        function=_as_it_is,
        axis="any",
        case="test_attention.test_one_row_a_shard",
        shows="*.hidden_states",
        catalogue=(81, 82),
    ),
    "a query that sees nothing of a shard subtracts infinity": Fault(
        module=blocks,
        name="finite",
        function=_as_it_is,
        axis="any",
        case="test_attention.test_one_row_a_shard",
        shows="*.hidden_states",
        catalogue=(61, 81),
    ),
    "scale of scores left out": Fault(
        module=blocks,
        name="masked_scores",
        function=_unscaled,
        axis="any",
        case=_EXCHANGES,
        shows="*.hidden_states",
        catalogue=(110,),
        params=_RING,
    ),
    "query heads read another head's keys": Fault(
        module=blocks,
        name="by_group",
        function=_interleaved_heads,
        axis="any",
        case=_EXCHANGES,
        shows="*.hidden_states",
        params=_GATHER,
    ),
    "a query does not see itself": Fault(
        module=masks,
        name="document_mask",
        function=_not_itself,
        axis="any",
        case=_EXCHANGES,
        shows="*.hidden_states",
        params=_GATHER,
    ),
    "document mask dropped in the second layer": Fault(
        module=ContextParallelAttention,
        name="forward",
        function=_second_layer_unmasked,
        axis="any",
        case="test_outputs.test_documents_do_not_see_each_other",
        shows="*.leak_of_document_*",
        catalogue=(46,),
    ),
    "prefix tree of one level": Fault(
        module=packing,
        name="pack",
        function=_one_level,
        axis="any",
        case="test_attention.test_deep_prefix_trees",
        shows="*.hidden_states",
        catalogue=(109,),
    ),
    "a shared row answers one document alone": Fault(
        module=plan,
        name="local_rows",
        function=_one_document_a_row,
        axis="any",
        case="test_attention.test_deep_prefix_trees",
        shows="*.logprobs",
        catalogue=(109,),
    ),
    "contiguous shards put back as zigzag ones": Fault(
        module=plan,
        name="local_rows",
        function=_zigzag_undone,
        axis="any",
        case="test_outputs.test_every_document_is_where_the_caller_put_it",
        shows="*.edges",
        catalogue=(43,),
    ),
}
