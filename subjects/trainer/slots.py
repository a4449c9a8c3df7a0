"""LoRA slots: several adapters resident at once, one of them chosen by each forward.

Factors are parameters of this rank, in the dtype of the run, placed as ``lora.py`` says. What
changes the slots is a collective of all ranks, and is refused by all where one of them can't.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subjects.token_ids import shown
from subjects.trainer import adapters, agreement, collectives, lora, lora_layers, reductions
from subjects.trainer.adapters import AdapterConfig
from subjects.trainer.agreement import Fact
from subjects.trainer.architecture import Architecture
from subjects.trainer.lora import Factor
from subjects.trainer.ownership import Owner
from subjects.trainer.reductions import Groups

Factory = Callable[[str, tuple[int, ...]], Tensor]
"""From a factor's name (``model.layers.0.self_attn.q_proj.lora_A``) and shape to its values."""

# A copy of the base model's head, which PEFT saves beside the factors of an lm_head.
_HEAD_COPY = "lm_head.base_layer"


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
        made: list[AdapterConfig] = []
        drawn: list[Tensor] = []

        def facts() -> dict[str, object]:
            self._check_free(name)
            made.append(adapters.adapter_config(rank=rank, alpha=alpha, targets=targets))
            check_factory(factory)
            if self._is_first:
                drawn.append(self._drawn(name, made[0], factory or _Initial(name)))
            return vars(made[0])

        self._agree("add_slot", name, facts)
        factors = self._factors(made[0])
        sizes = [one.shape[0] * one.shape[1] for one in factors.values()]
        empty = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        flat = drawn[0] if drawn else empty
        for group in self._axes:
            collectives.broadcast_first(flat, group)
        pieces = zip(flat.split(sizes), factors.values(), strict=True)
        values = {
            factor.name: lora.slice_of(piece.view(factor.shape), factor, self.part)
            for piece, factor in pieces
        }
        self._put(name, made[0], factors, values)

    def load(self, name: str, directory: str | Path) -> None:
        """Read a slot from PEFT's files; see ``TrainerRank.load_slot``."""
        found: list[tuple[AdapterConfig, dict[str, Factor], dict[str, Tensor]]] = []

        def facts() -> dict[str, object]:
            check_name(name)
            path = directory_of(directory)
            found.append(self._read(path))
            # Each rank reads slices of its own: of the same file, or they would never fit.
            return {**vars(found[0][0]), "contents": adapters.AdapterFile(path).digest()}

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

        def write() -> dict[str, object]:
            if self._is_first:
                adapters.write(Path(directory), slot.config, whole, base_model=self.base_model)
            return {"directory": str(directory)}

        # No rank returns before the files are there.
        self._agree("save_slot, files", name, write)

    def snapshot(self, name: str) -> SlotSnapshot:
        """Copies of this rank's values; see ``TrainerRank.snapshot_slot``."""
        slot = self.get(name)
        return SlotSnapshot(
            slot.config, {factor: copied(value) for factor, value in slot.values.items()}
        )

    def restore(self, name: str, snapshot: SlotSnapshot) -> None:
        """Set this rank's values to those of a snapshot; see ``TrainerRank.restore_slot``."""
        agreement.agree_on_values(
            "restore_slot",
            lambda: _facts({"name": name, **self._check_snapshot(name, snapshot)}),
            lambda: self._with_cuts(name, snapshot),
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

    @property
    def _is_first(self) -> bool:
        return all(group.rank() == 0 for group in self._axes)

    def _agree(self, call: str, name: str, given: Callable[[], Mapping[str, object]]) -> None:
        """Raise on every rank where one of them refuses, or was given something else."""
        agreement.agree(call, lambda: _facts({"name": name, **given()}), self._world)

    def _factors(self, config: AdapterConfig) -> dict[str, Factor]:
        return {one.name: one for one in lora.factors(config, self.architecture)}

    def _check_free(self, name: str) -> None:
        check_name(name)
        if name in self._slots:
            raise ValueError(
                f"slot {name!r} exists; remove_slot({name!r}) first, or load_slot to replace it"
            )

    def _check_snapshot(self, name: str, snapshot: SlotSnapshot) -> dict[str, object]:
        slot = self.get(name)
        check_snapshot(snapshot)
        shapes = {factor: value.shape for factor, value in slot.values.items()}
        found = {factor: value.shape for factor, value in snapshot.values.items()}
        if (slot.config, shapes) != (snapshot.config, found):
            raise ValueError(
                f"the snapshot is of {snapshot.config}, slot {name!r} is {slot.config}; restore "
                "it into a slot of the same configuration, on the topology that it was taken on"
            )
        return {"configuration": slot.config}

    def _with_cuts(self, name: str, snapshot: SlotSnapshot) -> dict[str, tuple[Tensor, bool]]:
        """Values of a snapshot, and whether tensor parallelism cuts each."""
        return {
            factor: (snapshot.values[factor], one.dim is not None)
            for factor, one in self._slots[name].factors.items()
        }

    def _drawn(self, slot: str, config: AdapterConfig, factory: Factory) -> Tensor:
        """The whole factors, end to end, in the dtype of the run."""
        pieces = []
        for name, factor in self._factors(config).items():
            value = _made(factory, slot, name, factor.shape)
            if tuple(value.shape) != factor.shape:
                raise ValueError(
                    f"slot {slot!r}: the factory returned shape {list(value.shape)} for {name}; "
                    f"expected {list(factor.shape)}"
                )
            pieces.append(value.detach().to(device=self.device, dtype=self.dtype).flatten())
        return torch.cat(pieces)

    def _read(self, directory: Path) -> tuple[AdapterConfig, dict[str, Factor], dict[str, Tensor]]:
        config = adapters.read_config(directory)
        factors = self._factors(config)
        file = adapters.AdapterFile(directory)
        shapes: dict[str, tuple[int, ...]] = {name: one.shape for name, one in factors.items()}
        copied_head = _HEAD_COPY in file.shapes and "lm_head" in config.targets
        if copied_head:
            shapes[_HEAD_COPY] = (self.architecture.vocabulary, self.architecture.hidden)
        file.check(shapes)
        if copied_head:
            self._check_head(file)
        return config, factors, {n: read_slice(file, one, self.part) for n, one in factors.items()}

    def _check_head(self, file: adapters.AdapterFile) -> None:
        """Refuse an adapter that brings another head than the checkpoint's."""
        tied = self.architecture.tied
        layer = self._model.embedding.word_embeddings if tied else self._model.output_layer
        copy = file.read(_HEAD_COPY, dim=0, part=self.part).to(self.device, self.dtype)
        if not torch.equal(copy, layer.weight.detach()[: len(copy)]):
            raise ValueError(
                f"{file.path} brings a head of its own ({_HEAD_COPY}), which differs from the "
                "checkpoint's; save the adapter with save_embedding_layers=False, or build the "
                "trainer on the model that it was trained with"
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


class _Initial:
    """PEFT's initialisation: A within 1 / sqrt(in), B zero."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Values of one factor, drawn without touching torch's own generator."""
        value = torch.zeros(shape)
        if not name.endswith("lora_A"):
            return value
        seed = zlib.crc32(f"{torch.initial_seed()}/{self.slot}/{name}".encode())
        bound = shape[1] ** -0.5
        return value.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def check_name(name: str) -> None:
    """Refuse a slot's name that could not be part of a gradient's.

    Raises:
        ValueError: it is no text, is empty, or has a dot or a slash.
    """
    if not isinstance(name, str) or not name or set(name) & set("./"):
        raise ValueError(
            f"slot name {name!r}: expected text without '.' and '/', since the names of gradients "
            "are slot/module.lora_A"
        )


def check_factory(factory: object) -> None:
    """Refuse what can't be called.

    Raises:
        TypeError: it is no function, and not None.
    """
    if factory is not None and not callable(factory):
        raise TypeError(
            f"factory is {shown(factory)}; expected a function (name, shape) -> tensor, or None "
            "for fresh values"
        )


def check_snapshot(snapshot: object) -> None:
    """Refuse what is no snapshot.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(snapshot, SlotSnapshot):
        raise TypeError(
            f"snapshot is {shown(snapshot)}; expected what snapshot_slot returned (load_slot reads "
            "files)"
        )


def directory_of(directory: object) -> Path:
    """The directory of an adapter.

    Raises:
        TypeError: it is no path.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"directory is {shown(directory)}; expected the path of a directory, as text or a Path"
        )
    return Path(directory)


def _made(factory: Factory, slot: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """What the caller's factory returns for one factor.

    Raises:
        TypeError: it can't be called with a name and a shape, or returns no tensor.
    """
    expected = f"expected a function (name, shape) -> tensor of shape {list(shape)}"
    try:
        value: object = factory(name, shape)
    except TypeError as error:
        # Most often it takes other arguments, of which Python says neither whose nor why.
        raise TypeError(f"slot {slot!r}: the factory failed on {name}: {error}; {expected}") from (
            error
        )
    if not isinstance(value, Tensor):
        raise TypeError(
            f"slot {slot!r}: the factory returned {shown(value)} for {name}; {expected}"
        )
    return value


def choose(slots: Slots, name: str | None) -> Slot | None:
    """The slot that a forward asked for; None for the bare model."""
    return None if name is None else slots.get(name)


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


def reduce_factor(gradient: Tensor, factor: Factor, groups: Groups) -> Tensor:
    """Sum a factor's gradient over CP and DP, and over TP where each rank has a partial sum."""
    return reductions.reduce_weight(gradient, groups, over_tp=lora.partial_over_tp(factor))


def read_slice(file: adapters.AdapterFile, factor: Factor, part: tuple[int, int]) -> Tensor:
    """Slice ``part[0]`` of ``part[1]`` of a factor of a file."""
    return file.read(factor.name, dim=factor.dim, part=part)


def copied(value: Tensor) -> Tensor:
    """The values, in memory of their own."""
    return value.detach().clone()
