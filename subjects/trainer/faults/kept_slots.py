"""LoRA slots that are made, read, saved, restored or replaced: what is lost, or not a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import (
    adapters,
    agreement,
    collectives,
    lora,
    slot_state,
    slot_values,
    slots,
    weights,
)
from subjects.trainer.adapters import AdapterConfig, AdapterFile
from subjects.trainer.agreement import Fact
from subjects.trainer.faults.fault import Fault
from subjects.trainer.faults.slots import of_slots
from subjects.trainer.lora import Factor
from subjects.trainer.slot_state import Slot, SlotSnapshot
from subjects.trainer.slot_values import Initial
from subjects.trainer.slots import Slots

Part = tuple[int, int]
_read_slice = slot_values.read_slice
_put = Slots._put
_slice_of = lora.slice_of
_write = adapters.write
_restore = Slots.restore
_check_snapshot = slot_state.check_snapshot


def _first_slice_read(file: AdapterFile, factor: Factor, part: Part) -> Tensor:
    return _read_slice(file, factor, (0, part[1]))


def _floor_slices(file: AdapterFile, factor: Factor, part: Part) -> Tensor:
    """Slices begin where those of a vocabulary that divides would."""
    start, stop = weights.bounds(factor.shape[0], part)
    if not factor.name.startswith("lm_head") or factor.dim is None:
        return _read_slice(file, factor, part)
    first = part[0] * (factor.shape[0] // part[1])
    return file.read(factor.name)[first : first + stop - start]


def _first_slice_made(value: Tensor, factor: Factor, part: Part) -> Tensor:
    return _slice_of(value, factor, (0, part[1]))


def _own_slice_saved(value: Tensor, factor: Factor, group: ProcessGroup) -> Tensor:
    if factor.dim is None:
        return value
    whole = value.new_zeros(factor.shape)
    start, stop = weights.bounds(factor.shape[factor.dim], (group.rank(), group.size()))
    whole.narrow(factor.dim, start, stop - start).copy_(value)
    return whole


def _own_values(value: Tensor, group: ProcessGroup) -> Tensor:
    """What a rank has that was sent nothing."""
    return value if group.rank() == 0 else value.fill_(1)


def _same_memory(value: Tensor) -> Tensor:
    return value.detach()


def _kept(
    self: Slots,
    name: str,
    config: AdapterConfig,
    factors: Mapping[str, Factor],
    values: Mapping[str, Tensor],
) -> None:
    if name not in self.names:
        _put(self, name, config, factors, values)


def _kept_in_place(
    self: Slots,
    name: str,
    config: AdapterConfig,
    factors: Mapping[str, Factor],
    values: Mapping[str, Tensor],
) -> None:
    """A slot of the same configuration has its new values in the parameters that it had."""
    there = self._slots.get(name)
    _put(self, name, config, factors, values)
    if there is not None and there.config == config:
        with torch.no_grad():
            for factor, value in there.values.items():
                value.copy_(values[factor])
        self._slots[name] = replace(self._slots[name], values=there.values)


def _gradients_dropped(self: Slots, name: str, snapshot: SlotSnapshot) -> None:
    _restore(self, name, snapshot)
    for value in self._slots[name].values.values():
        value.grad = None


def _in_new_parameters(self: Slots, name: str, snapshot: SlotSnapshot) -> None:
    _restore(self, name, snapshot)
    there = self._slots[name]
    values = {factor: self._owned(value) for factor, value in there.values.items()}
    for factor, value in values.items():
        value.grad = there.values[factor].grad
    self._slots[name] = replace(there, values=values)


def _shapes_alone(snapshot: SlotSnapshot, name: str, slot: Slot) -> None:
    _check_snapshot(replace(snapshot, config=slot.config), name, slot)


def _gone_alone(slot: Slot) -> Callable[[], str]:
    return lambda: slot.owner.gone


def _all_zero(self: Initial, name: str, shape: tuple[int, ...]) -> Tensor:
    del self, name
    return torch.zeros(shape)


def _no_contents(self: AdapterFile) -> str:
    del self
    return ""


def _retires_nothing(self: Slots, name: str, what: str) -> None:
    del self, name, what


def _no_values(value: Tensor) -> Fact:
    del value
    return Fact(b"", "")


def _whole_alpha(directory: Path, config: AdapterConfig, *rest: Any, **options: Any) -> None:
    _write(directory, replace(config, alpha=float(int(config.alpha))), *rest, **options)


FAULTS: dict[str, Fault] = {
    "every rank reads the first slice of a slot": of_slots(
        slot_values,
        "read_slice",
        _first_slice_read,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(89,),
    ),
    "slices of an odd head begin too early": of_slots(
        slot_values,
        "read_slice",
        _floor_slices,
        "test_head_of_tied_embeddings",
        "*.logits",
        axis="tp",
    ),
    "every rank makes the first slice of a slot": of_slots(
        lora,
        "slice_of",
        _first_slice_made,
        "test_added_slot",
        "new/*.down_proj.lora_B",
        axis="tp",
        catalogue=(89,),
    ),
    "the first rank's values of a new slot are not sent": of_slots(
        collectives, "broadcast_first", _own_values, "test_added_slot", "*.new_changed", axis="cp"
    ),
    "one rank's slices are saved": of_slots(
        lora,
        "whole_of",
        _own_slice_saved,
        "test_saved_files",
        "*.file.*.q_proj.lora_B.weight",
        axis="tp",
        catalogue=(86,),
    ),
    "a snapshot changes with its slot": of_slots(
        slot_state, "copied", _same_memory, "test_load_change_and_restore", "restored.wide/*"
    ),
    "a restored slot keeps what it owned": of_slots(
        Slots,
        "_retire",
        _retires_nothing,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "ranks restore other values each": of_slots(
        agreement,
        "of_values",
        _no_values,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "ranks load other files each": of_slots(
        AdapterFile,
        "digest",
        _no_contents,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "a snapshot of another alpha is restored": of_slots(
        slots,
        "check_snapshot",
        _shapes_alone,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "a slot that was changed is not told": of_slots(
        slots,
        "changes_of",
        _gone_alone,
        "test_load_change_and_restore",
        "raised: was changed in place",
    ),
    "a restored slot loses its gradients": of_slots(
        Slots,
        "restore",
        _gradients_dropped,
        "test_gradients_and_moments_of_a_slot",
        "grad.wide/*",
    ),
    "a restored slot loses its moments": of_slots(
        Slots,
        "restore",
        _in_new_parameters,
        "test_gradients_and_moments_of_a_slot",
        "moment.wide/*",
    ),
    "a replaced slot keeps its gradients and moments": of_slots(
        Slots,
        "_put",
        _kept_in_place,
        "test_gradients_and_moments_of_a_slot",
        "moment.twin/*",
    ),
    "a new slot begins with zeros alone": of_slots(
        Initial, "__call__", _all_zero, "test_added_slot", "drawn/*.limits.spread"
    ),
    "alpha is saved as a whole number": of_slots(
        adapters, "write", _whole_alpha, "test_saved_files", "narrow.config*"
    ),
    "a replaced slot keeps its weights": of_slots(
        Slots, "_put", _kept, "test_load_change_and_restore", "replaced.*.narrow"
    ),
}
"""By what is wrong."""
