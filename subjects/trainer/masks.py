"""Who sees whom, block by block: no mask is ever larger than one block of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subjects.trainer.packing import RowIds


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


class Block(NamedTuple):
    """Rows of the queries and of the keys that are worked on together."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class VisibleBlocks:
    """The blocks of this rank's queries and one shard's keys in which anybody sees anything.

    They depend on the rows alone, so that all layers of a forward share them.
    """

    queries: RowIds
    keys: RowIds
    remote: bool
    blocks: tuple[Block, ...]

    def mask(self, block: Block) -> Tensor:
        """Which keys of ``block`` each of its queries attends to, bool [queries, keys]."""
        return visible_keys(
            self.queries.cut(block.queries), self.keys.cut(block.keys), remote=self.remote
        )


def visible_blocks(queries: RowIds, keys: RowIds, *, remote: bool, size: int) -> VisibleBlocks:
    """Cut queries [n] and keys [k] into blocks of ``size`` rows and keep those that are seen."""
    every = VisibleBlocks(
        queries,
        keys,
        remote,
        tuple(Block(q, k) for q in cuts(len(queries), size) for k in cuts(len(keys), size)),
    )
    seen = [every.mask(block).any() for block in every.blocks]
    # One transfer for all blocks, where the rows are not on the CPU.
    kept = torch.stack(seen).tolist() if seen else []
    blocks = tuple(block for block, keep in zip(every.blocks, kept, strict=True) if keep)
    return VisibleBlocks(queries, keys, remote, blocks)


def cuts(rows: int, size: int) -> Iterator[slice]:
    """0 to ``rows`` in slices of ``size``, the last one what is left."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
