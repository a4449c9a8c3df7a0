"""What ranks compare, and what they say of it; by themselves, without ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from subjects.trainer import agreement, losses, reductions
from subjects.trainer.agreement import Circle, Fact
from subjects.trainer.facts import request_facts
from subjects.types import ForwardInput, ForwardOutput, TopK

REQUEST = ForwardInput([[1, 2], [3]], [4, -100, 5], top_k=3)
ALONE = Circle((), torch.device("cpu"), "the batch")


class Group:
    """The size of a process group, which is all that naming ranks needs."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def circle(**sizes: int) -> Circle:
    axes: Any = tuple((axis, Group(size)) for axis, size in sizes.items())
    return Circle(axes, torch.device("cpu"), "the batch of dp=1")


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, input_tokens=[[1, 2], [4]]),
        replace(REQUEST, input_tokens=[[1], [2, 3]]),
        replace(REQUEST, target_tokens=[4, -100, 6]),
        replace(REQUEST, target_tokens=[[4], [-100], [5]], input_tokens=[[1, 2], [3]]),
        replace(REQUEST, target_tokens=None),
        replace(REQUEST, top_k=2),
        replace(REQUEST, entropy=True),
        replace(REQUEST, logits=True),
        replace(REQUEST, logits="local"),
        replace(REQUEST, hidden_states=True),
        replace(REQUEST, no_grad=True),
        replace(REQUEST, slot="a"),
    ],
)
def test_requests_with_another_meaning_have_other_facts(other: ForwardInput) -> None:
    assert agreement.digest(request_facts(REQUEST)) != agreement.digest(request_facts(other))


def test_requests_with_one_meaning_have_the_same_facts() -> None:
    other = replace(
        REQUEST,
        input_tokens=[torch.tensor([1, 2]), torch.tensor([3], dtype=torch.int32)],
        target_tokens=[[4, -100], [5]],
        top_k=np.int64(3),  # type: ignore[arg-type]
    )
    assert agreement.digest(request_facts(REQUEST)) == agreement.digest(request_facts(other))


def test_grad_mode_is_a_fact() -> None:
    with torch.no_grad():
        off = request_facts(REQUEST)
    assert agreement.digest(off) != agreement.digest(request_facts(REQUEST))


def test_digests_know_where_a_fact_ends() -> None:
    one = agreement.digest({"ab": Fact(b"c", "")})
    assert one != agreement.digest({"a": Fact(b"bc", "")})
    assert one != agreement.digest({"ab": Fact(b"", ""), "c": Fact(b"", "")})
    assert len(one) == 4


def test_ranks_are_named_in_the_order_in_which_rows_are_gathered() -> None:
    assert circle(tp=2, cp=2).ranks == ["cp=0, tp=0", "cp=0, tp=1", "cp=1, tp=0", "cp=1, tp=1"]
    assert circle(tp=1, cp=3).ranks == ["cp=0", "cp=1", "cp=2"]
    assert circle(tp=1, cp=1).ranks == ["the one rank"]


def test_one_rank_raises_its_own_error() -> None:
    error = KeyError("mine")

    def refuse() -> dict[str, Fact]:
        raise error

    with pytest.raises(KeyError) as raised:
        agreement.agree("forward", refuse, ALONE)
    assert raised.value is error
    agreement.agree("forward", lambda: {"a": Fact(b"b", "c")}, ALONE)


def test_words_of_a_refusal() -> None:
    text = agreement.refused_text("forward", [None, "ValueError: bad"], circle(tp=1, cp=2))
    assert "cp=1: ValueError: bad. Nothing was wrong on cp=0." in text
    assert text.startswith("forward was refused by some ranks of the batch of dp=1")


def test_words_of_a_difference() -> None:
    pair = circle(tp=2, cp=1)
    text = agreement.differing_text(
        "forward", [{"top_k": ["aa", "3"]}, {"top_k": ["bb", "None"]}], pair
    )
    assert "top_k is 3 on tp=0, None on tp=1" in text
    # Tokens of equal lengths read alike: then the digests tell them apart.
    alike = [{"input_tokens": [digest, "1 documents of 3 tokens"]} for digest in ("aa", "bb")]
    text = agreement.differing_text("forward", alike, pair)
    assert "tokens (digest aa) on tp=0, 1 documents of 3 tokens (digest bb) on tp=1" in text
    many: list[dict[str, list[str]]] = [
        {f"f{at}": [str(rank), ""] for at in range(9)} for rank in (0, 1)
    ]
    assert "; and 5 more" in agreement.differing_text("forward", many, pair)
    swapped = [{"a": ["1", "x"], "b": ["2", "y"]}, {"b": ["2", "y"], "a": ["1", "x"]}]
    assert "in another order" in agreement.differing_text("forward", swapped, pair)


def seen(*gradients: Tensor | None) -> Tensor:
    return torch.stack([losses.statistics(gradient) for gradient in gradients])


