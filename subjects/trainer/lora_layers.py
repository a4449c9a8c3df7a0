"""Hooks on Megatron's linear layers that add the delta of the slot in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import lora
from subjects.trainer.architecture import Architecture


class InUse(Protocol):
    """What a hook needs of a slot."""

    @property
    def targets(self) -> Sequence[str]:
        """The projections that it changes."""

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """A and B of a module that it targets."""

    def scale(self) -> float:
        """What their product is multiplied by."""


def attach(
    model: Any, architecture: Architecture, group: ProcessGroup, in_use: Callable[[], InUse | None]
) -> None:
    """Let every layer of ``model`` add the delta of what ``in_use`` says when the layer runs.

    ``group`` are the tensor-parallel ranks. The head is no part of this: it runs in chunks, and
    takes the factors itself.
    """
    for index, layer in enumerate(model.decoder.layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        for linear, modules in (
            (layer.self_attention.linear_qkv, [f"{attention}.{part}_proj" for part in "qkv"]),
            (layer.self_attention.linear_proj, [f"{attention}.o_proj"]),
            (layer.mlp.linear_fc1, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            (layer.mlp.linear_fc2, [f"{mlp}.down_proj"]),
        ):
            linear.register_forward_hook(_Hook(modules, architecture, group, in_use))


class _Hook:
    """Adds to the output of one Megatron layer, which holds one or several ``modules``."""

    def __init__(
        self,
        modules: Sequence[str],
        architecture: Architecture,
        group: ProcessGroup,
        in_use: Callable[[], InUse | None],
    ) -> None:
        self.modules = {module.rpartition(".")[2]: module for module in modules}
        sizes = lora.sizes(architecture)
        self.widths = {target: sizes[target][1] // group.size() for target in self.modules}
        self.head_size = architecture.head_size
        self.group, self.in_use = group, in_use

    def __call__(
        self, layer: object, args: tuple[Tensor, ...], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        """(output, bias) with the delta added, or None: as it is."""
        del layer
        slot = self.in_use()
        if slot is None:
            return None
        pairs = {
            target: slot.pair(module)
            for target, module in self.modules.items()
            if target in slot.targets
        }
        if not pairs:
            return None
        return (output[0] + self.delta(args[0], pairs, slot.scale()), *output[1:])

    def delta(
        self, hidden: Tensor, pairs: dict[str, tuple[Tensor, Tensor]], scale: float
    ) -> Tensor:
        """What the factors of the chosen modules add to the layer's whole output."""
        first = next(iter(pairs))
        if not lora.column(first):
            return lora.row_delta(hidden, pairs[first], scale=scale, group=self.group)
        deltas = lora.column_deltas(hidden, list(pairs.values()), scale=scale, group=self.group)
        found = dict(zip(pairs, deltas, strict=True))
        rows = deltas[0].shape[:-1]
        parts = [
            found[target] if target in found else hidden.new_zeros((*rows, self.widths[target]))
            for target in self.modules
        ]
        if len(parts) == 3:
            return lora.interleave_qkv(*parts, head_size=self.head_size)
        return lora.gate_then_up(*parts)
