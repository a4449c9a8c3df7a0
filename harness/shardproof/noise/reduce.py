"""Sums, means, variances, norms and cumulative sums in another order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .perturb import Noise

_PERMUTED: Final = 1 << 16
"""Up to this many elements are copied in another order."""
_COPIED: Final = 1 << 20
"""Up to this many are copied and perturbed; larger values are cut into views."""

Dims = int | Sequence[int] | None


def dimensions(value: Tensor, dim: Dims) -> list[int]:
    """The reduced dimensions, none negative; None and the empty list mean all."""
    rank = value.dim()
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank))
    wanted = [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % rank if rank else 0 for d in wanted})


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _scattered(
    noise: Noise, value: Tensor, dim: int, spans: Sequence[tuple[int, int]], *, moved: bool
) -> Tensor:
    """A copy with the order changed inside each span and each term moved by a unit of rounding.

    Spans stay where they are: a split of sorted or cancelling terms has large partial sums, which
    a permutation of the whole would never show. Terms are moved (unless they just were) because
    equal terms round the same way in every order.
    """
    if value.numel() > _COPIED or (moved and value.numel() > _PERMUTED):
        return value
    if value.numel() > _PERMUTED:
        return noise.perturb_(value.clone())
    order = torch.cat(
        [noise.permutation(size, value.device).add_(begin) for begin, size in sorted(spans)]
    )
    copy = value.index_select(dim, order)
    return copy if moved else noise.perturb_(copy)


def total(
    noise: Noise, value: Tensor, dims: list[int], *, keepdim: bool, moved: bool = False
) -> Tensor:
    """The sum over ``dims`` in the dtype of ``value``, reassociated, not yet perturbed.

    ``moved`` says that the terms have just been perturbed.
    """
    if value.dim() == 0 or value.numel() == 0:
        return value.sum(dims, keepdim=keepdim) if value.dim() else value.clone()
    if len(dims) == value.dim() > 1 and value.is_contiguous() and not keepdim:
        value, dims = value.view(-1), [0]
    widest = max(dims, key=lambda d: value.shape[d])
    length = value.shape[widest]
    if length < 2:
        return value.sum(dims, keepdim=keepdim)
    results = value.numel() // math.prod(value.shape[d] for d in dims)
    large = results > _PERMUTED
    spans = noise.spans(length, 2 if large else noise.pieces(3, 8))
    value = _scattered(noise, value, widest, spans, moved=moved)
    result: Tensor | None = None
    for begin, size in spans:
        part = value.narrow(widest, begin, size).sum(dims, keepdim=keepdim)
        if not large and size > 1:
            noise.perturb_(part)
        result = part if result is None else result.add_(part)
    return value.sum(dims, keepdim=keepdim) if result is None else result


def sum_(
    noise: Noise,
    value: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten::sum``."""
    wanted = dtype or value.dtype
    dims = dimensions(value, dim)
    result = total(noise, value.to(_accumulator(wanted)), dims, keepdim=keepdim).to(wanted)
    return noise.perturb_(result)


