"""Steps of the optimizer: norms by slot, clipping, moments, and parameters afterwards.

Every case takes two steps in a row. Updates of gradients near zero are ill-conditioned in float32
(AdamW divides a gradient by its own size), so parameters are compared in float64 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from cases.material import AGAINST_ORACLE, TOPOLOGIES, factors, normal, probe_weight, requests

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from cases.material import Request
    from shardproof import Rank
    from subjects.protocol import Optimizer, OptimizerOptions, Trainer
    from subjects.types import StepResult

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE)
_FEWER = pytest.mark.parity("dp2xcp2", "tp2xcp2", **AGAINST_ORACLE)

ADAMW: OptimizerOptions = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SGD: OptimizerOptions = {"lr": 0.01, "momentum": 0.7, "weight_decay": 0.05}
TARGETS = ("q_proj", "o_proj", "lm_head")
"""By columns, by rows and over the vocabulary: factors that TP shards, and ones that it copies."""


def _limited(options: OptimizerOptions, max_norm: float) -> OptimizerOptions:
    return {**options, "max_norm": max_norm}


def _drawn(rank: Rank, name: str, *shape: int) -> Tensor:
    return normal(rank, rank.generator(name), *shape)


def _slot(rank: Rank, trainer: Trainer, slot: str, *, targets: Sequence[str] = TARGETS) -> None:
    """A slot of rank 2 whose factors are all other than zero, and a bias that it owns."""
    trainer.add_slot(slot, rank=2, alpha=3.0, targets=targets, factory=factors(rank, slot))
    trainer.parameter("bias", partial(_drawn, rank, f"{slot}/bias", 3), slot=slot)


def _losses(
    rank: Rank,
    trainer: Trainer,
    scales: dict[str | None, float],
    *,
    batches: Sequence[Request],
) -> None:
    """A backward for each batch and slot, of a loss as large as its scale says.

    The second batch leaves out the last slot, so that data-parallel ranks differ in what they use.
    """
    own = {name: parameter for name, parameter, _ in trainer.named_parameters()}
    slots = list(scales)
    for request in batches:
        for slot in slots if request.name == "first" else slots[:-1] or slots:
            output = trainer.forward(
                request.ask(target_tokens=request.targets, hidden_states=True, slot=slot)
            )
            assert output.hidden_states is not None
            assert output.target_logprobs is not None
            read = output.hidden_states @ own["probe"]
            if slot is not None:
                read = read + own[f"{slot}/bias"]
            weights = request.weights
            loss = (read - request.goals)[1:][request.mask].tanh().square().sum()
            loss = loss - (output.target_logprobs * weights).sum() / 8
            (loss * scales[slot]).backward()


def _observe(
    rank: Rank, trainer: Trainer, optimizer: Optimizer, result: StepResult, step: int
) -> None:
    """Whether it stepped, every norm, every moment; in float64 the parameters too."""
    rank.observe(f"step{step}.stepped", result.stepped)
    for slot, norm in result.norms.items():
        rank.observe(f"step{step}.norm.{slot or 'own'}", norm)
    for name, moment, placement in optimizer.moments():
        rank.observe(f"step{step}.moment.{name}", moment, **placement)  # type: ignore[arg-type]
    if rank.dtype == torch.float64:
        for name, parameter, placement in trainer.named_parameters():
            value = parameter.detach()
            rank.observe(f"step{step}.parameter.{name}", value, **placement)  # type: ignore[arg-type]


def _two_steps(
    rank: Rank, trainer: Trainer, optimizer: Optimizer, scales: dict[str | None, float]
) -> None:
    for step in range(2):
        _losses(rank, trainer, scales, batches=rank.split(requests(rank)))
        _observe(rank, trainer, optimizer, optimizer.step(), step)
        trainer.zero_gradients()


def _probe(rank: Rank, trainer: Trainer) -> torch.nn.Parameter:
    return trainer.parameter("probe", lambda: probe_weight(rank))


@pytest.mark.parity(*TOPOLOGIES, "dp2xtp2xcp2", **AGAINST_ORACLE)
def test_adamw(rank: Rank, build: BuildTrainer) -> None:
    """Norms count a sharded factor's slices and a copied one once; two steps follow them.

    Nothing is clipped: the norms are metrics alone.
    """
    trainer = build(sharing="full", layers=1)
    _probe(rank, trainer)
    _slot(rank, trainer, "one")
    optimizer = trainer.optimizer("adamw", **ADAMW)
    _two_steps(rank, trainer, optimizer, {"one": 1.0, None: 0.6})


def test_sgd_with_momentum(rank: Rank, build: BuildTrainer) -> None:
    """Momentum carries the first step's reduced gradient into the second.

    Ranks that would take up other states are refused.
    """
    trainer = build(sharing="full", layers=1)
    _probe(rank, trainer)
    _slot(rank, trainer, "one")
    optimizer = trainer.optimizer("sgd", **SGD)
    _two_steps(rank, trainer, optimizer, {"one": 0.2})
    if not rank.is_reference:
        last = int(rank.index == rank.world_size - 1)
        state = {
            name: {key: value + last for key, value in moments.items()}
            for name, moments in optimizer.state_dict().items()
        }
        with pytest.raises(ValueError, match="different things"):
            optimizer.load_state_dict(state)


def test_clipping_is_by_slot(rank: Rank, build: BuildTrainer) -> None:
    """One slot's norm is above the limit and one below: the other's gradients stay as they are."""
    trainer = build(sharing="full", layers=1)
    _probe(rank, trainer)
    _slot(rank, trainer, "large")
    _slot(rank, trainer, "small")
    optimizer = trainer.optimizer("sgd", **_limited(SGD, 1.0))
    scales: dict[str | None, float] = {"large": 1.0, "small": 1e-3}
    _two_steps(rank, trainer, optimizer, scales)
    _losses(rank, trainer, scales, batches=rank.split(requests(rank)))
    optimizer.step()
    # As they were reduced, whatever the step made of them.
    for name, parameter, placement in trainer.named_parameters():
        assert parameter.grad is not None, name
        rank.observe(f"gradient.{name}", parameter.grad, **placement)  # type: ignore[arg-type]


@_FEWER
def test_clipping_inactive(rank: Rank, build: BuildTrainer) -> None:
    """A limit above every norm changes nothing."""
    trainer = build(sharing="full", layers=1)
    _probe(rank, trainer)
    _slot(rank, trainer, "one", targets=("o_proj",))
    optimizer = trainer.optimizer("adamw", **_limited(ADAMW, 1e6))
    _two_steps(rank, trainer, optimizer, {"one": 1.0})


def test_a_norm_that_is_not_finite_blocks_the_step(rank: Rank, build: BuildTrainer) -> None:
    """One slot overflows on one data-parallel rank: no parameter and no moment moves anywhere."""
    trainer = build(sharing="full", layers=1)
    probe = _probe(rank, trainer)
    _slot(rank, trainer, "good", targets=("q_proj",))
    _slot(rank, trainer, "bad", targets=("o_proj",))
    optimizer = trainer.optimizer("adamw", **_limited(ADAMW, 1.0))
    scales: dict[str | None, float] = {"good": 1.0, "bad": 0.3}
    for step in range(3):
        batches = rank.split(requests(rank))
        _losses(rank, trainer, scales, batches=batches)
        if step == 1 and any(request.name == "first" for request in batches):
            bias = {name: value for name, value, _ in trainer.named_parameters()}["bad/bias"]
            (bias * torch.tensor([1.0, torch.inf, 1.0], dtype=rank.dtype)).sum().backward()
        before = {name: p.detach().clone() for name, p, _ in trainer.named_parameters()}
        result = optimizer.step()
        if step == 1:
            unchanged = [p.equal(before[name]) for name, p, _ in trainer.named_parameters()]
            rank.observe("unchanged", all(unchanged))
            norms = {slot: norm for slot, norm in result.norms.items() if slot != "bad"}
            result = type(result)(stepped=result.stepped, norms=norms)
        _observe(rank, trainer, optimizer, result, step)
        trainer.zero_gradients()
    rank.observe("probe", probe.detach().norm())


def test_parameters_without_gradient_are_left_alone(rank: Rank, build: BuildTrainer) -> None:
    """No decay of what nobody used, nor of a slot at rest; the second step wakes it."""
    trainer = build(sharing="full", layers=1)
    _probe(rank, trainer)
    resting = trainer.parameter("resting", partial(_drawn, rank, "resting", 4))
    _slot(rank, trainer, "one", targets=("q_proj",))
    _slot(rank, trainer, "two", targets=("o_proj",))
    optimizer = trainer.optimizer("adamw", **_limited(ADAMW, 0.8))
    for step in range(2):
        scales: dict[str | None, float] = {"one": 1.0} if step == 0 else {"one": 0.5, "two": 0.7}
        before = resting.detach().clone()
        _losses(rank, trainer, scales, batches=rank.split(requests(rank)))
        result = optimizer.step()
        rank.observe(f"step{step}.rested", resting.detach() - before, exact=True, zero=True)
        norms = {slot: norm for slot, norm in result.norms.items() if norm}
        result = type(result)(stepped=result.stepped, norms=norms)
        _observe(rank, trainer, optimizer, result, step)
        trainer.zero_gradients()


@_FEWER
def test_state_is_taken_up(rank: Rank, build: BuildTrainer) -> None:
    """A new optimizer goes on from the state of the old one: its second step is a second step.

    The state is a copy on both sides: it is taken up once more, and what it lacks begins anew.
    """
    trainer = build(sharing="full", layers=1)
    _probe(rank, trainer)
    _slot(rank, trainer, "one", targets=("o_proj",))
    optimizer = trainer.optimizer("adamw", **ADAMW)
    state: dict[str, dict[str, Tensor]] = {}
    for step in range(3):
        if step == 1:
            optimizer = trainer.optimizer("adamw", **ADAMW)
            optimizer.load_state_dict(state)
        elif step == 2:
            optimizer.load_state_dict({n: state[n] for n in state if n != "probe"})
        _losses(rank, trainer, {"one": 1.0}, batches=rank.split(requests(rank)))
        _observe(rank, trainer, optimizer, optimizer.step(), step)
        trainer.zero_gradients()
        if step == 0:
            state = optimizer.state_dict()
            for _, moment, _ in optimizer.moments():
                moment.zero_()


def test_forward_follows_the_step(rank: Rank, build: BuildTrainer) -> None:
    """What a forward gives after a step: a parameter that came a step late shows here.

    A head is added between the steps and is stepped by the same optimizer.
    """
    trainer = build(sharing="full", layers=1)
    probe = _probe(rank, trainer)
    _slot(rank, trainer, "one")
    optimizer = trainer.optimizer("sgd", lr=0.05, momentum=0.5, max_norm=2.0)
    late: torch.nn.Parameter | None = None
    for step in range(2):
        batches = rank.split(requests(rank))
        _losses(rank, trainer, {"one": 1.0}, batches=batches)
        if late is not None and any(request.name == "first" for request in batches):
            (late.square().sum() * 0.7).backward()
        _observe(rank, trainer, optimizer, optimizer.step(), step)
        trainer.zero_gradients()
        if late is None:
            late = trainer.parameter("late", partial(_drawn, rank, "late", 5), slot="one")
        for request in rank.split(requests(rank)):
            output = trainer.forward(
                request.ask(target_tokens=request.targets, hidden_states=True, slot="one")
            )
            assert output.hidden_states is not None
            rank.observe(f"step{step}.{request.name}.logprobs", output.target_logprobs)
            rank.observe(f"step{step}.{request.name}.read", output.hidden_states @ probe)
