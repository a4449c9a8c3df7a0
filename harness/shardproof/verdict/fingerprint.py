"""Bit identity of values that live on different ranks, without moving them."""

from __future__ import annotations

import functools
import hashlib

import torch

from .blocks import BLOCK, blocks


@functools.lru_cache(maxsize=4)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd 64-bit weights: an odd factor is invertible, so one changed number is always seen."""
    generator = torch.Generator().manual_seed(0x5EED)
    drawn = torch.randint(-(2**62), 2**62, (BLOCK,), generator=generator, dtype=torch.int64)
    return (drawn * 2 + 1).to(device)


class Fingerprint:
    """Digest of a sequence of blocks; equal for equal numbers in equal blocks.

    Each block is hashed where it lives, by a sum of products modulo 2^64 (integer addition is
    exact, so its order does not matter), and only that number travels. Floating values are taken
    as float64, which holds every narrower one exactly; the sign of a zero is not a difference.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def update(self, block: torch.Tensor) -> None:
        """Add a block of float64 or int64 numbers, at most ``BLOCK`` of them."""
        flat = block.reshape(-1)
        bits = (flat + 0.0).view(torch.int64) if flat.is_floating_point() else flat
        weights = _weights(bits.device)[: bits.numel()]
        # The shift brings high bits down: a product alone would lose them beyond bit 64.
        total = int(((bits ^ (bits >> 32)) * weights).sum())
        # With the count, since zeros at the end add nothing to the sum.
        self._hash.update(total.to_bytes(8, "little", signed=True))
        self._hash.update(bits.numel().to_bytes(8, "little"))

    def hex(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()


def fingerprint(value: torch.Tensor) -> str:
    """Digest of a whole tensor (real, or integers of at most 64 bits)."""
    result = Fingerprint()
    for index in blocks(value.shape):
        result.update(widen(value[index]))
    return result.hex()


def widen(block: torch.Tensor) -> torch.Tensor:
    """The numbers of a block as float64 or int64: exact for every dtype."""
    return block.to(torch.float64 if block.is_floating_point() else torch.int64)
