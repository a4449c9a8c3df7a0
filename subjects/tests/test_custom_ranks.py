"""Custom parts and the optimizer on four ranks: what one rank finds wrong, all of them refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from subjects.tests import worlds


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """One world for all of it: starting four processes costs more than what they do."""
    pytest.importorskip("megatron.core")
    worlds.spawn(body, tmp_path, ranks=4)


def body(directory: Path) -> None:
    del directory
    for name in ("dp2xcp2", "tp2xcp2"):
        rank = worlds.make_rank(name)
        values_are_the_first_ranks(rank)
        disagreements(rank)
        norms(rank)
        steps(rank)


def _parts(rank: Any) -> Any:
    from subjects.trainer.custom import CustomParts

    return CustomParts(
        _groups(rank),
        device=rank.device,
        dtype=torch.float64,
        taken=tuple,
        slots=tuple,
        borrowed=tuple,
    )


def _groups(rank: Any) -> Any:
    from subjects.trainer.reductions import Groups

    return Groups(rank.group("tp"), rank.group("cp"), rank.group("dp"))


def everyone(value: object) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def values_are_the_first_ranks(rank: Any) -> None:
    """Whatever the state of each rank's random generator."""
    parts = _parts(rank)
    torch.manual_seed(dist.get_rank())
    module = parts.module("module", lambda: torch.nn.Linear(3, 2))
    made = [
        parts.parameter("parameter", lambda: torch.randn(2, 3)),
        parts.buffer("counts", lambda: torch.randint(0, 99, (5,))),
        parts.buffer("flags", lambda: torch.rand(7) < 0.5),
        parts.buffer("halves", lambda: torch.randn(3, dtype=torch.bfloat16)),
        *module.parameters(),
    ]
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 2)
    assert module.weight.equal(linear.weight.double())
    assert made[0].equal(torch.randn(2, 3).double())
    assert made[1].equal(torch.randint(0, 99, (5,)))
    for values in zip(*everyone([value.detach().tolist() for value in made]), strict=True):
        assert all(value == values[0] for value in values)


def disagreements(rank: Any) -> None:
    """Each on rank 2 alone; every rank raises, and none of them has registered anything."""
    odd = dist.get_rank() == 2

    def fails() -> torch.Tensor:
        if odd:
            raise OSError("no such file")
        return torch.ones(3)

    def tied() -> torch.nn.Module:
        pair = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        if odd:
            pair[1].weight = pair[0].weight
        return pair

    def ordered() -> torch.nn.Module:
        names = ("b", "a") if odd else ("a", "b")
        return torch.nn.ParameterDict([(name, torch.ones(2)) for name in names])

    def of(right: Any, wrong: Any) -> Callable[[], Any]:
        return lambda: wrong if odd else right

    ways: dict[str, tuple[str, object, Callable[[], Any]]] = {
        "different things": ("parameter", "w", of(torch.ones(2, 3), torch.ones(3, 2))),
        r"float32 \[3\].*float64 \[3\]": ("buffer", "w", of(torch.ones(3), torch.ones(3).double())),
        "no such file": ("parameter", "w", fails),
        "expected a tensor": ("buffer", "w", of(torch.ones(3), None)),
        "out of step.*'w2'": ("parameter", "w2" if odd else "w", lambda: torch.ones(3)),
        "out of step.*buffer": ("buffer" if odd else "parameter", "w", lambda: torch.ones(3)),
        "the same as parameter 0.weight": ("module", "w", tied),
        "another order": ("module", "w", ordered),
        "not trained": (
            "module",
            "w",
            lambda: torch.nn.Linear(2, 2).requires_grad_(not odd),
        ),
        "Tanh.*ReLU": ("module", "w", of(torch.nn.Tanh(), torch.nn.ReLU())),
        "parameter bias": ("module", "w", lambda: torch.nn.Linear(2, 2, bias=not odd)),
        "out of step.*'/'": ("buffer", "/" if odd else "w", lambda: torch.ones(2)),
    }
    parts = _parts(rank)
    for words, (kind, name, factory) in ways.items():
        with pytest.raises(ValueError, match=rf"(?s){words}"):
            getattr(parts, kind)(name, factory)
    assert not list(parts.named_parameters())
    assert not list(parts.named_buffers())
    assert parts.parameter("w", lambda: torch.ones(3)).sum() == 3


class Stepped:
    """Two parameters of a slot, one cut over tp, and one of nobody's; gradients set by hand."""

    def __init__(self, rank: Any) -> None:
        self.groups, self.device = _groups(rank), rank.device
        tp = self.groups.tp
        whole = torch.arange(1.0, 7.0, dtype=torch.float64)
        self.own = {
            "a/cut": torch.nn.Parameter(whole.chunk(tp.size())[tp.rank()].clone()),
            "a/copied": torch.nn.Parameter(whole[:3].clone()),
            "probe": torch.nn.Parameter(whole[:2].clone()),
        }
        for parameter in self.own.values():
            parameter.grad = parameter.detach().clone()

    def reduce_gradients(self) -> None:
        """As the gradients are the same on all replicas, they are reduced."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
        for name, parameter in self.own.items():
            yield name, parameter, {"shard": {"tp": 0}} if name == "a/cut" else {}


def norms(rank: Any) -> None:
    """Each element once: 1 + 4 + ... + 36 of the cut one, 1 + 4 + 9 of the copied one."""
    from subjects.trainer.optimizer import Optimizer

    trainer = Stepped(rank)
    result = Optimizer(trainer, "sgd", lr=0.5, max_norm=1.0).step()
    expected = {"a": math.sqrt(91 + 14), "": math.sqrt(5)}
    assert result.norms == pytest.approx(expected, rel=1e-14)
    clipped = 1 / (expected["a"] + 1e-6)
    assert trainer.own["a/copied"].tolist() == pytest.approx(
        [value * (1 - 0.5 * clipped) for value in (1.0, 2.0, 3.0)], rel=1e-14
    )


def steps(rank: Any) -> None:
    """One rank's bad gradient, option or state stops all of them."""
    from subjects.trainer.optimizer import Optimizer

    trainer, odd = Stepped(rank), dist.get_rank() == 2
    before = {name: value.detach().clone() for name, value in trainer.own.items()}
    ours = Optimizer(trainer, "adamw", lr=0.1)
    good = trainer.own["probe"].grad
    if odd:
        trainer.own["probe"].grad = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    assert not ours.step().stepped
    assert all(value.equal(before[name]) for name, value in trainer.own.items())
    assert not list(ours.moments())
    trainer.own["probe"].grad = good
    assert ours.step().stepped
    state, kept = ours.state_dict(), ours.state_dict()["probe"]
    if odd:
        del state["probe"]
    with pytest.raises(ValueError, match=r"load_state_dict.*probe"):
        ours.load_state_dict(state)
    # A copied moment, the number of steps, and a slice, whose TP coordinate alone must agree.
    for name, key in (("probe", "exp_avg"), ("a/cut", "step"), ("a/cut", "exp_avg_sq")):
        state = ours.state_dict()
        if odd:
            state[name][key] += 1
        with pytest.raises(ValueError, match=rf"load_state_dict.*{name}\.{key} is .*digest"):
            ours.load_state_dict(state)
        assert all(value.equal(ours.state_dict()["probe"][k]) for k, value in kept.items())
    ours.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match=r"lr is 0\.1 on .*, 0\.2 on "):
        Optimizer(trainer, "adamw", lr=0.2 if odd else 0.1)
    with pytest.raises(ValueError, match="refused by some"):
        Optimizer(trainer, "adamw", lr=0.1, max_norm=-1.0 if odd else 1.0)
