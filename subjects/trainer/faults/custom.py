"""Heads, probes and buffers that differ between ranks, or are owned, shared or reduced wrongly."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from subjects.protocol import OwnModule
from subjects.trainer import custom, gradients, reductions, structure
from subjects.trainer.agreement import Fact
from subjects.trainer.custom import CustomParts, Member
from subjects.trainer.faults.fault import Fault
from subjects.trainer.ownership import Owner
from subjects.trainer.reductions import Groups
from subjects.trainer.slots import Slots

_reduce_custom = reductions.reduce_custom
_facts_of = structure.facts_of
_module = CustomParts.module
_buffer = CustomParts.buffer
_retire = CustomParts.retire
_part_with = Slots._part_with


def _always_free(self: CustomParts, what: str, names: Collection[str]) -> None:
    del self, what, names


def _own_values(value: Tensor, groups: Groups) -> Tensor:  # noqa: ARG001
    return value


def _with_both_names(members: list[Member]) -> list[Member]:
    return members


def _untied(
    self: CustomParts, name: str, factory: Callable[[], OwnModule], *, slot: str | None = None
) -> OwnModule:
    def copied() -> OwnModule:
        made = factory()
        seen: set[int] = set()
        for part in made.modules():
            for key, parameter in list(part.named_parameters(recurse=False)):
                if id(parameter) in seen:
                    setattr(part, key, torch.nn.Parameter(parameter.detach().clone()))
                seen.add(id(parameter))
        return made

    return _module(self, name, copied, slot=slot)


def _all_trained(
    self: CustomParts, name: str, factory: Callable[[], OwnModule], *, slot: str | None = None
) -> OwnModule:
    return _module(self, name, lambda: factory().requires_grad_(True), slot=slot)


def _trained_buffer(
    self: CustomParts, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
) -> Tensor:
    return _buffer(self, name, factory, slot=slot).requires_grad_(True)


def _summed_over_tp(gradient: Tensor, groups: Groups) -> Tensor:
    return _reduce_custom(gradient, groups) * groups.tp.size()


def _left_over_dp(gradient: Tensor, groups: Groups) -> Tensor:
    return _reduce_custom(gradient, Groups(groups.tp, groups.cp, groups.tp)) / groups.tp.size()


def _kept_where_used(gradient: Tensor, groups: Groups) -> Tensor:
    """A rank that has only zeros to add doesn't get what the others have."""
    whole = _reduce_custom(gradient.clone(), groups)
    return whole if gradient.any() else gradient


def _first_slots_head(
    self: CustomParts, name: str, factory: Callable[[], OwnModule], *, slot: str | None = None
) -> OwnModule:
    made = _module(self, name, factory, slot=slot)
    if slot is None:
        return made
    first: OwnModule = vars(self).setdefault(f"_first {name}", made)
    return first


