"""LoRA slots: the wrong slot, factor, slice, scale or sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import (
    adapters,
    agreement,
    collectives,
    gradients,
    lora,
    slot_state,
    slot_values,
    slots,
    weights,
)
from subjects.trainer.adapters import AdapterConfig, AdapterFile
from subjects.trainer.agreement import Fact
from subjects.trainer.faults.fault import Fault
from subjects.trainer.lora import Factor
from subjects.trainer.rank import TrainerRank
from subjects.trainer.reductions import Groups
from subjects.trainer.slot_state import Slot, SlotSnapshot
from subjects.trainer.slot_values import Initial
from subjects.trainer.slots import Slots

Part = tuple[int, int]

_reduce_factor = slots.reduce_factor
_choose = slots.choose
_read_slice = slot_values.read_slice
_put = Slots._put
_partial_over_tp = lora.partial_over_tp
_gather_low = lora.gather_low
_project_down = lora.project_down
_interleave_qkv = lora.interleave_qkv
_slice_of = lora.slice_of
_write = adapters.write
_restore = Slots.restore
_check_snapshot = slot_state.check_snapshot
_freeze = gradients.freeze


def _never_summed(_: Factor) -> bool:
    return False


def _slices_summed(factor: Factor) -> bool:
    # Slices of an odd vocabulary differ in length: their sum would end as an error.
    return _partial_over_tp(factor) or not factor.name.startswith("lm_head")


def _averaged_over_cp(gradient: Tensor, factor: Factor, groups: Groups) -> Tensor:
    return _reduce_factor(gradient, factor, groups) / groups.cp.size()


def _alone_in(axis: str) -> Any:
    """Reduce as if this rank were the only one along ``axis``."""

    def reduce(gradient: Tensor, factor: Factor, groups: Groups) -> Tensor:
        if lora.partial_over_tp(factor):
            collectives.all_reduce(gradient, groups.tp)
        other = groups.dp if axis == "cp" else groups.cp
        return collectives.all_reduce(gradient, other)

    return reduce


def _dp_twice(gradient: Tensor, factor: Factor, groups: Groups) -> Tensor:
    return _reduce_factor(gradient, factor, Groups(groups.tp, groups.dp, groups.dp))


def _own_rows_of_partial(low: Tensor, group: ProcessGroup) -> Tensor:
    return low.chunk(group.size())[group.rank()]


def _features_joined(low: Tensor, group: ProcessGroup) -> Tensor:
    """Each rank keeps a share of the features of its own rows, and joins those of others'."""
    share = -(-low.shape[-1] // group.size())
    rows = _gather_low(low, group).unflatten(0, (group.size(), -1))
    parts = rows.split(share, dim=-1)
    joined = torch.cat([part[at] for at, part in enumerate(parts)], dim=-1)
    return joined.repeat(group.size(), *[1] * (joined.dim() - 1))


def _gradient_of_own_rows(low: Tensor, group: ProcessGroup) -> Tensor:
    gathered: Tensor = gather_from_sequence_parallel_region(
        low, tensor_parallel_output_grad=False, group=group
    )
    return gathered


def _padded_per_shard(low: Tensor, group: ProcessGroup) -> Tensor:
    shards = _gather_low(low, group).chunk(group.size(), dim=-1)
    padded = torch.cat([torch.nn.functional.pad(shard, (0, 1)) for shard in shards], dim=-1)
    return padded[..., : low.shape[-1]]


def _cut_off(hidden: Tensor, a: Tensor) -> Tensor:
    return _project_down(hidden.detach(), a)


def _first_slot(registry: Slots, name: str | None) -> Slot | None:
    return None if name is None else _choose(registry, registry.names[0])


def _slot_for_bare(registry: Slots, name: str | None) -> Slot | None:
    return _choose(registry, registry.names[0] if name is None else name)


def _slot_stays(registry: Slots, name: str | None) -> Slot | None:
    """The bare model runs with the slot that ran last."""
    last = name or vars(registry).get("last")
    vars(registry)["last"] = last
    return _choose(registry, last)


def _gradient_to_twin(registry: Slots, name: str | None) -> Slot | None:
    """Values of the slot itself, whose gradients go to the other slot of its shape."""
    slot = _choose(registry, name)
    if slot is None:
        return None
    twin = _choose(registry, next(other for other in registry.names if other != name))
    values: dict[str, Any] = {}
    for factor, own in slot.values.items():
        other = own if twin is None else twin.values[factor]
        values[factor] = other + (own - other).detach()
    return replace(slot, values=values)


def _plain_scale(config: AdapterConfig) -> float:
    return config.alpha / config.rank


def _scale_of_rank_eight(config: AdapterConfig) -> float:
    return config.alpha / 8


def _no_head(registry: Slots, name: str | None) -> None:
    del registry, name


def _qkv_as_one_block(q: Tensor, k: Tensor, v: Tensor, *, head_size: int) -> Tensor:
    del head_size
    return torch.cat((q, k, v), dim=-1)


def _values_and_keys_swapped(q: Tensor, k: Tensor, v: Tensor, *, head_size: int) -> Tensor:
    return _interleave_qkv(q, v, k, head_size=head_size)


def _up_then_gate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((up, gate), dim=-1)


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


def _frozen_with_its_head(trainer: TrainerRank, part: str) -> None:
    _freeze(trainer, part)
    if part == "head" and trainer.architecture.tied:
        trainer.model.embedding.word_embeddings.weight.requires_grad_(False)


def _model_zeroed(self: TrainerRank) -> None:
    for parameter in self.model.parameters():
        parameter.grad = None
    self.reduced = None


def _retires_nothing(self: Slots, name: str, what: str) -> None:
    del self, name, what


def _no_values(value: Tensor) -> Fact:
    del value
    return Fact(b"", "")


def _whole_alpha(directory: Path, config: AdapterConfig, *rest: Any, **options: Any) -> None:
    _write(directory, replace(config, alpha=float(int(config.alpha))), *rest, **options)


def _fault(module: Any, name: str, function: Any, case: str, shows: str, **given: Any) -> Fault:
    options = {"axis": "any", **given}
    return Fault(
        module=module,
        name=name,
        function=function,
        case=f"test_slots.{case}",
        shows=shows,
        **options,
    )


FAULTS: dict[str, Fault] = {
    "a LoRA factor that TP replicates is not summed over tp": _fault(
        lora,
        "partial_over_tp",
        _never_summed,
        "test_gradients_of_slots",
        "grad.wide/*.q_proj.lora_A",
        axis="tp",
        catalogue=(4,),
    ),
    "slices of a LoRA factor are summed over tp": _fault(
        lora,
        "partial_over_tp",
        _slices_summed,
        "test_gradients_of_slots",
        "grad.wide/*.q_proj.lora_B",
        axis="tp",
        catalogue=(8,),
    ),
    "LoRA gradients are averaged over cp": _fault(
        slots,
        "reduce_factor",
        _averaged_over_cp,
        "test_gradients_of_slots",
        "grad.narrow/*.lora_A",
        axis="cp",
        catalogue=(14,),
    ),
    "LoRA gradients are those of one cp rank": _fault(
        slots,
        "reduce_factor",
        _alone_in("cp"),
        "test_gradients_of_slots",
        "grad.narrow/*.lora_B",
        axis="cp",
        catalogue=(9,),
    ),
    "LoRA gradients are those of one dp rank": _fault(
        slots,
        "reduce_factor",
        _alone_in("dp"),
        "test_ranks_with_slots_of_their_own",
        "grad.wide/*.lora_A",
        axis="dp",
        catalogue=(10,),
    ),
    "LoRA gradients are summed over dp in place of cp": _fault(
        slots,
        "reduce_factor",
        _dp_twice,
        "test_slots_on_all_axes",
        "grad.wide/*.lora_A",
        axis="cp",
        topology="dp2xtp2xcp2",
        catalogue=(12,),
    ),
    "one rank's partial LoRA delta is taken for the whole": _fault(
        lora,
        "scatter_low",
        _own_rows_of_partial,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(7,),
    ),
    "LoRA features of different rows are joined": _fault(
        lora,
        "gather_low",
        _features_joined,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(8,),
    ),
    "LoRA ranks are padded in each shard": _fault(
        lora,
        "gather_low",
        _padded_per_shard,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(88,),
    ),
    "the gather of LoRA features brings back one rank's gradient": _fault(
        lora,
        "gather_low",
        _gradient_of_own_rows,
        "test_gradients_of_slots",
        "grad.wide/*.q_proj.lora_A",
        axis="tp",
        catalogue=(19, 26),
    ),
    "no gradient passes below a LoRA layer's factors": _fault(
        lora,
        "project_down",
        _cut_off,
        "test_slots_trained_alone",
        "grad.wide/model.layers.0.*",
        catalogue=(7,),
    ),
    "every input gets the first slot": _fault(
        slots, "choose", _first_slot, "test_outputs_of_slots", "*.narrow.hidden_states"
    ),
    "the bare model runs with a slot": _fault(
        slots, "choose", _slot_for_bare, "test_bare_model_beside_slots", "grad.model.layers.*"
    ),
    "a slot stays in use": _fault(
        slots, "choose", _slot_stays, "test_slots_in_any_order", "*.bare.changed_in_*"
    ),
    "gradients of a slot go to another": _fault(
        slots,
        "choose",
        _gradient_to_twin,
        "test_gradients_stay_in_their_slot",
        "step0.wide/*",
    ),
    "gradients of slots are not zeroed": _fault(
        TrainerRank,
        "zero_gradients",
        _model_zeroed,
        "test_gradients_stay_in_their_slot",
        "step1.wide/*",
    ),
    "a rank-stabilised slot has the plain scale": _fault(
        slot_state, "scale_of", _plain_scale, "test_outputs_of_slots", "*.narrow.hidden_states"
    ),
    "slots share the scale of one rank": _fault(
        slot_state,
        "scale_of",
        _scale_of_rank_eight,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
    ),
    "a slot's head is left out": _fault(
        Slots, "head_factors", _no_head, "test_outputs_of_slots", "*.wide.logits"
    ),
    "deltas of q, k and v lie one behind the other": _fault(
        lora,
        "interleave_qkv",
        _qkv_as_one_block,
        "test_each_target_alone",
        "*.k_proj.logprobs",
        catalogue=(90,),
    ),
    "deltas of keys go to values": _fault(
        lora,
        "interleave_qkv",
        _values_and_keys_swapped,
        "test_each_target_alone",
        "*.v_proj.logprobs",
    ),
    "deltas of gates go to the up projection": _fault(
        lora, "gate_then_up", _up_then_gate, "test_each_target_alone", "*.gate_proj.logprobs"
    ),
    "every rank reads the first slice of a slot": _fault(
        slot_values,
        "read_slice",
        _first_slice_read,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(89,),
    ),
    "slices of an odd head begin too early": _fault(
        slot_values,
        "read_slice",
        _floor_slices,
        "test_head_of_tied_embeddings",
        "*.logits",
        axis="tp",
    ),
    "every rank makes the first slice of a slot": _fault(
        lora,
        "slice_of",
        _first_slice_made,
        "test_added_slot",
        "new/*.down_proj.lora_B",
        axis="tp",
        catalogue=(89,),
    ),
    "the first rank's values of a new slot are not sent": _fault(
        collectives, "broadcast_first", _own_values, "test_added_slot", "*.new_changed", axis="cp"
    ),
    "one rank's slices are saved": _fault(
        lora,
        "whole_of",
        _own_slice_saved,
        "test_saved_files",
        "*.file.*.q_proj.lora_B.weight",
        axis="tp",
        catalogue=(86,),
    ),
    "a snapshot changes with its slot": _fault(
        slot_state, "copied", _same_memory, "test_load_change_and_restore", "restored.wide/*"
    ),
    "a restored slot keeps what it owned": _fault(
        Slots,
        "_retire",
        _retires_nothing,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "ranks restore other values each": _fault(
        agreement,
        "of_values",
        _no_values,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "ranks load other files each": _fault(
        AdapterFile,
        "digest",
        _no_contents,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "a snapshot of another alpha is restored": _fault(
        slots,
        "check_snapshot",
        _shapes_alone,
        "test_load_change_and_restore",
        "raised: DID NOT RAISE",
    ),
    "a slot that was changed is not told": _fault(
        slots,
        "changes_of",
        _gone_alone,
        "test_load_change_and_restore",
        "raised: was changed in place",
    ),
    "a restored slot loses its gradients": _fault(
        Slots,
        "restore",
        _gradients_dropped,
        "test_gradients_and_moments_of_a_slot",
        "grad.wide/*",
    ),
    "a restored slot loses its moments": _fault(
        Slots,
        "restore",
        _in_new_parameters,
        "test_gradients_and_moments_of_a_slot",
        "moment.wide/*",
    ),
    "a replaced slot keeps its gradients and moments": _fault(
        Slots,
        "_put",
        _kept_in_place,
        "test_gradients_and_moments_of_a_slot",
        "moment.twin/*",
    ),
    "a new slot begins with zeros alone": _fault(
        Initial, "__call__", _all_zero, "test_added_slot", "drawn/*.limits.spread"
    ),
    "freezing a tied head freezes the embeddings": _fault(
        gradients,
        "freeze",
        _frozen_with_its_head,
        "test_head_of_tied_embeddings",
        "grad.model.embed_tokens.weight",
    ),
    "alpha is saved as a whole number": _fault(
        adapters, "write", _whole_alpha, "test_saved_files", "narrow.config*"
    ),
    "a replaced slot keeps its weights": _fault(
        Slots, "_put", _kept, "test_load_change_and_restore", "replaced.*.narrow"
    ),
}
"""By what is wrong."""
