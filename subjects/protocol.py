"""Where a system under test, an oracle and a case meet.

A case drives a ``Trainer`` and observes what comes back. A trainer sees of the run only what
``RankContext`` offers, so that any harness can supply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.types import ForwardInput, ForwardOutput, MicroBatch, Nested

Placement = Mapping[str, object]
"""How this rank's part lies in the whole value, in the words of an observation.

``{}``: the whole value. ``{"shard": {"tp": 0}}``: a slice along dimension 0, the slices in the
order of the tp coordinate, ceil(size / tp) rows each and the last ones what is left.
"""

ReduceOp = Literal["sum", "max", "min"]
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

    def parameter(self, name: str, factory: Callable[[], Tensor]) -> torch.nn.Parameter:
        """Register a parameter of the caller's own (a probe, a head), equal on all ranks."""

    def freeze(self, part: Literal["decoder", "head"]) -> None:
        """Take no gradients of ``part`` from here on."""

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None, Placement]]:
        """Reduced gradients by the names of the checkpoint; a collective of all ranks.

        None where nothing that was run depends on the parameter, or where it is frozen.
        """

    def zero_gradients(self) -> None:
        """Forget all gradients."""

    def dp_reduce(self, value: Value, op: ReduceOp = "sum") -> Value:
        """Reduce a metric over the data-parallel ranks alone; divides by nothing."""
