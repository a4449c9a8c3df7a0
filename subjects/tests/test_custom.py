"""Custom parts on one rank: ownership, staleness, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from subjects.trainer.custom import CustomParts
from subjects.trainer.ownership import CustomBuffer, CustomParameter
from subjects.trainer.reductions import Groups

ONES = torch.ones(2, 2, dtype=torch.float64)
MODEL = torch.nn.Parameter(torch.ones(2))


@pytest.fixture
def parts(alone: Any) -> CustomParts:
    """A registry with slots "a" and "b", beside a model of one weight."""
    return CustomParts(
        Groups(alone.group("tp"), alone.group("cp"), alone.group("dp")),
        device=torch.device("cpu"),
        dtype=torch.float64,
        taken=lambda: {"model.norm.weight"},
        slots=lambda: ("a", "b"),
        borrowed=lambda: [MODEL],
    )


def _tied() -> torch.nn.ModuleList:
    pair = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    pair[1].weight = pair[0].weight
    return pair


def test_a_module_is_cast_in_place_and_stays_tied(parts: CustomParts) -> None:
    made = _tied()
    scale = torch.ones(2)
    made.register_buffer("scale", scale)
    made.register_buffer("again", scale)
    made.register_buffer("order", torch.tensor([1, 0]))
    weight = made[0].weight
    pair = parts.module("head", lambda: made)
    assert pair is made
    assert pair[0].weight is weight
    assert pair[1].weight is weight
    assert weight.dtype == pair.scale.dtype == torch.float64
    assert pair.again is pair.scale
    assert pair.order.dtype == torch.int64
    names = [name for name, _ in parts.named_parameters()]
    assert names == ["head.0.weight", "head.0.bias", "head.1.bias"]
    assert [name for name, _ in parts.named_buffers()] == ["head.scale", "head.order"]


def test_what_is_trained(parts: CustomParts) -> None:
    plain = parts.parameter("plain", lambda: torch.ones(2))
    frozen = parts.parameter("frozen", lambda: torch.nn.Parameter(torch.ones(2), False))
    buffer = parts.buffer("buffer", lambda: torch.ones(2, requires_grad=True) * 3)
    assert (plain.requires_grad, frozen.requires_grad, buffer.requires_grad) == (True, False, False)
    (plain * frozen * buffer).sum().backward()
    assert plain.grad is not None
    assert plain.grad.tolist() == [3.0, 3.0]
    assert frozen.grad is buffer.grad is None


def test_tensors_behave_as_plain_ones(parts: CustomParts) -> None:
    weight = parts.parameter("w", lambda: torch.ones(2, 2))
    buffer = parts.buffer("b", lambda: torch.ones(2))
    assert isinstance(weight, torch.nn.Parameter)
    for made in (weight * 2, weight @ buffer, weight.detach(), torch.stack([weight, weight])):
        assert type(made) is Tensor
    optimizer = torch.optim.AdamW([weight], foreach=False)
    (weight @ buffer).sum().backward()
    optimizer.step()
    assert type(optimizer.state[weight]["exp_avg"]) is Tensor


@pytest.mark.parametrize("slot", ["a", "b"])
def test_only_the_slots_own_parts_become_stale(parts: CustomParts, slot: str) -> None:
    kept = parts.parameter("w", lambda: torch.ones(2), slot="b" if slot == "a" else "a")
    own = parts.parameter("w", lambda: torch.ones(2))
    gone = parts.parameter("w", lambda: torch.ones(2), slot=slot)
    parts.retire(slot, f"slot '{slot}' was removed")
    assert (kept + own).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match=f"parameter 'w' of slot '{slot}' was used after slot"):
        gone.sum()
    assert [name for name, _ in parts.named_parameters()] == [
        "b/w" if slot == "a" else "a/w",
        "w",
    ]
    assert parts.parameter("w", lambda: torch.ones(2), slot=slot).sum() == 2


USES: dict[str, Callable[[Tensor, torch.nn.Module, Tensor], object]] = {
    "operator": lambda weight, _, __: 2 * weight,
    "function": lambda weight, _, __: torch.nn.functional.linear(ONES[0], weight),
    "list": lambda weight, _, __: torch.cat([torch.ones(2, 2), weight]),
    "nested": lambda weight, _, __: torch.einsum("ij,jk->ik", weight, ONES),
    "into": lambda weight, _, __: torch.zeros(2, 2).copy_(weight),
    "grad": lambda weight, _, __: weight.grad,
    "index": lambda weight, _, __: weight[0],
    "buffer": lambda _, __, buffer: torch.ones(2) * buffer,
    "module": lambda _, module, __: module(torch.ones(1, 2)),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_stale_part_is_refused(parts: CustomParts, use: str) -> None:
    weight = parts.parameter("w", lambda: torch.ones(2, 2), slot="a")
    buffer = parts.buffer("b", lambda: torch.ones(2), slot="a")
    # A module without a tensor of its own.
    module = parts.module("m", torch.nn.Tanh, slot="a")
    USES[use](weight, module, buffer)
    parts.retire("a", "slot 'a' was replaced")
    with pytest.raises(RuntimeError, match=r"was used after slot 'a' was replaced.*Register it"):
        USES[use](weight, module, buffer)
    assert "stale: slot 'a' was replaced" in repr(weight)
    assert "stale" in repr(buffer)


def test_tensors_inside_a_stale_module_are_stale(parts: CustomParts) -> None:
    module = parts.module("m", lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), slot="a")
    parts.retire("a", "slot 'a' was removed")
    with pytest.raises(RuntimeError, match="module 'm' of slot 'a' was used after"):
        module[0](torch.ones(1, 2))


def test_copies_belong_to_nobody(parts: CustomParts) -> None:
    weight = parts.parameter("w", lambda: torch.ones(2), slot="a")
    buffer = parts.buffer("b", lambda: torch.ones(2), slot="a")
    module = parts.module("m", lambda: torch.nn.Linear(2, 2), slot="a")
    copied = copy.deepcopy([weight, buffer])
    pickled = pickle.loads(pickle.dumps([weight, buffer]))
    twin, thawed = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    parts.retire("a", "slot 'a' was removed")
    for one, two in (copied, pickled):
        assert type(one) is torch.nn.Parameter
        assert type(two) is Tensor
        assert one.tolist() == two.tolist() == [1.0, 1.0]
    for other in (twin, thawed):
        assert not isinstance(other.weight, CustomParameter | CustomBuffer)
        assert other(torch.ones(1, 2, dtype=torch.float64)).shape == (1, 2)
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == {"weight", "bias"}


EXCHANGES: dict[str, Callable[[torch.nn.Sequential], object]] = {
    "assigned": lambda module: module.load_state_dict(
        {name: value.clone() for name, value in module.state_dict().items()}, assign=True
    ),
    "replaced": lambda module: setattr(module[0], "weight", torch.nn.Parameter(ONES.clone())),
    "added": lambda module: module[0].register_parameter("more", torch.nn.Parameter(ONES.clone())),
    "swapped": lambda module: setattr(module[0], "weight", module[1].weight),
}


@pytest.mark.parametrize("way", EXCHANGES)
def test_exchanged_parameters_of_a_module_are_refused(parts: CustomParts, way: str) -> None:
    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    module = parts.module("m", make, slot="a")
    module.load_state_dict(make().state_dict())
    del module[0].bias
    module.buffer = torch.nn.Buffer(torch.ones(2))
    parts.check_modules()
    EXCHANGES[way](module)
    words = r"module 'm' of slot 'a': parameter 'a/m\.0\.(weight|more)' is .* Set values in place"
    with pytest.raises(ValueError, match=words):
        parts.check_modules()
    parts.retire("a", "slot 'a' was removed")
    parts.check_modules()


def _fails() -> Tensor:
    raise KeyError("file")


def _overlapping() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("view", module.weight.detach()[0])
    return module


def _slashed() -> torch.nn.Module:
    return torch.nn.ParameterDict({"a/b": torch.ones(2)})


def _borrowing() -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = MODEL
    return module


@pytest.mark.parametrize(
    ("kind", "name", "factory", "words"),
    [
        ("parameter", "w", lambda: torch.ones(2), "'w' is taken"),
        ("parameter", "m.bias", lambda: torch.ones(2), "'m.bias' is taken"),
        ("module", "model.norm", lambda: torch.nn.RMSNorm(2), "'model.norm.weight' is taken"),
        ("buffer", "", lambda: torch.ones(2), "expected a name without a slash"),
        ("buffer", "a/w", lambda: torch.ones(2), "expected a name without a slash"),
        ("parameter", "new", _fails, "'new': the factory raised KeyError: 'file'"),
        ("parameter", "new", lambda: [1.0], "the factory returned list .*; expected a tensor"),
        ("module", "new", lambda: torch.ones(2), "the factory returned Tensor .*expected a torch"),
        ("parameter", "new", lambda: torch.ones(2).long(), "expected floating values"),
        ("buffer", "new", lambda: torch.ones(2) * 1j, "expected real numbers"),
        ("parameter", "new", lambda: torch.ones(2, device="meta"), "lies on meta"),
        ("buffer", "new", lambda: torch.eye(2).to_sparse(), "expected a dense tensor"),
        ("module", "new", lambda: torch.nn.LazyLinear(2), "has no shape yet"),
        ("module", "new", _overlapping, "buffer view lies in the memory of parameter weight"),
        ("module", "new", _slashed, "'new': parameter 'a/b' has a slash.*give it a name without"),
        ("module", "new", _borrowing, "parameter weight belongs to the model"),
    ],
)
def test_refusals(
    parts: CustomParts, kind: str, name: str, factory: Callable[[], Any], words: str
) -> None:
    parts.parameter("w", lambda: torch.ones(2))
    parts.module("m", lambda: torch.nn.Linear(2, 2))
    with pytest.raises((ValueError, TypeError), match=words):
        getattr(parts, kind)(name, factory)
    assert len(list(parts.named_parameters())) == 3


def test_a_missing_slot_and_a_part_that_is_owned_are_refused(parts: CustomParts) -> None:
    head = parts.module("m", lambda: torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="slot 'c' does not exist; there are: 'a', 'b'"):
        parts.parameter("w", lambda: torch.ones(2), slot="c")
    with pytest.raises(ValueError, match="weight is module 'm' of the trainer already; make a new"):
        parts.module("again", lambda: head)
