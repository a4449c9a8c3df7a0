"""The optimizer step over slots and custom parts, clipped slot by slot.

torch.optim does the arithmetic. What is ours is the norm, which must count each element once
whatever holds it, and the decision to step, which must be the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import Placement
from subjects.trainer import agreement, collectives, optimizer_checks
from subjects.trainer.agreement import Fact
from subjects.trainer.precision import outside_inference, working_dtype
from subjects.trainer.reductions import Groups
from subjects.types import StepResult

OWN = ""
"""Stands for the slot of parameters that belong to none."""

CLIP_EPSILON = 1e-6
"""Added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does."""


class Steppable(Protocol):
    """What the optimizer needs of a trainer."""

    @property
    def groups(self) -> Groups:
        """Process groups by axis."""

    @property
    def device(self) -> torch.device:
        """Where parameters live."""

    def reduce_gradients(self) -> None:
        """Reduce all gradients over the ranks, once; refuse what is not to be stepped."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        """Name, this rank's part and placement of all that is stepped."""


class Named(NamedTuple):
    """A parameter of one slot: its full name, this rank's part, where that lies."""

    name: str
    parameter: torch.nn.Parameter
    placement: Placement


class Optimizer:
    """AdamW or SGD over the slots and custom parts of a trainer; made by ``TrainerRank.optimizer``.

    What is registered, loaded, replaced or removed after it was made is picked up by the next
    step: new parameters begin without moments, those of parameters that are gone are dropped. A
    slot whose values are restored in place keeps its moments.
    """

    def __init__(
        self, trainer: Steppable, kind: str, *, max_norm: float | None = None, **options: Any
    ) -> None:
        self._trainer = trainer
        self._world = agreement.world(trainer.groups, trainer.device)
        self._max_norm = max_norm
        made: list[torch.optim.Optimizer] = []

        def facts() -> dict[str, Fact]:
            optimizer_checks.check_max_norm(max_norm)
            made.append(optimizer_checks.empty_optimizer(kind, options))
            asked = {"kind": kind, "max_norm": max_norm, **options}
            return {name: optimizer_checks.fact(value) for name, value in asked.items()}

        agreement.agree("optimizer", facts, self._world)
        self._torch = made[0]
        self._wanted = optimizer_checks.wanted_by(kind, options)

    @outside_inference
    def step(self) -> StepResult:
        """Reduce gradients, clip each slot's by its own norm, update; a collective of all ranks.

        Norms are those before clipping, by slot, and under "" that of custom parts that belong to
        no slot. Where one of them is not finite nothing changes on any rank. A parameter without a
        gradient is left alone. Gradients stay as they were reduced, unclipped, until the caller's
        ``zero_gradients``.

        Raises:
            ValueError: nothing to step, a backward has added to gradients that were reduced, a
                module of the caller's holds other parameters than those registered, or an ``eps``
                that is 0 in the dtype of the run.
        """
        ready(self._trainer)
        slots = by_slot(self._trainer.named_parameters())
        if not slots:
            raise ValueError(
                "the trainer has no slot and no custom part to step; make one with add_slot, "
                "load_slot, module or parameter (the model itself is never stepped)"
            )
        self._follow(slots)
        optimizer_checks.check_epsilon(self._torch)
        norms = {
            slot: gradient_norm(members, self._trainer.groups) for slot, members in slots.items()
        }
        result = StepResult(stepped=not blocked(norms, self._world), norms=reported(norms))
        if result.stepped:
            with clipped(slots, coefficients(norms, self._max_norm)):
                self._torch.step()
        return result

    def moments(self) -> Iterator[tuple[str, Tensor, Placement]]:
        """The state of every parameter that was stepped, as ``parameter.moment``.

        Yields name, this rank's part and its placement: ``exp_avg`` and ``exp_avg_sq`` (AdamW) or
        ``momentum_buffer`` (SGD), each placed as its parameter, and for AdamW the scalar ``step``.
        """
        for name, parameter, placement in self._trainer.named_parameters():
            for key, value in self._state(parameter).items():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", value, placement if value.dim() else {}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of this rank's part of the state, by parameter; for the same topology."""
        return {
            name: {
                key: value.clone()
                for key, value in self._state(parameter).items()
                if isinstance(value, Tensor)
            }
            for name, parameter, _ in self._trainer.named_parameters()
            if self._state(parameter)
        }

    @outside_inference
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what ``state_dict`` gave; parameters that it lacks begin without moments.

        A collective of all ranks.

        Raises:
            TypeError: on every rank: no mapping of names to mappings of tensors.
            ValueError: on every rank: state of a parameter that there is not, of another kind of
                optimizer, incomplete, of another shape or dtype, or with numbers that no step
                leaves; or ranks that must hold the same and were given something else.
        """
        named = {one[0]: Named(*one) for one in self._trainer.named_parameters()}
        parameters = {name: one.parameter for name, one in named.items()}
        agreement.agree_on_values(
            "load_state_dict",
            lambda: optimizer_checks.check_state(state, parameters, self._wanted),
            lambda: with_cuts(state, named),
            self._trainer.groups,
            self._trainer.device,
        )
        self._torch.state.clear()
        for name, moments in state.items():
            self._torch.state[named[name].parameter] = taken_up(moments)

    def _state(self, parameter: torch.nn.Parameter) -> Mapping[str, object]:
        found: Mapping[str, object] = self._torch.state.get(parameter, {})
        return found

    def _follow(self, slots: Mapping[str, Sequence[Named]]) -> None:
        """Bring the groups of torch's optimizer to the parameters that there are now."""
        self._torch.param_groups.clear()
        for slot, members in slots.items():
            parameters = [member.parameter for member in members]
            self._torch.add_param_group({"params": parameters, "slot": slot})
        current = {id(member.parameter) for members in slots.values() for member in members}
        # Compared by identity: a parameter that is gone refuses every operation.
        for parameter in [key for key in self._torch.state if id(key) not in current]:
            del self._torch.state[parameter]


