"""The head a chunk of rows at a time: what was asked is taken from a chunk's logits, which then go.

Backward computes the logits of each chunk again, from the hidden states and the normalizers that
forward kept, so that no rank ever holds the logits of all its rows unless they were asked for.
Between chunks nothing is exchanged: all collectives come after the last one, and backward has none.

Shapes: n rows of this rank, c rows of a chunk, v columns of this rank's slice of the vocabulary,
m source positions that this rank answers, t targets of a position, T source positions of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from subjects.trainer import collectives, logprobs
from subjects.trainer.logprobs import Moments, VocabularySlice
from subjects.trainer.plan import LocalRows
from subjects.trainer.precision import working_dtype
from subjects.trainer.reductions import Groups
from subjects.types import IGNORED, logprob_dtype

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


def answer(hidden: Tensor, head: HeadWeights, asked: Asked, place: Place) -> Answers:
    """Answer ``asked`` from the hidden states [n, H] of this rank's rows.

    A collective of the TP ranks, and of the CP ranks too where the full logits are asked. The
    gradient of ``hidden`` is this slice's share, to be summed over TP; so is that of ``head.down``.
    Gradients of log-probabilities, entropy and full logits must be the same on all TP ranks; that
    of local logits is each rank's own.
    """
    return Answers(
        *Head.apply(hidden, *head, asked, place)  # type: ignore[no-untyped-call]
    )


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


def write_block(full: Tensor, block: Tensor, positions: Tensor, part: VocabularySlice) -> None:
    """Write logits [q, v] at rows ``positions`` [q] and this slice's columns of ``full`` [T, V]."""
    full.narrow(1, part.start, part.columns).index_copy_(0, positions, block)


def read_block(full: Tensor, positions: Tensor, part: VocabularySlice) -> Tensor:
    """What ``write_block`` wrote, out of a gradient that is the same on all ranks: once, as is."""
    return full.narrow(1, part.start, part.columns).index_select(0, positions)


class Head(torch.autograd.Function):
    """Answers of all chunks; see ``answer``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        down: Tensor | None,
        up: Tensor | None,
        scale: float,
        asked: Asked,
        place: Place,
    ) -> tuple[Tensor | None, ...]:
        """Hidden states [n, H] -> the fields of ``Answers``."""
        head = HeadWeights(weight, down, up, scale)
        part, groups = place.part, place.groups
        found = _Found.empty(hidden, asked, place)
        for chunk in chunks(place.local, place.head_rows):
            logits = chunk_logits(hidden[chunk.start : chunk.stop], head, part)
            found.take(chunk, logits, asked, place)
            # Before the next chunk's are made, or there would be two.
            del logits
        logprob = values = tokens = entropy = normalizer = None
        if found.moments is not None:
            normalizer, entropy = logprobs.merge_moments(found.moments, groups.tp)
        if asked.targets is not None and normalizer is not None and found.targets is not None:
            picked = logprobs.merge_targets(found.targets, groups.tp)
            logprob = picked - normalizer[place.local.source_rows][:, None]
            logprob = logprob.where(asked.targets != IGNORED, 0.0)
        if asked.top_k is not None and normalizer is not None and found.top is not None:
            values, tokens = logprobs.merge_candidates(*found.top, asked.top_k, groups.tp)
            values = values - normalizer[:, None]
            ctx.mark_non_differentiable(tokens)
        if asked.logits == "full" and found.logits is not None:
            # Each number is one rank's and zero on all others.
            for group in (groups.tp, groups.cp):
                collectives.all_reduce(found.logits, group)
        entropy = entropy if asked.entropy else None
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.asked, ctx.place = scale, asked, place
        ctx.save_for_backward(hidden, weight, down, up, normalizer, entropy, tokens)
        return logprob, values, tokens, entropy, found.logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the fields of ``Answers`` -> those of hidden states and weights."""
        hidden, weight, down, up, normalizer, entropy, tokens = ctx.saved_tensors
        head = HeadWeights(weight, down, up, ctx.scale)
        result = _Gradients.empty(hidden, head, ctx.needs_input_grad)
        known = _Known(normalizer, entropy, tokens, ctx.asked, ctx.place)
        for chunk in chunks(ctx.place.local, ctx.place.head_rows):
            rows = rows_again(hidden, chunk)
            logits = chunk_logits(rows, head, ctx.place.part)
            gradient = logits_gradient(chunk, logits, known, Answers(*gradients))
            del logits
            result.add(chunk, rows, real_columns(head, ctx.place.part), gradient)
            del gradient
        return (*result.like(hidden, head), None, None, None)


