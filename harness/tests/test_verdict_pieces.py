"""Pieces of a value: slices, rows, parts of a sum, and pieces that do not make the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import VALUE, Body, Rank, World, numbers, world_of

from shardproof.topology import parse_topology
from shardproof.verdict import Placement


@pytest.fixture
def world(tmp_path: Path) -> World:
    return world_of(tmp_path, VALUE)


SHARDS: dict[str, tuple[str, dict[str, int], Any]] = {
    "rows": ("tp2", {"tp": 0}, lambda c: VALUE.chunk(2, 0)[c["tp"]]),
    "columns": ("tp2", {"tp": 1}, lambda c: VALUE.chunk(2, 1)[c["tp"]]),
    "from the end": ("tp2xcp2", {"tp": -1}, lambda c: VALUE.chunk(2, 1)[c["tp"]]),
    "both": (
        "tp2xcp2",
        {"tp": 1, "cp": 0},
        lambda c: VALUE.chunk(2, 0)[c["cp"]].chunk(2, 1)[c["tp"]],
    ),
    "one dimension twice": (
        "dp2xtp2",
        {"dp": 0, "tp": 0},
        lambda c: VALUE.chunk(2, 0)[c["dp"]].chunk(2, 0)[c["tp"]],
    ),
    "one dimension twice, the other way": (
        "dp2xtp2",
        {"tp": 0, "dp": 0},
        lambda c: VALUE.chunk(2, 0)[c["tp"]].chunk(2, 0)[c["dp"]],
    ),
    "uneven rows": ("cp2", {"cp": 0}, lambda c: VALUE.split([5, 7], 0)[c["cp"]]),
    "uneven columns": ("cp2", {"cp": 1}, lambda c: VALUE.split([5, 11], 1)[c["cp"]]),
    "a slice of the even size among uneven ones": (
        "cp3",
        {"cp": 0},
        lambda c: VALUE.split([3, 4, 5], 0)[c["cp"]],
    ),
    "an empty slice": ("cp2", {"cp": 0}, lambda c: VALUE.split([12, 0], 0)[c["cp"]]),
    "chunks that run out": ("cp5", {"cp": 0}, lambda c: VALUE.split([3, 3, 3, 3, 0])[c["cp"]]),
    "an axis of size 1": ("cp2", {"tp": 0}, lambda _c: VALUE),
}


@pytest.mark.parametrize("name", SHARDS)
def test_slices(world: World, name: str) -> None:
    topology, shard, piece = SHARDS[name]
    verdict = world.one(
        topology, lambda rank: rank.observe("x", piece(rank.coordinates), shard=shard)
    )
    assert (verdict["outcome"], verdict["kind"]) == ("passed", "shard")

    def wrong(rank: Rank) -> None:
        mine = piece(rank.coordinates).clone()
        if mine.numel() and rank.coordinates == parse_topology(topology).coordinates(0):
            mine[-1, -1] += 1e-6
        rank.observe("x", mine, shard=shard)

    verdict = world.one(topology, wrong)
    assert verdict["outcome"] == "diverged"
    first = piece(parse_topology(topology).coordinates(0))
    assert verdict["details"]["row"] == first.shape[0] - 1
    assert verdict["details"]["rank"] == 0


def test_the_wrong_slice_on_each_rank(world: World) -> None:
    def body(rank: Rank) -> None:
        rank.observe("x", VALUE.chunk(2)[1 - rank.coordinates["tp"]], shard={"tp": 0})

    assert world.one("tp2", body)["outcome"] == "diverged"
    assert "rows 0 and 6 are swapped" in world.text


def test_all_ranks_hold_slice_zero(world: World) -> None:
    assert (
        world.one("tp2", lambda rank: rank.observe("x", VALUE.chunk(2)[0], shard={"tp": 0}))[
            "outcome"
        ]
        == "diverged"
    )


def test_slices_that_do_not_add_up(world: World) -> None:
    verdict = world.one("tp2", lambda rank: rank.observe("x", VALUE[:5], shard={"tp": 0}))
    assert verdict["outcome"] == "coverage"
    assert "add up to 5 + 5 = 10, expected 12" in verdict["message"]
    verdict = world.one("tp2", lambda rank: rank.observe("x", VALUE, shard={"tp": 0}))
    assert "every rank gave the whole, so it is not sharded" in verdict["message"]


def test_uneven_slices_too_large_to_keep(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.verdict.candidate.KEPT_VALUE", 100)

    def body(rank: Rank) -> None:
        rank.observe("x", VALUE.split([3, 4, 5])[rank.coordinates["cp"]], shard={"cp": 0})

    verdict = world.one("cp3", body)
    assert verdict["outcome"] == "coverage"
    assert "rows=" in verdict["message"]


def by_rows(*positions: list[int], axis: str = "cp", **options: Any) -> Body:
    def body(rank: Rank) -> None:
        mine = positions[rank.coordinates[axis]]
        rank.observe("x", VALUE[mine], rows=torch.tensor(mine, dtype=torch.int32), **options)

    return body


EVEN, ODD = list(range(0, 12, 2)), list(range(1, 12, 2))


@pytest.mark.parametrize(
    "positions",
    [(EVEN, ODD), (ODD[::-1], EVEN), ([7, 3], [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]), (range(12), [])],
)
@pytest.mark.parametrize("topology", ["cp2", "tp2xcp2", "dp2xcp2"])
def test_rows(world: World, topology: str, positions: tuple[Any, Any]) -> None:
    first, second = map(list, positions)
    verdict = world.one(topology, by_rows(first, second))
    assert (verdict["outcome"], verdict["kind"]) == ("passed", "rows")


def test_rows_over_data_parallel_ranks(world: World) -> None:
    assert world.one("dp2", by_rows(EVEN, ODD, axis="dp"))["outcome"] == "passed"
    # Each of them may also hold all rows, in an order and a split of its own.
    plans = [[EVEN, ODD], [[*ODD, 0], EVEN[1:]]]

    def body(rank: Rank) -> None:
        mine = plans[rank.coordinates["dp"]][rank.coordinates["cp"]]
        rank.observe("x", VALUE[mine], rows=mine)

    assert world.one("dp2xcp2", body)["outcome"] == "passed"


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ((EVEN, ODD[1:]), "row 1 is missing"),
        ((EVEN, [0, *ODD]), "row 0 is held more than once"),
        ((EVEN, [0, *ODD[1:]]), "row 1 is missing (on ranks [0, 1]); row 0 is held more than once"),
        ((EVEN, EVEN), "6 rows (1, 3, 5, 7, 9, 11) are missing"),
        (([0, 0, *EVEN[1:]], ODD), "row 0 is held more than once"),
    ],
)
def test_rows_with_a_hole_or_held_twice(world: World, positions: Any, words: str) -> None:
    verdict = world.one("cp2", by_rows(*positions))
    assert verdict["outcome"] == "coverage"
    assert words in verdict["message"]


def test_rows_beyond_the_end(world: World) -> None:
    verdict = world.one("cp2", lambda rank: rank.observe("x", VALUE[:2], rows=[0, 12]))
    assert verdict["outcome"] == "diverged"
    assert "a row at 12, the whole has rows 0 to 11" in verdict["message"]


def test_rows_in_the_wrong_order(world: World) -> None:
    def body(rank: Rank) -> None:
        mine = (EVEN, ODD)[rank.coordinates["cp"]]
        rank.observe("x", VALUE[mine[::-1]], rows=mine)

    verdict = world.one("cp2", body)
    assert verdict["outcome"] == "diverged"
    assert "rows 0 and 10 are swapped" in world.text


def test_rows_with_cut_columns_and_partial_sums(world: World) -> None:
    def body(rank: Rank, *, factor: float = 0.5) -> None:
        at = rank.coordinates
        mine = (EVEN, ODD)[at["cp"]]
        rank.observe(
            "x",
            VALUE[mine].chunk(2, 1)[at["tp"]] * factor,
            rows=mine,
            shard={"tp": 1},
            partial=("dp",),
        )

    verdict = world.one("dp2xtp2xcp2", body)
    assert (verdict["outcome"], verdict["kind"]) == ("passed", "shard+rows+partial")
    assert world.one("dp2xtp2xcp2", lambda rank: body(rank, factor=1.0))["outcome"] == "diverged"
    assert "α = cp = 2 or tp = 2 or dp = 2" in world.text


def test_a_fault_spread_over_the_slices_of_a_row_is_seen(world: World) -> None:
    """Each slice of the row is below its gate, the row is above it."""
    limit = world.same("single", VALUE)["row_gate"] * float(VALUE[4].norm()) * 1.2e-16

    def body(rank: Rank) -> None:
        wrong = VALUE.clone()
        wrong[4] += limit * 1.4 / 4 * wrong[4] / wrong[4].abs()
        rank.observe("x", wrong.chunk(4, 1)[rank.coordinates["tp"]], shard={"tp": 1})

    verdict = world.one("tp4", body)
    assert verdict["outcome"] == "diverged"
    assert float(verdict["row_ratio"]) > verdict["row_gate"]
    assert verdict["ratio"] < verdict["gate"]


def test_a_coverage_failure_shows_the_shape_of_the_rank_that_it_names(world: World) -> None:
    """Shares of different sizes: the named rank's own shape, not that of the last one."""
    held = {0: list(range(8)), 1: [6, 7, 8, 9, 10, 11]}

    def body(rank: Rank) -> None:
        rows = held[rank.coordinates["cp"]]
        rank.observe("x", VALUE[rows], rows=rows)

    verdict = world.one("cp2", body)
    assert verdict["outcome"] == "coverage"
    named = verdict["details"]["rank"]
    assert verdict["details"]["actual"] == f"float64[{len(held[named])}, 16]"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard": {"sp": 0}}, "known are tp, cp, dp, pp"),
        ({"rows": [0, 1]}, "2 positions for a value of 12 rows"),
        ({"partial": "cq"}, "names the axis 'cq'"),
        ({"on": {"cp": 7}}, "outside cp2"),
    ],
)
def test_placements_that_cannot_hold(world: World, options: Any, words: str) -> None:
    verdict = world.one("cp2", lambda rank: rank.observe("x", VALUE, **options))
    assert verdict["outcome"] == "invalid"
    assert words in verdict["message"]


