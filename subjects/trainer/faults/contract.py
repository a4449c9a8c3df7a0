"""A contract that is not kept: errors of one rank alone, and losses that nobody compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subjects.protocol import ReduceOp, Value
from subjects.trainer import (
    agreement,
    batches,
    collectives,
    facts,
    forward,
    gradients,
    losses,
    reductions,
)
from subjects.trainer.agreement import Circle, DisagreementError, Fact
from subjects.trainer.faults.fault import Fault
from subjects.trainer.losses import Watch
from subjects.trainer.rank import TrainerRank
from subjects.trainer.reductions import Groups
from subjects.types import ForwardInput, ForwardOutput

_MEANING = "test_contract.test_requests_without_meaning_are_refused"
_ONE_RANK = "test_contract.test_what_one_rank_alone_is_told_is_refused_by_all"
_LOSSES = "test_contract.test_losses_that_differ_are_refused"
_LEFT_OUT = "test_contract.test_a_loss_may_leave_outputs_out"
_KEPT = "test_contract.test_a_kept_graph_is_run_twice"
_CALLERS = "test_contract.test_outputs_belong_to_the_caller"
_RULES = "test_rules.test_rule_table"

_agree = agreement.agree
_refused_text = agreement.refused_text
_nested_facts = batches.nested_facts
_request_facts = facts.request_facts
_watch = losses.watch
_reduce_once = gradients.reduce_once
_check = forward.check
_differences = losses.differences
_dp_reduce = reductions.dp_reduce
_carried = reductions.carried
_reduce_weight = reductions.reduce_weight
_reduce_custom = reductions.reduce_custom


def _own_words(call: str, facts: Callable[[], Mapping[str, Fact]], circle: Circle) -> None:
    try:
        _agree(call, facts, circle)
    except DisagreementError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def _unnamed(call: str, texts: Sequence[str | None], circle: Circle) -> str:
    del texts, circle
    return f"{call} was refused by some ranks"


def _values_left_out(call: str, facts: Sequence[Mapping[str, Any]], circle: Circle) -> str:
    del facts
    return f"{call} was given different things on the ranks of {circle.name}"


def _always_same(rows: Tensor) -> bool:
    del rows
    return True


def _in_step(call: str, rows: Tensor, circle: Circle) -> None:
    del call, rows, circle


def _no_autocast() -> str:
    return "off"


def _reduced_or_not(trainer: TrainerRank, request: ForwardInput) -> None:
    trainer.reduced, kept = None, trainer.reduced
    try:
        _check(trainer, request)
    finally:
        trainer.reduced = kept


def _no_stamps(parameters: Mapping[str, torch.nn.Parameter]) -> gradients.Stamps:
    del parameters
    return {}


def _no_facts(value: object, op: object) -> dict[str, Fact]:
    del value, op
    return {}


def _nothing_told(told: object) -> dict[str, Fact]:
    del told
    return {}


def _slots_left_out(request: ForwardInput, *, prefix: str = "") -> dict[str, Fact]:
    found = _request_facts(request, prefix=prefix)
    del found[f"{prefix}slot"]
    return found


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


def _without_path(inputs: object, check_one: Callable[[ForwardInput], None]) -> dict[str, Fact]:
    try:
        return _nested_facts(inputs, check_one)
    except ValueError as error:
        raise error.__cause__ or error from None


def _unchecked(trainer: TrainerRank, request: ForwardInput) -> None:
    del trainer, request


def _probe_averaged_over_dp(gradient: Tensor, groups: Groups) -> Tensor:
    return _reduce_custom(gradient, groups) / groups.dp.size()


def _probe_of_this_rank(gradient: Tensor, groups: Groups) -> Tensor:
    return collectives.all_reduce(gradient, groups.dp)


def _never_over_tp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    del over_tp
    return _reduce_weight(gradient, groups, over_tp=False)


def _always_over_tp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    # Not the slices of the odd vocabulary: they differ in size, and no rank could sum them.
    return _reduce_weight(gradient, groups, over_tp=over_tp or len(gradient) < 60)


def _summed_as_float(value: Value, device: torch.device) -> Tensor:
    return _carried(float(value) if isinstance(value, int) else value, device)


def _counts_as_floats(value: Value, op: ReduceOp, groups: Groups, *, device: Any) -> Any:
    return _dp_reduce(float(value) if isinstance(value, int) else value, op, groups, device=device)


FAULTS: dict[str, Fault] = {
    "requests are not checked before the collectives": Fault(
        module=forward,
        name="check",
        function=_unchecked,
        axis="any",
        case=_MEANING,
        shows="raised: ",
    ),
    "a bad request in a nesting is not told by its path": Fault(
        module=batches,
        name="nested_facts",
        function=_without_path,
        axis="any",
        case=_MEANING,
        shows="raised: inputs['a'][1]: ",
    ),
    "each rank raises its own error": Fault(
        module=agreement,
        name="agree",
        function=_own_words,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: not all ranks raise",
    ),
    "the rank that refuses is not named": Fault(
        module=agreement,
        name="refused_text",
        function=_unnamed,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: was refused by some ranks",
    ),
    "what differs between requests is not told": Fault(
        module=agreement,
        name="differing_text",
        function=_values_left_out,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: was given different things",
    ),
    "requests of the ranks of a batch are not compared": Fault(
        module=agreement,
        name="same_rows",
        function=_always_same,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "slots of requests are not compared": Fault(
        module=batches,
        name="request_facts",
        function=_slots_left_out,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "options of ranks are not compared": Fault(
        module=facts,
        name="option_facts",
        function=_nothing_told,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "plans of ranks are not compared": Fault(
        module=facts,
        name="plan_facts",
        function=_nothing_told,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "what ranks train is not compared": Fault(
        module=facts,
        name="training_facts",
        function=_nothing_told,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
    "kinds of values are not compared": Fault(
        module=reductions,
        name="value_facts",
        function=_no_facts,
        axis="dp",
        case=_ONE_RANK,
        shows="raised: differ at collective",
    ),
    "ranks that make different calls are not told": Fault(
        module=agreement,
        name="check_step",
        function=_in_step,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: not all ranks raise",
    ),
    "autocast of ranks is not compared": Fault(
        module=facts,
        name="autocast",
        function=_no_autocast,
        axis="cp",
        case=_ONE_RANK,
        shows="raised: DID NOT RAISE",
    ),
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
    "custom gradients averaged over dp": Fault(
        module=reductions,
        name="reduce_custom",
        function=_probe_averaged_over_dp,
        axis="dp",
        case=_RULES,
        shows="reduced.custom",
    ),
    "custom gradients not averaged": Fault(
        module=reductions,
        name="reduce_custom",
        function=_probe_of_this_rank,
        axis="tp",
        case=_RULES,
        shows="reduced.custom",
    ),
    "replicated factors not summed over tp": Fault(
        module=reductions,
        name="reduce_weight",
        function=_never_over_tp,
        axis="tp",
        case=_RULES,
        shows="reduced.low/*",
        catalogue=(4,),
    ),
    "sharded factors summed over tp": Fault(
        module=reductions,
        name="reduce_weight",
        function=_always_over_tp,
        axis="tp",
        case=_RULES,
        shows="reduced.low/*",
    ),
    "counts summed as floats": Fault(
        module=reductions,
        name="carried",
        function=_summed_as_float,
        axis="any",
        case=_RULES,
        shows="a count that no float holds",
    ),
    "counts come back as floats": Fault(
        module=reductions,
        name="dp_reduce",
        function=_counts_as_floats,
        axis="any",
        case=_RULES,
        shows="count is an int",
    ),
}
