"""Softmax and its kin, row block by row block, with the sum over the row reassociated."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .perturb import Noise, blocks
from .reduce import Dims, dimensions, total

_BLOCK: Final = 1 << 20
"""Elements of a block of rows: what the intermediate values take beside the result."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _rows(value: Tensor, dim: int) -> Tensor:
    """[..., K, ...] -> [N, K]: a view where the reduced dimension is the last one."""
    moved = value.movedim(dim, -1)
    return moved.reshape(-1, moved.shape[-1])


def _shaped(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """[N, K] -> the shape of ``like``, contiguous as the kernels' results are."""
    moved = like.movedim(dim, -1)
    return rows.view(moved.shape).movedim(-1, dim).contiguous()


def _trivial(value: Tensor) -> bool:
    return value.dim() == 0 or value.numel() == 0


def softmax(noise: Noise, value: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """``aten::_softmax``."""
    dtype = torch.float32 if half_to_float else value.dtype
    if _trivial(value):
        return torch.softmax(value, dim, dtype=dtype)
    rows = _rows(value, dim)
    result = torch.empty_like(rows, dtype=dtype)
    for begin, size in blocks(rows.shape[0], _BLOCK // rows.shape[1]):
        part = rows.narrow(0, begin, size).to(_wide(dtype))
        part = noise.perturb_(part - part.amax(1, keepdim=True)).exp_()
        part.div_(noise.perturb_(total(noise, part, [1], keepdim=True, moved=True)))
        result.narrow(0, begin, size).copy_(part)
    return noise.perturb_(_shaped(result, value, dim))


def safe_softmax(noise: Noise, value: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``aten::_safe_softmax``: a row of nothing but -inf gives zeros."""
    source = value if dtype is None else value.to(dtype)
    result = softmax(noise, source, dim)
    empty = (source == float("-inf")).all(dim, keepdim=True)
    return result.masked_fill_(empty, 0.0)


def log_softmax(noise: Noise, value: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """``aten::_log_softmax``."""
    dtype = torch.float32 if half_to_float else value.dtype
    if _trivial(value):
        return torch.log_softmax(value, dim, dtype=dtype)
    rows = _rows(value, dim)
    result = torch.empty_like(rows, dtype=dtype)
    for begin, size in blocks(rows.shape[0], _BLOCK // rows.shape[1]):
        part = rows.narrow(0, begin, size).to(_wide(dtype))
        part = noise.perturb_(part - part.amax(1, keepdim=True))
        sums = noise.perturb_(total(noise, part.exp(), [1], keepdim=True, moved=True))
        part.sub_(noise.perturb_(sums.log_()))
        result.narrow(0, begin, size).copy_(part)
    return noise.perturb_(_shaped(result, value, dim))


def logsumexp(noise: Noise, value: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """``aten::logsumexp``."""
    if _trivial(value) or not value.is_floating_point():
        return noise.perturb_(torch.logsumexp(value, dimensions(value, dim), keepdim))
    dims = dimensions(value, dim)
    wide = value.to(_wide(value.dtype))
    top = wide.amax(dims, keepdim=True)
    top = torch.where(top.isinf(), 0, top)
    part = noise.perturb_(wide - top).exp_()
    sums = noise.perturb_(total(noise, part, dims, keepdim=keepdim, moved=True))
    result = noise.perturb_(sums.log_())
    result.add_(top if keepdim else top.sum(dims))  # of size one each: nothing is added up
    return noise.perturb_(result.to(value.dtype))


def softmax_backward(
    noise: Noise, gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """``aten::_softmax_backward_data``: y * (g - sum(g * y))."""
    if _trivial(output):
        return torch.zeros_like(output, dtype=input_dtype)
    grads, outputs = _rows(gradient, dim), _rows(output, dim)
    result = torch.empty_like(outputs, dtype=input_dtype)
    for begin, size in blocks(outputs.shape[0], _BLOCK // outputs.shape[1]):
        grad = grads.narrow(0, begin, size).to(_wide(output.dtype))
        part = outputs.narrow(0, begin, size).to(_wide(output.dtype))
        sums = noise.perturb_(total(noise, grad * part, [1], keepdim=True))
        result.narrow(0, begin, size).copy_(noise.perturb_(grad - sums).mul_(part))
    return noise.perturb_(_shaped(result, output, dim))


def log_softmax_backward(
    noise: Noise, gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """``aten::_log_softmax_backward_data``: g - exp(y) * sum(g)."""
    if _trivial(output):
        return torch.zeros_like(output, dtype=input_dtype)
    grads, outputs = _rows(gradient, dim), _rows(output, dim)
    result = torch.empty_like(outputs, dtype=input_dtype)
    for begin, size in blocks(outputs.shape[0], _BLOCK // outputs.shape[1]):
        grad = grads.narrow(0, begin, size).to(_wide(output.dtype))
        part = noise.perturb_(outputs.narrow(0, begin, size).to(_wide(output.dtype)).exp())
        sums = noise.perturb_(total(noise, grad, [1], keepdim=True))
        result.narrow(0, begin, size).copy_(grad - part.mul_(sums))
    return noise.perturb_(_shaped(result, output, dim))
