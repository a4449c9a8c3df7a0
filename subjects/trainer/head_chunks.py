"""The head a chunk of rows at a time: what was asked is taken from a chunk's logits, which then go.

Backward computes the logits of each chunk again, from the hidden states and the normalizers that
forward kept, so that no rank ever holds the logits of all its rows unless they were asked for.
Between chunks nothing is exchanged: all collectives come after the last one, and backward has none.
Shapes as in head_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from subjects.trainer import collectives, head_gradients, head_rows, logprobs
from subjects.trainer.head_rows import Answers, Asked, Chunk, HeadWeights, Place
from subjects.trainer.logprobs import Moments, VocabularySlice
from subjects.trainer.reductions import Groups
from subjects.types import IGNORED, logprob_dtype


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


def write_block(full: Tensor, block: Tensor, positions: Tensor, part: VocabularySlice) -> None:
    """Write logits [q, v] at rows ``positions`` [q] and this slice's columns of ``full`` [T, V]."""
    full.narrow(1, part.start, part.columns).index_copy_(0, positions, block)


def sum_blocks(full: Tensor, groups: Groups) -> None:
    """Sum the blocks [T, V] of all ranks of a batch in place: each number is one rank's own."""
    for group in (groups.tp, groups.cp):
        collectives.all_reduce(full, group)


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
        for chunk in head_rows.chunks(place.local, place.head_rows):
            logits = head_rows.chunk_logits(hidden[chunk.start : chunk.stop], head, part)
            found.take(chunk, logits, asked, place)
            # Before the next chunk's are made, or there would be two.
            del logits
        logprob = values = tokens = entropy = None
        normalizer = hidden.new_zeros(0)
        if found.moments is not None:
            normalizer, entropy = logprobs.merge_moments(found.moments, groups.tp)
        if asked.targets is not None and found.targets is not None:
            picked = logprobs.merge_targets(found.targets, groups.tp)
            logprob = picked - normalizer[place.local.source_rows][:, None]
            logprob = logprob.where(asked.targets != IGNORED, 0.0)
        if asked.top_k is not None and found.top is not None:
            values, tokens = logprobs.merge_candidates(*found.top, asked.top_k, groups.tp)
            values = values - normalizer[:, None]
            ctx.mark_non_differentiable(tokens)
        if asked.logits == "full" and found.logits is not None:
            sum_blocks(found.logits, groups)
        entropy = entropy if asked.entropy else None
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.asked, ctx.place = scale, asked, place
        ctx.save_for_backward(hidden, weight, down, up, normalizer, entropy, tokens)
        return logprob, values, tokens, entropy, found.logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the fields of ``Answers`` -> those of hidden states and weights."""
        if all(gradient is None for gradient in gradients):
            # The loss ignores them all: the head then has no gradient, not one of zeros.
            return (None,) * 7
        hidden, weight, down, up, normalizer, entropy, tokens = ctx.saved_tensors
        head = HeadWeights(weight, down, up, ctx.scale)
        wanted = Answers(*gradients)
        result = head_gradients.Gradients.empty(hidden, head, ctx.needs_input_grad)
        known = head_gradients.Known(normalizer, entropy, tokens, ctx.asked, ctx.place)
        for chunk in head_rows.chunks(ctx.place.local, ctx.place.head_rows):
            rows = head_rows.rows_again(hidden, chunk)
            if head_gradients.needs_logits(wanted):
                logits = head_rows.chunk_logits(rows, head, ctx.place.part)
            else:
                logits = rows.new_zeros(len(rows), ctx.place.part.columns)
            gradient = head_gradients.logits_gradient(chunk, logits, known, wanted)
            del logits
            result.add(chunk, rows, head_rows.real_columns(head, ctx.place.part), gradient)
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
            for questions, rows in head_rows.pieces(chunk):
                block = logits.index_select(0, rows)
                if asked.logits == "full":
                    write_block(self.logits, block, place.local.sources[questions], part)
                else:
                    self.logits.index_copy_(0, questions, block)
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
