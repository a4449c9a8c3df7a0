"""Gradients and metrics that are summed, averaged or left alone over the wrong axis."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import ReduceOp, Value
from subjects.trainer import collectives, reductions
from subjects.trainer.faults.fault import Fault
from subjects.trainer.faults.rows import EVERYWHERE
from subjects.trainer.reductions import Groups

_reduce_weight = reductions.reduce_weight
_sum_over_tp = reductions.sum_over_tp
_reduce_custom = reductions.reduce_custom
_dp_reduce = reductions.dp_reduce
_reduced_floats = reductions.reduced_floats
_reduced_integers = reductions.reduced_integers
_carried = reductions.carried
_RULES = "test_rules.test_rule_table"


def _probe_summed(gradient: Tensor, groups: Groups) -> Tensor:
    return _reduce_custom(gradient, groups) * groups.cp.size()


def _reduced_over_cp(value: Value, op: ReduceOp, groups: Groups, *, device: torch.device) -> Value:
    over_dp = _dp_reduce(value, op, groups, device=device)
    return _dp_reduce(over_dp, op, Groups(groups.tp, groups.cp, groups.cp), device=device)


def _qk_norm_left(name: str, parameter: Tensor) -> bool:
    return _sum_over_tp(name, parameter) and "q_layernorm" not in name and "k_layernorm" not in name


def _last_norm_left(name: str, parameter: Tensor) -> bool:
    return _sum_over_tp(name, parameter) and "final_layernorm" not in name


def _averaged_over_tp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    total = _reduce_weight(gradient, groups, over_tp=over_tp)
    return total / groups.tp.size() if over_tp else total


def _summed_over_world(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    if over_tp and dist.group.WORLD is not None:
        collectives.all_reduce(gradient, dist.group.WORLD)
        over_tp = False
    return _reduce_weight(gradient, groups, over_tp=over_tp)


def _over_dp_alone(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    if over_tp:
        collectives.all_reduce(gradient, groups.tp)
    return collectives.all_reduce(gradient, groups.dp)


def _not_over_dp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    if over_tp:
        collectives.all_reduce(gradient, groups.tp)
    return collectives.all_reduce(gradient, groups.cp)


def _averaged_over_dp_cp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    total = _reduce_weight(gradient, groups, over_tp=over_tp)
    return total / (groups.dp.size() * groups.cp.size())


def _rounded_over_tp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    if over_tp:
        total = collectives.all_reduce(gradient, groups.tp)
        gradient = total.to(torch.bfloat16).to(gradient.dtype)
    return _reduce_weight(gradient, groups, over_tp=False)


def _rounded_before_dp(gradient: Tensor, groups: Groups, *, over_tp: bool) -> Tensor:
    rounded = gradient.to(torch.bfloat16).to(gradient.dtype)
    return _reduce_weight(rounded, groups, over_tp=over_tp)


def _mean_over_dp(value: Value, op: ReduceOp, groups: Groups, *, device: torch.device) -> Value:
    total = _dp_reduce(value, op, groups, device=device)
    return (
        type(value)(total / groups.dp.size())
        if not isinstance(total, Tensor)
        else total / groups.dp.size()
    )


def _always_sum(value: Value, op: ReduceOp, groups: Groups, *, device: torch.device) -> Value:
    del op
    return _dp_reduce(value, "sum", groups, device=device)


def _carry_lost(value: Tensor, op: ReduceOp, group: ProcessGroup, kind: torch.dtype) -> Tensor:
    if op != "sum":
        return _reduced_integers(value, op, group, kind)
    halves = torch.stack((value >> 32, value & reductions.LOW))
    high, low = collectives.all_reduce(halves, group)
    total: Tensor = (high << 32) + (low & reductions.LOW)
    return total.to(kind)


def _nan_lost(value: Tensor, op: ReduceOp, group: ProcessGroup) -> Tensor:
    if op == "sum":
        return _reduced_floats(value, op, group)
    least = -math.inf if op == "max" else math.inf
    found: Tensor = collectives.all_reduce(value.masked_fill(value.isnan(), least), group, op=op)
    return found


def _uncopied(value: Value, device: torch.device) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else _carried(value, device)


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
    "counts are summed without their carry": Fault(
        module=reductions,
        name="reduced_integers",
        function=_carry_lost,
        axis="dp",
        case="test_rules.test_rule_table",
        shows="a count that carries",
    ),
    "a maximum leaves out what is no number": Fault(
        module=reductions,
        name="reduced_floats",
        function=_nan_lost,
        axis="dp",
        case="test_rules.test_rule_table",
        shows="operations that pass on the NaN of the *",
    ),
    "dp_reduce in the caller's tensor": Fault(
        module=reductions,
        name="carried",
        function=_uncopied,
        axis="dp",
        case="test_metrics.test_metrics_over_data_parallel_ranks",
        shows="own states are left alone",
    ),
    "probe gradient summed over cp": Fault(
        module=reductions,
        name="reduce_custom",
        function=_probe_summed,
        axis="cp",
        case="test_gradients.test_probe_gradient",
        shows="grad/probe",
        catalogue=(106,),
        topology=EVERYWHERE,
    ),
    "dp_reduce including cp": Fault(
        module=reductions,
        name="dp_reduce",
        function=_reduced_over_cp,
        axis="cp",
        case="test_metrics.test_metrics_over_data_parallel_ranks",
        shows="tokens",
        topology=EVERYWHERE,
    ),
    "q/k-norm gradient not summed over tp": Fault(
        module=reductions,
        name="sum_over_tp",
        function=_qk_norm_left,
        axis="tp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*.self_attn.[qk]_norm.weight",
        catalogue=(2,),
        topology=("tp2", "tp2xcp2"),
    ),
    "last norm's gradient not summed over tp": Fault(
        module=reductions,
        name="sum_over_tp",
        function=_last_norm_left,
        axis="tp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.norm.weight",
        catalogue=(1,),
    ),
    "norm gradients averaged over tp": Fault(
        module=reductions,
        name="reduce_weight",
        function=_averaged_over_tp,
        axis="tp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*norm.weight",
        catalogue=(11,),
    ),
    "norm gradients summed over the world": Fault(
        module=reductions,
        name="reduce_weight",
        function=_summed_over_world,
        axis="tp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*norm.weight",
        catalogue=(12,),
        topology="dp2xtp2",
    ),
    "gradients reduced over dp without cp": Fault(
        module=reductions,
        name="reduce_weight",
        function=_over_dp_alone,
        axis="cp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.*",
        catalogue=(9,),
    ),
    "gradients not reduced over dp": Fault(
        module=reductions,
        name="reduce_weight",
        function=_not_over_dp,
        axis="dp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.*",
        catalogue=(10, 104),
    ),
    "gradients divided by the ranks of dp and cp": Fault(
        module=reductions,
        name="reduce_weight",
        function=_averaged_over_dp_cp,
        axis="dp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.*",
        catalogue=(14,),
    ),
    "norm gradients rounded to bfloat16 between two reductions": Fault(
        module=reductions,
        name="reduce_weight",
        function=_rounded_over_tp,
        axis="tp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*norm.weight",
        catalogue=(107,),
    ),
    "gradients rounded to bfloat16 before they are summed": Fault(
        module=reductions,
        name="reduce_weight",
        function=_rounded_before_dp,
        axis="dp",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.*",
        catalogue=(108,),
    ),
    "dp_reduce averages": Fault(
        module=reductions,
        name="dp_reduce",
        function=_mean_over_dp,
        axis="dp",
        case="test_metrics.test_metrics_over_data_parallel_ranks",
        shows="states",
    ),
    "dp_reduce sums whatever is asked": Fault(
        module=reductions,
        name="dp_reduce",
        function=_always_sum,
        axis="dp",
        case="test_metrics.test_metrics_over_data_parallel_ranks",
        shows="longest",
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
