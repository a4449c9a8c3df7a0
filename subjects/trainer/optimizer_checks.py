"""What an optimizer may be given: options, and a state to go on from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subjects.token_ids import shown
from subjects.trainer import checks
from subjects.trainer.agreement import Fact

LARGEST = 1e18
"""Most that an option may be: with it, and betas near 1, every product is a finite float32."""

LEAST_EPS = 1e-37
"""Least of ``eps``: a normal float32."""


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


def check_epsilon(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an ``eps`` that vanishes beside the parameters, whose dtype torch adds it in.

    Raises:
        ValueError: with the least that does not.
    """
    for group in optimizer.param_groups:
        for dtype in {parameter.dtype for parameter in group["params"]}:
            form = torch.finfo(dtype)
            if "eps" in group and torch.tensor(group["eps"], dtype=dtype) == 0:
                raise ValueError(
                    f"optimizer: eps is {group['eps']:g}, which is 0 in {dtype}, the dtype of the "
                    f"run, so that a gradient of 0 gives NaN; expected at least "
                    f"{form.smallest_normal * form.eps:.1e}"
                )


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


def wanted_by(kind: str, options: Mapping[str, Any]) -> Wanted:
    """What an optimizer remembers of each parameter; SGD without momentum nothing."""
    if kind == "adamw":
        return Wanted(kind, frozenset({"exp_avg", "exp_avg_sq", "step"}))
    return Wanted(kind, frozenset({"momentum_buffer"} if options.get("momentum") else ()))


def check_state(state: object, named: Mapping[str, Tensor], wanted: Wanted) -> dict[str, Fact]:
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
            check_moment(f"{name}.{key}", value, named[name])
        if wanted.moments - moments.keys():
            raise ValueError(
                f"load_state_dict: {name} lacks {_listed(wanted.moments - moments.keys())}; load "
                "all that state_dict gave for it, or leave the parameter out to begin anew"
            )
    return {name: fact(sorted(moments)) for name, moments in state.items()}


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


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


def fact(value: object) -> Fact:
    """An option, or what stands for some, as ranks compare it."""
    return Fact(repr(value).encode(), repr(value))
