"""Fused attention, computed by its parts so that every rounding is seen.

Blocks of query rows keep the scores small, as the fused kernel does. Query heads that share a key
head are taken as one longer query, so their gradients are summed by one (reassociated) product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from .matmul import bmm
from .perturb import Noise, blocks
from .reduce import total

_BLOCK: Final = 1 << 20
"""Scores of one block."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Heads:
    """Sizes of one attention call and its scores, block by block.

    q is [B, H, S, D], k is [B, K, T, D] with H a multiple of K; a mask broadcasts to [B, H, S, T].
    """

    def __init__(
        self, query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None
    ) -> None:
        self.batch, heads, self.rows, depth = query.shape
        self.kv_heads, self.columns = key.shape[1], key.shape[2]
        self.groups = heads // self.kv_heads
        self.scale = 1.0 / math.sqrt(depth) if scale is None else scale
        self.causal = causal
        self.mask: Tensor | None = None
        if mask is not None:
            full = mask.expand(self.batch, heads, self.rows, self.columns)
            self.mask = full.unflatten(1, (self.kv_heads, self.groups))

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(group, first row, rows) of each block."""
        step = max(1, _BLOCK // max(1, self.batch * self.kv_heads * self.columns))
        for group in range(self.groups):
            for begin, size in blocks(self.rows, step):
                yield group, begin, size

    def part(self, value: Tensor, block: tuple[int, int, int]) -> Tensor:
        """The block's rows of a [B, H, S, ...] tensor as [B * K, rows, ...], widened."""
        group, begin, size = block
        grouped = value.unflatten(1, (self.kv_heads, self.groups))
        rows = grouped[:, :, group, begin : begin + size]
        flat: Tensor = rows.flatten(0, 1).to(_wide(value.dtype))
        return flat

    def put(self, into: Tensor, block: tuple[int, int, int], value: Tensor) -> None:
        """Write a block's [B * K, rows, ...] into a [B, H, S, ...] tensor."""
        group, begin, size = block
        grouped = into.unflatten(1, (self.kv_heads, self.groups))
        rows = value.unflatten(0, (self.batch, self.kv_heads))
        grouped[:, :, group, begin : begin + size].copy_(rows)

    def scores(
        self, noise: Noise, query: Tensor, key: Tensor, block: tuple[int, int, int]
    ) -> Tensor:
        """Masked scores [B * K, rows, T] of one block."""
        group, begin, size = block
        scores = bmm(noise, self.part(query, block), key.transpose(1, 2)).mul_(self.scale)
        if self.mask is not None:
            part = self.mask[:, :, group, begin : begin + size].flatten(0, 1)
            if part.dtype is torch.bool:
                scores.masked_fill_(~part, float("-inf"))
            else:
                scores.add_(part)
        if self.causal:
            rows = torch.arange(begin, begin + size, device=query.device).unsqueeze(1)
            hidden = torch.arange(self.columns, device=query.device) > rows
            scores.masked_fill_(hidden, float("-inf"))
        return noise.perturb_(scores)


def attention(
    noise: Noise,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``_scaled_dot_product_flash_attention_for_cpu``.

    Returns the output [B, H, S, D] and the log-sum-exp [B, H, S]. The kernel refuses dropout, so
    none is handled here.
    """
    del dropout_p
    heads = _Heads(query, key, is_causal, attn_mask, scale)
    batch, count, rows, _ = query.shape
    wide = _wide(query.dtype)
    keys, values = key.flatten(0, 1).to(wide), value.flatten(0, 1).to(wide)
    # The memory layout of the kernel's own results: callers may rely on it for views.
    output = torch.empty_like(query)
    sums_log = query.new_empty((batch, rows, count), dtype=wide).transpose(1, 2)
    for block in heads.blocks():
        scores = heads.scores(noise, query, keys, block)
        top = scores.amax(2, keepdim=True)
        top = torch.where(top.isinf(), 0, top)
        weights = noise.perturb_(scores.sub_(top)).exp_()
        sums = noise.perturb_(total(noise, weights, [2], keepdim=True, moved=True))
        mixed = bmm(noise, weights, values).div_(torch.where(sums == 0, 1, sums))
        heads.put(output, block, mixed)
        heads.put(sums_log, block, sums.log_().add_(top).squeeze(2))
    return noise.perturb_(output), noise.perturb_(sums_log)


def attention_backward(
    noise: Noise,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward operation of :func:`attention`: gradients of query, key and value."""
    del dropout_p
    heads = _Heads(query, key, is_causal, attn_mask, scale)
    wide = _wide(query.dtype)
    keys, values = key.flatten(0, 1).to(wide), value.flatten(0, 1).to(wide)
    batch, count, rows, depth = query.shape
    grad_query = query.new_empty((batch, rows, count, depth)).transpose(1, 2)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for block in heads.blocks():
        grad = heads.part(grad_out, block)
        offset = heads.part(logsumexp, block).unsqueeze(2)
        offset = torch.where(offset.isinf(), 0, offset)
        weights = noise.perturb_(heads.scores(noise, query, keys, block).sub_(offset)).exp_()
        grad_values.add_(bmm(noise, weights.transpose(1, 2), grad))
        inner = grad * heads.part(out, block)
        inner = noise.perturb_(total(noise, inner, [2], keepdim=True))
        grad_scores = bmm(noise, grad, values.transpose(1, 2)).sub_(inner)
        grad_scores = noise.perturb_(grad_scores).mul_(weights).mul_(heads.scale)
        noise.perturb_(grad_scores)
        heads.put(grad_query, block, bmm(noise, grad_scores, keys))
        grad_keys.add_(bmm(noise, grad_scores.transpose(1, 2), heads.part(query, block)))
    return (
        noise.perturb_(grad_query),
        noise.perturb_(grad_keys.view(key.shape).to(key.dtype)),
        noise.perturb_(grad_values.view(value.shape).to(value.dtype)),
    )
