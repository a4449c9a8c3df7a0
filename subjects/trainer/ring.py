"""Attention with keys and values that travel round the ring of context-parallel ranks.

After step s a rank has seen the shards of itself and of the s ranks before it, and holds one of
them (Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers", 2023). In backward the
gradient of a shard travels with it, is added to on every rank, and goes one step further than the
shard does, which brings it home. A message is under way while the rank works on what it holds.

Shapes: n rows of this rank, k of a shard; A query heads, G key-value heads, D head size. Shards may
be of any sizes, also empty.
"""

from __future__ import annotations

from collections.abc import Callable

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
    result, held = blocks.nothing(query), keys_values
    for step in range(steps(group)):
        coming = pass_on(held, seen, group, step) if step + 1 < steps(group) else None
        shard = seen[owner(group, step)]
        part = blocks.attend(query, held[:, 0], held[:, 1], shard, scale=scale)
        result = blocks.merge(result, part)
        held = held if coming is None else coming()
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
    held, d_query = keys_values, torch.zeros_like(asked.query, dtype=work)
    d_held = torch.zeros_like(keys_values, dtype=work)
    for step in range(steps(group)):
        coming = pass_on(held, seen, group, step) if step + 1 < steps(group) else None
        into = Gradients(d_query, d_held[:, 0], d_held[:, 1])
        shard = seen[owner(group, step)]
        blocks.add_gradients(into, asked, held[:, 0], held[:, 1], shard, scale=scale)
        if coming is not None:
            held, d_held = coming(), pass_on(d_held, seen, group, step)()
    return d_query, bring_home(d_held, seen, group)


def steps(group: ProcessGroup) -> int:
    """How many shards a rank works on: everyone's."""
    return group.size()


def owner(group: ProcessGroup, step: int) -> int:
    """Whose shard this rank holds in ``step``: its own in step 0, then that of the rank before."""
    return (group.rank() - step) % group.size()


def pass_on(
    held: Tensor, seen: tuple[VisibleBlocks, ...], group: ProcessGroup, step: int
) -> Callable[[], Tensor]:
    """Send what is held in ``step`` to the next rank; the result waits for what takes its place."""
    rows = len(seen[owner(group, step + 1)].keys)
    return collectives.rotate(held, rows, group)


def bring_home(d_held: Tensor, seen: tuple[VisibleBlocks, ...], group: ProcessGroup) -> Tensor:
    """The last step: the next rank owns the shard whose gradient [k, ...] this one has completed.

    Returns the gradient [n, ...] of this rank's own.
    """
    return pass_on(d_held, seen, group, steps(group) - 1)()
