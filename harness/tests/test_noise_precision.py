"""Where a run in float64 falls to a lower precision."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from shardproof.noise import NoiseMode


@pytest.mark.parametrize("perturb", [False, True])
def test_a_downcast_is_named_with_its_site_and_count(perturb: bool) -> None:
    value = torch.randn(5, dtype=torch.float64)
    with NoiseMode(0, perturb=perturb) as mode:
        for _ in range(3):
            value.float()
    (fall,) = mode.fallen
    assert (fall.op, fall.source, fall.target) == ("aten._to_copy.default", "float64", "float32")
    assert re.fullmatch(r".*test_noise_precision\.py:\d+", fall.site)
    assert fall.count == 3
    assert "float64 -> float32" in str(fall)
    assert "(3 times)" in str(fall)


def test_each_place_is_its_own_record() -> None:
    value = torch.randn(5, dtype=torch.float64)
    with NoiseMode(0, perturb=False) as mode:
        value.float()
        value.float()
        value.half()
    assert len(mode.fallen) == 3


@pytest.mark.parametrize(
    "fall",
    [
        lambda x: torch.zeros(5, 5).copy_(x),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.softmax(x, 0, dtype=torch.bfloat16),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.randn(5, 5).add_(x),
        lambda x: torch.add(x, 1, out=torch.empty(5, 5)),
    ],
)
@pytest.mark.parametrize("perturb", [False, True])
def test_every_way_down_is_seen(fall, perturb: bool) -> None:  # type: ignore[no-untyped-def]
    with NoiseMode(0, perturb=perturb) as mode:
        fall(torch.randn(5, 5, dtype=torch.float64))
    assert mode.fallen


def test_what_stays_in_float64_is_no_fall() -> None:
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    with NoiseMode(0, expected=torch.float64) as mode:
        value = torch.randn(4, 8, dtype=torch.float64) @ weight
        nn.functional.cross_entropy(torch.softmax(value, -1), torch.arange(4)).backward()
        value.argmax().float()
        torch.arange(5, dtype=torch.float64).float()  # clean: a table, an index
        torch.randn(5).double()  # an input that is exact in float32
    assert mode.fallen == []
    assert mode.lower == []


def test_the_autograd_engine_has_no_line_of_its_own() -> None:
    value = torch.randn(5, requires_grad=True)
    with NoiseMode(0, perturb=False) as mode:
        (value.double() * torch.randn(5, dtype=torch.float64)).sum().backward()
    (fall,) = mode.fallen
    assert fall.site == "backward"


def test_a_backward_written_in_python_has_one() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(_ctx: object, gradient: Tensor) -> Tensor:
            return gradient.float().double()

    value = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with NoiseMode(0, perturb=False) as mode:
        through: Tensor = Through.apply(value)  # type: ignore[no-untyped-call]
        (through * value).sum().backward()
    (fall,) = mode.fallen
    assert re.search(r"test_noise_precision\.py:\d+$", fall.site)


def test_a_run_that_never_was_in_float64_is_told_on_request() -> None:
    """No value falls where everything is float32 from the start."""
    weight = nn.Parameter(torch.randn(8, 8))

    def run(expected: torch.dtype | None) -> NoiseMode:
        with NoiseMode(0, perturb=False, expected=expected) as mode:
            (torch.randn(4, 8) @ weight).sum().backward()
        return mode

    assert run(None).lower == []
    assert run(None).fallen == []
    assert run(torch.float32).lower == []
    lower = run(torch.float64).lower
    products = [fall for fall in lower if fall.op == "aten.mm.default"]
    assert [fall.source for fall in products] == ["float32", "float32"]
    assert [fall.site == "backward" for fall in products] == [False, True]
    assert not {"aten.randn.default", "aten.t.default"} & {fall.op for fall in lower}
