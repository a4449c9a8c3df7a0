from __future__ import annotations

import torch

from oracles.analytic import probe_gradient, probe_loss, states_gradient


def batch(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, 5, dtype=torch.float64, generator=generator)
    return states, torch.randn(rows, 2, dtype=torch.float64, generator=generator)


def test_gradients_against_autograd() -> None:
    probe = batch(0, 2)[0].T.contiguous().requires_grad_()
    batches = [batch(1, 7), batch(2, 3)]
    for states, _ in batches:
        states.requires_grad_()
    sum((probe_loss(s, probe, g) for s, g in batches), torch.zeros(())).backward()
    assert probe.grad is not None
    torch.testing.assert_close(probe_gradient(batches, probe), probe.grad, rtol=1e-13, atol=1e-13)
    for states, goals in batches:
        torch.testing.assert_close(states_gradient(states, probe, goals), states.grad)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    probe = batch(0, 2)[0].T.contiguous()
    states, goals = batch(1, 7)
    gradient = probe_gradient([(states, goals)], probe)
    step = torch.zeros_like(probe)
    step[3, 1] = 1e-6
    slope = probe_loss(states, probe + step, goals) - probe_loss(states, probe - step, goals)
    torch.testing.assert_close(slope / 2e-6, gradient[3, 1], rtol=1e-8, atol=1e-8)
