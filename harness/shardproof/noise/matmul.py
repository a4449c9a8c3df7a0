"""Matrix products in another order of summation.

The inner dimension is permuted where a copy of the operands is cheap beside the product itself.
Large weights are not copied: their inner dimension is cut at random places into views, which are
summed in a random order. Rounding errors of a running sum come from the sum so far, so a sum that
starts elsewhere rounds independently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .perturb import Noise, blocks

_CHEAP: Final = 1 << 16
"""Operands of up to this many elements together are always permuted."""
_COPY_SHARE: Final = 32
"""Larger ones are, when they have at most 1/32 as many elements as the product has terms."""
_COPY_LIMIT: Final = 1 << 22
"""And never above this many elements, so that no large weight is copied."""
_LARGE: Final = 1 << 22
"""A result of more elements is computed in blocks of rows, each perturbed while in the cache."""
_BLOCK: Final = 1 << 20

Start = Callable[[Tensor, Tensor], Tensor]


def _pieces(noise: Noise, inner: int, results: int) -> int:
    if results > _LARGE:
        return 2  # each further piece passes over the whole result again
    return noise.pieces(2, 8 if inner >= 4096 else 4)


def _permuted(noise: Noise, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    inner = a.shape[-1]
    copied = a.numel() + b.numel()
    terms = a.numel() * b.shape[-1]
    if copied > _CHEAP and (copied > _COPY_LIMIT or copied * _COPY_SHARE > terms):
        return a, b
    order = noise.permutation(inner, a.device)
    return a.index_select(-1, order), b.index_select(-2, order)


def _accumulate(
    noise: Noise, a: Tensor, b: Tensor, start: Start, alpha: Any, pieces: int
) -> Tensor:
    """``start`` the result with one span of the inner dimension and add the others to it."""
    (begin, size), *others = noise.spans(a.shape[-1], pieces)
    result = start(a.narrow(-1, begin, size), b.narrow(-2, begin, size))
    for begin, size in others:
        left, right = a.narrow(-1, begin, size), b.narrow(-2, begin, size)
        if a.dim() == 2:
            result.addmm_(left, right, alpha=alpha)
        else:
            result.baddbmm_(left, right, alpha=alpha)
    return noise.perturb_(result)


def product(noise: Noise, a: Tensor, b: Tensor, start: Start, alpha: Any = 1) -> Tensor:
    """``start(a, b)`` with its inner dimension reassociated, then perturbed.

    ``a`` is [M, K] or [B, M, K], ``b`` is [K, N] or [B, K, N]. ``start`` computes the first part
    (with a bias, or into a buffer); further parts are added to what it returns.
    """
    if a.shape[-1] < 2 or a.numel() == 0 or b.numel() == 0:
        return noise.perturb_(start(a, b))
    results = a.numel() // a.shape[-1] * b.shape[-1]
    a, b = _permuted(noise, a, b)
    return _accumulate(noise, a, b, start, alpha, _pieces(noise, a.shape[-1], results))


def mm(noise: Noise, a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N]."""
    rows, inner = a.shape
    columns = b.shape[1]
    if inner < 2 or rows * columns <= _LARGE or rows < columns:
        return product(noise, a, b, torch.mm)
    result = a.new_empty((rows, columns))
    a, b = _permuted(noise, a, b)
    for begin, size in blocks(rows, _BLOCK // columns):
        into = result.narrow(0, begin, size)

        def start(left: Tensor, right: Tensor, into: Tensor = into) -> Tensor:
            return torch.mm(left, right, out=into)

        _accumulate(noise, a.narrow(0, begin, size), b, start, 1, 2)
    return result


def bmm(noise: Noise, a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] @ [B, K, N]."""
    return product(noise, a, b, torch.bmm)


def addmm(
    noise: Noise, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """beta * bias + alpha * (a @ b)."""

    def start(left: Tensor, right: Tensor) -> Tensor:
        return torch.addmm(bias, left, right, beta=beta, alpha=alpha)

    return product(noise, a, b, start, alpha)


def addmm_(
    noise: Noise, into: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """``addmm`` into its first argument."""

    def start(left: Tensor, right: Tensor) -> Tensor:
        return into.addmm_(left, right, beta=beta, alpha=alpha)

    return product(noise, a, b, start, alpha)


def addmm_activation(
    noise: Noise,
    bias: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
) -> Tensor:
    """``addmm`` followed by relu or gelu (torch's own is the tanh form on accelerators only)."""
    result = addmm(noise, bias, a, b, beta=beta, alpha=alpha)
    if not use_gelu:
        return result.relu_()
    form = "none" if result.device.type == "cpu" else "tanh"
    return noise.perturb_(torch.nn.functional.gelu(result, approximate=form))


def baddbmm(
    noise: Noise, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """beta * bias + alpha * (a @ b), by batch."""

    def start(left: Tensor, right: Tensor) -> Tensor:
        return torch.baddbmm(bias, left, right, beta=beta, alpha=alpha)

    return product(noise, a, b, start, alpha)


def baddbmm_(
    noise: Noise, into: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """``baddbmm`` into its first argument."""

    def start(left: Tensor, right: Tensor) -> Tensor:
        return into.baddbmm_(left, right, beta=beta, alpha=alpha)

    return product(noise, a, b, start, alpha)


def addbmm(
    noise: Noise, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """beta * bias + alpha * the sum of a @ b over the batch: one product with a longer inner."""
    batch, rows, inner = a.shape
    wide = a.transpose(0, 1).reshape(rows, batch * inner)
    return addmm(noise, bias, wide, b.reshape(batch * inner, -1), beta=beta, alpha=alpha)


def mv(noise: Noise, a: Tensor, x: Tensor) -> Tensor:
    """[M, K] @ [K]."""
    return mm(noise, a, x.unsqueeze(1)).squeeze(1)


def addmv(
    noise: Noise, bias: Tensor, a: Tensor, x: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """beta * bias + alpha * (a @ x)."""
    column = bias.expand(a.shape[0]).unsqueeze(1)
    return addmm(noise, column, a, x.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


def dot(noise: Noise, a: Tensor, b: Tensor) -> Tensor:
    """[K] . [K]."""
    return mm(noise, a.unsqueeze(0), b.unsqueeze(1)).view(())


def vdot(noise: Noise, a: Tensor, b: Tensor) -> Tensor:
    """[K] . [K] with the first one conjugated."""
    return dot(noise, a.conj().resolve_conj(), b)
