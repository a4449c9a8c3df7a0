"""The optimizer on one rank: torch's arithmetic, what blocks a step, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from subjects.protocol import Placement
from subjects.trainer import optimizer, optimizer_checks
from subjects.trainer.optimizer import Optimizer
from subjects.trainer.reductions import Groups


class Stepped:
    """A trainer of two slots and a part of its own, whose gradients are set by hand."""

    def __init__(self, rank: Any) -> None:
        self.groups = Groups(rank.group("tp"), rank.group("cp"), rank.group("dp"))
        self.device = torch.device("cpu")
        self.reductions = 0
        generator = torch.Generator().manual_seed(4)
        self.own = {
            name: torch.nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
            for name in ("one/a.lora_A", "one/head.weight", "two/a.lora_A", "probe")
        }

    def reduce_gradients(self) -> None:
        self.reductions += 1

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        for name, parameter in self.own.items():
            yield name, parameter, {}

    def set_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.own.values():
            parameter.grad = torch.randn(3, generator=generator, dtype=torch.float64)


@pytest.fixture
def trainer(alone: Any) -> Stepped:
    return Stepped(alone)


def _values(trainer: Stepped) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.own.items()}


@pytest.mark.parametrize("max_norm", [None, 0.7])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_two_steps_are_those_of_torch(trainer: Stepped, kind: str, max_norm: float | None) -> None:
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    options |= {"betas": (0.7, 0.8)} if kind == "adamw" else {"momentum": 0.6}
    theirs = {name: torch.nn.Parameter(value) for name, value in _values(trainer).items()}
    make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    torchs = make(list(theirs.values()), **options)
    ours = Optimizer(trainer, kind, max_norm=max_norm, **options)
    for seed in (1, 2):
        trainer.set_gradients(seed)
        before = {name: parameter.grad for name, parameter in trainer.own.items()}
        for name, parameter in theirs.items():
            gradient = before[name]
            assert gradient is not None
            parameter.grad = gradient.clone()
        norms = {}
        for slot in ("one", "two", ""):
            members = [p for name, p in theirs.items() if name.rpartition("/")[0] == slot]
            norms[slot] = float(torch.nn.utils.clip_grad_norm_(members, max_norm or math.inf))
        torchs.step()
        result = ours.step()
        assert result.stepped
        assert result.norms == pytest.approx(norms, rel=1e-14)
        for name, parameter in trainer.own.items():
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-14, atol=1e-14)
            assert parameter.grad is before[name], "gradients stay as they were reduced"
    assert trainer.reductions == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_norm_blocks_everything(trainer: Stepped, bad: float) -> None:
    ours = Optimizer(trainer, "adamw", lr=0.1, max_norm=1.0)
    trainer.set_gradients(1)
    assert ours.step().stepped
    before, state = _values(trainer), ours.state_dict()
    trainer.set_gradients(2)
    gradient = trainer.own["two/a.lora_A"].grad
    assert gradient is not None
    gradient[1] = bad
    result = ours.step()
    assert not result.stepped
    assert not math.isfinite(result.norms["two"])
    assert math.isfinite(result.norms["one"])
    assert all(value.equal(before[name]) for name, value in _values(trainer).items())
    for name, moments in ours.state_dict().items():
        assert all(value.equal(state[name][key]) for key, value in moments.items())


def test_parameters_without_gradient_neither_move_nor_decay(trainer: Stepped) -> None:
    ours = Optimizer(trainer, "adamw", lr=0.1, weight_decay=0.5)
    trainer.set_gradients(1)
    trainer.own["probe"].grad = None
    before = _values(trainer)
    result = ours.step()
    assert result.norms[""] == 0.0
    moved = [name for name, value in _values(trainer).items() if not value.equal(before[name])]
    assert moved == ["one/a.lora_A", "one/head.weight", "two/a.lora_A"]
    assert not any(name.startswith("probe.") for name, _, _ in ours.moments())


def test_what_is_added_replaced_and_removed_is_followed(trainer: Stepped) -> None:
    ours = Optimizer(trainer, "sgd", lr=0.1, momentum=0.9)
    trainer.set_gradients(1)
    ours.step()
    del trainer.own["one/head.weight"]
    trainer.own["two/a.lora_A"] = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    trainer.own["three/b"] = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    assert "two/a.lora_A" not in ours.state_dict()
    trainer.set_gradients(2)
    assert set(ours.step().norms) == {"one", "two", "three", ""}
    moments = {name: value for name, value, _ in ours.moments()}
    assert set(moments) == {f"{name}.momentum_buffer" for name in trainer.own}
    assert len(ours._torch.state) == len(trainer.own)
    # A replaced parameter began anew: its momentum is its first gradient.
    gradient = trainer.own["two/a.lora_A"].grad
    assert gradient is not None
    assert moments["two/a.lora_A.momentum_buffer"].equal(gradient)


def test_moments_are_named_and_placed(trainer: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded: Placement = {"shard": {"tp": 0}}
    named = [(name, parameter, sharded) for name, parameter in trainer.own.items()]
    monkeypatch.setattr(trainer, "named_parameters", lambda: iter(named))
    ours = Optimizer(trainer, "adamw", lr=0.1)
    trainer.set_gradients(1)
    ours.step()
    found = {name: placement for name, _, placement in ours.moments()}
    assert found["probe.exp_avg"] == found["probe.exp_avg_sq"] == sharded
    assert found["probe.step"] == {}


def test_steps_are_compared_over_tensor_parallel_ranks_and_slices_are_not() -> None:
    moments = {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}
    one = torch.nn.Parameter(torch.ones(3))
    for placement, cut in (({"shard": {"tp": 0}}, True), ({}, False)):
        named = {"w": optimizer.Named("w", one, placement)}
        found = optimizer.with_cuts({"w": moments}, named)
        assert {name: is_cut for name, (_, is_cut) in found.items()} == {
            "w.exp_avg": cut,
            "w.step": False,
        }


def test_a_loaded_state_goes_on(trainer: Stepped) -> None:
    first = Optimizer(trainer, "adamw", lr=0.1)
    trainer.set_gradients(1)
    first.step()
    start, state = _values(trainer), first.state_dict()
    trainer.set_gradients(2)
    first.step()
    expected = _values(trainer)
    with torch.no_grad():
        for name, parameter in trainer.own.items():
            parameter.copy_(start[name])
    second = Optimizer(trainer, "adamw", lr=0.1)
    second.load_state_dict(state)
    second.step()
    assert all(value.equal(expected[name]) for name, value in _values(trainer).items())
    assert state["probe"]["step"] == 1, "the loaded state is copied"


def test_a_state_that_does_not_fit_is_refused(trainer: Stepped) -> None:
    ours = Optimizer(trainer, "adamw", lr=0.1)
    with pytest.raises(ValueError, match="no parameter 'gone'; register it"):
        ours.load_state_dict({"gone": {"exp_avg": torch.ones(3)}})
    with pytest.raises(ValueError, match=r"probe.exp_avg has shape \[2\], the parameter \[3\]"):
        ours.load_state_dict({"probe": {"exp_avg": torch.ones(2)}})


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_state_of_another_kind_is_refused(trainer: Stepped, kind: str) -> None:
    ours = Optimizer(trainer, kind, lr=0.1, **({} if kind == "adamw" else {"momentum": 0.5}))
    other = "sgd" if kind == "adamw" else "adamw"
    theirs = Optimizer(trainer, other, lr=0.1, **({} if other == "adamw" else {"momentum": 0.5}))
    trainer.set_gradients(1)
    theirs.step()
    words = rf"load_state_dict: one/a\.lora_A has (exp|mom).*this optimizer is {kind} and keeps"
    with pytest.raises(ValueError, match=words):
        ours.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="this optimizer is sgd and keeps nothing"):
        Optimizer(trainer, "sgd", lr=0.1).load_state_dict(theirs.state_dict())
    assert not ours.state_dict()


def _with_moment(key: str, value: object, state: dict[str, Any]) -> dict[str, Any]:
    return {"probe": {**state["probe"], key: value}}


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    r"got None; expected what state_dict gave": lambda _: None,
    r"got list; expected": list,
    r"probe has 1, exp_avg": lambda state: {"probe": {**state["probe"], 1: torch.ones(3)}},
    r"probe has None; expected a mapping": lambda state: {**state, "probe": None},
    r"probe has Tensor": lambda state: {**state, "probe": torch.ones(3)},
    r"probe lacks exp_avg_sq; load all": lambda state: {
        "probe": {key: value for key, value in state["probe"].items() if key != "exp_avg_sq"}
    },
    r"probe lacks exp_avg, exp_avg_sq, step": lambda _: {"probe": {}},
    **{
        words: partial(_with_moment, key, value)
        for words, key, value in (
            (r"probe\.exp_avg_sq has shape \[\], the", "exp_avg_sq", torch.tensor(1.0)),
            (r"probe\.exp_avg has shape \[3, 1\], the", "exp_avg", torch.ones(3, 1)),
            (r"probe\.exp_avg has dtype torch\.int64, the", "exp_avg", torch.ones(3).long()),
            (r"probe\.exp_avg has dtype torch\.float32, the", "exp_avg", torch.ones(3)),
            (r"probe\.exp_avg is None; expected a tensor", "exp_avg", None),
            (r"probe\.step is int; expected a tensor", "step", 1),
            (r"probe\.step is torch\.int64 \[\]; expected a fl", "step", torch.tensor(1)),
            (r"probe\.step is torch\.float32 \[1\]; expected a fl", "step", torch.ones(1)),
            *(
                (rf"probe\.step is {steps}; expected how many steps", "step", torch.tensor(steps))
                for steps in (-1.0, 0.5, math.nan, math.inf)
            ),
            *(
                (rf"probe\.{key} has numbers that are not finite", key, numbers * bad)
                for key, bad in (("exp_avg", math.nan), ("exp_avg_sq", math.inf))
                for numbers in [torch.ones(3, dtype=torch.float64)]
            ),
            (
                r"probe\.exp_avg_sq has numbers below 0",
                "exp_avg_sq",
                -torch.ones(3, dtype=torch.float64),
            ),
            (
                r"probe\.exp_avg is a tensor of torch\.strided on meta",
                "exp_avg",
                torch.ones(3, dtype=torch.float64, device="meta"),
            ),
            (
                r"probe\.exp_avg is a tensor of torch\.sparse_coo on cpu",
                "exp_avg",
                torch.ones(3, dtype=torch.float64).to_sparse(),
            ),
        )
    },
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_state_is_refused_and_nothing_taken_up(trainer: Stepped, words: str) -> None:
    ours = Optimizer(trainer, "adamw", lr=0.1)
    trainer.set_gradients(1)
    ours.step()
    before = ours.state_dict()
    with pytest.raises((ValueError, TypeError), match=f"load_state_dict: {words}"):
        ours.load_state_dict(DAMAGES[words](before))  # type: ignore[arg-type]
    for name, moments in ours.state_dict().items():
        assert all(value.equal(before[name][key]) for key, value in moments.items())


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("adam", {"lr": 0.1}, "kind is 'adam'; expected one of adamw, sgd"),
        ("sgd", {"lr": 0.1, "betas": (0.9, 0.9)}, "got betas, lr; sgd needs lr, and takes lr, mom"),
        ("adamw", {"lr": 0.1, "momentum": 0.9}, "got lr, momentum; adamw needs lr"),
        ("adamw", {}, "got no options; adamw needs lr"),
        ([], {"lr": 0.1}, r"kind is \[\]; expected one of adamw, sgd"),
        ("adamw", {"lr": -1.0}, "lr is -1.0; expected a finite number of at least 0"),
        ("adamw", {"lr": math.inf}, "lr is inf; expected a finite number"),
        ("adamw", {"lr": "x"}, "lr is 'x'; expected a number"),
        ("adamw", {"lr": True}, "lr is True; expected a number"),
        ("adamw", {"lr": None}, "lr is None; expected a number"),
        ("adamw", {"lr": 0.1, "betas": (0.9,)}, r"betas is \(0\.9,\); expected two numbers"),
        ("adamw", {"lr": 0.1, "betas": 0.9}, r"betas is 0\.9; expected two numbers"),
        (
            "adamw",
            {"lr": 0.1, "betas": (0.9, "x")},
            r"betas is \(0\.9, 'x'\); expected two numbers",
        ),
        ("adamw", {"lr": 0.1, "betas": (0.9, 1.0)}, r"two numbers from 0 to below 1"),
        ("adamw", {"lr": 0.1, "eps": "x"}, "eps is 'x'; expected a number"),
        ("adamw", {"lr": 0.1, "weight_decay": []}, r"weight_decay is \[\]; expected a number"),
        ("sgd", {"lr": 0.1, "momentum": math.nan}, "momentum is nan; expected a finite number"),
        ("sgd", {"lr": 0.1, "max_norm": 0.0}, "max_norm is 0.0; expected a positive number"),
        ("sgd", {"lr": 0.1, "max_norm": math.nan}, "max_norm is nan"),
        ("sgd", {"lr": 0.1, "max_norm": True}, "max_norm is True; expected a positive number"),
        ("sgd", {"lr": 0.1, "max_norm": Fraction(1, 2)}, "max_norm is of type Fraction"),
        ("sgd", {"lr": 0.1, "max_norm": "1"}, "max_norm is '1'; expected a positive number"),
        ("sgd", {"lr": 0.1, "max_norm": 10**400}, "max_norm is an integer of 1329 bits"),
        ("sgd", {"lr": 10**5000}, "lr is an integer of 16610 bits; expected a finite number"),
        ("adamw", {"lr": 1e19}, r"lr is 1e\+19; expected a finite number of .* at most 1e\+18"),
        ("adamw", {"lr": Fraction(1, 2)}, "lr is of type Fraction; expected a number"),
        ("adamw", {"lr": 0.1, "betas": (0.9, Fraction(1, 2))}, "expected two numbers"),
        *(
            ("adamw", {"lr": 0.1, "eps": eps}, f"eps is {eps}; expected .* of at least 1e-37")
            for eps in (0, 0.0, 1e-60)
        ),
    ],
)
def test_options_are_refused(
    trainer: Stepped, kind: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        Optimizer(trainer, kind, **options)


def test_the_largest_options_leave_numbers_in_the_least_dtype(trainer: Stepped) -> None:
    """A gradient of 0 is divided by the least eps, and steps of the largest rate stay finite."""
    gradient = torch.tensor([0.0, 1.0, -1.0])
    trainer.own = {"probe": torch.nn.Parameter(torch.ones(3))}
    near = 1 - 2**-53
    Optimizer(trainer, "adamw", lr=1e18, betas=(near, near), eps=1e-37, weight_decay=1e18)
    for options in (
        {"lr": 0.1, "eps": optimizer_checks.LEAST_EPS},
        {"lr": optimizer_checks.LARGEST, "betas": (near, near), "weight_decay": 1.0},
    ):
        trainer.own["probe"].grad = gradient.clone()
        assert Optimizer(trainer, "adamw", **options).step().stepped
        assert trainer.own["probe"].isfinite().all()


def test_an_epsilon_that_the_dtype_does_not_hold_is_refused(trainer: Stepped) -> None:
    """torch adds it in the dtype of the parameters: 1e-8, where nobody says otherwise."""
    trainer.own = {"probe": torch.nn.Parameter(torch.ones(3, dtype=torch.float16))}
    trainer.own["probe"].grad = torch.zeros(3, dtype=torch.float16)
    with pytest.raises(
        ValueError, match=r"eps is 1e-08, which is 0 in torch\.float16.*least 6\.0e-08"
    ):
        Optimizer(trainer, "adamw", lr=0.1).step()
    assert trainer.own["probe"].eq(1).all()
    for kind, options in (("adamw", {"eps": 6e-8}), ("sgd", {})):
        assert Optimizer(trainer, kind, lr=0.1, **options).step().stepped
        assert trainer.own["probe"].isfinite().all()


def test_nothing_to_step_is_refused(trainer: Stepped) -> None:
    trainer.own.clear()
    with pytest.raises(ValueError, match="no slot and no custom part to step"):
        Optimizer(trainer, "sgd", lr=0.1).step()


def test_the_formula_of_clipping() -> None:
    assert optimizer.clip_coefficient(4.0, None) == 1.0
    assert optimizer.clip_coefficient(0.5, 1.0) == 1.0
    assert optimizer.clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
