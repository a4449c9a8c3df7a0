"""Backward of the head's chunks: from gradients of answers to those of hidden states and weights.

Shapes as in head_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subjects.trainer import head_rows, logprobs
from subjects.trainer.head_rows import Answers, Asked, Chunk, HeadWeights, Place
from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.precision import working_dtype
from subjects.types import IGNORED, logprob_dtype


class Known(NamedTuple):
    """What backward has of forward; the normalizer is empty where nothing needed one."""

    normalizer: Tensor
    entropy: Tensor | None
    tokens: Tensor | None
    asked: Asked
    place: Place


def needs_logits(gradients: Answers) -> bool:
    """Whether a chunk's logits must be computed again: not for the gradient of logits alone."""
    return any(
        gradient is not None
        for gradient in (gradients.logprobs, gradients.top_values, gradients.entropy)
    )


def logits_gradient(chunk: Chunk, logits: Tensor, known: Known, gradients: Answers) -> Tensor:
    """The gradient [c, v] of a chunk's logits, in the dtype of the run, from those of answers.

    ``logits`` may be overwritten; where they aren't needed they are zeros.
    """
    result = logits
    if needs_logits(gradients):
        wide = logits.to(logprob_dtype(logits.dtype))
        result = _normalized_gradient(chunk, wide, known, gradients)
    if gradients.logits is not None:
        for questions, rows in head_rows.pieces(chunk):
            block = _logits_block(questions, known.place, known.asked, gradients.logits)
            result.index_add_(0, rows, block.to(result.dtype))
            # Before the next piece's is made, or there would be two.
            del block
    return result.to(logits.dtype)


def _normalized_gradient(chunk: Chunk, wide: Tensor, known: Known, gradients: Answers) -> Tensor:
    """The share of log-probabilities and entropy in the gradient [c, v]; overwrites ``wide``."""
    asked, at = known.asked, slice(chunk.start, chunk.stop)
    picks: list[tuple[Tensor, Tensor, Tensor]] = []
    if gradients.logprobs is not None and asked.targets is not None:
        targets = asked.targets[chunk.questions]
        wanted = gradients.logprobs[chunk.questions].where(targets != IGNORED, 0.0)
        picks.append((chunk.rows, targets, wanted))
    if gradients.top_values is not None and known.tokens is not None:
        rows = torch.arange(len(wide), device=wide.device)
        picks.append((rows, known.tokens[at], gradients.top_values[at]))
    columns = [logprobs.target_columns(tokens, known.place.part) for _, tokens, _ in picks]
    picked = wide.new_zeros(len(wide)) if picks else None
    for (rows, _, gradient), own in zip(picks, columns, strict=True):
        if picked is not None:
            picked.index_add_(0, rows, share_of_row(gradient, own))
    entropy = entropy_gradient(known.entropy, gradients.entropy, at)
    result = logprobs.softmax_gradient(wide, known.normalizer[at], picked, entropy)
    for (rows, _, gradient), own in zip(picks, columns, strict=True):
        logprobs.add_at(result, rows, own, gradient)
    return result


def share_of_row(gradient: Tensor, columns: Tensor) -> Tensor:  # noqa: ARG001
    """What the log-probabilities picked from a row [q, t] send back through its normalizer, [q].

    Every slice has a share in the normalizer, wherever ``columns`` [q, t] say the token is.
    """
    return gradient.sum(dim=1)


def entropy_gradient(
    entropy: Tensor | None, gradient: Tensor | None, at: slice
) -> tuple[Tensor, Tensor] | None:
    """The entropies of a chunk's rows and their gradients, both [c]; None if nothing came."""
    return None if entropy is None or gradient is None else (entropy[at], gradient[at])


def _logits_block(questions: Tensor, place: Place, asked: Asked, gradient: Tensor) -> Tensor:
    """The gradient of the logits that were handed out, [q, v], in the order of the questions."""
    if asked.logits == "full":
        return read_block(gradient, place.local.sources[questions], place.part)
    return gradient.index_select(0, questions)


@dataclass
class Gradients:
    """Gradients of the hidden states and the weights so far; None where nobody wants one.

    Those of weights are sums over chunks, so they are kept in float32 at least.
    """

    hidden: Tensor | None
    weight: Tensor | None
    down: Tensor | None
    up: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, head: HeadWeights, needed: Sequence[bool]) -> Gradients:
        """Zeros for hidden, weight, down and up [..] where ``needed`` says so."""
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


def read_block(full: Tensor, positions: Tensor, part: VocabularySlice) -> Tensor:
    """What ``write_block`` wrote, out of a gradient that is the same on all ranks: once, as is."""
    return full.narrow(1, part.start, part.columns).index_select(0, positions)