@pytest.mark.parametrize(
    ("dtype", "little"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.3)]
)
@pytest.mark.parametrize("shape", [(7,), (60, 40), (300, 1000), (9, 2, 3)])
def test_small_differences_show_and_rounding_does_not(
    dtype: torch.dtype, little: float, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    ulp = torch.finfo(dtype).eps
    other = torch.randn(shape, generator=generator, dtype=torch.float64)
    bound = losses.tolerance(gradient)
    rounded = (gradient * (1 + ulp * other.sign())).to(dtype)
    if dtype != torch.bfloat16:
        assert losses.differences(seen(gradient, rounded), bound) == []
    for wrong in (gradient * (1 + little), gradient + little * other * gradient.std()):
        assert losses.differences(seen(gradient, wrong.to(dtype)), bound)
    assert losses.differences(seen(gradient, gradient.flip(0)), bound)
    assert losses.differences(seen(gradient, gradient.clone()), bound) == []


def test_a_loss_scaled_by_one_ulp_is_no_difference() -> None:
    """All signs equal: the sum moves by far more than an ulp of the norm."""
    gradient = torch.full((2000, 500), 1e-3)
    scaled = gradient * (1 + torch.finfo(torch.float32).eps)
    assert losses.differences(seen(gradient, scaled), losses.tolerance(gradient)) == []


def test_nan_and_infinity_are_equal_to_themselves_alone() -> None:
    gradient = torch.ones(5, 3)
    nan = gradient.clone()
    nan[2, 1] = float("nan")
    infinite = gradient.clone()
    infinite[2, 1] = float("inf")
    bound = losses.tolerance(gradient)
    for odd in (nan, infinite):
        assert losses.differences(seen(odd, odd.clone()), bound) == []
        assert losses.differences(seen(gradient, odd), bound)
        assert losses.differences(seen(odd, gradient), bound)


def test_none_differs_from_zeros() -> None:
    assert losses.differences(seen(None, torch.zeros(3)), 1.0) == [0]
    assert losses.differences(seen(None, None), 0.0) == []


def test_statistics_of_a_large_gradient_need_no_copy_of_it() -> None:
    """In chunks they are what they are at once, for gradients of stride 0 and empty ones too."""
    gradient = torch.randn(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = losses.statistics(gradient)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_CHUNK", 3 * 8)
        torch.testing.assert_close(losses.statistics(gradient), whole, rtol=1e-12, atol=1e-12)
    assert losses.statistics(torch.ones(()).expand(6, 4))[1:3].tolist() == [24.0, 24.0**0.5]
    assert losses.statistics(torch.zeros(0, 4)).tolist() == [1.0] + [0.0] * 6
    assert losses.statistics(gradient, local=True).tolist() == [1.0] + [0.0] * 6


def watched(output: ForwardOutput) -> ForwardOutput:
    return losses.watch(output, number=1, circle=ALONE, compare=True)


def test_outputs_keep_their_values_and_what_has_no_graph_stays() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    plain = torch.arange(4.0)
    output = ForwardOutput(
        hidden_states=weight * 2, target_logprobs=plain, top_k=TopK(weight * 3, torch.arange(8))
    )
    passed = watched(output)
    assert passed.target_logprobs is plain
    assert passed.top_k is not None
    assert output.top_k is not None
    assert passed.hidden_states is not None
    assert passed.top_k.tokens is output.top_k.tokens
    assert passed.top_k.values.equal(weight * 3)
    (passed.hidden_states.sum() + passed.top_k.values.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.eq(5).all()
    assert watched(ForwardOutput()) == ForwardOutput()


def test_outputs_can_be_changed_in_place() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    passed = watched(ForwardOutput(hidden_states=weight * 2, logits=weight * 3))
    assert passed.hidden_states is not None
    assert not passed.hidden_states._is_view()
    passed.hidden_states[1:].mul_(10)
    passed.hidden_states.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2, 2]] + [[20, 20]] * 3


def test_a_second_backward_needs_a_kept_graph() -> None:
    weight = torch.ones(4, requires_grad=True)
    passed = watched(ForwardOutput(target_logprobs=weight * 2))
    assert passed.target_logprobs is not None
    passed.target_logprobs.sum().backward(retain_graph=True)
    passed.target_logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(4).all()
    with pytest.raises(RuntimeError, match="a second time through the outputs of one forward"):
        passed.target_logprobs.sum().backward()
    assert weight.grad.eq(4).all()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "got bool"),
        ("1", "got str"),
        (1j, "complex"),
        *(
            (torch.zeros(1).to(dtype), f"got a tensor of {dtype}; expected one of float16, bf")
            for dtype in (torch.bool, torch.complex64, torch.uint16, torch.uint64)
        ),
        (torch.zeros(1).to(torch.float8_e4m3fn), "float8_e4m3fn; expected one of float16"),
        (torch.zeros(1, device="meta"), "got a tensor on meta, which has no values"),
        (torch.zeros(1).to_sparse(), r"got a tensor of torch\.sparse_coo; pass value\.to_dense"),
    ],
)
def test_values_that_cannot_be_reduced(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        reductions.value_facts(value, "sum")


def test_half_precisions_are_summed_in_float32(alone: Any) -> None:
    groups = reductions.Groups(*(alone.group(axis) for axis in ("tp", "cp", "dp")))
    gradient = torch.ones(3, dtype=torch.bfloat16)
    assert reductions.reduce_weight(gradient, groups, over_tp=True).dtype == torch.bfloat16
    assert reductions.reduce_custom(gradient, groups).dtype == torch.bfloat16