def mean(
    noise: Noise,
    value: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten::mean``."""
    wanted = dtype or value.dtype
    dims = dimensions(value, dim)
    result = total(noise, value.to(_accumulator(wanted)), dims, keepdim=keepdim)
    count = math.prod(value.shape[d] for d in dims) if value.dim() else 1
    return noise.perturb_((result / count).to(wanted))


def nansum(
    noise: Noise,
    value: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten::nansum``."""
    return sum_(noise, torch.where(value.isnan(), 0, value), dim, keepdim, dtype=dtype)


def _moments(
    noise: Noise, value: Tensor, dim: Dims, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    dims = dimensions(value, dim)
    count = math.prod(value.shape[d] for d in dims) if value.dim() else 1
    wide = value.to(_accumulator(value.dtype))
    if wide.is_complex() or value.dim() == 0 or value.numel() == 0:
        variance, centre = torch.var_mean(wide, dims, correction=correction, keepdim=keepdim)
        return variance, centre
    centre = noise.perturb_(total(noise, wide, dims, keepdim=True).div_(count))
    deviation = noise.perturb_(wide - centre)
    free = max(0.0, count - (1.0 if correction is None else float(correction)))
    squares = total(noise, deviation.square_(), dims, keepdim=keepdim, moved=True)
    if not keepdim:
        centre = centre.sum(dims)  # each is of size one: nothing is added up
    return squares.div_(free), centre


def var_mean(
    noise: Noise,
    value: Tensor,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """``aten::var_mean``."""
    variance, centre = _moments(noise, value, dim, correction, keepdim)
    return noise.perturb_(variance.to(value.dtype)), centre.to(value.dtype)


def std_mean(
    noise: Noise,
    value: Tensor,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """``aten::std_mean``."""
    variance, centre = _moments(noise, value, dim, correction, keepdim)
    return noise.perturb_(variance.sqrt().to(value.dtype)), centre.to(value.dtype)


def var(
    noise: Noise,
    value: Tensor,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """``aten::var``."""
    return var_mean(noise, value, dim, correction=correction, keepdim=keepdim)[0]


def std(
    noise: Noise,
    value: Tensor,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """``aten::std``."""
    return std_mean(noise, value, dim, correction=correction, keepdim=keepdim)[0]


def vector_norm(
    noise: Noise,
    value: Tensor,
    ord: Any = 2,  # noqa: A002 - the operation's own name
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten::linalg_vector_norm``: the norm of the norms of parts."""
    wanted = dtype or value.dtype
    order = 2.0 if ord is None else float(ord)
    dims = dimensions(value, dim)
    if value.numel() == 0 or order == 0 or math.isinf(order):
        # Counts and the largest entry: nothing is added up.
        selected: Tensor = torch.linalg.vector_norm(value, order, dims, keepdim, dtype=dtype)
        return selected
    wide = value.to(_accumulator(wanted))
    if value.dim() == 0:
        wide, dims, keepdim = wide.view(1), [0], False
    widest = max(dims, key=lambda d: wide.shape[d])
    spans = noise.spans(wide.shape[widest], noise.pieces(3, 8))
    wide = _scattered(noise, wide, widest, spans, moved=False)
    parts = [
        torch.linalg.vector_norm(wide.narrow(widest, begin, size), order, dims, keepdim)
        for begin, size in spans
    ]
    result = torch.linalg.vector_norm(torch.stack(parts), order, 0)
    return noise.perturb_(result.real.to(wanted) if result.is_complex() else result.to(wanted))


def norm(
    noise: Noise,
    value: Tensor,
    p: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten::norm``."""
    return vector_norm(noise, value, p, dim, keepdim, dtype=dtype)


def dist(noise: Noise, value: Tensor, other: Tensor, p: Any = 2) -> Tensor:
    """``aten::dist``: the norm of the difference."""
    return vector_norm(noise, noise.perturb_(value - other), p)


def foreach_norm(
    noise: Noise,
    values: Sequence[Tensor],
    ord: Any = 2,  # noqa: A002 - the operation's own name
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """``aten::_foreach_norm``."""
    return [vector_norm(noise, value, ord, dtype=dtype) for value in values]


def cumsum(noise: Noise, value: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """``aten::cumsum``: parts on their own, then each one's start added."""
    wanted = dtype or value.dtype
    wide = value.to(_accumulator(wanted))
    if value.dim() == 0 or value.numel() == 0 or value.shape[dim] < 2:
        return noise.perturb_(torch.cumsum(value, dim, dtype=wanted))
    result = torch.empty_like(wide)
    carry: Tensor | None = None
    length = value.shape[dim]
    for begin, size in sorted(noise.spans(length, noise.pieces(2, 8))):
        part = torch.cumsum(wide.narrow(dim, begin, size), dim)
        if carry is not None:
            part.add_(carry)
        carry = part.narrow(dim, size - 1, 1)
        result.narrow(dim, begin, size).copy_(part)
    return noise.perturb_(result.to(wanted))
