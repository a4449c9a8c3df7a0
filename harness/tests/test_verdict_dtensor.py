"""Real DTensors and asynchronous collectives, over a process group that only pretends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.verdict_support import Rank, World, numbers

from shardproof.topology import parse_topology
from shardproof.verdict import placement_of
from shardproof.verdict.candidate import cuts

VALUE = numbers(8, 12)


@contextmanager
def pretended_mesh(rank: int, topology: str) -> Iterator[Any]:
    """A DeviceMesh of the topology as ``rank`` sees it; its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = parse_topology(topology)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=found.world_size)
    try:
        shape, names = found.mesh_layout()
        yield dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def observing(topology: str, placements: dict[str, Any], local: Any, **options: Any) -> Any:
    """A case that observes a DTensor of these placements (others replicate)."""
    from torch.distributed.tensor import DTensor, Replicate

    found = parse_topology(topology)

    def body(rank: Rank) -> None:
        if not rank.recorder.judging:
            rank.observe("x", rank.noise(VALUE))
            return
        with pretended_mesh(found.rank_of(rank.coordinates), topology) as mesh:
            where = [placements.get(axis, Replicate()) for axis in mesh.mesh_dim_names]
            mine = local(rank.coordinates)
            rank.observe("x", DTensor.from_local(mine, mesh, where, run_check=False), **options)

    return body


def test_shards_and_partial_sums(tmp_path: Path) -> None:
    from torch.distributed.tensor import Partial, Shard

    body = observing(
        "tp2xcp2",
        {"tp": Shard(1), "cp": Partial()},
        lambda at: VALUE.chunk(2, 1)[at["tp"]] * (0.25, 0.75)[at["cp"]],
    )
    world = World(tmp_path)
    world.reference(body)
    verdict = world.one("tp2xcp2", body)
    assert (verdict["outcome"], verdict["kind"]) == ("passed", "shard+partial")


def test_a_placement_that_contradicts_the_dtensor(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    def body(**options: Any) -> Any:
        return observing("tp2", {"tp": Shard(0)}, lambda at: VALUE.chunk(2)[at["tp"]], **options)

    world = World(tmp_path)
    world.reference(body())
    assert world.one("tp2", body(shard={"tp": 0}))["outcome"] == "passed"
    verdict = world.one("tp2", body(shard={"tp": 1}))
    assert verdict["outcome"] == "invalid"
    assert "whose own placement says {'tp': 0}" in verdict["message"]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("strided", [False, True])
def test_two_cuts_of_one_dimension_stand_where_torch_puts_them(rank: int, strided: bool) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    topology = parse_topology("dp2xtp2")
    with pretended_mesh(rank, "dp2xtp2") as mesh:
        outer: Any = _StridedShard(0, split_factor=2) if strided else Shard(0)
        by_axis = {"dp": outer, "tp": Shard(0)}
        where = [by_axis.get(axis, Replicate()) for axis in mesh.mesh_dim_names]
        shape, offset = compute_local_shape_and_global_offset((8, 12), mesh, where)
        value = DTensor.from_local(torch.zeros(2, 12), mesh, where, run_check=False)
        shard = placement_of(value).shard
    at, count = cuts(shard, topology, topology.coordinates(rank))[0]
    assert (shape[0], count) == (2, 4)
    assert at * 2 == offset[0]


def test_an_asynchronous_result_is_waited_for(tmp_path: Path) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(VALUE)))

    def body(rank: Rank) -> None:
        rank.observe("x", AsyncCollectiveTensor(VALUE.clone()))

    assert world.one("cp2", body)["outcome"] == "passed"
