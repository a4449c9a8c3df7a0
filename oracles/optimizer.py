"""torch.optim and torch.nn.utils.clip_grad_norm_ on one device, for each slot by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from subjects.protocol import Placement
from subjects.types import StepResult

Named = tuple[str, torch.nn.Parameter]


class TorchOptimizer:
    """One optimizer of torch for each parameter, which it treats as one for all would.

    ``named`` gives the parameters that there are now. A name begins with its slot and a slash.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[Named]],
        kind: str,
        *,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
        self._make: Callable[[torch.nn.Parameter], torch.optim.Optimizer] = lambda parameter: make(
            [parameter], **options
        )
        self._named, self._max_norm = named, max_norm
        self._own: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def step(self) -> StepResult:
        """Clip each slot's gradients and step, unless one slot's norm is not finite."""
        slots: dict[str, list[torch.nn.Parameter]] = {}
        for name, parameter in self._named():
            slots.setdefault(name.rpartition("/")[0], []).append(parameter)
        norms = {
            slot: float(get_total_norm([p.grad for p in parameters if p.grad is not None]))
            for slot, parameters in slots.items()
        }
        if not all(math.isfinite(norm) for norm in norms.values()):
            return StepResult(stepped=False, norms=norms)
        every = [parameter for parameters in slots.values() for parameter in parameters]
        unclipped = [None if p.grad is None else p.grad.clone() for p in every]
        for parameters in slots.values():
            if self._max_norm is not None:
                clip_grad_norm_(parameters, self._max_norm)
        self._own = {p: self._own[p] if p in self._own else self._make(p) for p in every}
        for optimizer in self._own.values():
            optimizer.step()
        for parameter, gradient in zip(every, unclipped, strict=True):
            parameter.grad = gradient
        return StepResult(stepped=True, norms=norms)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the state, by parameter."""
        return {
            name: {
                key: value.clone()
                for key, value in self._own[parameter].state[parameter].items()
                if isinstance(value, Tensor)
            }
            for name, parameter in self._named()
            if parameter in self._own
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what ``state_dict`` gave, and from nothing else."""
        named = dict(self._named())
        self._own.clear()
        for name, moments in state.items():
            own = self._own[named[name]] = self._make(named[name])
            own.state[named[name]] = {key: value.clone() for key, value in moments.items()}

    def moments(self) -> Iterator[tuple[str, Tensor, Placement]]:
        """The state of each parameter's optimizer."""
        for name, parameter in self._named():
            if parameter in self._own:
                for key, value in self._own[parameter].state[parameter].items():
                    if isinstance(value, Tensor):
                        yield f"{name}.{key}", value, {}
