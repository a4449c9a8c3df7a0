from __future__ import annotations

import pytest
import torch

from subjects.trainer.packing import pack
from subjects.trainer.plan import (
    POLICIES,
    local_rows,
    make_plan,
    padded,
    positions_for,
    targets_for,
    tokens_for,
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 7, 61])
def test_every_policy_holds_each_row_once(policy: str, cp: int, rows: int) -> None:
    shards = make_plan(policy, rows=rows, cp=cp).shards
    assert len(shards) == cp
    assert sorted(torch.cat(shards).tolist()) == list(range(rows))


@pytest.mark.parametrize("cp", [2, 4])
def test_policies_do_what_they_are_named_for(cp: int) -> None:
    even = make_plan("balanced", rows=61, cp=cp).sizes
    assert max(even) - min(even) <= 1
    uneven = make_plan("uneven", rows=61, cp=cp)
    assert len(set(uneven.sizes)) > 1
    assert any(shard.diff().min() < 0 for shard in uneven.shards)
    empty = make_plan("empty", rows=61, cp=cp)
    assert empty.sizes[-1] == 0
    assert min(empty.sizes[:-1]) > 0


def test_a_plan_of_ones_own() -> None:
    assert make_plan([[2, 0], [], [1]], rows=3, cp=3).sizes == [2, 0, 1]
    own = make_plan(lambda rows, cp: [list(range(rows))] + [[]] * (cp - 1), rows=5, cp=2)
    assert own.sizes == [5, 0]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("zigzag", "'zigzag'; expected one of balanced, uneven, empty"),
        ([[0, 1, 2]], "1 shards for 2"),
        ([[0, 1], [1]], "each of the 3 packed rows"),
        ([[0, 1], []], "each of the 3 packed rows"),
        ([[0, 1], [2, 3]], "each of the 3 packed rows"),
    ],
)
def test_a_plan_that_does_not_add_up(policy: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(policy, rows=3, cp=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_share_answers_its_own_source_positions(tp: int) -> None:
    packed = pack([torch.tensor([5, 6, 7]), torch.tensor([5, 6, 8, 9])], sharing="full")
    plan = make_plan([[3, 1], [], [4, 0, 2]], rows=5, cp=3)
    targets = torch.arange(7) * 10
    answered = torch.zeros(7, dtype=torch.int64)
    for at in range(3):
        local = local_rows(packed, plan, cp_rank=at, tp=tp)
        assert (len(local.rows) + local.padding) % tp == 0
        assert len(local.rows) + local.padding > 0
        assert len(padded(tokens_for(local), local)) == len(local.rows) + local.padding
        answered[local.sources] += 1
        source = torch.cat((torch.tensor([5, 6, 7]), torch.tensor([5, 6, 8, 9])))
        positions = torch.tensor([0, 1, 2, 0, 1, 2, 3])
        assert tokens_for(local)[local.source_rows].equal(source[local.sources])
        assert positions_for(local)[local.source_rows].equal(positions[local.sources])
        assert targets_for(targets, local).equal(local.sources * 10)
    assert answered.eq(1).all()
