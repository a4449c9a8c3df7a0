"""Heads, probes and buffers of the caller's own, equal on all ranks.

Each belongs to a slot or to the trainer. The factory of each runs on every rank, so that random
generators stay in step and the ranks can compare what they made; the values of the first rank are
then sent to all. Every TP and CP rank sees the full outputs and so computes the whole gradient:
``reductions.reduce_custom`` says how they are brought together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from subjects.protocol import OwnModule
from subjects.trainer import agreement, collectives, ownership, structure
from subjects.trainer.agreement import Fact
from subjects.trainer.ownership import Owner
from subjects.trainer.reductions import Groups

Made = TypeVar("Made", bound=Tensor | torch.nn.Module)
Member = tuple[str, str, Tensor]
"""Kind ("parameter" or "buffer"), full name and tensor."""


class CustomParts:
    """The registry of one rank.

    ``taken``: names that gradients have already. ``slots``: the slots that there are now.
    ``borrowed``: tensors of the model, which no custom part may hold.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        taken: Callable[[], Collection[str]],
        slots: Callable[[], Collection[str]],
        borrowed: Callable[[], Collection[Tensor]],
    ) -> None:
        self._groups, self._device, self._dtype = groups, device, dtype
        self._world = agreement.world(groups, device)
        self._taken, self._slots, self._borrowed = taken, slots, borrowed
        self._parts: dict[tuple[str | None, str], tuple[Owner, list[Member]]] = {}
        self._modules: dict[tuple[str | None, str], torch.nn.Module] = {}

    def module(
        self, name: str, factory: Callable[[], OwnModule], *, slot: str | None = None
    ) -> OwnModule:
        """Register a module; see ``TrainerRank.module``."""
        made = self._agreed("module", name, factory, slot)
        own = full_name(slot, name)
        members = [(kind, f"{own}.{n}", t) for kind, n, t in ownership.tensors_of(made)]
        owner = self._adopt("module", name, slot, members)
        ownership.guard(made, owner)
        self._modules[slot, name] = made
        return made

    def parameter(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> torch.nn.Parameter:
        """Register a parameter; see ``TrainerRank.parameter``."""
        made = self._agreed("parameter", name, factory, slot)
        parameter = torch.nn.Parameter(made.detach().clone(), structure.is_trained(made))
        self._adopt("parameter", name, slot, [("parameter", full_name(slot, name), parameter)])
        return parameter

    def buffer(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> Tensor:
        """Register a buffer; see ``TrainerRank.buffer``."""
        buffer = self._agreed("buffer", name, factory, slot).detach().clone()
        self._adopt("buffer", name, slot, [("buffer", full_name(slot, name), buffer)])
        return buffer

    def retire(self, slot: str, why: str) -> None:
        """Part with everything that ``slot`` owns; ``why`` completes "was used after ...".

        Whoever still uses one of them gets an error.
        """
        for key in [key for key in self._parts if key[0] == slot]:
            owner, _ = self._parts.pop(key)
            owner.gone = why
            self._modules.pop(key, None)

    def check_modules(self) -> None:
        """Refuse modules that hold other parameters than those registered, on this rank.

        Raises:
            ValueError: with the parameter.
        """
        for key, module in self._modules.items():
            owner, members = self._parts[key]
            own = full_name(*key)
            known = {full: tensor for kind, full, tensor in members if kind == "parameter"}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                check_registered(owner.what, f"{own}.{name}", parameter, known)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter by its full name; a shared one once, by its first name."""
        for _, members in self._parts.values():
            for kind, name, tensor in distinct(members):
                if kind == "parameter" and isinstance(tensor, torch.nn.Parameter):
                    yield name, tensor

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer by its full name; a shared one once, by its first name."""
        for _, members in self._parts.values():
            yield from (
                (name, value) for kind, name, value in distinct(members) if kind != "parameter"
            )

    def _agreed(self, kind: str, name: str, factory: Callable[[], Made], slot: str | None) -> Made:
        """What the factory made here, once every rank has made the same."""
        made: list[Made] = []
        what = f"{kind} {name!r}"

        def facts() -> dict[str, Fact]:
            check_name(what, name)
            if slot is not None and slot not in self._slots():
                there = ", ".join(map(repr, self._slots())) or "none"
                raise ValueError(f"{what}: slot {slot!r} does not exist; there are: {there}")
            full = full_name(slot, name)
            self._check_free(what, [full])
            made.append(_run(what, factory))
            if isinstance(made[0], torch.nn.Module):
                inside = list(ownership.tensors_of(made[0]))
                check_inner_names(what, inside)
                self._check_free(what, [f"{full}.{inner}" for _, inner, _ in inside])
            return {
                "owner": structure.in_words(_owner_name(slot)),
                **structure.facts_of(kind, made[0], self._borrowed()),
            }

        agreement.agree(what, facts, self._world)
        return made[0]

    def _check_free(self, what: str, names: Collection[str]) -> None:
        parts = {full_name(*key) for key in self._parts}
        tensors = {full for _, members in self._parts.values() for _, full, _ in members}
        known = {*parts, *tensors, *self._taken()}
        for full in names:
            if full in known:
                raise ValueError(f"{what}: the name {full!r} is taken; give each its own")

    def _adopt(self, kind: str, name: str, slot: str | None, members: list[Member]) -> Owner:
        """Give every tensor the first rank's values, the run's dtype and an owner, in place."""
        owner = Owner(f"{kind} {name!r} of {_owner_name(slot)}")
        for part, _, tensor in distinct(members):
            trained = part == "parameter" and tensor.requires_grad
            value = converted(tensor, self._device, self._dtype)
            share = parameter_of_first_rank if part == "parameter" else buffer_of_first_rank
            tensor.requires_grad_(False)
            tensor.grad = None
            tensor.data = share(value, self._groups)
            if part == "parameter":
                # Torch takes hooks of what is trained alone, and keeps them.
                tensor.requires_grad_(True).register_hook(owner.check_gradient)
            tensor.requires_grad_(trained)
            ownership.own(tensor, owner)
        self._parts[slot, name] = owner, members
        return owner


def full_name(slot: str | None, name: str) -> str:
    """The name of gradients: that of the part, after the slot that owns it."""
    return name if slot is None else f"{slot}/{name}"


def distinct(members: list[Member]) -> list[Member]:
    """The members without those that are an earlier one under another name.

    A shared parameter thus has one gradient, which is reduced once, and is one to the optimizer.
    """
    seen: set[int] = set()
    found = []
    for member in members:
        if id(member[2]) not in seen:
            seen.add(id(member[2]))
            found.append(member)
    return found


def parameter_of_first_rank(value: Tensor, groups: Groups) -> Tensor:
    """Overwrite the values of a parameter with those of the first rank of all."""
    return from_first_rank(value, groups)


def buffer_of_first_rank(value: Tensor, groups: Groups) -> Tensor:
    """Overwrite the values of a buffer with those of the first rank of all."""
    return from_first_rank(value, groups)


def from_first_rank(value: Tensor, groups: Groups) -> Tensor:
    """Overwrite contiguous ``value`` in place with that of the first rank, and return it."""
    if value.numel():
        # As bytes, since Gloo doesn't know every dtype.
        raw = value.view(-1).view(torch.uint8)
        for group in (groups.dp, groups.cp, groups.tp):
            collectives.broadcast_first(raw, group)
    return value


def converted(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A contiguous copy on the device of the run, in its dtype if floating."""
    kind = dtype if value.is_floating_point() else value.dtype
    return value.detach().to(device, kind, copy=True).contiguous()


def _owner_name(slot: str | None) -> str:
    return "the trainer" if slot is None else f"slot {slot!r}"


def check_name(what: str, name: object) -> None:
    """Refuse a name that could not be part of a gradient's.

    Raises:
        ValueError: it is no text, is empty, or has a slash.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(
            f"{what}: expected a name without a slash, which parts a slot from what it owns"
        )


def check_inner_names(what: str, members: Collection[Member]) -> None:
    """Refuse a tensor of a module whose name would be read as a slot's.

    Raises:
        ValueError: its name has a slash, as any key of a ``ParameterDict`` may.
    """
    for kind, name, _ in members:
        if "/" in name:
            raise ValueError(
                f"{what}: {kind} {name!r} has a slash in its name, which parts a slot from what "
                "it owns; give it a name without one in the factory"
            )


def check_registered(what: str, name: str, parameter: Tensor, known: Mapping[str, Tensor]) -> None:
    """Refuse a parameter of a module that is not the one ``known`` by its name.

    Raises:
        ValueError: it would be neither reduced nor stepped.
    """
    if known.get(name) is not parameter:
        found = "another tensor than the one that was" if name in known else "not what was"
        raise ValueError(
            f"{what}: parameter {name!r} is {found} registered, and would be neither reduced nor "
            "stepped. Set values in place (load_state_dict without assign, or parameter.copy_ "
            "under torch.no_grad), or register a module anew from a factory that makes it so"
        )


def _run(what: str, factory: Callable[[], Made]) -> Made:
    try:
        return factory()
    except Exception as error:
        raise ValueError(f"{what}: the factory raised {type(error).__name__}: {error}") from error
