"""Ranks together: who must hold a value, replicas, ranks that disagree, and who judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import VALUE, Body, Rank, World, world_of

from shardproof.topology import Axis, declare_axes, parse_topology
from shardproof.verdict import Recorder, merge
from shardproof.verdict.replicas import ulps


@pytest.fixture
def world(tmp_path: Path) -> World:
    return world_of(tmp_path, VALUE)


def at(**wanted: int) -> Any:
    """Whether a rank stands at these coordinates."""
    return lambda rank: all(rank.coordinates[axis] == index for axis, index in wanted.items())


def some(where: Any, value: object = VALUE, **options: Any) -> Body:
    """A case that observes on some ranks."""

    def body(rank: Rank) -> None:
        if where(rank):
            rank.observe("x", value, **options)

    return body


def test_a_model_axis_needs_the_value_on_all_its_ranks(world: World) -> None:
    verdict = world.one("tp2xcp2", some(lambda rank: not at(tp=1, cp=1)(rank)))
    assert verdict["outcome"] == "ranks disagree"
    assert "and not on rank 3 (tp=1, cp=1)" in verdict["message"]


def test_a_data_axis_needs_it_on_one_coordinate(world: World) -> None:
    assert world.one("dp2xcp2", some(at(dp=1)))["outcome"] == "passed"
    assert world.one("dp2xcp2", some(at(dp=1, cp=1)))["outcome"] == "ranks disagree"


def test_axes_of_the_projects_own_have_their_role(tmp_path: Path, world: World) -> None:
    axes = declare_axes(["fsdp:data", "ep:model"])
    assert Axis("fsdp", "data") in axes
    for name, outcome in (("fsdp2", "passed"), ("ep2", "ranks disagree")):
        topology = parse_topology(name, axes)
        recorders = [
            Recorder(
                role="candidate",
                topology=topology,
                rank=rank,
                reference_dir=world.reference_dir,
                cell_dir=tmp_path / name,
                dtype=torch.float64,
            )
            for rank in range(2)
        ]
        recorders[1].observe("x", VALUE)
        sealed = [recorder.seal() for recorder in recorders]
        assert recorders[0].judge(sealed)[0]["outcome"] == outcome


def test_on_says_where_the_value_is(world: World) -> None:
    assert world.one("tp2xcp2", some(at(cp=0), on={"cp": 0}))["outcome"] == "passed"

    def everywhere(rank: Rank) -> None:
        # Elsewhere the value does not count, whatever it is.
        value: object = VALUE if rank.coordinates["cp"] == 0 else "nothing"
        rank.observe("x", value, on={"cp": 0})

    verdict = world.one("tp2xcp2", everywhere)
    assert (verdict["outcome"], verdict["kind"]) == ("passed", "on")
    missing = world.one("tp2xcp2", some(at(tp=0), on={"cp": 0}))
    assert missing["outcome"] == "ranks disagree"
    wrong = world.one("tp2xcp2", some(at(), VALUE + 1, on={"cp": 0}))
    assert wrong["outcome"] == "diverged"
    nobody = world.one("tp2xcp2", some(at(cp=1), on={"cp": 0}))
    assert nobody["outcome"] == "missing"
    assert "only on ranks that on={'cp': 0} leaves out" in nobody["message"]


def test_missing_and_extra(world: World) -> None:
    def renamed(rank: Rank) -> None:
        rank.observe("y", VALUE)

    verdicts = world.cell("cp2", renamed)
    assert [(one["name"], one["outcome"]) for one in verdicts] == [
        ("x", "missing"),
        ("y", "extra"),
    ]
    assert "observed by the reference and by no rank here" in world.text
    assert "and not by the reference" in world.text


def test_an_extra_name_on_one_rank(world: World) -> None:
    def body(rank: Rank) -> None:
        rank.observe("x", VALUE)
        if rank.coordinates["cp"] == 1:
            rank.observe("more", 1)

    verdicts = world.cell("cp2", body)
    assert [one["outcome"] for one in verdicts] == ["passed", "extra"]
    assert "rank 1 (cp=1)" in verdicts[1]["message"]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            lambda rank: rank.observe("x", None),
            "tensor on rank 0 (cp=0) and none on rank 1",
        ),
        (lambda rank: rank.observe("x", VALUE.float()), "dtype is float64 on rank 0"),
        (lambda rank: rank.observe("x", VALUE[:6], shard={"cp": 0}), "shard is nothing on rank 0"),
        (lambda rank: rank.observe("x", VALUE, partial=("cp",)), "partial is nothing on rank 0"),
        (lambda rank: rank.observe("x", VALUE, rows=range(12)), "rows is False on rank 0"),
        (lambda rank: rank.observe("x", VALUE, exact=True), "exact is False on rank 0"),
        (lambda rank: rank.observe("x", VALUE, on={"cp": 1}), "on is nothing on rank 0"),
    ],
)
def test_ranks_that_call_differently(world: World, second: Any, words: str) -> None:
    def body(rank: Rank) -> None:
        if rank.coordinates["cp"] == 0:
            rank.observe("x", VALUE)
        else:
            second(rank)

    verdict = world.one("cp2", body)
    assert verdict["outcome"] == "ranks disagree"
    assert words in verdict["message"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [1, 3])
def test_replicas_that_differ_by_some_ulp(tmp_path: Path, dtype: torch.dtype, steps: int) -> None:
    value = VALUE.to(dtype)
    world = world_of(tmp_path, value)

    def body(rank: Rank) -> None:
        mine = value.clone()
        if rank.coordinates["cp"] == 1:
            for _ in range(steps):
                mine[7, 5] = torch.nextafter(mine[7, 5], torch.zeros((), dtype=dtype))
        rank.observe("x", mine)

    verdict = world.one("cp2", body)
    assert verdict["outcome"] == "replicas differ"
    assert verdict["message"] == f"replicas differ by {steps} ulp in 1 of 192 elements"
    assert verdict["details"]["rank"] == 1
    assert "worst in row 7" in world.text
    assert "on rank 0 (cp=0)" in world.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("rows", [None, [7, 0, 3], [2, 1]])
def test_a_wrong_value_of_which_ranks_hold_different_ones(
    tmp_path: Path, rows: list[int] | None, dtype: torch.dtype
) -> None:
    """One number, or two parts of one value of rows; the first has the row that differs."""
    whole = torch.arange(8).to(dtype) + 1
    value = whole if rows else whole[7]
    mine = [rows, [row for row in range(8) if row not in rows]] if rows else []

    def body(rank: Rank, *, step: int) -> None:
        tp, cp = rank.coordinates["tp"], rank.coordinates["cp"]
        if not rank.recorder.judging:
            rank.observe("x", rank.noise(value) if dtype.is_floating_point else value)
        elif rows is None:
            rank.observe("x", value * 2 + tp * step)
        else:
            part = whole[mine[cp]] * 2
            part[0] += tp * step * (cp == 0)
            rank.observe("x", part, rows=mine[cp])

    world = World(tmp_path)
    world.reference(lambda rank: body(rank, step=0), runs=8)
    assert world.one("tp2xcp2", lambda rank: body(rank, step=32))["outcome"] == "diverged"
    first = int(whole[rows[0]] if rows else value) * 2
    right, wrong = ["rank 0 (tp=0, cp=0)"], ["rank 1 (tp=1, cp=0)"]
    if rows is None:
        right.append("rank 2 (tp=0, cp=1)")
        wrong.append("rank 3 (tp=1, cp=1)")
    where = f", worst in row {rows[0]}" if rows else ""
    line = f"ranks differ{where}: {first} on {'; '.join(right)}, {first + 32} on {'; '.join(wrong)}"
    assert [one.strip() for one in world.text.splitlines() if "ranks differ" in one] == [line]
    # Ranks that are wrong alike do not differ.
    assert world.one("tp2xcp2", lambda rank: body(rank, step=0))["outcome"] == "diverged"
    assert "ranks differ" not in world.text


def test_at_most_four_values_of_ranks_are_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", 1), runs=8)
    world.one("cp6", lambda rank: rank.observe("x", rank.coordinates["cp"] + 2))
    assert "5 on rank 3 (cp=3), and 2 more values" in world.text


def test_replicas_that_differ_across_zero(tmp_path: Path) -> None:
    value = VALUE.clone()
    value[0, 0] = 0.0
    world = world_of(tmp_path, value)

    def body(rank: Rank, size: float) -> None:
        mine = value.clone()
        mine[0, 0] = size * (1 if rank.coordinates["cp"] else -1)
        rank.observe("x", mine)

    assert world.one("cp2", lambda rank: body(rank, 5e-324))["message"].startswith(
        "replicas differ by 2 ulp"
    )
    assert (
        "replicas differ by 8.6e+18 ulp"
        in (world.one("cp2", lambda rank: body(rank, 1e-20))["message"])
    )
    assert world.one("cp2", lambda rank: body(rank, 0.0))["outcome"] == "passed"


def test_replicas_of_a_slice_and_of_parts_of_a_sum(world: World) -> None:
    def body(rank: Rank, **options: Any) -> None:
        mine = VALUE.chunk(2)[rank.coordinates["tp"]].clone() if options else VALUE / 2
        if rank.coordinates["cp"] == 1:
            mine[0, 0] = torch.nextafter(mine[0, 0], torch.zeros((), dtype=torch.float64))
        rank.observe("x", mine, **(options or {"partial": ("tp",)}))

    for options in ({"shard": {"tp": 0}}, {}):
        verdict = world.one("tp2xcp2", lambda rank, o=options: body(rank, **o))  # type: ignore[misc]
        assert verdict["outcome"] == "replicas differ"
        assert verdict["details"]["rank"] == 2


def test_replicas_across_data_parallel_ranks(world: World) -> None:
    def body(rank: Rank) -> None:
        rank.observe("x", VALUE * (1 + rank.coordinates["dp"] * 3e-16))

    assert world.one("dp2", body)["outcome"] == "replicas differ"


def test_a_large_value_is_told_apart_without_being_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardproof.verdict.candidate.KEPT_VALUE", 100)

    def body(rank: Rank) -> None:
        rank.observe("x", VALUE * (1 + rank.coordinates["cp"] * 3e-16))

    verdict = world.one("cp2", body)
    assert verdict["outcome"] == "replicas differ"
    assert "the value is large" in verdict["message"]
    assert "ranks differ: rank 0 (cp=0) and rank 1 (cp=1) hold other bits" in world.text


def test_bad_input_on_one_rank_is_a_verdict_with_its_line(world: World) -> None:
    def body(rank: Rank) -> None:
        rank.observe("x", VALUE)
        if rank.coordinates["cp"] == 1:
            rank.observe("x", VALUE)

    verdict = world.one("cp2", body)
    assert verdict["outcome"] == "invalid"
    assert verdict["details"]["rank"] == 1
    assert "observed twice" in verdict["message"]
    assert "test_verdict_ranks.py:" in verdict["source"]


def test_every_rank_owns_its_share_and_must_judge(world: World) -> None:
    topology = parse_topology("cp2")
    recorders = [
        Recorder(
            role="candidate",
            topology=topology,
            rank=rank,
            reference_dir=world.reference_dir,
            cell_dir=world.directory / "own",
            dtype=torch.float64,
        )
        for rank in range(2)
    ]
    for recorder in recorders:
        recorder.observe("x", VALUE)
        recorder.observe("y", VALUE)
    sealed = [recorder.seal() for recorder in recorders]
    parts = [recorder.judge(sealed) for recorder in recorders]
    assert [[one["name"] for one in part] for part in parts] == [["x"], ["y"]]
    with pytest.raises(ValueError, match="every rank's part is needed once"):
        merge([parts[1]])
    with pytest.raises(ValueError, match="every rank's part is needed once"):
        merge([parts[0], parts[0]])
    with pytest.raises(ValueError, match="each of 2 ranks"):
        recorders[0].judge(sealed[:1])


def test_of_several_replicas_the_farthest_is_told(tmp_path: Path) -> None:
    """Rank 2 is farther off, in another row, than the first that differs."""
    value = torch.arange(1.0, 13.0, dtype=torch.float64).view(6, 2)

    def body(rank: Rank) -> None:
        mine = value.clone()
        if rank.recorder.judging:
            mine[0, 0] += 1e-3 * (rank.coordinates["dp"] == 1)
            mine[5, 0] += 100.0 * (rank.coordinates["dp"] == 2)
        rank.observe("x", mine if rank.recorder.judging else rank.noise(mine))

    world = World(tmp_path)
    world.reference(body)
    world.one("dp3", body)
    assert "ranks differ, worst in row 5: 11 on rank 0" in world.text
    assert "111 on rank 2 (dp=2)" in world.text


def test_whole_numbers_that_no_float_holds_are_told_apart() -> None:
    one = torch.tensor([2**60, -(2**63), 7])
    other = torch.tensor([2**60 + 1, 2**63 - 1, 7])
    assert ulps(one, other).tolist() == [1.0, 2.0**64, 0.0]