@dataclass
class _Found:
    """What forward keeps of the chunks so far."""

    moments: Moments | None
    targets: Tensor | None
    top: tuple[Tensor, Tensor] | None
    logits: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, asked: Asked, place: Place) -> _Found:
        rows, part, local = len(hidden), place.part, place.local
        wide = hidden.new_zeros(0, dtype=logprob_dtype(hidden.dtype))
        logits = None
        if asked.logits == "full":
            logits = hidden.new_zeros(local.total, part.size)
        elif asked.logits == "local":
            logits = hidden.new_zeros(len(local.sources), part.columns)
        normalized = asked.entropy or asked.targets is not None or asked.top_k is not None
        top = None
        if asked.top_k is not None:
            shape = (rows, min(asked.top_k, part.widest))
            top = wide.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=wide.device)
        return cls(
            Moments(
                wide.new_zeros(rows),
                wide.new_zeros(rows),
                wide.new_zeros(rows if asked.entropy else 0),
            )
            if normalized
            else None,
            None if asked.targets is None else wide.new_zeros(asked.targets.shape),
            top,
            logits,
        )

    def take(self, chunk: Chunk, logits: Tensor, asked: Asked, place: Place) -> None:
        """Take what was asked from the logits [c, v] of ``chunk``."""
        part, at = place.part, slice(chunk.start, chunk.stop)
        if self.logits is not None:
            block = logits.index_select(0, chunk.rows)
            if asked.logits == "full":
                write_block(self.logits, block, place.local.sources[chunk.questions], part)
            else:
                self.logits.index_copy_(0, chunk.questions, block)
            del block
        if self.moments is None:
            return
        wide = logits.to(logprob_dtype(logits.dtype))
        if self.targets is not None and asked.targets is not None:
            columns = logprobs.target_columns(asked.targets[chunk.questions], part)
            self.targets[chunk.questions] = logprobs.own_logits(wide, chunk.rows, columns)
        if self.top is not None and asked.top_k is not None:
            value, token = logprobs.top_candidates(wide, asked.top_k, part)
            self.top[0][at], self.top[1][at] = value, token
        moments = logprobs.slice_moments(wide, entropy=asked.entropy)
        self.moments.highest[at], self.moments.total[at] = moments.highest, moments.total
        if asked.entropy:
            self.moments.weighted[at] = moments.weighted


class _Known(NamedTuple):
    """What backward has of forward."""

    normalizer: Tensor | None
    entropy: Tensor | None
    tokens: Tensor | None
    asked: Asked
    place: Place


def logits_gradient(chunk: Chunk, logits: Tensor, known: _Known, gradients: Answers) -> Tensor:
    """The gradient [c, v] of a chunk's logits, in the dtype of the run, from those of answers."""
    wide = logits.to(logprob_dtype(logits.dtype))
    result = _normalized_gradient(chunk, wide, known, gradients)
    block = _logits_block(chunk, known.place, known.asked, gradients.logits)
    if result is None:
        result = torch.zeros_like(logits)
    if block is not None:
        result.index_add_(0, chunk.rows, block.to(result.dtype))
    return result.to(logits.dtype)