def ready(trainer: Steppable) -> None:
    """Have gradients reduced, as reading them does, before anything is computed from them."""
    trainer.reduce_gradients()


def by_slot(
    named: Iterator[tuple[str, torch.nn.Parameter, Placement]],
) -> dict[str, Sequence[Named]]:
    """The parameters of each slot; names begin with it and a slash, and have no other."""
    slots: dict[str, list[Named]] = {}
    for name, parameter, placement in named:
        slots.setdefault(name.rpartition("/")[0] or OWN, []).append(
            Named(name, parameter, placement)
        )
    return dict(slots)


def gradient_norm(members: Sequence[Named], groups: Groups) -> float:
    """The L2 norm of one slot's reduced gradients, each element once; a collective over TP.

    Context- and data-parallel ranks hold the same gradients. Of tensor-parallel ranks each holds
    its slice of a sharded parameter, and all hold a replicated one.
    """
    sharded, replicated = None, None
    for member in members:
        if member.parameter.grad is None:
            continue
        square = sum_of_squares(member.parameter.grad)
        if is_sharded(member.placement):
            sharded = square if sharded is None else sharded + square
        else:
            replicated = square if replicated is None else replicated + square
    # Which of the two there are is the same on all ranks, so that all call the collective or none.
    total = 0.0
    if sharded is not None:
        total += float(sum_over_slices(sharded, groups))
    if replicated is not None:
        total += float(once(replicated, groups))
    return math.sqrt(total) if math.isfinite(total) else total


def sum_of_squares(gradient: Tensor) -> Tensor:
    """A scalar, in the dtype of the run but never below float32."""
    return gradient.detach().to(working_dtype(gradient.dtype)).square().sum()


def is_sharded(placement: Placement) -> bool:
    """Whether each tensor-parallel rank holds a slice of its own."""
    return bool(placement.get("shard"))


def sum_over_slices(square: Tensor, groups: Groups) -> Tensor:
    """The sum of squares of all slices, of that of this rank's."""
    return collectives.all_reduce(square, norm_group(groups))


def norm_group(groups: Groups) -> ProcessGroup:
    """The ranks that hold the other slices."""
    return groups.tp


def once(square: Tensor, groups: Groups) -> Tensor:  # noqa: ARG001
    """The sum of squares of what all ranks of ``groups`` hold alike: counted here alone."""
    return square


def blocked(norms: Mapping[str, float], world: agreement.Circle) -> bool:
    """Whether a norm of any slot is not finite on any rank; a collective of all of them."""
    wrong = not all(math.isfinite(norm) for norm in norms.values())
    found = torch.tensor(int(wrong), device=world.device)
    for _, group in world.axes:
        collectives.all_reduce(found, group, op="max")
    return bool(found)


def reported(norms: Mapping[str, float]) -> dict[str, float]:
    """What a training loop logs: the norms that decided, before clipping."""
    return dict(norms)


def coefficients(norms: Mapping[str, float], max_norm: float | None) -> dict[str, float]:
    """What each slot's gradients are multiplied by, from its own norm alone."""
    return {slot: clip_coefficient(norm, max_norm) for slot, norm in norms.items()}


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """min(1, max_norm / (norm + 1e-6)): the formula of torch.nn.utils.clip_grad_norm_."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + CLIP_EPSILON))


@contextmanager
def clipped(slots: Mapping[str, Sequence[Named]], factors: Mapping[str, float]) -> Iterator[None]:
    """Multiply each slot's gradients by its factor in the block; afterwards they are as before."""
    kept = [
        (member.parameter, member.parameter.grad, factors[slot])
        for slot, members in slots.items()
        for member in members
    ]
    try:
        for parameter, gradient, factor in kept:
            if gradient is not None and factor != 1.0:
                parameter.grad = gradient * factor
        yield
    finally:
        for parameter, gradient, _ in kept:
            parameter.grad = gradient


def with_cuts(
    state: Mapping[str, Mapping[str, Tensor]], named: Mapping[str, Named]
) -> dict[str, tuple[Tensor, bool]]:
    """Every moment by its full name, and whether each tensor-parallel rank has its own slice."""
    return {
        f"{name}.{key}": (value, bool(value.dim()) and is_sharded(named[name].placement))
        for name, moments in state.items()
        for key, value in moments.items()
    }


def taken_up(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, since a step changes them in place."""
    return {key: value.detach().clone() for key, value in moments.items()}
