"""The ``rank`` fixture's value: where this process stands, and what it observes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardproof.topology import Topology

if TYPE_CHECKING:
    from shardproof.verdict import Placement, Recorder

Item = TypeVar("Item")


class Rank:
    """One rank of a topology, or the single-device reference of a case.

    Attributes:
        topology: sizes and order of all axes; ``single`` on the reference.
        index: this rank's number in the topology, 0 on the reference.
        coordinates: position on every axis by name; size-1 axes included.
        mesh: ``DeviceMesh`` over all axes by name, slowest first.
        device: where the case's tensors belong.
        dtype: floating dtype of the run (``--parity-dtype``).
        is_reference: whether this is the reference run, which has one device.
        case_dir: a directory shared by the reference and all topologies of the case.
        seed: ``--parity-seed``.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        index: int,
        mesh: DeviceMesh,
        groups: Mapping[str, ProcessGroup],
        dtype: torch.dtype,
        is_reference: bool,
        case_dir: Path,
        seed: int,
        recorder: Recorder,
    ) -> None:
        self.topology = topology
        self.index = index
        self.coordinates = topology.coordinates(index)
        self.mesh = mesh
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.is_reference = is_reference
        self.case_dir = case_dir
        self.seed = seed
        self._groups = groups
        self._recorder = recorder

    def __repr__(self) -> str:
        role = "reference" if self.is_reference else f"rank {self.index} of {self.topology.name}"
        return f"<{role} {str(self.dtype).removeprefix('torch.')} on {self.device}>"

    @property
    def world_size(self) -> int:
        """Number of ranks of the topology."""
        return self.topology.world_size

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``; 1 when the topology leaves it out.

        Raises:
            TopologyError: the axis is not declared.
        """
        self.topology.role(axis)
        return self.topology.sizes[axis]

    def group(self, axis: str) -> ProcessGroup:
        """Process group of this rank along ``axis``, of size 1 when the topology leaves it out.

        Raises:
            TopologyError: the axis is not declared.
        """
        self.topology.role(axis)
        return self._groups[axis]

    def generator(self, name: str) -> torch.Generator:
        """A new generator whose numbers depend on ``--parity-seed`` and ``name`` alone.

        Every rank of every topology, and the reference, draws the same numbers.
        """
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device=self.device)
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        return generator

    def split(self, items: Sequence[Item], axis: str = "dp") -> list[Item]:
        """The items that this rank's coordinate on ``axis`` works on: every n-th one.

        The reference gets all of them; a rank may get none.
        """
        return list(items[self.coordinates[self._axis(axis)] :: self.size(axis)])

    def rows(self, count: int, axis: str = "cp") -> torch.Tensor:
        """Positions of this rank's share of ``count`` rows split contiguously along ``axis``.

        Returns:
            int64 tensor of row numbers in order; shares differ by at most one row, first ones
            larger. The reference gets ``arange(count)``.
        """
        shares = torch.arange(count).tensor_split(self.size(axis))
        return shares[self.coordinates[self._axis(axis)]]

    def observe(
        self,
        name: str,
        value: object,
        *,
        shard: Mapping[str, int] | None = None,
        rows: torch.Tensor | Sequence[int] | None = None,
        partial: Sequence[str] = (),
        on: Mapping[str, int] | None = None,
        exact: bool = False,
        zero: bool = False,
    ) -> None:
        """Compare ``value`` with what the reference observed under the same name.

        Never raises and never communicates: problems and verdicts come at the end of the case.
        Without a placement the value must be equal on all ranks of every model axis, and present
        on at least one coordinate of each data axis. Placements combine.

        Args:
            name: unique within the case.
            value: a tensor, number, None, or nested mappings and sequences of these. Integers and
                booleans compare exactly; the value is taken as it is now.
            shard: this rank holds a slice, ``{"tp": 0}``: along tensor dimension 0 by tp.
            rows: this rank holds these rows of the full tensor (source positions); all ranks
                together must hold each row exactly once.
            partial: the sum over these axes is the value.
            on: only ranks at these coordinates hold the value, ``{"cp": 0}``.
            exact: compare floating values bit by bit.
            zero: a zero reference is meant; the candidate must be zero within its noise too.
        """
        self._recorder.observe(
            name, value, shard=shard, rows=rows, partial=partial, on=on, exact=exact, zero=zero
        )

    def observe_gradients(
        self,
        named: Iterable[tuple[str, torch.Tensor | None, Placement | Mapping[str, object] | None]],
        *,
        prefix: str = "grad",
        zero: Collection[str] = (),
    ) -> None:
        """Observe ``(full name, gradient or None, placement)`` triples as ``prefix.name``.

        A placement is a mapping of keywords of :meth:`observe`, such as
        ``{"shard": {"tp": 0}}``, or None for a replicated gradient. None for a gradient means that
        the parameter has none, which is not the same as zero; ``zero`` names gradients that are
        meant to be zero.
        """
        self._recorder.observe_gradients(named, prefix=prefix, zero=zero)

    def _axis(self, axis: str) -> str:
        self.topology.role(axis)
        return axis
