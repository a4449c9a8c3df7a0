"""Log-probabilities and the most probable tokens of vocabulary-parallel logits.

Each tensor-parallel rank holds the logits of its own slice of the vocabulary. Shapes: n rows, v
columns of this rank, of which the first ``columns`` are real and the rest padding, m questions.
Everything is computed in the dtype of the run, but never below float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from subjects.trainer import collectives
from subjects.types import IGNORED


@dataclass(frozen=True, kw_only=True)
class VocabularySlice:
    """The ids ``start .. start + columns`` that this rank holds, of ``size`` in all."""

    start: int
    columns: int
    size: int
    group: ProcessGroup


def log_normalizer(logits: Tensor, part: VocabularySlice) -> Tensor:
    """log(sum(exp(logits))) over the whole vocabulary; [n, v] -> [n], without a gradient."""
    own = logits.detach()[:, : part.columns]
    # A rank whose slice is all padding has no maximum of its own.
    highest = own.amax(dim=1) if part.columns else own.new_full((len(own),), float("-inf"))
    highest = collectives.all_reduce(highest, part.group, op="max")
    total = collectives.all_reduce((own - highest[:, None]).exp().sum(dim=1), part.group)
    return highest + total.log()


def target_logprobs(
    logits: Tensor, normalizer: Tensor, rows: Tensor, targets: Tensor, part: VocabularySlice
) -> Tensor:
    """Log-probabilities of targets, exactly 0 where the target is -100.

    ``logits`` [n, v], ``normalizer`` [n]; question i asks row ``rows[i]`` for ``targets[i, ...]``:
    rows [m], targets [m, ...] -> [m, ...]. Differentiable in the logits, which must be used in the
    same way on every tensor-parallel rank.
    """
    flat = targets.reshape(len(targets), math.prod(targets.shape[1:]))
    values: Tensor = TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, normalizer, rows, flat, part
    )
    return values.view(targets.shape)


class TargetLogprobs(torch.autograd.Function):
    """logits[row, target] - normalizer[row], and its gradient onehot - softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        normalizer: Tensor,
        rows: Tensor,
        targets: Tensor,
        part: VocabularySlice,
    ) -> Tensor:
        """Targets [m, t] -> values [m, t]."""
        asked = targets != IGNORED
        column = targets - part.start
        mine = asked & (column >= 0) & (column < part.columns)
        column = column.where(mine, 0)
        own = logits[rows[:, None], column] if part.columns else logits.new_zeros(targets.shape)
        found = collectives.all_reduce(own.where(mine, 0.0), part.group)
        ctx.columns = part.columns
        ctx.save_for_backward(logits, normalizer, rows, column, mine, asked)
        return (found - normalizer[rows][:, None]).where(asked, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Gradient [m, t] -> gradient of this rank's logits [n, v]."""
        logits, normalizer, rows, column, mine, asked = ctx.saved_tensors
        gradient = gradient.where(asked, 0.0)
        weight = gradient.new_zeros(len(logits)).index_add_(0, rows, gradient.sum(dim=1))
        result = torch.zeros_like(logits)
        own = logits[:, : ctx.columns]
        result[:, : ctx.columns] = (own - normalizer[:, None]).exp_().mul_(-weight[:, None])
        at = (rows[:, None] * logits.shape[1] + column)[mine]
        result.view(-1).index_add_(0, at, gradient[mine])
        return result, None, None, None, None


def top_tokens(logits: Tensor, k: int, part: VocabularySlice) -> Tensor:
    """Ids of the k largest logits of each row; [n, v] -> int64 [n, k], largest first.

    Of equal logits the lower id comes first, on every rank alike. No gradient.
    """
    own = logits.detach()[:, : part.columns]
    width = min(k, logits.shape[1])
    value = own.new_full((len(own), width), float("-inf"))
    # Padding and unused places sort behind every real id.
    token = torch.full((len(own), width), part.size, device=own.device)
    found = lowest_first(own, min(k, part.columns))
    value[:, : found.shape[1]] = own.gather(1, found)
    token[:, : found.shape[1]] = found + part.start
    # Rows lead, so that the slices of all ranks arrive side by side after one transpose.
    sizes = [width] * part.group.size()
    value = collectives.all_gather_rows(value.t().contiguous(), sizes, part.group).t()
    token = collectives.all_gather_rows(token.t().contiguous(), sizes, part.group).t()
    # Ranks follow in the order of their ids, so a stable sort keeps the lower id first.
    order = value.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return token.gather(1, order)


def lowest_first(values: Tensor, k: int) -> Tensor:
    """Columns of the k largest ``values`` [n, v] of each row, largest first, ties by column.

    ``torch.topk`` alone leaves open which of equal values it returns.
    """
    if k == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    # A NaN would be found in neither comparison.
    values = values.where(~values.isnan(), float("-inf"))
    threshold = values.topk(k, dim=1).values[:, -1:]
    above = values > threshold
    equal = values == threshold
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= room))
    columns = chosen.nonzero()[:, 1].view(len(values), k)
    order = values.gather(1, columns).sort(dim=1, descending=True, stable=True).indices
    return columns.gather(1, order)
