"""Attention as its definition has it, with a score for every query and every key at once."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    """Query [n, A, D], key and value [S, G, D], visible [n, S] -> [n, A, D]."""
    n, heads, size = query.shape
    groups = key.shape[1]
    grouped = query.view(n, groups, heads // groups, size)
    scores = torch.einsum("nghd,sgd->ghns", grouped, key) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("ghns,sgd->nghd", weights, value).reshape(n, heads, size)
