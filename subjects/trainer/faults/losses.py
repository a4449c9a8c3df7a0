"""Losses that nobody compares, graphs that are run twice, outputs that are not the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subjects.trainer import (
    forward,
    gradients,
    losses,
)
from subjects.trainer.agreement import Circle
from subjects.trainer.faults.fault import Fault
from subjects.trainer.losses import Watch
from subjects.trainer.rank import TrainerRank
from subjects.types import ForwardInput, ForwardOutput

_LOSSES = "test_contract.test_losses_that_differ_are_refused"
_LEFT_OUT = "test_contract.test_a_loss_may_leave_outputs_out"
_KEPT = "test_contract.test_a_kept_graph_is_run_twice"
_CALLERS = "test_contract.test_outputs_belong_to_the_caller"
_watch = losses.watch
_reduce_once = gradients.reduce_once
_check = forward.check
_differences = losses.differences


def _reduced_or_not(trainer: TrainerRank, request: ForwardInput) -> None:
    trainer.reduced, kept = None, trainer.reduced
    try:
        _check(trainer, request)
    finally:
        trainer.reduced = kept


def _no_stamps(parameters: Mapping[str, torch.nn.Parameter]) -> gradients.Stamps:
    del parameters
    return {}


def _own_left_out(gradients: Mapping[str, Tensor | None], everyone: Circle) -> None:
    del gradients, everyone


def _own_compared_anyway(
    trainer: TrainerRank, reduced: gradients.Stamps | None
) -> gradients.Stamps:
    trainer.check_losses, kept = True, trainer.check_losses
    try:
        return _reduce_once(trainer, reduced)
    finally:
        trainer.check_losses = kept


def _not_compared(gradients: Sequence[Tensor | None], watched: Watch) -> None:
    del gradients, watched


def _compared_anyway(output: ForwardOutput, **options: Any) -> ForwardOutput:
    return _watch(output, **{**options, "compare": True})


def _presence_left_out(seen: Tensor) -> bool:
    del seen
    return True


def _sizes_alone(seen: Tensor, tolerance: float) -> list[int]:
    return _differences(seen[:, :3], tolerance)


def _nan_is_anything(seen: Tensor, tolerance: float) -> list[int]:
    known = seen.where(~seen.isnan().any(dim=0), 1.0)
    return _differences(known, tolerance)


def _tolerant(gradient: Tensor | None) -> float:
    del gradient
    return 1e-3


def _nothing_checked(ctx: Any) -> None:
    del ctx


def _once_for_all(ctx: Any) -> None:
    if getattr(ctx, "ran", False):
        raise RuntimeError("backward ran a second time through the outputs of one forward")
    ctx.ran = True


class _ZerosForNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return gradients


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return gradients


def _through(function: type[torch.autograd.Function]) -> Callable[..., ForwardOutput]:
    def watch(output: ForwardOutput, **options: Any) -> ForwardOutput:
        del options
        tensors = losses.differentiable(output)
        if not tensors:
            return output
        passed = function.apply(*tensors.values())
        return losses.put_back(output, dict(zip(tensors, passed, strict=True)))

    return watch


FAULTS: dict[str, Fault] = {
    "losses of replicas are not compared": Fault(
        module=losses,
        name="compare",
        function=_not_compared,
        axis="cp",
        case=_LOSSES,
        shows="raised: DID NOT RAISE",
    ),
    "losses compared although left out": Fault(
        module=losses,
        name="watch",
        function=_compared_anyway,
        axis="cp",
        case=_LOSSES,
        shows="raised: the losses differ",
    ),
    "gradients of a caller's parameter are not compared": Fault(
        module=losses,
        name="compare_own",
        function=_own_left_out,
        axis="cp",
        case=_LOSSES,
        shows="raised: DID NOT RAISE",
    ),
    "gradients of a caller's parameter compared although left out": Fault(
        module=gradients,
        name="reduce_once",
        function=_own_compared_anyway,
        axis="cp",
        case=_LOSSES,
        shows="raised: the gradients of the caller's own parameters differ",
    ),
    "a missing gradient counts as one of zeros": Fault(
        module=losses,
        name="same_presence",
        function=_presence_left_out,
        axis="cp",
        case=_LOSSES,
        shows="raised: DID NOT RAISE",
    ),
    "gradients compared by sum and norm alone": Fault(
        module=losses,
        name="differences",
        function=_sizes_alone,
        axis="cp",
        case=_LOSSES,
        shows="raised: DID NOT RAISE",
    ),
    "NaN counts as equal to anything": Fault(
        module=losses,
        name="differences",
        function=_nan_is_anything,
        axis="cp",
        case=_LOSSES,
        shows="raised: DID NOT RAISE",
    ),
    "losses may differ by a thousandth": Fault(
        module=losses,
        name="tolerance",
        function=_tolerant,
        axis="cp",
        case=_LOSSES,
        shows="raised: DID NOT RAISE",
    ),
    "an output that is left out sends zeros": Fault(
        module=losses,
        name="watch",
        function=_through(_ZerosForNone),
        axis="any",
        case=_LEFT_OUT,
        shows="of states alone.lm_head.weight",
    ),
    "a freed graph is not refused": Fault(
        module=losses,
        name="check_graph",
        function=_nothing_checked,
        axis="any",
        case=_KEPT,
        shows="raised: assert",
    ),
    "a kept graph is refused too": Fault(
        module=losses,
        name="check_graph",
        function=_once_for_all,
        axis="any",
        case=_KEPT,
        shows="raised: backward ran a second time",
    ),
    "a forward after the reduction is let through": Fault(
        module=forward,
        name="check",
        function=_reduced_or_not,
        axis="any",
        case=_KEPT,
        shows="raised: DID NOT RAISE",
    ),
    "a backward after the reduction goes unseen": Fault(
        module=gradients,
        name="stamps",
        function=_no_stamps,
        axis="any",
        case=_KEPT,
        shows="raised: DID NOT RAISE",
    ),
    "outputs are views": Fault(
        module=losses,
        name="watch",
        function=_through(_Views),
        axis="any",
        case=_CALLERS,
        shows="raised: is a view and is being modified inplace",
    ),
}
"""By what is wrong."""
