"""LoRA slots: the wrong slot, factor, scale or sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.trainer import (
    collectives,
    gradients,
    lora,
    slot_state,
    slots,
)
from subjects.trainer.adapters import AdapterConfig
from subjects.trainer.faults.fault import Fault
from subjects.trainer.lora import Factor
from subjects.trainer.rank import TrainerRank
from subjects.trainer.reductions import Groups
from subjects.trainer.slot_state import Slot
from subjects.trainer.slots import Slots

_reduce_factor = slots.reduce_factor
_choose = slots.choose
_partial_over_tp = lora.partial_over_tp
_gather_low = lora.gather_low
_project_down = lora.project_down
_interleave_qkv = lora.interleave_qkv
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


def _frozen_with_its_head(trainer: TrainerRank, part: str) -> None:
    _freeze(trainer, part)
    if part == "head" and trainer.architecture.tied:
        trainer.model.embedding.word_embeddings.weight.requires_grad_(False)


def _model_zeroed(self: TrainerRank) -> None:
    for parameter in self.model.parameters():
        parameter.grad = None
    self.reduced = None


def of_slots(module: Any, name: str, function: Any, case: str, shows: str, **given: Any) -> Fault:
    """A fault that a case of ``test_slots`` is about; ``given`` as ``Fault`` has it."""
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
    "a LoRA factor that TP replicates is not summed over tp": of_slots(
        lora,
        "partial_over_tp",
        _never_summed,
        "test_gradients_of_slots",
        "grad.wide/*.q_proj.lora_A",
        axis="tp",
        catalogue=(4,),
    ),
    "slices of a LoRA factor are summed over tp": of_slots(
        lora,
        "partial_over_tp",
        _slices_summed,
        "test_gradients_of_slots",
        "grad.wide/*.q_proj.lora_B",
        axis="tp",
        catalogue=(8,),
    ),
    "LoRA gradients are averaged over cp": of_slots(
        slots,
        "reduce_factor",
        _averaged_over_cp,
        "test_gradients_of_slots",
        "grad.narrow/*.lora_A",
        axis="cp",
        catalogue=(14,),
    ),
    "LoRA gradients are those of one cp rank": of_slots(
        slots,
        "reduce_factor",
        _alone_in("cp"),
        "test_gradients_of_slots",
        "grad.narrow/*.lora_B",
        axis="cp",
        catalogue=(9,),
    ),
    "LoRA gradients are those of one dp rank": of_slots(
        slots,
        "reduce_factor",
        _alone_in("dp"),
        "test_ranks_with_slots_of_their_own",
        "grad.wide/*.lora_A",
        axis="dp",
        catalogue=(10,),
    ),
    "LoRA gradients are summed over dp in place of cp": of_slots(
        slots,
        "reduce_factor",
        _dp_twice,
        "test_slots_on_all_axes",
        "grad.wide/*.lora_A",
        axis="cp",
        topology="dp2xtp2xcp2",
        catalogue=(12,),
    ),
    "one rank's partial LoRA delta is taken for the whole": of_slots(
        lora,
        "scatter_low",
        _own_rows_of_partial,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(7,),
    ),
    "LoRA features of different rows are joined": of_slots(
        lora,
        "gather_low",
        _features_joined,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(8,),
    ),
    "LoRA ranks are padded in each shard": of_slots(
        lora,
        "gather_low",
        _padded_per_shard,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
        axis="tp",
        catalogue=(88,),
    ),
    "the gather of LoRA features brings back one rank's gradient": of_slots(
        lora,
        "gather_low",
        _gradient_of_own_rows,
        "test_gradients_of_slots",
        "grad.wide/*.q_proj.lora_A",
        axis="tp",
        catalogue=(19, 26),
    ),
    "no gradient passes below a LoRA layer's factors": of_slots(
        lora,
        "project_down",
        _cut_off,
        "test_slots_trained_alone",
        "grad.wide/model.layers.0.*",
        catalogue=(7,),
    ),
    "every input gets the first slot": of_slots(
        slots, "choose", _first_slot, "test_outputs_of_slots", "*.narrow.hidden_states"
    ),
    "the bare model runs with a slot": of_slots(
        slots, "choose", _slot_for_bare, "test_bare_model_beside_slots", "grad.model.layers.*"
    ),
    "a slot stays in use": of_slots(
        slots, "choose", _slot_stays, "test_slots_in_any_order", "*.bare.changed_in_*"
    ),
    "gradients of a slot go to another": of_slots(
        slots,
        "choose",
        _gradient_to_twin,
        "test_gradients_stay_in_their_slot",
        "step0.wide/*",
    ),
    "gradients of slots are not zeroed": of_slots(
        TrainerRank,
        "zero_gradients",
        _model_zeroed,
        "test_gradients_stay_in_their_slot",
        "step1.wide/*",
    ),
    "a rank-stabilised slot has the plain scale": of_slots(
        slot_state, "scale_of", _plain_scale, "test_outputs_of_slots", "*.narrow.hidden_states"
    ),
    "slots share the scale of one rank": of_slots(
        slot_state,
        "scale_of",
        _scale_of_rank_eight,
        "test_outputs_of_slots",
        "*.wide.hidden_states",
    ),
    "a slot's head is left out": of_slots(
        Slots, "head_factors", _no_head, "test_outputs_of_slots", "*.wide.logits"
    ),
    "deltas of q, k and v lie one behind the other": of_slots(
        lora,
        "interleave_qkv",
        _qkv_as_one_block,
        "test_each_target_alone",
        "*.k_proj.logprobs",
        catalogue=(90,),
    ),
    "deltas of keys go to values": of_slots(
        lora,
        "interleave_qkv",
        _values_and_keys_swapped,
        "test_each_target_alone",
        "*.v_proj.logprobs",
    ),
    "deltas of gates go to the up projection": of_slots(
        lora, "gate_then_up", _up_then_gate, "test_each_target_alone", "*.gate_proj.logprobs"
    ),
    "freezing a tied head freezes the embeddings": of_slots(
        gradients,
        "freeze",
        _frozen_with_its_head,
        "test_head_of_tied_embeddings",
        "grad.model.embed_tokens.weight",
    ),
}
"""By what is wrong."""
