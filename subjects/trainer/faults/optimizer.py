"""Norms that count elements twice or not at all, clipping of the wrong thing, steps taken amiss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import Placement
from subjects.trainer import agreement, collectives, optimizer, optimizer_checks
from subjects.trainer.agreement import Fact
from subjects.trainer.faults.fault import Fault
from subjects.trainer.optimizer import Named, Optimizer, Steppable
from subjects.trainer.reductions import Groups
from subjects.types import StepResult

_step = Optimizer.step
_follow = Optimizer._follow
_ready = optimizer.ready
_clipped = optimizer.clipped
_load_state_dict = Optimizer.load_state_dict


def _summed_over_tp(square: Tensor, groups: Groups) -> Tensor:
    return collectives.all_reduce(square, groups.tp)


def _summed_over_dp(square: Tensor, groups: Groups) -> Tensor:
    return collectives.all_reduce(square, groups.dp)


def _own_slices(square: Tensor, groups: Groups) -> Tensor:  # noqa: ARG001
    return square


def _all_sharded(placement: Placement) -> bool:  # noqa: ARG001
    return True


def _context_group(groups: Groups) -> ProcessGroup:
    return groups.cp


def _local_norms(self: Optimizer) -> StepResult:
    result = _step(self)
    slots = optimizer.by_slot(self._trainer.named_parameters())
    return StepResult(
        stepped=result.stepped,
        norms={
            slot: math.sqrt(
                sum(
                    float(optimizer.sum_of_squares(one.parameter.grad))
                    for one in members
                    if one.parameter.grad is not None
                )
            )
            for slot, members in slots.items()
        },
    )


def _used_up(
    slots: Mapping[str, Sequence[Named]], factors: Mapping[str, float]
) -> AbstractContextManager[None]:
    return _clipped(dict.fromkeys(slots, ()), factors)


@contextmanager
def _left_clipped(
    slots: Mapping[str, Sequence[Named]], factors: Mapping[str, float]
) -> Iterator[None]:
    for slot, members in slots.items():
        for member in members:
            if member.parameter.grad is not None:
                member.parameter.grad.mul_(factors[slot])
    yield


def _not_reduced(trainer: Steppable) -> None:
    del trainer


def _one_norm_for_all(norms: Mapping[str, float], max_norm: float | None) -> dict[str, float]:
    whole = math.hypot(*norms.values())
    return dict.fromkeys(norms, optimizer.clip_coefficient(whole, max_norm))


def _always_scaled(norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None else max_norm / (norm + optimizer.CLIP_EPSILON)


def _no_epsilon(norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None else min(1.0, max_norm / norm)


def _over_the_limit(norm: float, max_norm: float | None) -> float:  # noqa: ARG001
    return 1.0 if max_norm is None else 1.0 / max(1.0, max_norm)


def _clipped_before(self: Optimizer) -> StepResult:
    for members in optimizer.by_slot(self._trainer.named_parameters()).values():
        norm = optimizer.gradient_norm(members, self._trainer.groups)
        factor = optimizer.clip_coefficient(norm, self._max_norm)
        for member in members:
            if member.parameter.grad is not None:
                member.parameter.grad.mul_(factor)
    limit, self._max_norm = self._max_norm, None
    try:
        return _step(self)
    finally:
        self._max_norm = limit


def _never_blocked(norms: Mapping[str, float], world: agreement.Circle) -> bool:  # noqa: ARG001
    return False


def _moments_move(self: Optimizer) -> StepResult:
    result = _step(self)
    if not result.stepped:
        for _, parameter, _ in self._trainer.named_parameters():
            moments = self._torch.state.get(parameter, {})
            if parameter.grad is not None and "exp_avg" in moments:
                moments["exp_avg"].lerp_(parameter.grad.nan_to_num(posinf=0.0), 0.2)
    return result


def _others_step(self: Optimizer) -> StepResult:
    result = _step(self)
    if not result.stepped:
        for name, parameter, _ in self._trainer.named_parameters():
            if not math.isfinite(result.norms[name.rpartition("/")[0]]):
                parameter.grad = None
        self._torch.step()
    return result


def _zeros_for_none(trainer: Steppable) -> None:
    _ready(trainer)
    for _, parameter, _ in trainer.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _one_late(self: Optimizer) -> StepResult:
    """The first parameter gets each update a step late."""
    _, parameter, _ = next(self._trainer.named_parameters())
    late = getattr(self, "_late", None)
    before = parameter.detach().clone()
    if late is not None:
        parameter.data.copy_(late)
    result = _step(self)
    self._late = parameter.detach().clone()  # type: ignore[attr-defined]
    parameter.data.copy_(before if late is None else late)
    return result


def _forgetful(self: Optimizer, slots: Mapping[str, Sequence[Named]]) -> None:
    _follow(self, slots)
    self._torch.state.clear()


def _first_alone(self: Optimizer, slots: Mapping[str, Sequence[Named]]) -> None:
    if not self._torch.param_groups:
        _follow(self, slots)


def _nothing_dropped(self: Optimizer, slots: Mapping[str, Sequence[Named]]) -> None:
    before = dict(self._torch.state)
    _follow(self, slots)
    self._torch.state.update(before)


def _state_lost(self: Optimizer, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    del self, state


def _state_added(self: Optimizer, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    before = dict(self._torch.state)
    _load_state_dict(self, state)
    for parameter, moments in before.items():
        self._torch.state.setdefault(parameter, moments)


def _callers_own(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(moments)


def _no_copy(self: Optimizer) -> dict[str, dict[str, Any]]:
    return {
        name: dict(self._state(parameter))
        for name, parameter, _ in self._trainer.named_parameters()
        if self._state(parameter)
    }


def _no_values(value: Tensor) -> Fact:
    del value
    return Fact(b"", "")


def _one_group(
    named: Iterator[tuple[str, torch.nn.Parameter, Placement]],
) -> dict[str, list[Named]]:
    """Everything in one group, whatever slot owns it."""
    return {optimizer.OWN: [Named(*one) for one in named]}


def _fault(function: Callable[..., Any], name: str, *, of: Any = optimizer, **about: Any) -> Fault:
    return Fault(module=of, name=name, function=function, **about)


_NORMS = "test_optimizer.test_adamw"
_SLOTS = "test_optimizer.test_clipping_is_by_slot"
_BLOCKED = "test_optimizer.test_a_norm_that_is_not_finite_blocks_the_step"

FAULTS: dict[str, Fault] = {
    "norm of copied parameters summed over tp": _fault(
        _summed_over_tp, "once", axis="tp", case=_NORMS, shows="step0.norm.*", catalogue=(49,)
    ),
    "norm of copied parameters summed over dp": _fault(
        _summed_over_dp, "once", axis="dp", case=_NORMS, shows="step0.norm.*", catalogue=(55,)
    ),
    "norm of slices not summed over tp": _fault(
        _own_slices,
        "sum_over_slices",
        axis="tp",
        case=_NORMS,
        shows="step0.norm.one",
        catalogue=(51,),
    ),
    "every parameter taken for a slice": _fault(
        _all_sharded, "is_sharded", axis="tp", case=_NORMS, shows="step0.norm.*", catalogue=(52,)
    ),
    "norm of slices summed over cp": _fault(
        _context_group,
        "norm_group",
        axis="tp",
        topology="tp2xcp2",
        case=_NORMS,
        shows="step0.norm.one",
        catalogue=(54,),
    ),
    "this rank's part of the norm logged": _fault(
        _local_norms,
        "step",
        of=Optimizer,
        axis="tp",
        case=_NORMS,
        shows="step0.norm.one",
        catalogue=(56,),
    ),
    "clipping finds its list of parameters used up": _fault(
        _used_up,
        "clipped",
        axis="any",
        case=_SLOTS,
        shows="step0.moment.large/*",
        catalogue=(54,),
    ),
    "gradients stay clipped after the step": _fault(
        _left_clipped, "clipped", axis="any", case=_SLOTS, shows="gradient.large/*"
    ),
    "step before gradients are reduced": _fault(
        _not_reduced,
        "ready",
        axis="dp",
        case="test_optimizer.test_sgd_with_momentum",
        shows="step0.moment.*",
        catalogue=(10, 104),
    ),
    "clipped by the norm over all slots": _fault(
        _one_norm_for_all, "coefficients", axis="any", case=_SLOTS, shows="step0.moment.small/*"
    ),
    "gradients scaled up to the limit": _fault(
        _always_scaled, "clip_coefficient", axis="any", case=_SLOTS, shows="step0.moment.small/*"
    ),
    "clipping without its epsilon": _fault(
        _no_epsilon, "clip_coefficient", axis="any", case=_SLOTS, shows="step0.moment.large/*"
    ),
    "gradients clipped before they are reduced": _fault(
        _clipped_before,
        "step",
        of=Optimizer,
        axis="dp",
        case=_SLOTS,
        shows="step0.moment.large/*",
    ),
    "gradients divided by the limit": _fault(
        _over_the_limit,
        "clip_coefficient",
        axis="any",
        case="test_optimizer.test_clipping_inactive",
        shows="step0.moment.*",
    ),
    "slots are one group": _fault(
        _one_group, "by_slot", axis="any", case=_SLOTS, shows="step0.moment.small/*"
    ),
    "a norm that is not finite blocks nothing": _fault(
        _never_blocked, "blocked", axis="any", case=_BLOCKED, shows="step1.stepped"
    ),
    "a blocked step moves the moments": _fault(
        _moments_move,
        "step",
        of=Optimizer,
        axis="any",
        case=_BLOCKED,
        shows="step1.moment.good/*",
    ),
    "a blocked step moves the other slots": _fault(
        _others_step,
        "step",
        of=Optimizer,
        axis="any",
        case=_BLOCKED,
        shows="unchanged",
    ),
    "what nobody used decays": _fault(
        _zeros_for_none,
        "ready",
        axis="any",
        case="test_optimizer.test_parameters_without_gradient_are_left_alone",
        shows="step0.rested",
    ),
    "one parameter is a step late": _fault(
        _one_late,
        "step",
        of=Optimizer,
        axis="any",
        case="test_optimizer.test_forward_follows_the_step",
        shows="step0.*.logprobs",
        catalogue=(103,),
    ),
    "moments begin anew at every step": _fault(
        _forgetful,
        "_follow",
        of=Optimizer,
        axis="any",
        case="test_optimizer.test_sgd_with_momentum",
        shows="step1.moment.*",
    ),
    "a loaded state is not taken up": _fault(
        _state_lost,
        "load_state_dict",
        of=Optimizer,
        axis="any",
        case="test_optimizer.test_state_is_taken_up",
        shows="step1.moment.*",
    ),
    "a loaded state is added to the one before": _fault(
        _state_added,
        "load_state_dict",
        of=Optimizer,
        axis="any",
        case="test_optimizer.test_state_is_taken_up",
        shows="step2.moment.probe.*",
    ),
    "a loaded state stays the caller's": _fault(
        _callers_own,
        "taken_up",
        axis="any",
        case="test_optimizer.test_state_is_taken_up",
        shows="step2.moment.one/*",
    ),
    "a state that was given changes with the optimizer": _fault(
        _no_copy,
        "state_dict",
        of=Optimizer,
        axis="any",
        case="test_optimizer.test_state_is_taken_up",
        shows="step1.moment.*",
    ),
    "ranks take up other states each": _fault(
        _no_values,
        "of_values",
        of=agreement,
        axis="any",
        case="test_optimizer.test_sgd_with_momentum",
        shows="raised: DID NOT RAISE",
    ),
    "ranks step by other options each": _fault(
        _no_values,
        "fact",
        of=optimizer_checks,
        axis="cp",
        case="test_contract.test_what_one_rank_alone_is_told_is_refused_by_all",
        shows="raised: DID NOT RAISE",
    ),
    "moments of what is gone are kept": _fault(
        _nothing_dropped,
        "_follow",
        of=Optimizer,
        axis="any",
        case="test_slots.test_gradients_and_moments_of_a_slot",
        shows="lives_on",
    ),
    "what is registered later is not stepped": _fault(
        _first_alone,
        "_follow",
        of=Optimizer,
        axis="any",
        case="test_optimizer.test_forward_follows_the_step",
        shows="step1.parameter.one/late",
    ),
}
"""By what is wrong."""
