"""The random choices of one noise run, and the perturbation of values in place."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from .pool import POOL_SIZE, UNITS, WINDOW, pool


class Noise:
    """A seeded source of roundings and of orders of summation.

    Every choice comes from generators of its own, so the global generators of torch, numpy and
    ``random`` stay where the code under test expects them. The same seed and the same sequence
    of calls give the same bits.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def perturb_(self, value: Tensor) -> Tensor:
        """Round each element of ``value`` anew, at random and in place.

        One element in four moves to a neighbouring number of its own dtype, evenly up or down.
        Zeros, infinities and NaN stay as they are, and a finite value never becomes infinite.
        Other dtypes are left alone.
        """
        size = value.numel()
        if value.dtype not in UNITS or size == 0:
            if value.is_complex() and not value.is_conj():
                self.perturb_(torch.view_as_real(value))
            return value
        if value.layout is not torch.strided or value.is_meta:
            return value
        flat = _flat(value)
        if flat is None:
            self._perturb_strided(value)
        elif size <= WINDOW:
            self._perturb_window(flat)
        else:
            for start in range(0, size, WINDOW):
                self._perturb_window(flat[start : start + WINDOW])
        return value

    def window(self, value: Tensor) -> Tensor:
        """Noise of the shape of ``value`` (at most WINDOW elements): a view into the pool."""
        size = value.numel()
        start = int(self._random.random() * (POOL_SIZE - size + 1))
        noise = pool(value.dtype, value.device).narrow(0, start, size)
        return noise if value.dim() == 1 else noise.view(value.shape)

    def _perturb_strided(self, value: Tensor) -> None:
        sizes, strides = value.shape, value.stride()
        if any(size > 1 and stride == 0 for size, stride in zip(sizes, strides, strict=True)):
            return  # an expanded tensor: no operation computes into one
        if value.numel() <= WINDOW:
            self._perturb_window(value)
            return
        widest = max(range(value.dim()), key=lambda dim: sizes[dim])
        step = max(1, sizes[widest] * WINDOW // value.numel())
        for part in torch.split(value, step, widest):
            self._perturb_strided(part)

    def _perturb_window(self, value: Tensor) -> None:
        noise = self.window(value)
        if _surely_finite(value):
            value.addcmul_(value, noise)
            return
        # x + x * noise turns infinity into NaN and can push the largest finite numbers over.
        moved = torch.addcmul(value, value, noise)
        torch.where(torch.isfinite(moved), moved, value, out=moved)
        value.copy_(moved)

    def coin(self) -> bool:
        """True or False, evenly."""
        return self._random.random() < 0.5

    def pieces(self, least: int, most: int) -> int:
        """A number of pieces, evenly from ``least`` to ``most``."""
        return self._random.randint(least, most)

    def spans(self, length: int, pieces: int) -> list[tuple[int, int]]:
        """Cut ``range(length)`` at random places; return (start, size) in a random order.

        Each span has at least one element; there are ``pieces`` of them where the length allows.
        The span that starts at zero is kept below about half: inside it, a kernel rounds exactly
        as in the plain run, so this part of the sum would not move.
        """
        pieces = min(pieces, length)
        cuts = sorted(self._random.sample(range(1, length), pieces - 1))
        if cuts and cuts[0] > (length + 1) // 2:
            cuts = sorted({length - cut for cut in cuts})
        edges = [0, *cuts, length]
        spans = [(start, end - start) for start, end in itertools.pairwise(edges)]
        self._random.shuffle(spans)
        return spans

    def permutation(self, length: int, device: torch.device) -> Tensor:
        """A random order of ``range(length)``: int64, shape ``[length]``, on ``device``."""
        return torch.randperm(length, generator=self._generator).to(device)

    def mask(self, value: Tensor) -> Tensor:
        """A random boolean of the shape of ``value``, half of it True."""
        mask = torch.empty(value.shape, dtype=torch.bool)
        return mask.bernoulli_(generator=self._generator).to(value.device)


def blocks(length: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, size) of consecutive blocks of ``range(length)``, of at most ``step`` each."""
    step = max(1, step)
    for start in range(0, length, step):
        yield start, min(step, length - start)


def _surely_finite(value: Tensor) -> bool:
    # One cheap pass: a dot product of finite values may overflow, never the reverse, and then the
    # careful path is taken for nothing.
    if value.dtype in (torch.float16, torch.bfloat16) or value.dim() != 1:
        # Half precision would overflow all the time; strided values have no dot product.
        largest = float(value.abs().amax())
        return largest < torch.finfo(value.dtype).max / 2
    return math.isfinite(float(torch.dot(value, value)))


def _flat(value: Tensor) -> Tensor | None:
    """The tensor's elements as one dimension without a copy, in whatever order they lie."""
    if value.is_contiguous():
        return value.view(-1)
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
