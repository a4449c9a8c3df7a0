"""Softmax statistics and the most probable tokens of vocabulary-parallel logits.

Each tensor-parallel rank holds the logits of its own slice of the vocabulary. What it finds there,
a chunk of rows at a time, is a few numbers a row; those of all ranks are then merged, once for all
rows. Shapes: n rows, c rows of a chunk, v columns of this rank (none of them padding), m questions.
Everything is computed in the dtype of log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import collectives


@dataclass(frozen=True, kw_only=True)
class VocabularySlice:
    """The ids ``start .. start + columns`` that this rank holds, of ``size`` in all."""

    start: int
    columns: int
    size: int
    group: ProcessGroup

    @property
    def widest(self) -> int:
        """The most columns that a rank of the group holds."""
        return -(-self.size // self.group.size())


class Moments(NamedTuple):
    """What one slice contributes to the softmax of each row.

    ``highest`` [n] is h, its largest logit; ``total`` [n] is sum(exp(l - h)); ``weighted`` [n] is
    sum(exp(l - h) (l - h)), or empty where no entropy is asked.
    """

    highest: Tensor
    total: Tensor
    weighted: Tensor


def slice_moments(logits: Tensor, *, entropy: bool) -> Moments:
    """The moments of logits [c, v] of one slice."""
    lowest = torch.finfo(logits.dtype).min
    # A rank of a small vocabulary may hold none of it: it must not decide the maximum.
    highest = logits.amax(dim=1) if logits.shape[1] else logits.new_full(logits.shape[:1], lowest)
    shifted = logits - highest[:, None]
    weight = shifted.exp() if entropy else shifted.exp_()
    total = weight.sum(dim=1)
    weighted = weight.mul_(shifted).sum(dim=1) if entropy else total.new_empty(0)
    return Moments(highest, total, weighted)


def merge_moments(own: Moments, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """log(sum(exp(l))) [n] and the entropy [n] of the whole vocabulary, from those of slices.

    With the maximum m of all slices, S = sum(exp(l - m)) and W = sum(exp(l - m) (l - m)), the
    normalizer is m + log(S) and the entropy -sum(p log(p)) = log(S) - W / S, two terms that are
    never negative. The entropy is empty where ``own.weighted`` is.
    """
    highest = shared_maximum(own.highest, group)
    total, weighted = shared_sums(own, highest, group)
    normalizer = highest + total.log()
    return normalizer, total.log() - weighted / total if len(weighted) else weighted


def shared_maximum(highest: Tensor, group: ProcessGroup) -> Tensor:
    """The largest logit of each row [n] over all slices."""
    return collectives.all_reduce(highest.clone(), group, op="max")


def shared_sums(own: Moments, highest: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """S and W of ``merge_moments``: the sums of all slices, about one maximum."""
    below = own.highest - highest
    scale = below.exp()
    total = own.total * scale
    if not len(own.weighted):
        return collectives.all_reduce(total, group), own.weighted
    weighted = (own.weighted + own.total * below) * scale
    both = collectives.all_reduce(torch.stack((total, weighted)), group)
    return both[0], both[1]


def target_columns(targets: Tensor, part: VocabularySlice) -> Tensor:
    """The columns of this rank's slice that hold ``targets``, -1 where another rank has them.

    Targets that ask for nothing (-100) are nobody's.
    """
    column = targets - part.start
    return column.where((targets >= 0) & (column >= 0) & (column < part.columns), -1)


def own_logits(logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Logits [c, v] at rows [m] and columns [m, t] -> [m, t], 0 where the column is -1."""
    if not logits.shape[1]:
        return logits.new_zeros(columns.shape)
    found = logits[rows[:, None], columns.clamp(min=0)]
    return found.where(columns >= 0, 0.0)


def merge_targets(own: Tensor, group: ProcessGroup) -> Tensor:
    """Logits of targets [m, t], each found by one rank -> the same on all."""
    return collectives.all_reduce(own, group)


def top_candidates(logits: Tensor, k: int, part: VocabularySlice) -> tuple[Tensor, Tensor]:
    """The k largest logits [c, w] of this rank's slice and their ids, largest first.

    All ranks answer with w = min(k, the widest slice); unused places are -inf and sort last.
    """
    width = min(k, part.widest)
    value = logits.new_full((len(logits), width), float("-inf"))
    token = torch.full((len(logits), width), part.size, device=logits.device)
    found = lowest_first(logits, min(k, part.columns))
    value[:, : found.shape[1]] = logits.gather(1, found)
    token[:, : found.shape[1]] = token_ids(found, part)
    return value, token


def token_ids(columns: Tensor, part: VocabularySlice) -> Tensor:
    """The ids of columns of this rank's slice."""
    return columns + part.start


def merge_candidates(
    value: Tensor, token: Tensor, k: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Candidates [n, w] of every slice -> the k largest logits [n, k] and their ids.

    Of equal logits the lower id comes first, on every rank alike.
    """
    # Rows lead, so that the slices of all ranks arrive side by side after one transpose.
    sizes = [value.shape[1]] * group.size()
    value = collectives.all_gather_rows(value.t().contiguous(), sizes, group).t()
    token = collectives.all_gather_rows(token.t().contiguous(), sizes, group).t()
    order = descending(value)[:, :k]
    return value.gather(1, order), token.gather(1, order)


def descending(values: Tensor) -> Tensor:
    """The order [n, w] of ``values``, largest first; of equal ones the first stays first.

    Slices follow in the order of their ids, so that equal logits of two slices do too.
    """
    return values.sort(dim=1, descending=True, stable=True).indices


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
    # int32: the counts are a matrix as large as the values, and no vocabulary is that long.
    chosen = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    columns = chosen.nonzero()[:, 1].view(len(values), k)
    return columns.gather(1, descending(values.gather(1, columns)))


def softmax_gradient(
    logits: Tensor, normalizer: Tensor, picked: Tensor | None, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The part of the gradient of logits [c, v] that every column has a share in.

    With p = exp(l - normalizer): -p times ``picked`` [c], the summed gradients of the
    log-probabilities picked from a row; and for ``entropy``, given as (entropy [c], its gradient
    [c]), the gradient times d(entropy)/dl = -p (log(p) + entropy). ``logits`` may be overwritten.
    """
    logp = logits.sub_(normalizer[:, None])
    if entropy is None:
        return logp.exp_().mul_(-_column(picked, logp))
    value, gradient = entropy
    p = logp.exp()
    result = logp.add_(value[:, None]).mul_(gradient[:, None])
    if picked is not None:
        result.add_(picked[:, None])
    return result.mul_(p).neg_()


def add_at(gradient: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values [m, t] to gradient [c, v] at rows [m] and columns [m, t], but where -1."""
    mine = columns >= 0
    at = (rows[:, None] * gradient.shape[1] + columns)[mine]
    gradient.view(-1).index_add_(0, at, values[mine])


def _column(picked: Tensor | None, like: Tensor) -> Tensor:
    """``picked`` as a column; zeros where nothing was."""
    return like.new_zeros(len(like), 1) if picked is None else picked[:, None]