def _as_made(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return value.detach().to(device, copy=True).contiguous()


def _never_stale(self: Owner) -> None:
    del self


def _kept(self: CustomParts, slot: str, why: str) -> None:
    del self, slot, why


def _all_retired(self: CustomParts, slot: str, why: str) -> None:
    for owner in {slot, *(key[0] for key in self._parts if key[0] is not None)}:
        _retire(self, owner, why)


def _parted_with_nothing(self: Slots, name: str, what: str) -> None:
    if what != "replaced":
        _part_with(self, name, what)


def _no_changes(self: Slots, name: str | None) -> Callable[[], str]:
    del self, name
    return lambda: ""


def _last_of_equal_rows(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return gradient
    full = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    full[gradient._indices()[0]] = gradient._values()
    return full


def _any_gradient(self: Owner, gradient: Tensor) -> None:
    del self, gradient


def _not_looked_at(self: CustomParts) -> None:
    del self


def _shapes_alone(kind: str, made: object, borrowed: Collection[Tensor]) -> dict[str, Fact]:
    found = _facts_of(kind, made, borrowed)
    shapes = {name: fact.text.rpartition(",")[0].partition(" ")[2] for name, fact in found.items()}
    return {name: structure.in_words(shape) for name, shape in shapes.items()}


def _fault(function: Callable[..., Any], module: Any, name: str, **about: Any) -> Fault:
    return Fault(module=module, name=name, function=function, **about)


FAULTS: dict[str, Fault] = {
    "each rank keeps the parameters of its own factory": _fault(
        _own_values,
        custom,
        "parameter_of_first_rank",
        axis="any",
        case="test_custom.test_values_of_the_first_rank",
        shows="parameter",
        catalogue=(98,),
    ),
    "each rank keeps the buffers of its own factory": _fault(
        _own_values,
        custom,
        "buffer_of_first_rank",
        axis="any",
        case="test_custom.test_values_of_the_first_rank",
        shows="buffer",
    ),
    "custom parts keep the dtype of the factory": _fault(
        _as_made,
        custom,
        "converted",
        axis="any",
        case="test_custom.test_values_of_the_first_rank",
        shows="parameter",
    ),
    "shared parameter untied": _fault(
        _untied,
        CustomParts,
        "module",
        axis="any",
        case="test_custom.test_shared_parameter_has_one_gradient",
        shows="grad.head.left.weight",
        catalogue=(101,),
    ),
    "shared parameter reduced once for each name": _fault(
        _with_both_names,
        custom,
        "distinct",
        axis="dp",
        case="test_custom.test_shared_parameter_has_one_gradient",
        shows="grad.head.left.weight",
    ),
    "head gradient summed over tp": _fault(
        _summed_over_tp,
        reductions,
        "reduce_custom",
        axis="tp",
        case="test_custom.test_head_across_documents",
        shows="grad.head.*",
        catalogue=(106,),
    ),
    "head gradient left on each data-parallel rank": _fault(
        _left_over_dp,
        reductions,
        "reduce_custom",
        axis="dp",
        case="test_custom.test_head_used_twice",
        shows="grad.head.*",
        catalogue=(10, 104),
    ),
    "of equal rows of a sparse gradient the last alone": _fault(
        _last_of_equal_rows,
        gradients,
        "dense",
        axis="any",
        case="test_custom.test_head_used_twice",
        shows="grad.bins.weight",
    ),
    "a head's gradient stays where it was used": _fault(
        _kept_where_used,
        reductions,
        "reduce_custom",
        axis="dp",
        case="test_custom.test_head_of_some_batches",
        shows="grad.[ab].*",
    ),
    "the first slot's head is every slot's": _fault(
        _first_slots_head,
        CustomParts,
        "module",
        axis="any",
        case="test_custom.test_heads_of_slots",
        shows="*.two.read",
    ),
    "buffer of the caller's trained": _fault(
        _trained_buffer,
        CustomParts,
        "buffer",
        axis="any",
        case="test_custom.test_buffers_are_not_trained",
        shows="buffers.shift",
    ),
    "untrained parameter of a head trained": _fault(
        _all_trained,
        CustomParts,
        "module",
        axis="any",
        case="test_custom.test_buffers_are_not_trained",
        shows="grad.head.frozen",
    ),
    "stale head used in silence": _fault(
        _never_stale,
        Owner,
        "check",
        axis="any",
        case="test_custom.test_head_of_a_replaced_slot_is_stale",
        shows="raised: DID NOT RAISE",
    ),
    "head outlives its slot": _fault(
        _kept,
        CustomParts,
        "retire",
        axis="any",
        case="test_custom.test_head_of_a_replaced_slot_is_stale",
        shows="raised: is taken",
    ),
    "a slot takes every slot's heads with it": _fault(
        _all_retired,
        CustomParts,
        "retire",
        axis="any",
        case="test_custom.test_head_of_a_replaced_slot_is_stale",
        shows="raised: was used after",
    ),
    "a slot that is loaded anew keeps the old one's heads": _fault(
        _parted_with_nothing,
        Slots,
        "_part_with",
        axis="any",
        case="test_custom.test_head_of_a_replaced_slot_is_stale",
        shows="raised: is taken",
    ),
    "a backward goes to a slot that is gone": _fault(
        _no_changes,
        Slots,
        "changes",
        axis="any",
        case="test_custom.test_head_of_a_replaced_slot_is_stale",
        shows="raised: DID NOT RAISE",
    ),
    "a head that is gone takes gradients": _fault(
        _any_gradient,
        Owner,
        "check_gradient",
        axis="any",
        case="test_custom.test_head_of_a_replaced_slot_is_stale",
        shows="raised: DID NOT RAISE",
    ),
    "an exchanged parameter is trained by nobody": _fault(
        _not_looked_at,
        CustomParts,
        "check_modules",
        axis="any",
        case="test_custom.test_ranks_that_make_different_heads_are_refused",
        shows="raised: DID NOT RAISE",
    ),
    "a name that is taken is given again": _fault(
        _always_free,
        CustomParts,
        "_check_free",
        axis="any",
        case="test_custom.test_ranks_that_make_different_heads_are_refused",
        shows="raised: DID NOT RAISE",
    ),
    "ranks compare the shapes of heads alone": _fault(
        _shapes_alone,
        structure,
        "facts_of",
        axis="any",
        case="test_custom.test_ranks_that_make_different_heads_are_refused",
        shows="raised: DID NOT RAISE",
    ),
}
"""By what is wrong."""
