"""Softmax attention in blocks of queries and keys, forward and backward.

No score, mask or weight outlives its block. A block's result is a ``Partial``: the attention over
the keys of the block alone, and the log-sum-exp of their scores, by which partials of any keys are
merged in any order (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021). Backward recomputes the
weights of a block from the log-sum-exp of all keys (Dao, "FlashAttention-2", 2023, algorithm 2).

The log-sum-exp is kept in two parts, as in the first FlashAttention: the highest score, and the sum
of exponentials relative to it. One number would cost as many digits as the scores are large, in
weights that are nearly 1 too.

Shapes: n queries and k keys of some rows, A query heads, G key-value heads, D head size. Query head
a reads key-value head a // (A / G). Everything is computed and returned in the working dtype, the
run's own but never below float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subjects.trainer.masks import Block, VisibleBlocks
from subjects.trainer.precision import working_dtype


class Partial(NamedTuple):
    """Attention over some of the keys: ``out`` [n, A, D], and what it was divided by.

    ``highest`` [n, A] is the highest score and ``total`` [n, A] the sum of exp(score - highest). A
    query that sees none of the keys has ``out`` 0, ``highest`` -inf and ``total`` 0.
    """

    out: Tensor
    highest: Tensor
    total: Tensor

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the scores, [n, A]."""
        return self.highest + self.total.log()

    def cut(self, rows: slice) -> Partial:
        """Views of some of the queries."""
        return Partial(self.out[rows], self.highest[rows], self.total[rows])


def nothing(query: Tensor) -> Partial:
    """The partial over no keys at all, of queries [n, A, D]."""
    out = torch.zeros_like(query, dtype=working_dtype(query.dtype))
    return Partial(out, torch.full_like(out[..., 0], float("-inf")), torch.zeros_like(out[..., 0]))


def attend(
    query: Tensor, key: Tensor, value: Tensor, seen: VisibleBlocks, *, scale: float
) -> Partial:
    """Attention of query [n, A, D] over key and value [k, G, D]."""
    result = nothing(query)
    groups = key.shape[1]
    for block in seen.blocks:
        scores = masked_scores(
            by_group(query[block.queries], groups),
            _by_key_head(key[block.keys]),
            seen.mask(block),
            scale=scale,
        )
        part = softmax(scores, _by_key_head(value[block.keys]))
        rows = result.cut(block.queries)
        for into, merged in zip(rows, merge(rows, part), strict=True):
            into.copy_(merged)
    return result


def merge(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both, which have none in common.

    Each counts by its share of the sum of exponentials, relative to the higher of both highest
    scores: exp of a score or of a log-sum-exp is never formed, since it overflows.
    """
    highest = torch.maximum(one.highest, other.highest)
    mine = one.total * (one.highest - finite(highest)).exp()
    theirs = other.total * (other.highest - finite(highest)).exp()
    total = mine + theirs
    out = mine[..., None] * one.out + theirs[..., None] * other.out
    return Partial(out / positive(total)[..., None], highest, total)


def finite(highest: Tensor) -> Tensor:
    """0 in place of -inf, so that -inf - highest is -inf and not NaN."""
    return highest.masked_fill(highest == float("-inf"), 0.0)


def positive(total: Tensor) -> Tensor:
    """1 in place of 0: what a query that sees nothing is divided by, 0 itself, stays 0."""
    return total.masked_fill(total == 0, 1.0)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Scores [G, A / G, n, k] of query [G, A / G, n, D] and key [G, k, D]; -inf where not seen."""
    scores = _fold(query) @ key.mT * scale
    return scores.view(*query.shape[:3], len(mask[0])).masked_fill(~mask, float("-inf"))


def row_products(gradient: Tensor, out: Tensor) -> Tensor:
    """The product of each query's output and its gradient [n, A, D], [n, A]; D in FlashAttention-2.

    It is the sum over all keys of weight times gradient of the weight, so ``out`` is that over all.
    """
    work = working_dtype(out.dtype)
    return (gradient.to(work) * out.to(work)).sum(-1)


class Asked(NamedTuple):
    """This rank's queries, and what their backward knows of all keys.

    ``query`` and ``gradient`` (of the output) are [n, A, D]; ``highest`` and ``total`` are those of
    all keys, and ``products`` come from ``row_products``, all [n, A].
    """

    query: Tensor
    gradient: Tensor
    highest: Tensor
    total: Tensor
    products: Tensor


class Gradients(NamedTuple):
    """Of query [n, A, D], key and value [k, G, D], in the working dtype; added to in place."""

    query: Tensor
    key: Tensor
    value: Tensor


def add_gradients(
    into: Gradients, asked: Asked, key: Tensor, value: Tensor, seen: VisibleBlocks, *, scale: float
) -> None:
    """Add to ``into`` what attention over key and value [k, G, D] contributes."""
    groups = key.shape[1]
    for at, to in seen.blocks:
        q, d_out = by_group(asked.query[at], groups), by_group(asked.gradient[at], groups)
        numbers = (finite(asked.highest[at]), positive(asked.total[at]), asked.products[at])
        highest, total, products = (by_group(one[..., None], groups) for one in numbers)
        k, v = _by_key_head(key[to]), _by_key_head(value[to])
        scores = masked_scores(q, k, seen.mask(Block(at, to)), scale=scale)
        weights = (scores - highest).exp() / total
        d_scores = weights * ((_fold(d_out) @ v.mT).view_as(weights) - products) * scale
        into.value[to] += (_fold(weights).mT @ _fold(d_out)).transpose(0, 1)
        into.key[to] += (_fold(d_scores).mT @ _fold(q)).transpose(0, 1)
        into.query[at] += _by_row((_fold(d_scores) @ k).view_as(q))


def softmax(scores: Tensor, value: Tensor) -> Partial:
    """The partial of scores [G, A / G, n, k] and value [G, k, D]."""
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - finite(highest)).exp()
    total = weights.sum(-1, keepdim=True)
    out = (_fold(weights) @ value).view(*scores.shape[:3], -1) / positive(total)
    return Partial(_by_row(out), _by_row(highest)[..., 0], _by_row(total)[..., 0])


def by_group(rows: Tensor, groups: int) -> Tensor:
    """[n, A, D] -> [G, A / G, n, D] in the working dtype."""
    grouped: Tensor = rows.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    return grouped.to(working_dtype(rows.dtype))


def _by_row(grouped: Tensor) -> Tensor:
    """[G, A / G, n, D] -> [n, A, D]."""
    return grouped.permute(2, 0, 1, 3).flatten(1, 2)


def _by_key_head(rows: Tensor) -> Tensor:
    """[k, G, D] -> [G, k, D] in the working dtype."""
    return rows.transpose(0, 1).to(working_dtype(rows.dtype))


def _fold(grouped: Tensor) -> Tensor:
    """[G, h, n, ...] -> [G, h * n, ...]: the query heads of one key-value head as more rows."""
    return grouped.flatten(1, 2)
