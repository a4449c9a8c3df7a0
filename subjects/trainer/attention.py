"""Core attention over the keys and values of all context-parallel ranks.

Each rank keeps the queries of its own rows and fetches the keys and values of everyone's. Shapes:
n rows of this rank, S rows of all shards in shard order, A query heads, G key-value heads, D head
size; A and G are those of this tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from subjects.trainer import collectives
from subjects.trainer.packing import RowIds
from subjects.trainer.plan import LocalRows
from subjects.trainer.precision import working_dtype


@dataclass
class AttentionRows(PackedSeqParams):
    """What every layer's attention needs of one forward.

    It travels as Megatron's ``packed_seq_params``, which is handed through to the core attention
    untouched and is kept with a forward that is recomputed.
    """

    sizes: tuple[int, ...] = ()
    visible: Tensor | None = None
    cp_group_of_rows: ProcessGroup | None = None


def attention_rows(local: LocalRows, *, cp_rank: int, group: ProcessGroup) -> AttentionRows:
    """The shard sizes and the mask [n, S] of one forward."""
    shards = [shard.to(local.rows.device) for shard in local.plan.shards]
    queries = local.packed.take(local.rows)
    visible = [
        visible_keys(queries, local.packed.take(shard), remote=at != cp_rank)
        for at, shard in enumerate(shards)
    ]
    return AttentionRows(
        qkv_format="sbhd",
        sizes=tuple(local.plan.sizes),
        visible=torch.cat(visible, dim=1),
        cp_group_of_rows=group,
    )


def visible_keys(queries: RowIds, keys: RowIds, *, remote: bool) -> Tensor:
    """Which keys each query attends to, bool [n, keys]; ``remote`` keys lie on another rank."""
    return causal_mask(queries, keys) & document_mask(queries, keys, remote=remote)


def causal_mask(queries: RowIds, keys: RowIds) -> Tensor:
    """Keys at the query's own position or before it."""
    return keys.positions[None, :] <= queries.positions[:, None]


def document_mask(queries: RowIds, keys: RowIds, *, remote: bool) -> Tensor:  # noqa: ARG001
    """Keys on the query's own path through the prefix tree: its document, its shared prefixes.

    The rule is the same for keys of this rank and ``remote`` ones.
    """
    return (keys.enter[None, :] <= queries.enter[:, None]) & (
        queries.enter[:, None] < keys.leave[None, :]
    )


class ExchangeRows(torch.autograd.Function):
    """Rows [n, ...] of each rank to the rows [S, ...] of all; backward brings gradients home."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, sizes: tuple[int, ...], rank: int, group: ProcessGroup
    ) -> Tensor:
        """Gather the uneven shards in rank order."""
        ctx.sizes, ctx.rank, ctx.group = sizes, rank, group
        return collectives.all_gather_rows(local, list(sizes), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Every rank's queries used every rank's rows: sum, and keep the part of the owner."""
        return sum_to_owner(gradient, ctx.sizes, ctx.rank, ctx.group), None, None, None


def sum_to_owner(
    gradient: Tensor, sizes: tuple[int, ...], rank: int, group: ProcessGroup
) -> Tensor:
    """Sum gradients [S, ...] over the ranks and return the n rows that ``rank`` owns."""
    total = collectives.all_reduce(gradient.clone(), group)
    start = sum(sizes[:rank])
    return total[start : start + sizes[rank]]


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    """Softmax attention: query [n, A, D], key and value [S, G, D], visible [n, S] -> [n, A, D].

    Query head a reads key-value head a // (A / G). Scores and softmax are computed in the dtype of
    the run, but never below float32.
    """
    n, heads, size = query.shape
    groups = key.shape[1]
    grouped = query.view(n, groups, heads // groups, size)
    scores = torch.einsum("nghd,sgd->ghns", grouped, key) * scale
    scores = scores.to(working_dtype(query.dtype)).masked_fill(~visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    return torch.einsum("ghns,sgd->nghd", weights, value).reshape(n, heads, size)


class ContextParallelAttention(torch.nn.Module):
    """The core attention of a layer; Megatron's own refuses context parallelism on this path."""

    def __init__(
        self, config: Any, *_: object, softmax_scale: float | None = None, **__: object
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *_: object,
        packed_seq_params: AttentionRows | None = None,
        **__: object,
    ) -> Tensor:
        """Attend: query [p, 1, A, D], key and value [p, 1, G, D] -> [p, 1, A * D].

        p counts this rank's rows and its padding; padding neither asks nor is seen, and comes out
        as zeros.
        """
        rows = packed_seq_params
        if rows is None or rows.visible is None or rows.cp_group_of_rows is None:
            raise ValueError(
                "the context-parallel core attention was called without AttentionRows; pass them "
                "to the decoder as packed_seq_params (attention_rows makes them)"
            )
        if attention_mask is not None:
            raise ValueError(
                "attention_mask was given; masks of packed rows come from AttentionRows alone"
            )
        group = rows.cp_group_of_rows
        n = rows.visible.shape[0]
        keys_values = torch.stack((key[:n, 0], value[:n, 0]), dim=1)
        everyone: Tensor = ExchangeRows.apply(  # type: ignore[no-untyped-call]
            keys_values, rows.sizes, group.rank(), group
        )
        out = attend(
            query[:n, 0], everyone[:, 0], everyone[:, 1], rows.visible, scale=self.scale
        ).flatten(1)
        return torch.nn.functional.pad(out, (0, 0, 0, len(query) - n)).unsqueeze(1)