def _normalized_gradient(
    chunk: Chunk, wide: Tensor, known: _Known, gradients: Answers
) -> Tensor | None:
    """The share of log-probabilities and entropy in the gradient [c, v]; None if there is none.

    ``wide`` may be overwritten.
    """
    if known.normalizer is None:
        return None
    asked, at = known.asked, slice(chunk.start, chunk.stop)
    picks: list[tuple[Tensor, Tensor, Tensor]] = []
    if gradients.logprobs is not None and asked.targets is not None:
        targets = asked.targets[chunk.questions]
        wanted = gradients.logprobs[chunk.questions].where(targets != IGNORED, 0.0)
        picks.append((chunk.rows, targets, wanted))
    if gradients.top_values is not None and known.tokens is not None:
        rows = torch.arange(len(wide), device=wide.device)
        picks.append((rows, known.tokens[at], gradients.top_values[at]))
    entropy = entropy_gradient(known.entropy, gradients.entropy, at)
    if not picks and entropy is None:
        return None
    picked = wide.new_zeros(len(wide)) if picks else None
    for rows, _, gradient in picks:
        if picked is not None:
            picked.index_add_(0, rows, gradient.sum(dim=1))
    result = logprobs.softmax_gradient(wide, known.normalizer[at], picked, entropy)
    for rows, tokens, gradient in picks:
        columns = logprobs.target_columns(tokens, known.place.part)
        logprobs.add_at(result, rows, columns, gradient)
    return result


def entropy_gradient(
    entropy: Tensor | None, gradient: Tensor | None, at: slice
) -> tuple[Tensor, Tensor] | None:
    """The entropies of a chunk's rows and their gradients, both [c]; None if nothing came."""
    return None if entropy is None or gradient is None else (entropy[at], gradient[at])


def _logits_block(
    chunk: Chunk, place: Place, asked: Asked, gradient: Tensor | None
) -> Tensor | None:
    """The gradient of the logits that were handed out, [q, v], in the order of the questions."""
    if gradient is None:
        return None
    if asked.logits == "full":
        return read_block(gradient, place.local.sources[chunk.questions], place.part)
    return gradient.index_select(0, chunk.questions)


@dataclass
class _Gradients:
    """Gradients of the hidden states and the weights so far; None where nobody wants one.

    Those of weights are sums over chunks, so they are kept in float32 at least.
    """

    hidden: Tensor | None
    weight: Tensor | None
    down: Tensor | None
    up: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, head: HeadWeights, needed: Sequence[bool]) -> _Gradients:
        sums = [
            torch.zeros_like(value, dtype=working_dtype(value.dtype))
            if value is not None and need
            else None
            for value, need in zip((head.weight, head.down, head.up), needed[1:4], strict=True)
        ]
        return cls(torch.zeros_like(hidden) if needed[0] else None, *sums)

    def add(self, chunk: Chunk, rows: Tensor, head: HeadWeights, gradient: Tensor) -> None:
        """Add what the gradient [c, v] of a chunk's logits gives, from its hidden states [c, H]."""
        if self.hidden is not None:
            self.hidden[chunk.start : chunk.stop] = gradient @ head.weight
        if self.weight is not None:
            add_product(self.weight[: len(head.weight)], gradient.t(), rows)
        if head.down is None or head.up is None:
            return
        inner = (gradient @ head.up) * head.scale
        if self.hidden is not None:
            self.hidden[chunk.start : chunk.stop] += inner @ head.down
        if self.down is not None:
            add_product(self.down, inner.t(), rows)
        if self.up is not None:
            scaled = (rows @ head.down.t()) * head.scale
            add_product(self.up[: len(head.up)], gradient.t(), scaled)

    def like(self, hidden: Tensor, head: HeadWeights) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, weight, down and up, each in the dtype of its value."""
        pairs = zip(
            (self.hidden, self.weight, self.down, self.up),
            (hidden, head.weight, head.down, head.up),
            strict=True,
        )
        return tuple(
            None if sum_ is None or value is None else sum_.to(value.dtype) for sum_, value in pairs
        )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left [a, c] @ right [c, b] to ``total`` [a, b] in place, whose dtype may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
