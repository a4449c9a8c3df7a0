"""One LoRA slot of this rank: its factors, its scale, its snapshot, and what has happened to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subjects.token_ids import shown
from subjects.trainer.adapters import AdapterConfig
from subjects.trainer.lora import Factor
from subjects.trainer.ownership import Owner


@dataclass(frozen=True)
class Slot:
    """One adapter on this rank: its factors, and this rank's part of each, by name.

    ``owner`` knows whether the slot is still there.
    """

    config: AdapterConfig
    factors: Mapping[str, Factor]
    values: Mapping[str, torch.nn.Parameter]
    owner: Owner

    @property
    def targets(self) -> Sequence[str]:
        """The projections that it changes."""
        return self.config.targets

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """A and B of a module that the slot targets."""
        return self.values[f"{module}.lora_A"], self.values[f"{module}.lora_B"]

    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return scale_of(self.config)


class HeadFactors(NamedTuple):
    """The lm_head of a slot: A [r, H], this rank's rows of B [v, r] without padding, the scale.

    Where the head runs on all rows of the sequence, A's gradient is a partial sum over TP, as that
    of any A that every rank holds.
    """

    A: Tensor
    B: Tensor
    scale: float


@dataclass(frozen=True)
class SlotSnapshot:
    """The values of a slot on this rank at one time; for ``restore`` on the same topology."""

    config: AdapterConfig
    values: Mapping[str, Tensor]


def check_snapshot(snapshot: object, name: str, slot: Slot) -> None:
    """Refuse what is no snapshot, or one of another slot than ``slot``, called ``name``.

    Raises:
        TypeError: it is, or holds, something else.
        ValueError: it is of another configuration, another dtype, or from another topology.
    """
    if not isinstance(snapshot, SlotSnapshot):
        raise TypeError(
            f"snapshot is {shown(snapshot)}; expected what snapshot_slot returned (load_slot reads "
            "files)"
        )
    for factor, value in snapshot.values.items():
        kept = slot.values.get(factor)
        if not isinstance(value, Tensor):
            raise TypeError(f"snapshot: {factor} is {shown(value)}; expected a tensor")
        form = value.layout == torch.strided and not value.is_meta and not value.is_quantized
        if not form or (kept is not None and value.dtype != kept.dtype):
            raise ValueError(
                f"snapshot: {factor} is a tensor of {value.dtype}, {value.layout}, on "
                f"{value.device.type}; expected a dense one with values, of the dtype of the run, "
                "as snapshot_slot returned it"
            )
    shapes = {factor: value.shape for factor, value in slot.values.items()}
    found = {factor: value.shape for factor, value in snapshot.values.items()}
    if (slot.config, shapes) != (snapshot.config, found):
        raise ValueError(
            f"the snapshot is of {snapshot.config}, slot {name!r} is {slot.config}; restore "
            "it into a slot of the same configuration, on the topology that it was taken on"
        )


def with_cuts(snapshot: SlotSnapshot, slot: Slot) -> dict[str, tuple[Tensor, bool]]:
    """Values of a snapshot, and whether tensor parallelism cuts each."""
    return {
        name: (snapshot.values[name], factor.dim is not None)
        for name, factor in slot.factors.items()
    }


def changes_of(slot: Slot) -> Callable[[], str]:
    """A function that says whether the slot is gone or its values were changed since this call."""
    versions = {name: value._version for name, value in slot.values.items()}

    def changed() -> str:
        found = [name for name, value in slot.values.items() if value._version != versions[name]]
        if slot.owner.gone or not found:
            return slot.owner.gone
        return f"{found[0]} of {slot.owner.what} was changed in place"

    return changed


def scale_of(config: AdapterConfig) -> float:
    """What the product of a slot's factors is multiplied by: its own alpha over its own rank."""
    return config.scale


def snapshot_of(slot: Slot) -> SlotSnapshot:
    """Copies of a slot's values, with its configuration."""
    return SlotSnapshot(slot.config, {name: copied(value) for name, value in slot.values.items()})


def copied(value: Tensor) -> Tensor:
    """The values, in memory of their own."""
    return value.detach().clone()
