"""Attention with the keys and values of all context-parallel ranks gathered on each.

Fewer and larger messages than a ring, and S rows of keys and values in memory while a layer is at
work. They are gathered again in backward rather than kept, so a layer leaves only its own rows.

Shapes: n rows of this rank, S of all; A query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import blocks, collectives
from subjects.trainer.blocks import Asked, Gradients, Partial
from subjects.trainer.masks import VisibleBlocks
from subjects.trainer.precision import working_dtype


def forward(
    query: Tensor,
    keys_values: Tensor,
    seen: tuple[VisibleBlocks, ...],
    group: ProcessGroup,
    *,
    scale: float,
) -> Partial:
    """Attention of query [n, A, D] over all ranks' ``keys_values`` [n, 2, G, D]."""
    result = blocks.nothing(query)
    shards = everyones(keys_values, seen, group).split([len(shard.keys) for shard in seen])
    for shard, blocks_of_shard in zip(shards, seen, strict=True):
        part = blocks.attend(query, shard[:, 0], shard[:, 1], blocks_of_shard, scale=scale)
        result = blocks.merge(result, part)
    return result


def backward(
    asked: Asked,
    keys_values: Tensor,
    seen: tuple[VisibleBlocks, ...],
    group: ProcessGroup,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of query [n, A, D] and of this rank's ``keys_values`` [n, 2, G, D]."""
    work = working_dtype(keys_values.dtype)
    every = everyones(keys_values, seen, group)
    d_query, d_every = (
        torch.zeros_like(asked.query, dtype=work),
        torch.zeros_like(every, dtype=work),
    )
    start = 0
    for shard in seen:
        rows = slice(start, start + len(shard.keys))
        start = rows.stop
        into = Gradients(d_query, d_every[rows, 0], d_every[rows, 1])
        blocks.add_gradients(into, asked, every[rows, 0], every[rows, 1], shard, scale=scale)
    return d_query, sum_to_owner(d_every, [len(shard.keys) for shard in seen], group)


def everyones(keys_values: Tensor, seen: tuple[VisibleBlocks, ...], group: ProcessGroup) -> Tensor:
    """The rows [S, ...] of all ranks, in rank order, of this rank's [n, ...]."""
    return collectives.all_gather_rows(keys_values, [len(shard.keys) for shard in seen], group)


def sum_to_owner(gradient: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    """Sum gradients [S, ...] over the ranks, whose queries all used all rows; return the own n."""
    total = collectives.all_reduce(gradient, group)
    start = sum(sizes[: group.rank()])
    return total[start : start + sizes[group.rank()]]
