"""The core attention of a layer, over the keys and values of all context-parallel ranks.

Each rank keeps the queries of its own rows. Keys and values come to it in one of two ways, gathered
(allgather.py) or round a ring (ring.py), and are attended to in blocks (blocks.py, masks.py).

Shapes: n rows of this rank, S of all; A query heads, G key-value heads, D head size, of this
tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from subjects.trainer import allgather, blocks, checks, masks, ring
from subjects.trainer.blocks import Asked
from subjects.trainer.masks import VisibleBlocks
from subjects.trainer.plan import LocalRows

Exchange = Literal["auto", "gather", "ring"]

GATHER_LIMIT = 2**26
"""Most keys and values of a layer, in numbers, that ``"auto"`` gathers: 128 MiB in bfloat16.

Below that one large message is quicker than many; above, memory decides. With 8 key-value heads of
128 it is 32,768 rows.
"""


ATTENTION_BLOCK = 512
"""Queries and keys of a block: a score of 4 bytes for each pair and head is a MiB a head."""


@dataclass(frozen=True)
class AttentionOptions:
    """How keys and values come to other ranks, and how many rows are attended to at a time.

    ``gather_limit`` are the numbers of keys and values of a layer that ``"auto"`` gathers at most.

    Raises:
        ValueError: an unknown way, blocks of no rows, or a limit that is no number.
    """

    exchange: Exchange = "auto"
    block: int = ATTENTION_BLOCK
    gather_limit: int = GATHER_LIMIT

    def __post_init__(self) -> None:
        checks.one_of("attention", self.exchange, get_args(Exchange))
        checks.count("attention_block", self.block, "at least one row", least=1)
        checks.count("gather_limit", self.gather_limit, "a number of keys and values", least=0)


@dataclass
class AttentionRows(PackedSeqParams):
    """What every layer's attention needs of one forward.

    It travels as Megatron's ``packed_seq_params``, which is handed through to the core attention
    untouched and is kept with a forward that is recomputed. ``seen`` are the blocks of each rank's
    shard that this rank's queries see something of, in rank order.
    """

    seen: tuple[VisibleBlocks, ...] = ()
    exchange: Exchange = "auto"
    gather_limit: int = GATHER_LIMIT
    cp_group_of_rows: ProcessGroup | None = None


def attention_rows(
    local: LocalRows, options: AttentionOptions, *, cp_rank: int, group: ProcessGroup
) -> AttentionRows:
    """Who sees whom in one forward."""
    queries = local.packed.take(local.rows)
    shards = [shard.to(local.rows.device) for shard in local.plan.shards]
    return AttentionRows(
        qkv_format="sbhd",
        seen=tuple(
            masks.visible_blocks(
                queries, local.packed.take(shard), remote=at != cp_rank, size=options.block
            )
            for at, shard in enumerate(shards)
        ),
        exchange=options.exchange,
        gather_limit=options.gather_limit,
        cp_group_of_rows=group,
    )


def choose(exchange: Exchange, *, rows: int, width: int, limit: int = GATHER_LIMIT) -> ModuleType:
    """The module that exchanges ``rows`` of keys and values, ``width`` numbers each.

    All ranks of a group know the same sizes, so all choose alike.
    """
    if exchange == "auto":
        exchange = "gather" if rows * width <= limit else "ring"
    return {"gather": allgather, "ring": ring}[exchange]


def width_of(keys_values: Tensor) -> int:
    """The numbers of one row of keys and values [n, 2, G, D], also where n is 0."""
    return keys_values.shape[1:].numel()


class RowAttention(torch.autograd.Function):
    """Query [n, A, D] and keys and values [n, 2, G, D] of this rank's rows -> [n, A, D].

    A collective of the context-parallel ranks, forward and backward, also where n is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys_values: Tensor, rows: AttentionRows, scale: float
    ) -> Tensor:
        """Attend to the keys of all ranks."""
        everyone = sum(len(shard.keys) for shard in rows.seen)
        ctx.exchange = choose(
            rows.exchange, rows=everyone, width=width_of(keys_values), limit=rows.gather_limit
        )
        ctx.rows, ctx.scale = rows, scale
        whole = ctx.exchange.forward(
            query, keys_values, rows.seen, rows.cp_group_of_rows, scale=scale
        )
        out: Tensor = whole.out.to(query.dtype)
        ctx.save_for_backward(query, keys_values, out, whole.highest, whole.total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Exchange keys and values again and bring their gradients to their owners."""
        query, keys_values, out, highest, total = ctx.saved_tensors
        products = blocks.row_products(gradient, out)
        asked = Asked(query, gradient, highest, total, products)
        d_query, d_keys_values = ctx.exchange.backward(
            asked, keys_values, ctx.rows.seen, ctx.rows.cp_group_of_rows, scale=ctx.scale
        )
        return d_query.to(query.dtype), d_keys_values.to(keys_values.dtype), None, None


class ContextParallelAttention(torch.nn.Module):
    """The core attention of a layer; Megatron's own refuses context parallelism on this path."""

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        *_: object,
        softmax_scale: float | None = None,
        **__: object,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
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
        if rows is None or not rows.seen or rows.cp_group_of_rows is None:
            raise ValueError(
                "the context-parallel core attention was called without AttentionRows; pass them "
                "to the decoder as packed_seq_params (attention_rows makes them)"
            )
        if attention_mask is not None:
            raise ValueError(
                "attention_mask was given; masks of packed rows come from AttentionRows alone"
            )
        n = len(rows.seen[0].queries)
        keys_values = torch.stack((key[:n, 0], value[:n, 0]), dim=1)
        out: Tensor = RowAttention.apply(  # type: ignore[no-untyped-call]
            query[:n, 0], keys_values, rows, self.scale
        )
        return torch.nn.functional.pad(out.flatten(1), (0, 0, 0, len(query) - n)).unsqueeze(1)
