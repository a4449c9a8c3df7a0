from __future__ import annotations

import pytest
import torch

from subjects.trainer.architecture import Architecture
from subjects.trainer.packing import pack
from subjects.trainer.plan import (
    POLICIES,
    linear_work,
    local_rows,
    make_plan,
    padded,
    positions_for,
    row_work,
    targets_for,
    tokens_for,
)


def causal(rows: int, *, linear: float = 0.0) -> torch.Tensor:
    return torch.arange(1, rows + 1, dtype=torch.float64) + linear


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 7, 61])
def test_every_policy_holds_each_row_once(policy: str, cp: int, rows: int) -> None:
    plan = make_plan(policy, work=causal(rows), cp=cp)
    assert len(plan.shards) == cp
    assert sorted(torch.cat(plan.shards).tolist()) == list(range(rows))
    assert sum(plan.loads) == rows * (rows + 1) / 2


@pytest.mark.parametrize("cp", [2, 4])
def test_policies_do_what_they_are_named_for(cp: int) -> None:
    work = causal(61)
    even = make_plan("runs", work=work, cp=cp).sizes
    assert max(even) - min(even) <= 1
    uneven = make_plan("uneven", work=work, cp=cp)
    assert len(set(uneven.sizes)) > 1
    assert any(shard.diff().min() < 0 for shard in uneven.shards)
    empty = make_plan("empty", work=work, cp=cp)
    assert empty.sizes[-1] == 0
    assert min(empty.sizes[:-1]) > 0


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_balanced_evens_out_the_work_where_equal_runs_do_not(cp: int) -> None:
    """The last run of a long causal sequence is nearly twice the mean."""
    work = causal(10_007)
    equal = make_plan("runs", work=work, cp=cp)
    assert equal.imbalance > 1.98 - 1 / cp
    assert make_plan("balanced", work=work, cp=cp).imbalance < 1.02
    assert make_plan([[*range(10_007)]] + [[]] * (cp - 1), work=work, cp=cp).imbalance == cp


def test_balanced_evens_out_documents_and_trees() -> None:
    """Work follows positions in documents and paths, not numbers of rows."""
    stem = torch.arange(900) % 100
    documents = [torch.cat((stem[:cut], torch.tensor([100 + cut % 31]))) for cut in (899, 640, 7)]
    documents += [torch.full((1500,), 130), torch.tensor([5])]
    for sharing in ("none", "full"):
        packed = pack(documents, sharing=sharing)
        work = row_work(packed, linear=0)
        mask = (packed.enter[None] <= packed.enter[:, None]) & (
            packed.enter[:, None] < packed.leave[None]
        )
        assert work.equal(mask.sum(1).double())
        assert make_plan("balanced", work=work, cp=4).imbalance < 1.06
        assert make_plan("runs", work=work, cp=4).imbalance > 1.25


def test_linear_layers_count_in_keys() -> None:
    """A row of Qwen3-0.6B costs as much as 3,840 keys before it attends to any."""
    architecture = Architecture(
        layers=28,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_size=128,
        mlp=3072,
        vocabulary=151936,
        norm_epsilon=1e-6,
        rope_base=1e6,
        tied=True,
    )
    per_row = 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072
    assert linear_work(architecture) == per_row / (16 * 2 * 128)
    packed = pack([torch.tensor([3, 4, 5])], sharing="none")
    assert row_work(packed, linear=100.5).tolist() == [101.5, 102.5, 103.5]


def test_a_plan_of_ones_own() -> None:
    assert make_plan([[2, 0], [], [1]], work=causal(3), cp=3).sizes == [2, 0, 1]
    own = make_plan(
        lambda work, cp: [list(range(len(work)))] + [[]] * (cp - 1), work=causal(5), cp=2
    )
    assert own.sizes == [5, 0]
    heavy = make_plan(
        lambda work, cp: [work.argsort().tolist()[at::cp] for at in range(cp)],
        work=torch.tensor([3.0, 1.0, 2.0]),
        cp=2,
    )
    assert [shard.tolist() for shard in heavy.shards] == [[1, 0], [2]]
    assert heavy.loads == (4.0, 2.0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("zigzag", "'zigzag'; expected one of balanced, runs, uneven, empty"),
        ([[0, 1, 2]], "1 shards for 2"),
        ([[0, 1], [1]], "each of the 3 packed rows"),
        ([[0, 1], []], "each of the 3 packed rows"),
        ([[0, 1], [2, 3]], "each of the 3 packed rows"),
    ],
)
def test_a_plan_that_does_not_add_up(policy: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(policy, work=causal(3), cp=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (5, "plan is 5; expected a list of rows for each context-parallel rank, a function"),
        (None, "plan is None; expected a list"),
        ([0, 1, 2], "plan has 0 in its shard 0; expected a list of rows, each an integer"),
        ([[0, 1.5], [2]], r"plan has 1\.5 in its shard 0"),
        ([[0, 1], "2"], "plan has '2' in its shard 1"),
        (lambda *_: 5, "what the function given as plan returned is 5; expected a list"),
        (lambda *_: [[0, 1], [None]], "plan returned has None in its shard 1"),
    ],
)
def test_what_is_no_plan(policy: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make_plan(policy, work=causal(3), cp=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_share_answers_its_own_source_positions(tp: int) -> None:
    packed = pack([torch.tensor([5, 6, 7]), torch.tensor([5, 6, 8, 9])], sharing="full")
    plan = make_plan([[3, 1], [], [4, 0, 2]], work=causal(5), cp=3)
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
