"""Where a system under test, an oracle and a case meet.

A case drives a ``Trainer`` and observes what comes back. A trainer sees of the run only what
``RankContext`` offers, so that any harness can supply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Required, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.types import ForwardInput, ForwardOutput, MicroBatch, Nested, StepResult

Placement = Mapping[str, object]
"""How this rank's part lies in the whole value, in the words of an observation.

``{}``: the whole value. ``{"shard": {"tp": 0}}``: a slice along dimension 0, the slices in the
order of the tp coordinate, ceil(size / tp) rows each and the last ones what is left.
"""

ReduceOp = Literal["sum", "max", "min"]
OwnModule = TypeVar("OwnModule", bound=torch.nn.Module)
Value = TypeVar("Value", int, float, Tensor)


class RankContext(Protocol):
    """What a trainer needs to know of the process that it runs in."""

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Where this rank stands on each axis."""

    @property
    def device(self) -> torch.device:
        """Where parameters and activations live."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""

    def group(self, axis: str) -> ProcessGroup:
        """The ranks that differ from this one along ``axis`` only, in order of their coordinate."""


class OptimizerOptions(TypedDict, total=False):
    """``betas`` and ``eps`` are AdamW's, ``momentum`` is SGD's; what is left out is as in torch.

    ``max_norm`` is what the gradients of each slot are clipped to; without it nothing is.
    """

    lr: Required[float]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float
    max_norm: float


class Optimizer(Protocol):
    """Steps the parameters of slots and of the caller's own."""

    def step(self) -> StepResult:
        """Reduce and clip gradients, and update; a norm that is not finite blocks all of it."""

    def moments(self) -> Iterator[tuple[str, Tensor, Placement]]:
        """What it remembers of each parameter that was stepped, as ``parameter.moment``."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of this rank's part of what it remembers, by parameter."""

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what ``state_dict`` gave on the same topology."""


class Trainer(Protocol):
    """A language model that is trained, as a case sees it.

    Losses must be identical on all TP and CP replicas of a batch: compute them from the outputs
    alone, in the same way on every rank. Each rank of a batch then runs the same backward from the
    same full-length outputs, and the trainer takes from it what is this rank's.
    """

    def forward(self, request: ForwardInput) -> ForwardOutput:
        """Run the model; a collective of the TP and CP ranks of a batch."""

    def forward_micro_batches(
        self, inputs: Sequence[Nested], *, yield_empty: bool = False
    ) -> Iterator[MicroBatch]:
        """Deal the elements of ``inputs``, which every rank passes, over DP and run them lazily.

        ``yield_empty``: a rank without an element in the last wave gets ``MicroBatch(None, None)``,
        so that all ranks loop equally often.
        """

    def dp_rank_forward(self, inputs: Nested) -> Any:
        """Run inputs that are this DP rank's own; answers nested as the inputs were."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the LoRA slots that there are."""

    def add_slot(
        self,
        name: str,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = ...,
        factory: Callable[[str, tuple[int, ...]], Tensor] | None = None,
    ) -> None:
        """Make a LoRA slot, with B zero or with the factory's values; a collective of all ranks."""

    def load_slot(self, name: str, directory: str | Path) -> None:
        """Read a slot from PEFT's files, in place of any of this name; a collective of all."""

    def save_slot(self, name: str, directory: str | Path) -> None:
        """Write a slot as PEFT's files; a collective of all ranks."""

    def snapshot_slot(self, name: str) -> Any:
        """Copy a slot's values on this rank."""

    def restore_slot(self, name: str, snapshot: Any) -> None:
        """Set a slot's values to those of a snapshot, bit for bit; a collective of all ranks."""

    def remove_slot(self, name: str) -> None:
        """Forget a slot and what it owns; a collective of all ranks."""

    def module(
        self, name: str, factory: Callable[[], OwnModule], *, slot: str | None = None
    ) -> OwnModule:
        """Register a module of the caller's own (a head), equal on all ranks."""

    def parameter(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> torch.nn.Parameter:
        """Register a parameter of the caller's own (a probe), equal on all ranks."""

    def buffer(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> Tensor:
        """Register a tensor of the caller's own that is not trained, equal on all ranks."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        """Parameters of slots and of the caller's own, by the names of their gradients."""

    def optimizer(
        self, kind: Literal["adamw", "sgd"], **options: Unpack[OptimizerOptions]
    ) -> Optimizer:
        """An optimizer of ``named_parameters``, clipped slot by slot."""

    def freeze(self, part: Literal["decoder", "head", "base"]) -> None:
        """Take no gradients of ``part`` of the model from here on; ``"base"`` is all of it."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None, Placement]]:
        """Reduced gradients by the names of the checkpoint; a collective of all ranks.

        None where nothing that was run depends on the parameter, or where it is frozen.
        """

    def zero_gradients(self) -> None:
        """Forget all gradients."""

    def dp_reduce(self, value: Value, op: ReduceOp = "sum") -> Value:
        """Reduce a metric over the data-parallel ranks alone; divides by nothing."""
