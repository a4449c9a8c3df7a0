"""Process groups and meshes of a rank: made for a topology, kept while provably clean.

A kept group is clean when nothing of an earlier case can still be on its wire: the case ended on
every rank, every member counts the same number of operations on it, and no point-to-point
operation was used (an orphan send would be received by a later case). The controller compares the
counts; this module reports them. The ledger counts point-to-point operations as it records them;
without it they are counted by themselves.
"""

from __future__ import annotations

import datetime as dt
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardproof.rank import gloo
from shardproof.topology import Topology

# The controller ends a hang, with every rank's stack; a group that gives up first would hide it.
_NEVER = dt.timedelta(days=1)
_POINT_TO_POINT = ("send", "recv", "recv_anysource")


@dataclass
class _Usage:
    """How often this process used a point-to-point operation."""

    point_to_point: int = 0
    watched: bool = False


_usage = _Usage()


@dataclass
class TopologyGroups:
    """Groups of one topology on this rank: one for each axis, and the mesh over them.

    ``megatron`` is megatron-core's parallel state for the topology, once a case asked for it.
    """

    by_axis: dict[str, ProcessGroup]
    mesh: DeviceMesh
    megatron: dict[str, object] | None = None


@dataclass
class RankGroups:
    """All process groups of this rank, kept from case to case."""

    rank: int
    size: int
    world: ProcessGroup | None = None
    own: ProcessGroup | None = None
    topologies: dict[str, TopologyGroups] = field(default_factory=dict)
    _kept: set[ProcessGroup] = field(default_factory=set)
    _point_to_point: int = 0
    _store: dist.Store | None = None
    _generation: int = 0

    def ensure(
        self, topology: Topology, rendezvous: Path, *, megatron: bool, ledger: bool
    ) -> TopologyGroups:
        """Groups for ``topology``; the world is made when there is none.

        ``rendezvous`` is a private directory of this fleet; ``ledger`` says whether the case's
        operations are recorded, and point-to-point operations counted, elsewhere.
        """
        if not ledger:
            _watch_point_to_point()
        gloo.share_device()
        if self.world is None:
            dist.init_process_group(
                "gloo",
                store=self._new_store(rendezvous),
                rank=self.rank,
                world_size=self.size,
                timeout=_NEVER,
            )
            self.world = cast("ProcessGroup", dist.group.WORLD)
            self.own = self.world if self.size == 1 else _alone(self.rank)
        if topology.name not in self.topologies:
            self.topologies[topology.name] = self._make(topology)
        groups = self.topologies[topology.name]
        if megatron:
            from shardproof import megatron as integration

            if groups.megatron is None:
                groups.megatron = integration.make_parallel_state(topology)
            integration.activate(groups.megatron)
        self._kept = set(dist.distributed_c10d._world.pg_map)
        self._point_to_point = _usage.point_to_point
        return groups

    def _new_store(self, rendezvous: Path) -> dist.Store:
        """A store that no earlier group has used: a new prefix of one store that is kept.

        File stores are polled every 10 ms, which would double what new groups cost.
        """
        if self._store is None:
            self._store = _connect(rendezvous, self.rank, self.size)
        self._generation += 1
        return dist.PrefixStore(f"generation{self._generation}", self._store)

    def _make(self, topology: Topology) -> TopologyGroups:
        by_axis: dict[str, ProcessGroup] = {}
        for axis in topology.axes:
            if topology.sizes[axis.name] == 1:
                by_axis[axis.name] = cast("ProcessGroup", self.own)
                continue
            # Every rank makes every group, in one order: the names that torch gives to groups which
            # their members make alone depend on how many groups each of them is in already.
            for members in topology.groups(axis.name):
                group = dist.new_group(list(members))
                if self.rank in members:
                    by_axis[axis.name] = cast("ProcessGroup", group)
        shape, names = topology.mesh_layout()
        ranks = torch.arange(topology.world_size, dtype=torch.int).view(shape)
        mesh = DeviceMesh.from_group(
            [by_axis[name] for name in names], "cpu", mesh=ranks, mesh_dim_names=names
        )
        return TopologyGroups(by_axis, mesh)

    def end_case(self, *, megatron: bool, messages: int = 0) -> dict[str, Any]:
        """Drop the groups that the case made; say what the controller needs to judge cleanness.

        Args:
            megatron: whether the case had megatron-core's parallel state.
            messages: point-to-point operations that the ledger recorded.

        Returns:
            ``intact``: the kept groups still exist and nothing of the case's was point to point.
            ``counts``: operations so far by kept group of several ranks, ``{"1@0-1": n}``.
        """
        if megatron:
            from shardproof import megatron as integration

            integration.deactivate()
        if self.world is None:
            return {"intact": True, "counts": {}}
        if not dist.is_initialized() or dist.group.WORLD is not self.world:
            return {"intact": False, "counts": {}}
        existing = dist.distributed_c10d._world.pg_map
        for group in [group for group in existing if group not in self._kept]:
            dist.destroy_process_group(group)
        counts: dict[str, int] = {}
        for group in self._kept:
            members = dist.get_process_group_ranks(group)
            if group in existing and len(members) > 1:
                key = f"{group.group_name}@{'-'.join(map(str, members))}"
                counts[key] = cast("Any", group)._get_sequence_number_for_group()
        used = _usage.point_to_point - self._point_to_point + messages
        intact = used == 0 and self._kept <= set(existing)
        return {"intact": intact, "counts": counts}

    def close(self) -> None:
        """Destroy every group; the next case makes them anew."""
        self.topologies.clear()
        self._kept.clear()
        self.world = None
        self.own = None
        if dist.is_initialized():
            dist.destroy_process_group()


def same_counts(reports: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every kept group is intact and counts as many operations on each of its members."""
    if not all(report["intact"] for report in reports):
        return False
    for report in reports:
        for key, count in report["counts"].items():
            members = [int(rank) for rank in key.rpartition("@")[2].split("-")]
            if any(reports[rank]["counts"].get(key) != count for rank in members):
                return False
    return True


def _connect(rendezvous: Path, rank: int, size: int) -> dist.Store:
    """The store of this fleet: rank 0 serves it on the loopback interface alone."""
    if size == 1:
        return dist.HashStore()
    where = rendezvous / "store-port"
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        # The store takes over the descriptor; left to itself it would listen on every interface.
        served = dist.TCPStore(
            "127.0.0.1",
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        part = where.with_suffix(".part")
        part.write_text(str(port), encoding="ascii")
        part.replace(where)
        return served
    while not where.exists():  # the controller's limit ends this, with a stack that shows it
        time.sleep(0.0005)
    port = int(where.read_text(encoding="ascii"))
    return dist.TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)


def _alone(rank: int) -> ProcessGroup:
    """The group of one rank, for every axis of size 1; no other rank takes part in making it."""
    return cast("ProcessGroup", dist.new_group([rank], use_local_synchronization=True))


def _watch_point_to_point() -> None:
    """Count sends and receives, once per process; every public path goes through these methods."""
    if _usage.watched:
        return
    _usage.watched = True
    for name in _POINT_TO_POINT:
        setattr(ProcessGroup, name, _counting(getattr(ProcessGroup, name)))


def _counting(method: Callable[..., object]) -> Callable[..., object]:
    def counted(*args: object, **kwargs: object) -> object:
        _usage.point_to_point += 1
        return method(*args, **kwargs)

    counted.__name__ = method.__name__
    counted.__doc__ = method.__doc__
    return counted
