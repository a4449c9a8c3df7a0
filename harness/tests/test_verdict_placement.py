"""Placements: what is understood, and what is refused with its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardproof.topology import parse_topology
from shardproof.verdict import Placement, PlacementError, placement_of
from shardproof.verdict.placement import resolve

TOPOLOGY = parse_topology("tp2xcp2")


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(shard={"sp": 0}), "shard names the axis 'sp', known are tp, cp, dp, pp"),
        (Placement(partial=("sp",)), "partial names the axis 'sp'"),
        (Placement(on={"sp": 0}), "on names the axis 'sp'"),
        (Placement(shard={"tp": 2}), "out of range for a value of 2 dimensions"),
        (Placement(shard={"tp": 0}, partial=("tp",)), "in shard and in partial"),
        (Placement(shard={"tp": 0}, on={"tp": 0}), "in on and in shard or partial"),
        (Placement(on={"cp": 2}), "outside dp1|outside tp2xcp2"),
        (Placement(rows=[0, 1]), "2 positions for a value of 4 rows"),
        (Placement(rows=[0, 1, 2, -3]), "negative position -3"),
        (Placement(rows=torch.rand(4)), "vector of integers.*float32"),
        (Placement(rows=torch.ones(4, dtype=torch.bool)), "nonzero"),
        (Placement(rows="abcd"), "expected rows to be source positions"),  # type: ignore[arg-type]
        (Placement(rows=[0, 1, 2, 3], shard={"tp": 0}), "choose one"),
        (Placement(partial=("cp", "cp")), "twice"),
        (Placement(partial=(1,)), "sequence of axes"),  # type: ignore[arg-type]
        (Placement(shard=["tp"]), "mapping such as"),  # type: ignore[arg-type]
        (Placement(shard={"tp": True}), "axes to integers"),
        (Placement(shard={"tp": "0"}), "axes to integers"),  # type: ignore[dict-item]
    ],
)
def test_refused(placement: Placement, words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        resolve(placement, topology=TOPOLOGY, shape=(4, 6))


def test_dimensions_count_from_either_end() -> None:
    placed = resolve(Placement(shard={"tp": -1, "cp": 0}), topology=TOPOLOGY, shape=(4, 6))
    assert placed.shard == {"tp": 1, "cp": 0}


def test_rows_of_a_scalar_are_refused() -> None:
    with pytest.raises(PlacementError, match="no dimension"):
        resolve(Placement(rows=[0]), topology=TOPOLOGY, shape=())


def test_one_axis_may_be_a_plain_word() -> None:
    placed = resolve(
        Placement(partial="cp"),
        topology=TOPOLOGY,
        shape=(4,),
    )
    assert placed.partial == ("cp",)


def test_megatron_attributes() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 6))
    assert placement_of(weight).shard == {}
    attributes: Any = weight
    attributes.tensor_model_parallel, attributes.partition_dim = True, 1
    assert placement_of(weight).shard == {"tp": 1}
    attributes.partition_stride = 2
    with pytest.raises(PlacementError, match="partition_stride 2"):
        placement_of(weight)
    attributes.partition_dim = -1
    with pytest.raises(PlacementError, match="partition_dim -1"):
        placement_of(weight)


class FakeDTensor(torch.Tensor):
    """The attributes of a DTensor that a placement is read from."""

    placements: tuple[object, ...]
    device_mesh: object


def dtensor(names: tuple[str, ...] | None, *placements: object) -> FakeDTensor:
    found = torch.ones(2).as_subclass(FakeDTensor)
    found.placements, found.device_mesh = placements, SimpleNamespace(mesh_dim_names=names)
    return found


def test_dtensor_placements() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    found = placement_of(dtensor(("dp", "cp", "tp"), Replicate(), Partial(), Shard(1)))
    assert found.shard == {"tp": 1}
    assert found.partial == ("cp",)
    with pytest.raises(PlacementError, match="only sums"):
        placement_of(dtensor(("cp",), Partial("avg")))
    with pytest.raises(PlacementError, match="mesh_dim_names"):
        placement_of(dtensor(None, Replicate()))


def test_a_strided_shard_is_the_inner_cut() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found = placement_of(dtensor(("dp", "tp"), _StridedShard(0, split_factor=2), Shard(0)))
    assert list(found.shard.items()) == [("tp", 0), ("dp", 0)]