def test_gradients_with_placements(tmp_path: Path) -> None:
    world = World(tmp_path)
    weight, norm = numbers(8, 8), numbers(8, seed=2)

    class Parameters:
        """A parameter that knows how megatron-core cut it."""

        tensor_model_parallel, partition_dim = True, 0

    def body(rank: Rank) -> None:
        if not rank.recorder.judging:
            named: list[Any] = [("w", rank.noise(weight), None), ("n", rank.noise(norm), None)]
            named += [("frozen", None, None), ("zero", torch.zeros(3), None)]
            named += [("own", rank.noise(weight), {"tp": 0}), ("m", rank.noise(weight), None)]
        else:
            tp, cp = rank.coordinates["tp"], rank.coordinates["cp"]
            own = weight.chunk(2, 0)[tp].clone()
            vars(own).update(tensor_model_parallel=True, partition_dim=0)
            named = [
                ("w", weight.chunk(2, 1)[tp], Placement(shard={"tp": 1})),
                ("n", norm * (0.25, 0.75)[cp], {"partial": ("cp",)}),
                ("frozen", None, {"tp": 1}),
                ("zero", torch.zeros(3), None),
                ("own", weight.chunk(2, 0)[tp], {"tp": 0}),
                ("m", own, None),
            ]
        rank.recorder.observe_gradients(named, prefix="g", zero={"zero"})

    assert world.reference(body)["failures"] == []
    verdicts = world.cell("tp2xcp2", body)
    assert [(one["name"], one["outcome"], one["kind"]) for one in verdicts] == [
        ("g.w", "passed", "shard"),
        ("g.n", "passed", "partial"),
        ("g.frozen", "passed", "replicated"),
        ("g.zero", "passed", "replicated"),
        ("g.own", "passed", "shard"),
        ("g.m", "passed", "shard"),
    ]
