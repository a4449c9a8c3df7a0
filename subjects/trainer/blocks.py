"""Softmax attention in blocks of queries and keys, forward and backward.

No score, mask or weight outlives its block. A block's result is a ``Partial``: the attention over
the keys of the block alone, and the log-sum-exp of their scores, by which partials of any keys are
merged in any order (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021). Backward recomputes the
weights of a block from the log-sum-exp of all keys (Dao, "FlashAttention-2", 2023, algorithm 2).

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
    """Attention over some of the keys: ``out`` [n, A, D] and log-sum-exp of scores ``lse`` [n, A].

    A query that sees none of them has ``out`` 0 and ``lse`` -inf.
    """

    out: Tensor
    lse: Tensor


def nothing(query: Tensor) -> Partial:
    """The partial over no keys at all, of queries [n, A, D]."""
    work = working_dtype(query.dtype)
    return Partial(
        torch.zeros_like(query, dtype=work),
        query.new_full(query.shape[:2], float("-inf"), dtype=work),
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, seen: VisibleBlocks, *, scale: float
) -> Partial:
    """Attention of query [n, A, D] over key and value [k, G, D]."""
    result = nothing(query)
    groups = key.shape[1]
    for block in seen.blocks:
        scores = masked_scores(
            _by_group(query[block.queries], groups),
            _by_key_head(key[block.keys]),
            seen.mask(block),
            scale=scale,
        )
        part = _softmax(scores, _by_key_head(value[block.keys]))
        merged = merge(
            Partial(result.out[block.queries], result.lse[block.queries]),
            Partial(_by_row(part.out), _by_row(part.lse[..., None])[..., 0]),
        )
        result.out[block.queries], result.lse[block.queries] = merged
    return result


def merge(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both, which have none in common.

    Each counts by its share exp(lse - lse of both) of the sum of exponentials, which is never above
    1; exp(lse) itself is never formed, since it overflows. A query that sees nothing in either
    keeps out 0 and lse -inf.
    """
    lse = torch.logaddexp(one.lse, other.lse)
    safe = finite(lse)
    mine, theirs = (one.lse - safe).exp(), (other.lse - safe).exp()
    return Partial(mine[..., None] * one.out + theirs[..., None] * other.out, lse)


def finite(lse: Tensor) -> Tensor:
    """``lse`` with 0 in place of -inf, so that -inf - lse is -inf and not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


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

    ``query`` and ``gradient`` (of the output) are [n, A, D]; ``lse`` is that of the scores of all
    keys, and ``products`` come from ``row_products``, both [n, A].
    """

    query: Tensor
    gradient: Tensor
    lse: Tensor
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
        q, d_out = _by_group(asked.query[at], groups), _by_group(asked.gradient[at], groups)
        lse = _by_group(finite(asked.lse[at])[..., None], groups)
        products = _by_group(asked.products[at][..., None], groups)
        k, v = _by_key_head(key[to]), _by_key_head(value[to])
        scores = masked_scores(q, k, seen.mask(Block(at, to)), scale=scale)
        weights = (scores - lse).exp()
        d_scores = weights * ((_fold(d_out) @ v.mT).view_as(weights) - products) * scale
        into.value[to] += (_fold(weights).mT @ _fold(d_out)).transpose(0, 1)
        into.key[to] += (_fold(d_scores).mT @ _fold(q)).transpose(0, 1)
        into.query[at] += _by_row((_fold(d_scores) @ k).view_as(q))


def _softmax(scores: Tensor, value: Tensor) -> Partial:
    """Scores [G, h, n, k] and value [G, k, D] -> out [G, h, n, D] and lse [G, h, n]."""
    highest = finite(scores.amax(-1, keepdim=True))
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    out = (_fold(weights) @ value).view(*scores.shape[:3], -1)
    # A query that sees nothing has total 0, and out 0 whatever it is divided by.
    out = out / total.masked_fill(total == 0, 1.0)
    return Partial(out, (highest + total.log())[..., 0])


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """[n, A, D] -> [G, A / G, n, D] in the working dtype."""
    grouped = rows.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
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
