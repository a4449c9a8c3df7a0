"""The trainer's own collectives and reductions on four ranks, clean and with each fault put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from subjects.tests import dense_attention, scenario, worlds

# For grad = rank + 1 and value = rank + 1, what rank 0 gets.
RULES = {
    "dp2": (3.0, 3.0),
    "tp2": (1.5, 1.0),
    "cp2": (1.5, 1.0),
    "tp2xcp2": (2.5, 1.0),
    "dp2xcp2": (5.0, 4.0),
}
# Faults of what the scenario looks at; every fault has a control of its own besides.
SEEN = (
    "two rows of a shard swapped",
    "one row zeroed",
    "gather backward summed over cp",
    "gather backward divided by cp",
    "labels shifted inside the shard",
    "document mask dropped for remote keys",
    "positions restarted per shard",
    "probe gradient summed over cp",
    "dp_reduce including cp",
    "q/k-norm gradient not summed over tp",
)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """One world for all of it: starting four processes costs more than what they do."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    from oracles.checkpoints import tiny_checkpoint
    from oracles.transformers_oracle import TransformersTrainer

    checkpoint = tiny_checkpoint(tmp_path / "checkpoint")
    rank = worlds.TestRank(coordinates={}, groups={})
    oracle = TransformersTrainer(checkpoint, rank)
    expected = scenario.step(oracle, list(enumerate(scenario.requests())))
    expected |= {f"grad {n}": value for n, (value, _) in scenario.gradients(oracle).items()}
    torch.save(expected, tmp_path / "expected")
    worlds.spawn(body, tmp_path, ranks=4)


def body(directory: Path) -> None:
    rules()
    for sizes in ([3, 0, 5, 1], [0, 0, 0, 4]):
        exchanges(sizes)
        gather_rows(sizes)
    expected = torch.load(directory / "expected")
    for name in ("cp4", "dp2xcp2", "tp2xcp2"):
        rank = worlds.make_rank(name)
        worlds.make_parallel_state(rank)
        trainer(directory, rank, expected)
        if name == "dp2xcp2":
            idle(directory, rank)
        faults(directory, rank, expected)


def rules() -> None:
    from subjects.trainer import reductions

    for name, (custom, metric) in RULES.items():
        rank = worlds.make_rank(name)
        groups = reductions.Groups(rank.group("tp"), rank.group("cp"), rank.group("dp"))
        size = groups.tp.size() * groups.cp.size() * groups.dp.size()
        here = float(dist.get_rank() % size + 1)
        gradient = reductions.reduce_custom(torch.tensor([here]), groups)
        value = reductions.dp_reduce(here, "sum", groups, device=torch.device("cpu"))
        if here == 1.0:
            assert (gradient.item(), value) == (custom, metric), name


