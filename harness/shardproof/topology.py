"""Axes, topologies and the one place where the order of ranks is stated.

Rank order: ``tp`` varies fastest, then ``cp``, then model axes of the project's own, then ``dp``,
then data axes of its own, and ``pp`` slowest. Any spelling of a topology (``tp2xcp2``, ``CP2×TP2``)
means this order. Names are written data axes first: ``dp2xtp2xcp2``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

Role = Literal["data", "model"]

SINGLE = "single"
_PART = re.compile(r"([a-z][a-z_]*)(\d+)")
_AXIS_NAME = re.compile(r"[a-z][a-z_]*")


class TopologyError(ValueError):
    """A topology or axis that cannot be understood; the text says what would be."""


@dataclass(frozen=True)
class Axis:
    """One named axis of a mesh.

    ``role`` is ``"model"`` when the ranks along it work on the same data (their values must agree)
    and ``"data"`` when each works on its own.
    """

    name: str
    role: Role


BUILTIN_AXES: tuple[Axis, ...] = (
    Axis("tp", "model"),
    Axis("cp", "model"),
    Axis("dp", "data"),
    Axis("pp", "model"),
)


def declare_axes(declarations: Iterable[str]) -> tuple[Axis, ...]:
    """All axes, fastest first, with the project's own from ``name:role`` declarations.

    Raises:
        TopologyError: a declaration is not ``name:data`` or ``name:model``, or repeats an axis.
    """
    own: list[Axis] = []
    known = {axis.name for axis in BUILTIN_AXES}
    for text in declarations:
        name, _, role = text.partition(":")
        if not _AXIS_NAME.fullmatch(name) or role not in ("data", "model"):
            raise TopologyError(
                f"axis declaration {text!r}: expected NAME:data or NAME:model with a NAME of "
                "lower-case letters, such as 'fsdp:data'"
            )
        if name == SINGLE or name in known:
            raise TopologyError(f"axis declaration {text!r}: the axis {name!r} exists already")
        known.add(name)
        own.append(Axis(name, cast("Role", role)))
    tp, cp, dp, pp = BUILTIN_AXES
    model = [axis for axis in own if axis.role == "model"]
    data = [axis for axis in own if axis.role == "data"]
    return (tp, cp, *model, dp, *data, pp)


@dataclass(frozen=True)
class Topology:
    """Sizes of all axes, and where each rank stands.

    Every declared axis exists on every topology; one that the name leaves out has size 1.
    ``axes`` are ordered fastest first.
    """

    axes: tuple[Axis, ...]
    extents: tuple[int, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size by axis name, for every declared axis."""
        return {axis.name: n for axis, n in zip(self.axes, self.extents, strict=True)}

    @cached_property
    def name(self) -> str:
        """The canonical name: data axes first, then pp, tp, cp and the project's model axes."""
        first = {"dp": 0, "pp": 2, "tp": 3, "cp": 4}

        def key(axis: Axis) -> int:
            return first.get(axis.name, 1 if axis.role == "data" else 5)

        parts = [
            f"{axis.name}{self.sizes[axis.name]}"
            for axis in sorted(self.axes, key=key)
            if self.sizes[axis.name] > 1
        ]
        return "x".join(parts) or SINGLE

    @property
    def world_size(self) -> int:
        """How many ranks the topology needs."""
        return math.prod(self.extents)

    def role(self, axis: str) -> Role:
        """Role of an axis.

        Raises:
            TopologyError: no such axis is declared.
        """
        return next(a.role for a in self.axes if a.name == self._known(axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on each axis."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside {self.name}, which has {self.world_size}")
        found: dict[str, int] = {}
        for axis, size in zip(self.axes, self.extents, strict=True):
            rank, found[axis.name] = divmod(rank, size)
        return found

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at ``coordinates``; axes left out count as 0."""
        for name, at in coordinates.items():
            if not 0 <= at < self.sizes[self._known(name)]:
                raise TopologyError(
                    f"coordinate {name}={at} is outside {self.name}, where {name} has size "
                    f"{self.sizes[name]}"
                )
        rank, stride = 0, 1
        for axis, size in zip(self.axes, self.extents, strict=True):
            rank += coordinates.get(axis.name, 0) * stride
            stride *= size
        return rank

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axis`` only, itself included, in order."""
        self._known(axis)
        here = self.coordinates(rank)
        return tuple(self.rank_of({**here, axis: at}) for at in range(self.sizes[axis]))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ranks along ``axis``, each in order of its coordinate."""
        return sorted({self.peers(rank, axis) for rank in range(self.world_size)})

    def mesh_layout(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Shape and axis names for a ``DeviceMesh``: slowest axis first, ranks in plain order."""
        return tuple(reversed(self.extents)), tuple(axis.name for axis in reversed(self.axes))

    def _known(self, axis: str) -> str:
        if axis not in self.sizes:
            raise TopologyError(
                f"axis {axis!r} is not declared: known are {', '.join(self.sizes)}; declare it "
                f"with shardproof_axes = {axis}:data (or :model) in the ini"
            )
        return axis


def parse_topology(text: str, axes: Sequence[Axis] = BUILTIN_AXES) -> Topology:
    """The topology that ``text`` names, in any order and case, with ``x`` or ``×`` between axes.

    Raises:
        TopologyError: not of the form ``cp2``, ``dp2xcp2`` or ``single``; an axis that is not
            declared or stands twice; a size below 1.
    """
    sizes = {axis.name: 1 for axis in axes}
    plain = text.strip().lower()
    if plain == SINGLE:
        return Topology(tuple(axes), tuple(sizes.values()))
    seen: set[str] = set()
    at = 0
    while True:
        part = _PART.match(plain, at)
        if part is None:
            raise TopologyError(
                f"topology {text!r}: expected 'single' or axes with sizes such as cp2 or dp2xcp2, "
                f"got {plain[at:] or 'nothing'!r} at position {at}"
            )
        name, size = part[1], int(part[2])
        if name not in sizes:
            raise TopologyError(
                f"topology {text!r}: unknown axis {name!r}, known are "
                f"{', '.join(sizes)}; declare more with shardproof_axes in the ini"
            )
        if name in seen:
            raise TopologyError(f"topology {text!r}: axis {name!r} stands twice")
        if size < 1:
            raise TopologyError(f"topology {text!r}: the size of {name!r} must be at least 1")
        seen.add(name)
        sizes[name] = size
        at = part.end()
        if at == len(plain):
            return Topology(tuple(axes), tuple(sizes.values()))
        if plain[at] not in "x×":
            raise TopologyError(
                f"topology {text!r}: expected 'x' between axes, got {plain[at]!r} at position {at}"
            )
        at += 1
