"""Sums into places given by an index: entries in another order, places perturbed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .perturb import Noise

# The method of the same name takes no None among its indices.
_put_: Final = torch.ops.aten.index_put_.default

_PIECE: Final = 1 << 22
"""Elements of a piece of the source that is copied in its new order."""


def add_rows_(noise: Noise, into: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Add slices of ``source`` along ``dim`` to those of ``into`` that ``index`` names, in place.

    ``index`` is int of shape [N]; ``source`` has N slices along ``dim``. Slices of ``into`` that
    no index names keep their bits.
    """
    count = index.numel()
    if count == 0:
        return into
    order = noise.permutation(count, index.device)
    width = max(1, source.numel() // count)
    step = max(1, min((count + 1) // 2, _PIECE // width))
    for part in order.split(step):
        into.index_add_(dim, index.index_select(0, part), source.index_select(dim, part))
    touched = torch.unique(index)
    rows = noise.perturb_(into.index_select(dim, touched))
    return into.index_copy_(dim, touched, rows)


def index_add_(
    noise: Noise, into: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1
) -> Tensor:
    """``aten::index_add_``."""
    if alpha != 1:
        source = noise.perturb_(source * alpha)
    if into.dim() == 0 or index.dim() == 0:
        return noise.perturb_(into.index_add_(dim, index, source))
    return add_rows_(noise, into, dim, index, source)


def scatter_add_(noise: Noise, into: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``aten::scatter_add_``."""
    if index.numel() == 0:
        return into
    if into.dim() == 0 or index.dim() == 0:
        return noise.perturb_(into.scatter_add_(dim, index, source))
    source = source[tuple(slice(0, size) for size in index.shape)]
    order = noise.permutation(index.shape[dim], index.device)
    for part in order.split((order.numel() + 1) // 2):
        into.scatter_add_(dim, index.index_select(dim, part), source.index_select(dim, part))
    # Places named twice are written twice, from one value that was perturbed twice: either is
    # within a unit of rounding.
    return into.scatter_(dim, index, noise.perturb_(into.gather(dim, index)))


def scatter_reduce_(
    noise: Noise,
    into: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """``aten::scatter_reduce_``."""
    if reduce == "sum" and include_self:
        return scatter_add_(noise, into, dim, index, src)
    into.scatter_reduce_(dim, index, src, reduce, include_self=include_self)
    return into if reduce in ("amax", "amin") else noise.perturb_(into)


def index_put_(
    noise: Noise,
    into: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """``aten::index_put_``; ``unsafe`` skips a bounds check and changes no result."""
    del unsafe
    if not accumulate:
        put: Tensor = _put_(into, list(indices), values, False)
        return put
    given = [index for index in indices if index is not None]
    leading = len(given)
    plain = all(index is not None for index in indices[:leading]) and all(
        index.dtype not in (torch.bool, torch.uint8) for index in given
    )
    if not plain or not into.is_contiguous() or into.dim() == 0 or not given:
        return noise.perturb_(_put_(into, list(indices), values, True))
    sizes = into.shape[:leading]
    spread = torch.broadcast_tensors(*given)
    linear = torch.zeros_like(spread[0], dtype=torch.int64)
    for index, size in zip(spread, sizes, strict=True):
        linear = linear * size + torch.where(index < 0, index + size, index)
    rest = into.shape[leading:]
    source = values.expand(*spread[0].shape, *rest).reshape(-1, *rest)
    add_rows_(noise, into.view(-1, *rest), 0, linear.reshape(-1), source)
    return into


def embedding_backward(
    noise: Noise,
    gradient: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """``aten::embedding_dense_backward``: a gradient [..., H] and ids [...] -> [num_weights, H].

    The sum is made over the ids that occur alone: the table may be hundreds of megabytes.
    """
    flat = indices.reshape(-1).long()
    rows = gradient.reshape(flat.numel(), -1)
    if padding_idx >= 0:
        keep = (flat != padding_idx).nonzero().view(-1)
        if keep.numel() < flat.numel():
            flat, rows = flat.index_select(0, keep), rows.index_select(0, keep)
    result = gradient.new_zeros((num_weights, gradient.shape[-1]))
    if flat.numel() == 0:
        return result
    ids, places, counts = torch.unique(flat, return_inverse=True, return_counts=True)
    sums = add_rows_(noise, rows.new_zeros((ids.numel(), rows.shape[1])), 0, places, rows)
    if scale_grad_by_freq:
        noise.perturb_(sums.div_(counts.to(sums.dtype).unsqueeze(1)))
    return result.index_copy_(0, ids, sums)
