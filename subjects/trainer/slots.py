"""LoRA slots: several adapters resident at once, one of them chosen by each forward.

Factors are parameters of this rank, in the dtype of the run, placed as ``lora.py`` says. What
changes the slots is a collective of all ranks, and is refused by all where one of them can't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subjects.trainer import (
    adapters,
    agreement,
    collectives,
    lora,
    lora_layers,
    reductions,
    slot_values,
)
from subjects.trainer.adapters import AdapterConfig
from subjects.trainer.agreement import Fact
from subjects.trainer.architecture import Architecture
from subjects.trainer.lora import Factor
from subjects.trainer.ownership import Owner
from subjects.trainer.reductions import Groups
from subjects.trainer.slot_state import (
    HeadFactors,
    Slot,
    SlotSnapshot,
    changes_of,
    check_snapshot,
    snapshot_of,
    with_cuts,
)
from subjects.trainer.slot_values import Factory, Read, check_factory, directory_of, factors_of


class Slots:
    """The adapters of one model on this rank.

    ``on_replace`` are called with the name of a slot that is replaced, restored or removed, and
    with what happened to it. ``base_model`` is written into saved adapters, for readers that load
    the base by it.
    """

    def __init__(
        self,
        model: Any,
        architecture: Architecture,
        groups: Groups,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.architecture, self.groups = architecture, groups
        self.device, self.dtype = device, dtype
        self.on_replace: list[Callable[[str, str], None]] = []
        self.base_model: str | None = None
        self._model = model
        self._world = agreement.world(groups, device)
        self._slots: dict[str, Slot] = {}
        self._in_use: Slot | None = None
        lora_layers.attach(model, architecture, groups.tp, lambda: self._in_use)

    @property
    def names(self) -> tuple[str, ...]:
        """The slots that there are."""
        return tuple(self._slots)

    @property
    def part(self) -> tuple[int, int]:
        """Which tensor-parallel slice this rank holds, of how many."""
        return self.groups.tp.rank(), self.groups.tp.size()

    def get(self, name: str) -> Slot:
        """The slot ``name``.

        Raises:
            ValueError: there is none of this name.
        """
        if not isinstance(name, str) or name not in self._slots:
            there = ", ".join(map(repr, self._slots)) or "none"
            raise ValueError(
                f"slot {name!r} does not exist; there are: {there}. add_slot and load_slot make one"
            )
        return self._slots[name]

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Add the slot's deltas to the layers in the block, or none.

        Raises:
            ValueError: the slot does not exist.
        """
        previous, self._in_use = self._in_use, choose(self, name)
        try:
            yield
        finally:
            self._in_use = previous

    def head_factors(self, name: str | None) -> HeadFactors | None:
        """What the head adds for a slot, or None where it is the model's alone.

        Raises:
            ValueError: the slot does not exist.
        """
        slot = choose(self, name)
        if slot is None or "lm_head" not in slot.targets:
            return None
        return HeadFactors(*slot.pair("lm_head"), slot.scale())

    def changes(self, name: str | None) -> Callable[[], str]:
        """A function that says what has happened to a slot since this call; "" for nothing.

        Raises:
            ValueError: the slot does not exist.
        """
        slot = choose(self, name)
        return (lambda: "") if slot is None else changes_of(slot)

    def named_factors(self) -> Iterator[tuple[str, torch.nn.Parameter, Factor]]:
        """Name of the gradient (slot/factor), this rank's part and the factor, slot by slot."""
        for slot, found in self._slots.items():
            for name, factor in found.factors.items():
                yield f"{slot}/{name}", found.values[name], factor

    def add(
        self,
        name: str,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        factory: Factory | None = None,
    ) -> None:
        """Make a slot; see ``TrainerRank.add_slot``."""
        made: list[tuple[AdapterConfig, Tensor]] = []

        def facts() -> dict[str, object]:
            self._check_free(name)
            config = adapters.adapter_config(rank=rank, alpha=alpha, targets=targets)
            check_factory(factory)
            factors = factors_of(config, self.architecture).values()
            room = slot_values.room(name, factors, device=self.device, dtype=self.dtype)
            made.append((config, room))
            return {**vars(config), "factory": "none" if factory is None else "given"}

        self._agree("add_slot", name, facts)
        (config, flat), *_ = made
        factors = factors_of(config, self.architecture)
        pieces = slot_values.pieces(flat, factors.values())
        agreement.lead(
            "add_slot, values from its factory,",
            lambda: slot_values.draw(pieces, name, factors.values(), factory),
            self._world,
        )
        for group in self._axes:
            collectives.broadcast_first(flat, group)
        values = {
            factor.name: lora.slice_of(piece, factor, self.part)
            for piece, factor in zip(pieces, factors.values(), strict=True)
        }
        self._put(name, config, factors, values)

    def load(self, name: str, directory: str | Path) -> None:
        """Read a slot from PEFT's files; see ``TrainerRank.load_slot``."""
        found: list[Read] = []

        def facts() -> dict[str, object]:
            check_name(name)
            path = directory_of(directory)
            found.append(
                slot_values.read(path, self.architecture, part=self.part, head=self._head())
            )
            # Each rank reads slices of its own: of the same file, or they would never fit.
            return {**vars(found[0].config), "contents": adapters.AdapterFile(path).digest()}

        self._agree("load_slot", name, facts)
        self._put(name, *found[0])

    def save(self, name: str, directory: str | Path) -> None:
        """Write a slot as PEFT's files, whole; see ``TrainerRank.save_slot``."""

        def facts() -> dict[str, object]:
            directory_of(directory)
            return {"configuration": self.get(name).config}

        self._agree("save_slot", name, facts)
        slot = self._slots[name]
        whole = {
            factor.name: lora.whole_of(slot.values[factor.name].detach(), factor, self.groups.tp)
            for factor in slot.factors.values()
        }

        def write() -> None:
            adapters.write(Path(directory), slot.config, whole, base_model=self.base_model)

        # No rank returns before the files are there.
        agreement.lead("save_slot, writing files,", write, self._world)

    def snapshot(self, name: str) -> SlotSnapshot:
        """Copies of this rank's values; see ``TrainerRank.snapshot_slot``."""
        return snapshot_of(self.get(name))

    def restore(self, name: str, snapshot: SlotSnapshot) -> None:
        """Set this rank's values to those of a snapshot; see ``TrainerRank.restore_slot``."""

        def facts() -> dict[str, Fact]:
            slot = self.get(name)
            check_snapshot(snapshot, name, slot)
            return _facts({"name": name, "configuration": slot.config})

        agreement.agree_on_values(
            "restore_slot",
            facts,
            lambda: with_cuts(snapshot, self._slots[name]),
            self.groups,
            self.device,
        )
        with torch.no_grad():
            for factor, value in self._slots[name].values.items():
                value.copy_(snapshot.values[factor])
        self._retire(name, "restored")

    def remove(self, name: str) -> None:
        """Forget a slot; see ``TrainerRank.remove_slot``."""
        self._agree("remove_slot", name, lambda: {"configuration": self.get(name).config})
        self._part_with(name, "removed")
        del self._slots[name]

    @property
    def _axes(self) -> tuple[Any, Any, Any]:
        return self.groups.dp, self.groups.cp, self.groups.tp

    def _agree(self, call: str, name: str, given: Callable[[], Mapping[str, object]]) -> None:
        """Raise on every rank where one of them refuses, or was given something else."""
        agreement.agree(call, lambda: _facts({"name": name, **given()}), self._world)

    def _head(self) -> Tensor:
        """This rank's rows of the model's own head, and their padding."""
        tied = self.architecture.tied
        layer = self._model.embedding.word_embeddings if tied else self._model.output_layer
        weight: Tensor = layer.weight
        return weight

    def _check_free(self, name: str) -> None:
        check_name(name)
        if name in self._slots:
            raise ValueError(
                f"slot {name!r} exists; remove_slot({name!r}) first, or load_slot to replace it"
            )

    def _put(
        self,
        name: str,
        config: AdapterConfig,
        factors: Mapping[str, Factor],
        values: Mapping[str, Tensor],
    ) -> None:
        if name in self._slots:
            self._part_with(name, "replaced")
        owned = {n: self._owned(v) for n, v in values.items()}
        self._slots[name] = Slot(config, factors, owned, Owner(f"slot {name!r}"))

    def _owned(self, value: Tensor) -> torch.nn.Parameter:
        # A copy, so that a slice does not keep the whole alive.
        here = value.detach().to(device=self.device, dtype=self.dtype, copy=True)
        return torch.nn.Parameter(here.contiguous())

    def _part_with(self, name: str, what: str) -> None:
        self._slots[name].owner.gone = f"slot {name!r} was {what}"
        self._retire(name, what)

    def _retire(self, name: str, what: str) -> None:
        for callback in self.on_replace:
            callback(name, f"slot {name!r} was {what}")


def _facts(given: Mapping[str, object]) -> dict[str, Fact]:
    """What ranks are told, as what they compare: all that its words say."""
    texts = {key: str(value) for key, value in given.items()}
    return {key: Fact(text.encode(), text) for key, text in texts.items()}


def check_name(name: str) -> None:
    """Refuse a slot's name that could not be part of a gradient's.

    Raises:
        ValueError: it is no text, is empty, can't be printed, or has a dot or a slash.
    """
    text = isinstance(name, str) and name.isprintable()
    if not text or not name or set(name) & set("./"):
        raise ValueError(
            f"slot name {name!r}: expected printable text without '.' and '/', since the names "
            "of gradients are slot/module.lora_A"
        )


def choose(slots: Slots, name: str | None) -> Slot | None:
    """The slot that a forward asked for; None for the bare model."""
    return None if name is None else slots.get(name)


def reduce_factor(gradient: Tensor, factor: Factor, groups: Groups) -> Tensor:
    """Sum a factor's gradient over CP and DP, and over TP where each rank has a partial sum."""
    return reductions.reduce_weight(gradient, groups, over_tp=lora.partial_over_tp(factor))
