"""The optimizer step over slots and custom parts, clipped slot by slot.

torch.optim does the arithmetic. What is ours is the norm, which must count each element once
whatever holds it, and the decision to step, which must be the same on all ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import Placement
from subjects.token_ids import shown
from subjects.trainer import agreement, checks, collectives
from subjects.trainer.agreement import Fact
from subjects.trainer.precision import outside_inference, working_dtype
from subjects.trainer.reductions import Groups
from subjects.types import StepResult

OWN = ""
"""Stands for the slot of parameters that belong to none."""

CLIP_EPSILON = 1e-6
"""Added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does."""


LARGEST = 1e18
"""Most that an option may be: with it, and betas near 1, every product is a finite float32."""

LEAST_EPS = 1e-37
"""Least of ``eps``: a normal float32."""


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
            check_max_norm(max_norm)
            made.append(empty_optimizer(kind, options))
            asked = {"kind": kind, "max_norm": max_norm, **options}
            return {name: _fact(value) for name, value in asked.items()}

        agreement.agree("optimizer", facts, self._world)
        self._torch = made[0]
        self._kind, self._moments = kind, moments_of(kind, options)

    @outside_inference
    def step(self) -> StepResult:
        """Reduce gradients, clip each slot's by its own norm, update; a collective of all ranks.

        Norms are those before clipping, by slot, and under "" that of custom parts that belong to
        no slot. Where one of them is not finite nothing changes on any rank. A parameter without a
        gradient is left alone. Gradients stay as they were reduced, unclipped, until the caller's
        ``zero_gradients``.

        Raises:
            ValueError: nothing to step, a backward has added to gradients that were reduced, or a
                module of the caller's holds other parameters than those registered.
        """
        ready(self._trainer)
        slots = by_slot(self._trainer.named_parameters())
        if not slots:
            raise ValueError(
                "the trainer has no slot and no custom part to step; make one with add_slot, "
                "load_slot, module or parameter (the model itself is never stepped)"
            )
        self._follow(slots)
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
        wanted = Wanted(self._kind, self._moments)
        agreement.agree_on_values(
            "load_state_dict",
            lambda: check_state(state, named, wanted),
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


def empty_optimizer(kind: str, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """torch's optimizer without parameters.

    Raises:
        ValueError: an unknown kind, or an option out of range.
        TypeError: an option of the other kind or of another type, or no ``lr``.
    """
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    takes = {
        "adamw": {"lr", "betas", "eps", "weight_decay"},
        "sgd": {"lr", "momentum", "weight_decay"},
    }
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"optimizer: kind is {shown(kind)}; expected one of {', '.join(kinds)}")
    wrong = options.keys() - takes[kind]
    if wrong or "lr" not in options:
        raise TypeError(
            f"optimizer: got {', '.join(sorted(options)) or 'no options'}; {kind} needs lr, and "
            f"takes {', '.join(sorted(takes[kind]))}"
        )
    for name, value in options.items():
        check_option(name, value)
    # The plain loop everywhere: which kernels are fused must not depend on a rank's device.
    optimizer = kinds[kind]([torch.zeros(1)], **options, foreach=False)
    optimizer.param_groups.clear()
    return optimizer


def check_option(name: str, value: object) -> None:
    """Refuse an option of torch's optimizer by its name.

    Raises:
        TypeError: no number, or for ``betas`` no two of them.
        ValueError: a number out of range.
    """
    if name == "betas":
        pair = (
            isinstance(value, tuple | list)
            and len(value) == 2
            and all(map(checks.is_number, value))
        )
        if not pair:
            raise TypeError(f"optimizer: betas is {shown(value)}; expected two numbers")
        if not all(0 <= one < 1 for one in value):  # type: ignore[attr-defined]
            raise ValueError(
                f"optimizer: betas is {shown(value)}; expected two numbers from 0 to below 1"
            )
        return
    if not checks.is_number(value):
        raise TypeError(
            f"optimizer: {name} is {shown(value)}; expected a number, an int or a float"
        )
    least = LEAST_EPS if name == "eps" else 0
    if not least <= value <= LARGEST:
        why = ", since without it a gradient of 0 gives NaN" if least else ""
        raise ValueError(
            f"optimizer: {name} is {shown(value)}; expected a finite number of at least "
            f"{least:g}, at most {LARGEST:g}{why}"
        )


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


def check_max_norm(max_norm: float | None) -> None:
    """Refuse a norm that nothing can be clipped to.

    Raises:
        TypeError: it is no number, and not None.
        ValueError: it is not positive, or an int that no float holds.
    """
    if max_norm is None:
        return
    told = f"optimizer: max_norm is {shown(max_norm)}; expected a positive number or None"
    if not checks.is_number(max_norm):
        raise TypeError(told)
    if not 0 < max_norm <= sys.float_info.max and max_norm != math.inf:
        raise ValueError(told)


class Wanted(NamedTuple):
    """What an optimizer of one ``kind`` remembers of each parameter."""

    kind: str
    moments: frozenset[str]


def moments_of(kind: str, options: Mapping[str, Any]) -> frozenset[str]:
    """The names of what an optimizer remembers of each parameter; SGD without momentum nothing."""
    if kind == "adamw":
        return frozenset({"exp_avg", "exp_avg_sq", "step"})
    return frozenset({"momentum_buffer"} if options.get("momentum") else ())


def check_state(state: object, named: Mapping[str, Named], wanted: Wanted) -> dict[str, Fact]:
    """What ranks must be told alike about a state: which parameters it has, and which moments.

    Raises:
        TypeError: it is no mapping of names to mappings of tensors.
        ValueError: a parameter that there is not, another optimizer's moments or not all of this
            one's, or a moment of another shape or dtype, or that no step leaves.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"load_state_dict: got {_kind(state)}; expected what state_dict gave, a mapping of "
            "names of parameters to their moments"
        )
    for name, moments in state.items():
        if name not in named:
            raise ValueError(
                f"load_state_dict: there is no parameter {name!r}; register it, or load its slot, "
                "before the state of the optimizer"
            )
        if not isinstance(moments, Mapping):
            raise TypeError(
                f"load_state_dict: {name} has {_kind(moments)}; expected a mapping of moments "
                "to tensors, as state_dict gave it"
            )
        if moments.keys() - wanted.moments:
            raise ValueError(
                f"load_state_dict: {name} has {_listed(moments)}; this optimizer is {wanted.kind} "
                f"and keeps {_listed(wanted.moments)}. Load the state of one of the same kind and "
                "options"
            )
        for key, value in moments.items():
            check_moment(f"{name}.{key}", value, named[name].parameter)
        if wanted.moments - moments.keys():
            raise ValueError(
                f"load_state_dict: {name} lacks {_listed(wanted.moments - moments.keys())}; load "
                "all that state_dict gave for it, or leave the parameter out to begin anew"
            )
    return {name: _fact(sorted(moments)) for name, moments in state.items()}


