"""The random choices of a noise run: which roundings, which orders."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shardproof.noise.perturb import Noise, blocks
from shardproof.noise.pool import POOL_SIZE, UNITS, WINDOW, pool

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def values(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_value_stays_or_becomes_a_neighbour(dtype: torch.dtype) -> None:
    """A perturbation of more or less than one number of the dtype would make the floor lie."""
    before = values(100_000)
    before = before[before.abs() > 0.01].to(dtype)  # float16 has coarser numbers near zero
    after = Noise(1).perturb_(before.clone())
    wide = before.double()
    # The neighbours of x are eps or eps / 2 of its binade away.
    binade = 2.0 ** torch.floor(wide.abs().log2())
    steps = (after.double() - wide).abs() / (binade * torch.finfo(dtype).eps)
    assert set(steps.unique().tolist()) <= {0.0, 0.5, 1.0}
    moved = (after != before).double().mean().item()
    assert 0.24 < moved < 0.26


@pytest.mark.parametrize("start", [1.0001, 1.5, 1.9999])
def test_the_leading_digits_do_not_matter(start: float) -> None:
    """Relative noise uniform in [-u, u] never moves a value just above a power of two."""
    before = torch.full((50_000,), start)
    after = Noise(2).perturb_(before.clone())
    up, down = (after > before).double().mean().item(), (after < before).double().mean().item()
    assert up == pytest.approx(1 / 8, abs=0.01)
    assert down == pytest.approx(1 / 8, abs=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pool_pushes_nowhere(dtype: torch.dtype) -> None:
    noise = pool(dtype, torch.device("cpu"))
    assert noise.shape == (POOL_SIZE,)
    assert noise.double().sum().item() == 0
    assert noise.double().abs().max().item() == 1.25 * UNITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_nan_zeros_and_the_largest_numbers_keep_their_places(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    special = torch.tensor(
        [float("inf"), float("-inf"), float("nan"), 0.0, limits.max, limits.min], dtype=dtype
    ).repeat(2000)
    after = Noise(3).perturb_(special.clone())
    assert torch.equal(after.isinf(), special.isinf())
    assert torch.equal(after.isnan(), special.isnan())
    assert torch.equal(after == 0, special == 0)
    assert torch.equal(after.sign().nan_to_num(), special.sign().nan_to_num())


def test_finite_values_beside_infinite_ones_still_move() -> None:
    """Attention scores hold both; a mask must not switch the noise off."""
    before = values(1000)
    before[::3] = float("-inf")
    after = Noise(4).perturb_(before.clone())
    finite = before.isfinite()
    assert (after[finite] != before[finite]).any()
    assert torch.equal(after[~finite], before[~finite])


@pytest.mark.parametrize(
    "make",
    [
        lambda: values(700, 700),
        lambda: values(700, 700).t(),
        lambda: values(30, 40, 50).permute(2, 0, 1),
        lambda: values(900, 1400)[:, ::2],
        lambda: values(600, 5, 600)[:, 1:4],
        lambda: values(3),
        lambda: values(8, 8).unsqueeze(1),
    ],
)
def test_every_layout_is_reached_and_its_neighbours_in_memory_are_not(make) -> None:  # type: ignore[no-untyped-def]
    value = make()
    base = value if value._base is None else value._base
    whole = base.clone()
    before = value.clone()
    Noise(5).perturb_(value)
    changed = (value != before).double().mean().item()
    assert changed > 0.15 or value.numel() < 100
    # What changed in memory is what changed in the view.
    assert (base != whole).sum() == (value != before).sum()


def test_values_larger_than_a_window_are_covered_to_the_end() -> None:
    before = torch.ones(2 * WINDOW + 17)
    moved = Noise(6).perturb_(before.clone()) != 1
    assert moved[:WINDOW].any()
    assert moved[WINDOW : 2 * WINDOW].any()
    # Each window reads another part of the pool.
    assert not torch.equal(moved[:WINDOW], moved[WINDOW : 2 * WINDOW])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int8], ids=str)
def test_integers_and_booleans_are_left_alone(dtype: torch.dtype) -> None:
    before = torch.ones(1000, dtype=dtype)
    assert torch.equal(Noise(7).perturb_(before.clone()), before)


def test_complex_values_move_in_both_parts() -> None:
    before = torch.complex(values(1000), values(1000) + 1)
    after = Noise(8).perturb_(before.clone())
    assert (after.real != before.real).any()
    assert (after.imag != before.imag).any()


@pytest.mark.parametrize("make", [lambda: torch.zeros(0, 3), lambda: torch.ones(3).expand(4, 3)])
def test_empty_and_expanded_values_pass(make) -> None:  # type: ignore[no-untyped-def]
    assert torch.equal(Noise(9).perturb_(make()), make())


@pytest.mark.parametrize("length", [2, 3, 5, 64, 1000])
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_spans_cover_the_length_once(length: int, pieces: int) -> None:
    noise = Noise(10)
    for _ in range(50):
        spans = sorted(noise.spans(length, pieces))
        assert len(spans) == min(pieces, length)
        assert spans[0][0] == 0
        for (start, size), (following, _) in itertools.pairwise(spans):
            assert size >= 1
            assert start + size == following
        assert sum(spans[-1]) == length
        # A long first span would round as in the plain run.
        assert spans[0][1] <= (length + 1) // 2


def test_orders_differ_and_come_back_with_the_seed() -> None:
    def orders(seed: int) -> list[object]:
        noise = Noise(seed)
        return [noise.spans(1000, 4), noise.permutation(50, torch.device("cpu")).tolist()]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


def test_a_permutation_holds_each_place_once() -> None:
    order = Noise(11).permutation(97, torch.device("cpu"))
    assert sorted(order.tolist()) == list(range(97))


def test_a_mask_is_about_half_true() -> None:
    mask = Noise(12).mask(torch.empty(100, 100))
    assert 0.45 < mask.double().mean().item() < 0.55


def test_blocks_cover_the_length() -> None:
    assert list(blocks(10, 4)) == [(0, 4), (4, 4), (8, 2)]
    assert list(blocks(2, 0)) == [(0, 1), (1, 1)]


def test_the_global_generators_stay_where_they_are() -> None:
    """The model's own dropout must be that of the plain run."""
    torch.manual_seed(0)
    random.seed(0)
    state, python = torch.get_rng_state(), random.getstate()
    noise = Noise(13)
    noise.perturb_(values(100))
    noise.spans(100, 4)
    noise.permutation(100, torch.device("cpu"))
    noise.mask(torch.empty(100))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