def exchanges(sizes: list[int]) -> None:
    """Each rank's rows attend to all rows of a prefix tree, as one device would have it.

    A rank's rows may see nothing of a shard, and a shard may be empty.
    """
    from subjects.trainer.attention import AttentionRows, RowAttention
    from subjects.trainer.masks import visible_blocks, visible_keys
    from subjects.trainer.packing import pack

    rank, group, total = dist.get_rank(), dist.group.WORLD, sum(sizes)
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(0, 9, (total - 1,), generator=generator)
    packed = pack([long, long[: total // 2], torch.tensor([50])], sharing="full")
    order = torch.randperm(total, generator=generator)
    shapes = ((total, 4, 3), (total, 2, 2, 3), (total, 4, 3))
    query, keys_values, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    query, keys_values = query.requires_grad_(), keys_values.requires_grad_()
    everyone = packed.take(order)
    dense = dense_attention.attend(
        query,
        keys_values[:, 0],
        keys_values[:, 1],
        visible_keys(everyone, everyone, remote=True),
        scale=0.7,
    )
    expected = torch.autograd.grad(dense, (query, keys_values), gradient)
    shards = [packed.take(shard) for shard in order.split(sizes)]
    for exchange, block in (("gather", 2), ("ring", 2), ("ring", 512)):
        seen = tuple(
            visible_blocks(shards[rank], shard, remote=at != rank, size=block)
            for at, shard in enumerate(shards)
        )
        own = [x.detach().split(sizes)[rank].requires_grad_() for x in (query, keys_values)]
        rows = AttentionRows(seen=seen, exchange=exchange, cp_group_of_rows=group)  # type: ignore[arg-type]
        found: Any = RowAttention.apply(*own, rows, 0.7)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(found, dense.split(sizes)[rank], rtol=1e-13, atol=1e-13)
        found.backward(gradient.split(sizes)[rank])
        for x, whole in zip(own, expected, strict=True):
            torch.testing.assert_close(x.grad, whole.split(sizes)[rank], rtol=1e-12, atol=1e-12)


def gather_rows(sizes: list[int]) -> None:
    """Backward takes from a replicated gradient what is this rank's, once."""
    from subjects.trainer.gather import GatherRows

    rank, group, total = dist.get_rank(), dist.group.WORLD, sum(sizes)
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(total, 2, dtype=torch.float64, generator=generator).split(sizes)
    order = torch.randperm(total, generator=generator).split(sizes)
    replicated = torch.randn(total, 2, dtype=torch.float64, generator=generator)
    local = parts[rank].clone().requires_grad_()
    full: Any = GatherRows.apply(local, order[rank], total, group)  # type: ignore[no-untyped-call]
    assert full[torch.cat(order)].equal(torch.cat(parts))
    full.backward(replicated)
    assert local.grad is not None
    assert local.grad.equal(replicated[order[rank]])


def run(
    directory: Path, rank: Any, expected: dict[str, torch.Tensor], **options: Any
) -> dict[str, float]:
    from subjects.trainer import TrainerRank

    trainer = TrainerRank.build(directory / "checkpoint", rank, **options)
    batches = list(enumerate(scenario.requests()))[
        rank.coordinates["dp"] :: rank.group("dp").size()
    ]
    tp = rank.group("tp")
    found = scenario.step(trainer, batches)
    return scenario.worst(found, scenario.gradients(trainer), expected, tp=(tp.rank(), tp.size()))


def trainer(directory: Path, rank: Any, expected: dict[str, torch.Tensor]) -> None:
    from subjects.trainer.plan import POLICIES

    for sharing in ("none", "full"):
        for plan in POLICIES:
            found = run(directory, rank, expected, sharing=sharing, plan=plan)
            assert max(found.values()) < 1e-13, (sharing, plan, found)


def idle(directory: Path, rank: Any) -> None:
    """A data-parallel rank without a batch takes part in the reduction and gets its result."""
    from subjects.trainer import ForwardInput, TrainerRank

    trainer = TrainerRank.build(directory / "checkpoint", rank)
    if rank.coordinates["dp"] == 0:
        output = trainer.forward(ForwardInput([1, 2, 3, 4, 5], hidden_states=True))
        assert output.hidden_states is not None
        output.hidden_states.square().sum().backward()
    found = {n: None if g is None else g.norm().item() for n, g, _ in trainer.named_gradients()}
    everyone: list[dict[str, float | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert all(one == found for one in everyone)
    # Only the head was left out of what ran, by every rank: it has none, the others have some.
    assert [name for name, norm in found.items() if not norm] == ["lm_head.weight"]
    assert found["lm_head.weight"] is None


def faults(directory: Path, rank: Any, expected: dict[str, torch.Tensor]) -> None:
    """A fault moves what it should by far more than rounding, on some rank, and leaves no trace."""
    from subjects.trainer.faults import FAULTS, inject

    for name in SEEN:
        axis = FAULTS[name].axis
        if axis != "any" and rank.group(axis).size() == 1:
            continue
        with inject(name):
            found = run(directory, rank, expected, sharing="full")
        everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        seen = [key for one in everyone for key, distance in one.items() if distance > 1e-3]
        assert seen, f"{name} shows nowhere"
    assert max(run(directory, rank, expected, sharing="full").values()) < 1e-13
