"""Gradients and metrics that are summed, averaged or left alone over the wrong axis."""

from __future__ import annotations

import torch
from torch import Tensor

from subjects.protocol import ReduceOp, Value
from subjects.trainer import reductions
from subjects.trainer.faults.fault import Fault
from subjects.trainer.faults.rows import EVERYWHERE
from subjects.trainer.reductions import Groups

_sum_over_tp = reductions.sum_over_tp
_reduce_probe = reductions.reduce_probe
_dp_reduce = reductions.dp_reduce


def _probe_summed(gradient: Tensor, groups: Groups) -> Tensor:
    return _reduce_probe(gradient, groups) * groups.cp.size()


def _reduced_over_cp(value: Value, op: ReduceOp, groups: Groups, *, device: torch.device) -> Value:
    over_dp = _dp_reduce(value, op, groups, device=device)
    return _dp_reduce(over_dp, op, Groups(groups.tp, groups.cp, groups.cp), device=device)


def _qk_norm_left(name: str, parameter: Tensor) -> bool:
    return _sum_over_tp(name, parameter) and "q_layernorm" not in name and "k_layernorm" not in name


FAULTS: dict[str, Fault] = {
    "probe gradient summed over cp": Fault(
        module=reductions,
        name="reduce_probe",
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
}
