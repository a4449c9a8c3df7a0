"""Only what depends on a parameter or on a floating input moves."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardproof.noise import NoiseMode
from shardproof.noise.taint import REGISTRY, TaintRegistry


def tracked(build: Callable[[], Tensor], *, perturb: bool = False) -> Tensor:
    with NoiseMode(0, perturb=perturb):
        return build()


def rotary() -> Tensor:
    """A rotary table at positions around 20,000."""
    inverse = 1.0 / (10000.0 ** (torch.arange(0, 64, 2).float() / 64))
    angles = torch.outer(torch.arange(19_000, 20_000).float(), inverse)
    return torch.cat([angles.cos(), angles.sin()], -1) * torch.tensor(1.1)


CLEAN: dict[str, Callable[[], Tensor]] = {
    "rotary table": rotary,
    "causal mask": lambda: torch.full((8, 8), float("-inf")).triu(1),
    "mask by where": lambda: torch.where(torch.ones(8, 8).tril().bool(), 0.0, -1e30),
    "integers": lambda: torch.randint(0, 9, (8,)).float() * 0.3,
    "linspace": lambda: torch.linspace(0, 1, 50) / 3,
    "constant": lambda: torch.tensor(0.1) * 3,
    "constant in full size": lambda: torch.tensor(0.1).expand(5) * 3,
    "like a tainted one": lambda: torch.zeros_like(torch.randn(5)) + 0.1,
    "new from a tainted one": lambda: torch.randn(5).new_full((5,), 0.1).mul_(3),
    "filled buffer": lambda: torch.empty(5).fill_(0.1).mul_(3),
    "comparison": lambda: (torch.randn(5) > 0).float() / 3,
    "sum": lambda: torch.sum(torch.arange(100).double() / 7),
    "matrix product": lambda: (torch.ones(5, 7) / 3) @ (torch.ones(7, 5) / 7),
    "copy of clean rows": lambda: torch.zeros(5).copy_(torch.arange(5) / 3),
    "python scalar": lambda: torch.scalar_tensor(0.3) * 7,
}

TAINTED: dict[str, Callable[[], Tensor]] = {
    "random": lambda: torch.randn(5),
    "random like": lambda: torch.rand_like(torch.zeros(5)),
    "random in place": lambda: torch.zeros(5).normal_(),
    "list": lambda: torch.tensor([0.1, 0.2]),
    "parameter of ones": lambda: nn.Parameter(torch.ones(5)) * 3,
    "its data": lambda: nn.Parameter(torch.ones(5)).detach() * 3,
    "requires grad": lambda: torch.ones(5, requires_grad=True) * 3,
    "numpy": lambda: torch.from_numpy(torch.ones(5).numpy().copy()),
    "row copied in": lambda: torch.zeros(5, 3).index_copy_(0, torch.tensor([1]), torch.randn(1, 3)),
    "assignment": lambda: assigned(torch.randn(2, 3)),
    "out": lambda: torch.add(torch.randn(3), 1, out=torch.zeros(3)),
    "gathered": lambda: torch.randn(9)[torch.arange(3)],
    "view of": lambda: torch.randn(9).view(3, 3).t(),
    "loss": lambda: torch.randn(9).sum(),
    "clean times loss": lambda: torch.ones(3) * torch.randn(9).sum(),
    "mean into a constant": lambda: torch.tensor(0.0).add_(torch.randn(9).mean()),
}


def assigned(rows: Tensor) -> Tensor:
    buffer = torch.zeros(5, 3)
    buffer[2:4] = rows
    return buffer


@pytest.mark.parametrize("name", CLEAN)
def test_factories_and_integers_are_clean(name: str) -> None:
    assert not REGISTRY.tainted(tracked(CLEAN[name]))


@pytest.mark.parametrize("name", CLEAN)
def test_clean_values_keep_their_bits(name: str) -> None:
    torch.manual_seed(0)
    plain = CLEAN[name]()
    torch.manual_seed(0)
    assert torch.equal(tracked(CLEAN[name], perturb=True), plain)


@pytest.mark.parametrize("name", TAINTED)
def test_parameters_inputs_and_what_follows_are_tainted(name: str) -> None:
    assert REGISTRY.tainted(tracked(TAINTED[name]))


def test_random_factories_keep_their_own_values() -> None:
    """They are inputs; every topology draws the same ones."""

    def draw() -> Tensor:
        torch.manual_seed(0)
        return torch.cat([torch.randn(9), torch.rand(9), torch.zeros(9).normal_()])

    assert torch.equal(tracked(draw, perturb=True), draw())


def test_views_made_before_a_write_are_tainted_by_it() -> None:
    with NoiseMode(0):
        buffer = torch.zeros(6, 4)
        view = buffer.view(24)[3:]
        assert not REGISTRY.tainted(view)
        buffer[:2].copy_(torch.randn(2, 4))
        assert REGISTRY.tainted(view)
        assert REGISTRY.tainted(buffer[4])


def test_writing_clean_values_does_not_wash_a_buffer() -> None:
    with NoiseMode(0):
        buffer = torch.randn(6, 4)
        buffer[:2] = 0.0
        buffer[0].copy_(torch.arange(4) / 3)
        assert REGISTRY.tainted(buffer)


def test_what_was_made_before_is_tainted_but_for_single_numbers() -> None:
    weights, number = torch.ones(5), torch.tensor(0.3)
    with NoiseMode(0):
        assert REGISTRY.tainted(weights * 3)
        assert not REGISTRY.tainted(number * 3)
        assert REGISTRY.tainted(nn.Parameter(number) * 3)
        assert REGISTRY.tainted(weights.new_tensor(0.3) * weights)


def test_one_number_of_a_larger_tensor_is_no_constant() -> None:
    weights = torch.ones(5)
    with NoiseMode(0):
        assert REGISTRY.tainted(weights[0] * 3)


def test_knowledge_outlives_the_mode() -> None:
    """A session fixture is built once, without perturbation, and used in many runs."""
    table = tracked(rotary)
    loss = tracked(lambda: torch.randn(9).sum())
    with NoiseMode(7):
        product = table[:5] * 3
        assert not REGISTRY.tainted(product)
        assert REGISTRY.tainted(loss * torch.ones(()))
    assert torch.equal(product, table[:5] * 3)


def test_a_reused_address_says_nothing() -> None:
    """Freed clean storages must not vouch for weights that get their address."""
    with NoiseMode(0):
        for _ in range(300):
            made = [torch.zeros(1000) for _ in range(10)]
            del made
        for _ in range(300):
            loaded = torch.from_numpy(torch.ones(1000).numpy())
            assert REGISTRY.tainted(loaded.clone() * loaded) or not REGISTRY.tainted(loaded)
    outside = [torch.empty(1000) for _ in range(500)]
    assert all(REGISTRY.tainted(value) for value in outside)


def test_dead_storages_are_forgotten() -> None:
    """A long session must not grow with every mask that it ever made."""
    registry = TaintRegistry()
    kept = torch.zeros(3)
    registry.mark_clean(kept)
    for _ in range(20_000):
        registry.mark_clean(torch.zeros(1))
    gc.collect()
    assert len(registry) < 5000
    registry.sweep()
    assert len(registry) == 1
    assert not registry.tainted(kept)


def test_no_storage_is_kept_alive() -> None:
    value = torch.zeros(10)
    REGISTRY.mark_clean(value)
    reference = torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage())
    assert not reference.expired()
    del value
    assert reference.expired()


def test_each_entry_of_a_foreach_call_is_judged_by_itself() -> None:
    """Optimizers keep step counters beside moments in one call."""
    with NoiseMode(3):
        clean, dirty = torch.full((4000,), 0.1), torch.randn(4000)
        before = dirty.clone()
        torch._foreach_mul_([clean, dirty], 1.7)
        assert not REGISTRY.tainted(clean)
        assert REGISTRY.tainted(dirty)
    assert torch.equal(clean, torch.full((4000,), 0.1).mul_(1.7))
    assert not torch.equal(dirty, before.mul_(1.7))


def test_sparse_tensors_are_left_to_themselves() -> None:
    with NoiseMode(0):
        sparse = torch.eye(3).to_sparse()
        assert torch.equal((sparse * 2).to_dense(), torch.eye(3) * 2)
