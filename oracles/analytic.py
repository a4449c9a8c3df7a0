"""Gradients by formula, for what is simple enough to have one.

A probe W [H, C] reads z = X W from states X [n, H]; the loss is half the squared distance to goals
Y [n, C], summed. Then dL/dW = X^T (X W - Y) and dL/dX = (X W - Y) W^T. No autograd is used.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def probe_loss(states: Tensor, probe: Tensor, goals: Tensor) -> Tensor:
    """0.5 * sum((X W - Y)^2), a scalar; differentiable."""
    return 0.5 * (states @ probe - goals).square().sum()


@torch.no_grad()
def probe_gradient(batches: Iterable[tuple[Tensor, Tensor]], probe: Tensor) -> Tensor:
    """dL/dW [H, C] of the losses of all ``batches`` of (states, goals) together."""
    total = torch.zeros_like(probe)
    for states, goals in batches:
        total += states.T @ (states @ probe - goals)
    return total


@torch.no_grad()
def states_gradient(states: Tensor, probe: Tensor, goals: Tensor) -> Tensor:
    """dL/dX [n, H], what the probe sends back into the model."""
    return (states @ probe - goals) @ probe.T