def check_moment(what: str, value: object, parameter: Tensor) -> None:
    """Refuse what could not be a moment of ``parameter``, or its number of steps.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape, is not of the right dtype, or holds what no step leaves.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"load_state_dict: {what} is {_kind(value)}; expected a tensor")
    if value.layout != torch.strided or value.is_meta:
        raise ValueError(
            f"load_state_dict: {what} is a tensor of {value.layout} on {value.device.type}; "
            "expected a dense one with values, as state_dict gave it"
        )
    if what.endswith(".step"):
        if value.dim() or not value.is_floating_point():
            raise ValueError(
                f"load_state_dict: {what} is {value.dtype} {list(value.shape)}; expected a "
                "floating scalar, the number of steps, as state_dict gave it"
            )
        steps = float(value)
        if not (math.isfinite(steps) and steps >= 0 and steps.is_integer()):
            raise ValueError(
                f"load_state_dict: {what} is {steps}; expected how many steps were taken, a whole "
                "number from 0 up, as state_dict gave it"
            )
        return
    if value.shape != parameter.shape:
        raise ValueError(
            f"load_state_dict: {what} has shape {list(value.shape)}, the parameter "
            f"{list(parameter.shape)}; load it on the topology that it is from"
        )
    if value.dtype != parameter.dtype:
        raise ValueError(
            f"load_state_dict: {what} has dtype {value.dtype}, the parameter {parameter.dtype}; "
            "load it in a run of the dtype that it is from"
        )
    if not value.isfinite().all():
        raise ValueError(
            f"load_state_dict: {what} has numbers that are not finite; no step leaves such: load "
            "an earlier state, or leave the parameter out to begin anew"
        )
    if what.endswith(".exp_avg_sq") and (value < 0).any():
        raise ValueError(
            f"load_state_dict: {what} has numbers below 0; it averages squares: load what "
            "state_dict gave, or leave the parameter out to begin anew"
        )


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


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _fact(value: object) -> Fact:
    return Fact(repr(value).encode(), repr(value))
