"""Nestings of requests, their waves, and what is wrong with them."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from oracles.batches import answer, one_by_one
from subjects.trainer import batches
from subjects.types import ForwardInput, ForwardOutput, MicroBatch


class Pair(NamedTuple):
    left: Any
    right: Any


def request(token: int) -> ForwardInput:
    return ForwardInput([token])


def forward(asked: ForwardInput) -> ForwardOutput:
    """Answers with the token, so that a test can tell which request was run."""
    return ForwardOutput(hidden_states=torch.tensor([float(asked.documents()[0][0])]))


def token(output: ForwardOutput) -> float:
    assert output.hidden_states is not None
    return output.hidden_states.item()


@pytest.mark.parametrize("elements", range(8))
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_every_element_is_dealt_once(elements: int, dp: int) -> None:
    dealt = [batches.schedule(elements, dp_rank=rank, dp=dp) for rank in range(dp)]
    assert len({len(one) for one in dealt}) == 1
    in_order = [at for wave in zip(*dealt, strict=True) for at in wave]
    assert in_order[:elements] == list(range(elements))
    assert in_order[elements:] == [None] * (-elements % dp)


@pytest.mark.parametrize("yield_empty", [False, True])
def test_a_rank_without_an_element(yield_empty: bool) -> None:
    inputs = [request(at) for at in range(3)]
    found = list(batches.micro_batches(inputs, forward, dp_rank=1, dp=2, yield_empty=yield_empty))
    assert found[0].index == 1
    assert token(found[0].output) == 1
    assert found[1:] == ([MicroBatch(None, None)] if yield_empty else [])


def test_a_wave_runs_when_it_is_asked_for_and_is_not_held() -> None:
    ran: list[int] = []

    def counted(asked: ForwardInput) -> ForwardOutput:
        ran.append(int(asked.documents()[0][0]))
        return forward(asked)

    inputs = [request(at) for at in range(3)]
    waves = batches.micro_batches(inputs, counted, dp_rank=0, dp=1, yield_empty=False)
    assert ran == []
    held = weakref.ref(next(waves).output)
    assert ran == [0]
    gc.collect()
    assert held() is None
    next(waves)
    assert ran == [0, 1]


@pytest.mark.parametrize("run", [batches.run, answer])
def test_containers_come_back_as_they_went_in(run: Any) -> None:
    nested = {"b": [request(1), (request(2),)], "a": Pair(request(3), []), 7: request(4)}
    found = run(nested, forward)
    assert list(found) == ["b", "a", 7]
    assert type(found["b"]) is list
    assert type(found["b"][1]) is tuple
    assert type(found["a"]) is Pair
    assert [token(found["b"][0]), token(found["b"][1][0]), token(found["a"].left)] == [1, 2, 3]
    assert (found["a"].right, token(found[7])) == ([], 4)
    assert isinstance(nested["b"], list)
    assert isinstance(nested["b"][0], ForwardInput)


def test_subclasses_keep_what_they_carry() -> None:
    nested = OrderedDict(z=request(1), a=request(2))
    found = batches.run(nested, forward)
    assert type(found) is OrderedDict
    assert [(key, token(value)) for key, value in found.items()] == [("z", 1), ("a", 2)]


@pytest.mark.parametrize(
    ("nested", "path"),
    [
        (["text"], r"inputs\[0\] is of type str"),
        ([request(1), {"a": (request(2), torch.ones(2))}], r"inputs\[1\]\['a'\]\[1\] is of type T"),
        ([None], r"inputs\[0\] is of type NoneType"),
        ([{7}], r"inputs\[0\] is of type set"),
    ],
)
def test_a_nesting_that_is_none_is_told_by_its_path(nested: Any, path: str) -> None:
    with pytest.raises(TypeError, match=path):
        list(batches.requests_in(nested))
    with pytest.raises(TypeError, match="expected requests"):
        list(one_by_one(nested, forward))


def test_requests_run_in_the_order_in_which_they_are_compared() -> None:
    nested = {"b": [request(1), (request(2),)], "a": Pair(request(3), request(4))}
    order: list[ForwardInput] = []

    def kept(asked: ForwardInput) -> ForwardOutput:
        order.append(asked)
        return forward(asked)

    batches.run(nested, kept)
    paths = dict(batches.requests_in(nested))
    assert [id(one) for one in paths.values()] == [id(one) for one in order]
    assert list(paths) == [
        "inputs['b'][0]",
        "inputs['b'][1][0]",
        "inputs['a'][0]",
        "inputs['a'][1]",
    ]


def test_a_nesting_without_an_end_is_refused_by_its_path() -> None:
    inner: list[Any] = [request(1)]
    inner.append({"a": inner})
    with pytest.raises(TypeError, match=r"^inputs\[0\]\[1\]\['a'\] is a container that it lies in"):
        list(batches.requests_in([inner]))
    deep: Any = request(1)
    for _ in range(batches.DEEPEST):
        deep = [deep]
    assert len(list(batches.requests_in(deep))) == 1
    with pytest.raises(TypeError, match="inputs is nested more than 50 deep"):
        list(batches.requests_in([deep]))
    # The same container in two places is no circle.
    shared = [request(1)]
    assert [path for path, _ in batches.requests_in([shared, shared])] == [
        "inputs[0][0]",
        "inputs[1][0]",
    ]


def test_facts_of_a_nesting_have_paths_and_errors_too() -> None:
    def refuse(asked: ForwardInput) -> None:
        if asked.top_k is not None:
            raise ValueError("no top_k here")

    facts = batches.nested_facts([[request(1)]], refuse)
    assert facts["len(inputs)"].text == "1"
    assert facts["inputs[0][0].input_tokens"].text == "1 documents of 1 tokens"
    with pytest.raises(ValueError, match=r"inputs\[0\]\['a'\]: no top_k here"):
        batches.nested_facts([{"a": ForwardInput([1], top_k=3)}], refuse)
