"""What may be observed, and what a value becomes."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import World, numbers
from torch.nn.parameter import Parameter

from shardproof.verdict.fingerprint import fingerprint
from shardproof.verdict.values import BadValueError, capture, flatten

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - an untyped one has _fields too


@dataclasses.dataclass
class Output:
    logits: object
    hidden: object


def names(value: object) -> list[str]:
    return [name for name, _ in flatten("out", value)]


def test_containers_become_named_leaves() -> None:
    assert names({"a": 1, "b": [2, {"c": None}], 3: 4}) == [
        "out.a",
        "out.b.0",
        "out.b.1.c",
        "out.3",
    ]
    assert names(Point(1, 2)) == ["out.x", "out.y"]
    assert names(Output(1, (2, 3))) == ["out.logits", "out.hidden.0", "out.hidden.1"]
    assert names(7) == ["out"]
    assert names([]) == ["out"]


def test_a_container_that_holds_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(BadValueError, match="holds itself"):
        names(endless)


def test_keys_must_be_names() -> None:
    with pytest.raises(BadValueError, match=r"key 1\.5 of type float"):
        names({1.5: 1})


@pytest.mark.parametrize(
    "value", ["text", b"bytes", object(), {1, 2}, torch.float32, Point, len, iter([1])]
)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(BadValueError, match="expected a tensor"):
        capture(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo.*to_dense"),
        (torch.empty(3, device="meta"), "meta device"),
        (2**63, "64 bits"),
    ],
)
def test_tensors_without_dense_numbers_are_refused(value: object, words: str) -> None:
    with pytest.raises(BadValueError, match=words):
        capture(value)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(BadValueError, match="nested"):
        capture(nested)


@pytest.mark.parametrize(
    ("value", "kind", "dtype", "floating"),
    [
        (1.5, "scalar", "float64", True),
        (True, "scalar", "bool", False),
        (3, "scalar", "int64", False),
        (1j, "scalar", "complex128", True),
        (None, "none", "", False),
        (torch.tensor(2), "tensor", "int64", False),
        (torch.ones(2, dtype=torch.bfloat16), "tensor", "bfloat16", True),
        (torch.ones(2, dtype=torch.uint16), "tensor", "uint16", False),
        (torch.ones(2, dtype=torch.complex64), "tensor", "complex64", True),
        (Parameter(torch.ones(2)), "tensor", "float32", True),
    ],
)
def test_kinds(value: object, kind: str, dtype: str, floating: bool) -> None:
    leaf = capture(value)
    assert (leaf.kind, leaf.dtype, leaf.floating) == (kind, dtype, floating)


def test_numpy_arrays_and_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert capture(numpy.arange(3)).dtype == "int64"
    assert capture(numpy.float32(2.5)).dtype == "float32"
    assert capture(numpy.ones((2, 3))[:, ::-1]).shape == (2, 3)
    with pytest.raises(BadValueError, match="dtype object"):
        capture(numpy.array([object()]))


def test_complex_numbers_are_pairs_and_lazy_conjugates_are_done() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    leaf = capture(value)
    assert leaf.shape == (2,)
    assert leaf.tensor is not None
    assert leaf.tensor.tolist() == [[1, -2], [3, 4]]
    negative = value.imag
    assert negative.is_neg()
    found = capture(negative).tensor
    assert found is not None
    assert not found.is_neg()


ODD_LAYOUTS = {
    "transposed": numbers(5, 6).T,
    "expanded": numbers(6, 1).expand(6, 5),
    "strided": numbers(12, 5)[::2],
    "requires grad": numbers(6, 5).requires_grad_(),
    "float32": numbers(6, 5, dtype=torch.float32),
    "bfloat16": numbers(6, 5, dtype=torch.bfloat16),
    "float16": numbers(6, 5, dtype=torch.float16),
    "complex": torch.complex(numbers(6, 5), numbers(6, 5, seed=1)),
    "0-dim": numbers(1)[0],
    "uint8": torch.arange(30, dtype=torch.uint8).view(6, 5),
    "uint16": torch.arange(30).to(torch.uint16).view(6, 5),
    "uint64": torch.arange(30).to(torch.uint64).view(6, 5),
    "bool": numbers(6, 5) > 0,
}


@pytest.mark.parametrize("layout", ODD_LAYOUTS)
def test_odd_layouts_pass_and_their_change_is_seen(tmp_path: Path, layout: str) -> None:
    value = ODD_LAYOUTS[layout]
    world = World(tmp_path)
    assert world.reference(lambda rank: rank.observe("x", value), runs=8)["failures"] == []
    assert world.same("cp2", value)["outcome"] == "passed"
    changed = value.detach().clone().contiguous()
    if changed.dtype == torch.bool:
        changed = ~changed
    elif changed.dtype in (torch.uint16, torch.uint64):
        changed = (changed.to(torch.int64) + 1).to(changed.dtype)
    else:
        changed = changed + 1
    assert world.same("cp2", changed)["outcome"] == "diverged"


def test_float8_is_upcast_exactly(tmp_path: Path) -> None:
    value = numbers(6, 5).to(torch.float8_e4m3fn)
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", value, exact=True))
    order = [5, 3, 1, 0, 2, 4]
    moved = value.float()[order].to(torch.float8_e4m3fn)
    # Rows of the reference are gathered too, which torch cannot do for every dtype by itself.
    assert world.same("cp2", moved, rows=order)["outcome"] == ("passed")
    assert world.same("cp2", moved)["outcome"] == "diverged"


def test_values_made_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        value = numbers(4, 9) * 2
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", value))
    assert world.same("cp2", value)["outcome"] == "passed"

    def inside(rank: Any) -> None:
        with torch.inference_mode():
            rank.observe("x", value.T.clone().T)

    assert world.one("cp2", inside)["outcome"] == "passed"


def test_a_value_counts_as_it_was_when_observed(tmp_path: Path) -> None:
    world = World(tmp_path)

    def body(rank: Any) -> None:
        value = numbers(4, 9)
        rank.observe("x", value)
        value.zero_()

    world.reference(body)
    assert world.one("cp2", body)["outcome"] == "passed"
    assert world.same("cp2", numbers(4, 9) * 0)["outcome"] == ("diverged")


def test_the_fingerprint_sees_one_bit_and_order_and_no_sign_of_zero() -> None:
    value = numbers(1000)
    near = value.clone()
    near[517] = torch.nextafter(near[517], torch.tensor(9.0, dtype=torch.float64))
    swapped = value.clone()
    swapped[[3, 900]] = swapped[[900, 3]]
    powers = torch.tensor([1.0, 2.0] * 2048, dtype=torch.float64)
    assert len({fingerprint(one) for one in (value, near, swapped)}) == 3
    assert fingerprint(powers) != fingerprint(powers.roll(1))
    assert fingerprint(torch.zeros(3)) != fingerprint(torch.zeros(4))
    assert fingerprint(torch.zeros(3)) == fingerprint(-torch.zeros(3))
    assert fingerprint(value) == fingerprint(value.clone())


def test_the_fingerprint_sees_every_swap_of_a_power_of_two() -> None:
    """Neighbours 1 and 2 differ in bit 52 alone, which a product modulo 2^64 all but loses."""
    value = torch.tensor([1.0, 2.0] * 4000, dtype=torch.float64)
    expected = fingerprint(value)
    for at in range(0, 8000, 2):
        value[at : at + 2] = torch.tensor([2.0, 1.0])
        assert fingerprint(value) != expected
        value[at : at + 2] = torch.tensor([1.0, 2.0])
    assert fingerprint(value) == expected
