"""Operations that are linear in one argument, whose sums are made inside a kernel.

f(x) = f(x * m) + f(x * (1 - m)) for a random mask m: each sum is made in two parts, and adding
the zeros between their terms is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .perturb import Noise


def halves(noise: Noise, value: Tensor) -> tuple[Tensor, Tensor]:
    """``value`` as a sum of two tensors that are zero in complementary random places."""
    mask = noise.mask(value)
    return torch.where(mask, value, 0), torch.where(mask, 0, value)


def convolution(noise: Noise, op: OpOverload, args: tuple[Any, ...]) -> Tensor:
    """``aten::convolution``: linear in its input; the bias is added once."""
    value, weight, bias, *rest = args
    first, second = halves(noise, value)
    result: Tensor = op(first, weight, bias, *rest)
    result.add_(op(second, weight, None, *rest))
    return noise.perturb_(result)


def convolution_backward(
    noise: Noise, op: OpOverload, args: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """``aten::convolution_backward``: its three gradients are linear in the output's gradient."""
    gradient, *rest = args
    first, second = halves(noise, gradient)
    results = []
    for one, other in zip(op(first, *rest), op(second, *rest), strict=True):
        results.append(None if one is None else noise.perturb_(one.add_(other)))
    return tuple(results)


def transform(noise: Noise, op: OpOverload, args: tuple[Any, ...]) -> Tensor:
    """A transform that is linear in its first argument, such as ``aten::_fft_r2c``."""
    value, *rest = args
    first, second = halves(noise, value)
    result: Tensor = op(first, *rest)
    return noise.perturb_(result.add_(op(second, *rest)))
