"""Names, rank order and coordinates of topologies."""

from __future__ import annotations

import pytest

from shardproof.topology import BUILTIN_AXES, TopologyError, declare_axes, parse_topology


@pytest.mark.parametrize(
    ("text", "name", "world"),
    [
        ("single", "single", 1),
        ("cp1", "single", 1),
        ("cp2", "cp2", 2),
        ("CP4", "cp4", 4),
        ("cp2xdp2", "dp2xcp2", 4),
        ("cp2×tp2", "tp2xcp2", 4),
        ("tp2xcp2xdp2", "dp2xtp2xcp2", 8),
        ("dp1xcp3", "cp3", 3),
        ("pp2xdp3", "dp3xpp2", 6),
    ],
)
def test_any_spelling_has_one_canonical_name(text: str, name: str, world: int) -> None:
    topology = parse_topology(text)
    assert topology.name == name
    assert topology.world_size == world
    assert parse_topology(name) == topology


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got 'nothing'"),
        ("cp", "expected 'single'"),
        ("cp2x", "got 'nothing' at position 4"),
        ("cp2,dp2", "expected 'x' between axes, got ','"),
        ("zz2", "unknown axis 'zz'"),
        ("cp2xcp2", "stands twice"),
        ("cp0", "at least 1"),
        ("2cp", "got '2cp' at position 0"),
        ("cp-2", "expected 'single'"),
    ],
)
def test_a_name_that_cannot_be_parsed_says_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(TopologyError, match="topology") as caught:
        parse_topology(text)
    assert says in str(caught.value)


def test_tp_varies_fastest_then_cp_then_dp() -> None:
    topology = parse_topology("dp2xcp2xtp2")
    assert topology.coordinates(1) == {"tp": 1, "cp": 0, "dp": 0, "pp": 0}
    assert topology.coordinates(2) == {"tp": 0, "cp": 1, "dp": 0, "pp": 0}
    assert topology.coordinates(4) == {"tp": 0, "cp": 0, "dp": 1, "pp": 0}
    assert topology.peers(5, "tp") == (4, 5)
    assert topology.peers(5, "dp") == (1, 5)
    assert topology.groups("cp") == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_coordinates_and_ranks_are_inverse_on_every_topology() -> None:
    for text in ("single", "cp3", "dp2xcp2", "tp2xcp3", "pp2xdp2xtp2"):
        topology = parse_topology(text)
        ranks = range(topology.world_size)
        assert [topology.rank_of(topology.coordinates(rank)) for rank in ranks] == list(ranks)


def test_ranks_and_coordinates_outside_are_refused() -> None:
    topology = parse_topology("cp2")
    with pytest.raises(TopologyError, match="rank 2 is outside cp2"):
        topology.coordinates(2)
    with pytest.raises(TopologyError, match="coordinate cp=2 is outside"):
        topology.rank_of({"cp": 2})
    with pytest.raises(TopologyError, match="axis 'ep' is not declared"):
        topology.peers(0, "ep")


def test_mesh_layout_lists_the_slowest_axis_first() -> None:
    shape, names = parse_topology("dp2xtp3").mesh_layout()
    assert names == ("pp", "dp", "cp", "tp")
    assert shape == (1, 2, 1, 3)


def test_own_axes_stand_beside_their_role() -> None:
    axes = declare_axes(["expert:model", "fsdp:data"])
    assert [axis.name for axis in axes] == ["tp", "cp", "expert", "dp", "fsdp", "pp"]
    topology = parse_topology("expert2xfsdp2xcp2", axes)
    assert topology.name == "fsdp2xcp2xexpert2"
    assert topology.role("fsdp") == "data"
    assert topology.role("expert") == "model"
    assert declare_axes([]) == BUILTIN_AXES


@pytest.mark.parametrize("text", ["ep", "ep:other", "EP:data", "cp:model", "single:data", "2:data"])
def test_a_bad_axis_declaration_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="axis declaration"):
        declare_axes([text])
