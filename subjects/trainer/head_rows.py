"""Chunks of rows of the head: what is asked of them, where they lie, and their logits.

Shapes, here and in the modules that use this one: n rows of this rank, c rows of a chunk, v columns
of this rank's slice of the vocabulary, m source positions that this rank answers, t targets of a
position, T source positions of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.plan import LocalRows
from subjects.trainer.reductions import Groups

HEAD_ROWS = 1024
"""Rows of a chunk where nobody says otherwise."""


class HeadWeights(NamedTuple):
    """This rank's slice of the head, [rows, H], whose rows behind the real ids are padding.

    An adapter adds ``scale * up @ down``: ``down`` [r, H], the same on all tensor-parallel ranks,
    and ``up`` [rows, r], a slice like that of the weight.
    """

    weight: Tensor
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is wanted of the head; ``targets`` [m, t] belong to the positions of this rank."""

    targets: Tensor | None
    top_k: int | None
    entropy: bool
    logits: Literal["none", "local", "full"]


class Answers(NamedTuple):
    """What was asked, the rest None.

    ``logprobs`` [m, t]; ``top_values`` and ``top_tokens`` [n, k]; ``entropy`` [n]; ``logits``
    [m, v] of this rank alone, or [T, V] of all.
    """

    logprobs: Tensor | None
    top_values: Tensor | None
    top_tokens: Tensor | None
    entropy: Tensor | None
    logits: Tensor | None


class Chunk(NamedTuple):
    """Rows ``start`` to ``stop`` of a rank, and what is asked of them.

    ``questions`` [q] index the m source positions that these rows answer, and ``rows`` [q] are the
    rows of the chunk that do.
    """

    start: int
    stop: int
    questions: Tensor
    rows: Tensor


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands: its rows, its slice of the vocabulary, its groups, its chunks."""

    local: LocalRows
    part: VocabularySlice
    groups: Groups
    head_rows: int


def row_ranges(rows: int, head_rows: int) -> list[tuple[int, int]]:
    """Where each chunk of ``rows`` starts and stops; the last one holds what is left."""
    return [(at, min(at + head_rows, rows)) for at in range(0, rows, head_rows)]


def chunks(local: LocalRows, head_rows: int) -> Iterator[Chunk]:
    """The chunks of a rank's rows; none of an empty shard."""
    order = local.source_rows.argsort(stable=True)
    by_row = local.source_rows[order]
    ranges = row_ranges(len(local.rows), head_rows)
    edges = [start for start, _ in ranges] + [stop for _, stop in ranges[-1:]]
    at = torch.searchsorted(by_row, torch.tensor(edges, dtype=torch.int64, device=by_row.device))
    for (start, stop), (low, high) in zip(ranges, pairwise(at.tolist()), strict=True):
        yield Chunk(start, stop, order[low:high], by_row[low:high] - start)


def pieces(chunk: Chunk) -> Iterator[tuple[Tensor, Tensor]]:
    """The questions of a chunk and their rows, no more at a time than the chunk has rows.

    A row of a shared prefix answers many source positions, of which each has logits of its own.
    """
    size = max(1, chunk.stop - chunk.start)
    yield from zip(chunk.questions.split(size), chunk.rows.split(size), strict=True)


def chunk_logits(hidden: Tensor, head: HeadWeights, part: VocabularySlice) -> Tensor:
    """Logits [c, v] of hidden states [c, H], in the dtype of the run."""
    head = real_columns(head, part)
    logits = torch.nn.functional.linear(hidden, head.weight)
    if head.down is not None and head.up is not None:
        logits.addmm_(hidden @ head.down.t(), head.up.t(), alpha=head.scale)
    return logits


def real_columns(head: HeadWeights, part: VocabularySlice) -> HeadWeights:
    """The rows of the head that belong to ids: what pads the vocabulary is never computed."""
    return head._replace(
        weight=head.weight[: part.columns], up=None if head.up is None else head.up[: part.columns]
    )


def rows_again(hidden: Tensor, chunk: Chunk) -> Tensor:
    """The rows of hidden states [n, H] that backward computes a chunk from: the same ones."""
    return hidden[chunk.start : chunk.stop]
