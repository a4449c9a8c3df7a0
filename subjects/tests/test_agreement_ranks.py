"""Four ranks of which one does something else: all of its world, or of its batch, are told so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from subjects.tests import scenario, worlds


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """One world for all of it: starting four processes costs more than what they do."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    from oracles.checkpoints import tiny_checkpoint

    tiny_checkpoint(tmp_path / "checkpoint")
    worlds.spawn(body, tmp_path, ranks=4)


def body(directory: Path) -> None:
    memory_of_any_strides()
    for name in ("tp2xcp2", "dp2xcp2"):
        rank = worlds.make_rank(name)
        worlds.make_parallel_state(rank)
        checkpoint = directory / "checkpoint"
        options_of_one_rank(checkpoint, rank)
        plans_of_one_rank(checkpoint, rank)
        from subjects.trainer import TrainerRank

        trainer = TrainerRank.build(checkpoint, rank)
        before = step(trainer)
        frozen_on_one_rank(trainer, rank)
        late_backward(trainer)
        other_calls(trainer, rank)
        own_gradients(trainer, checkpoint, rank)
        values(trainer, rank)
        trainer.zero_gradients()
        assert step(trainer) == before, "the trainer has kept something of what it refused"


def odd() -> bool:
    return dist.get_rank() == 3


def touched(rank: Any) -> bool:
    """Whether this rank is of the batch of the odd one."""
    return bool(rank.coordinates["dp"] == rank.group("dp").size() - 1)


def step(trainer: Any) -> dict[str, float]:
    """The norms of the gradients of one right step."""
    output = trainer.forward(scenario.requests()[0])
    (output.target_logprobs.sum() + output.hidden_states.square().sum()).backward()
    found = {n: g.norm().item() for n, g, _ in trainer.named_gradients() if g is not None}
    trainer.zero_gradients()
    return {name: norm for name, norm in found.items() if not name.startswith("own")}


def raised(action: Callable[[], object], *, by: str = "world") -> str:
    """The error of ``action``, the same on all ranks that raise one."""
    text = ""
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    everyone: list[str] = [""] * 4
    dist.all_gather_object(everyone, text)
    told = everyone if by == "world" else [one for one in everyone if one]
    assert len(set(told)) == 1, everyone
    return text


def memory_of_any_strides() -> None:
    from subjects.trainer import collectives, reductions

    rank = worlds.make_rank("dp4")
    groups = reductions.Groups(rank.group("tp"), rank.group("cp"), rank.group("dp"))
    whole = torch.arange(6.0).view(2, 3)
    turned = whole.t().contiguous().t() if odd() else whole.clone()
    for summed in (
        reductions.dp_reduce(turned, "sum", groups, device=rank.device),
        collectives.all_reduce(turned, groups.dp),
    ):
        assert summed.equal(4 * whole), summed
    assert turned.equal(4 * whole), "in place"
    edges_of_dp_reduce(partial(reductions.dp_reduce, groups=groups, device=rank.device))
    turned = whole.t().contiguous().t() if dist.get_rank() == 0 else torch.zeros(2, 3)
    assert collectives.broadcast_first(turned, groups.dp).equal(whole)


def edges_of_dp_reduce(reduce: Any) -> None:
    """NaN of whichever rank, sums at the edge of a dtype, and beyond it."""
    at, nan = dist.get_rank(), float("nan")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op, edge in (("max", 3.0), ("min", 0.0)):
            mine = torch.tensor([at, *(nan if at == one else at for one in range(4))], dtype=dtype)
            assert reduce(mine, op)[0] == edge
            assert reduce(mine, op)[1:].isnan().all()
    infinite = float("inf") if at == 2 else 1.0
    assert (reduce(infinite, "max"), reduce(infinite, "min")) == (float("inf"), 1.0)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        # The first two ranks hold all that fits; their partial sum with the third may not.
        whole = torch.tensor([limits.max, limits.min], dtype=dtype)
        parts = [whole - whole // 2, whole // 2, torch.zeros_like(whole), torch.zeros_like(whole)]
        if limits.min:
            parts[2:] = torch.tensor([1, -1], dtype=dtype), torch.tensor([-1, 1], dtype=dtype)
        summed = reduce(parts[at], "sum")
        assert summed.equal(whole), summed
        assert summed.dtype == reduce(whole, "max").dtype == dtype
        assert reduce(whole, "max").equal(reduce(whole, "min"))
        words = f"does not fit into {dtype}, which holds {limits.min} to {limits.max}"
        beyond = torch.full((2,), 3 * (limits.max // 8), dtype=dtype)
        assert words in raised(partial(reduce, beyond, "sum"))
    assert reduce(-(2**61), "sum") == -(2**63)
    for number in (2**61, -(2**63)):
        assert "ValueError: dp_reduce: the sum" in raised(partial(reduce, number, "sum"))


def options_of_one_rank(checkpoint: Path, rank: Any) -> None:
    from subjects.trainer import TrainerRank

    options: dict[str, tuple[Any, Any]] = {
        "plan": ("uneven", "runs"),
        "sharing": ("none", "full"),
        "attention": ("gather", "ring"),
        "attention_block": (512, 256),
        "gather_limit": (0, 1),
        "head_rows": (7, 9),
        "check_losses": (True, False),
        "layers": (1, 2),
        "memory_limit is None": (None, 1 << 30),
    }
    for name, pair in options.items():
        given = {name.partition(" ")[0]: pair[odd()]}
        text = raised(partial(TrainerRank.build, checkpoint, rank, **given))
        assert f"DisagreementError: build was given different things: {name}" in text.replace(
            " on the ranks of this trainer", ""
        ), text
    for name, wrong in {"head_rows": 0, "attention": "post", "layers": 9}.items():
        given = {name: wrong} if odd() else {}
        text = raised(partial(TrainerRank.build, checkpoint, rank, **given))
        assert "build was refused by some ranks" in text
        assert f"1: ValueError: {name} is {wrong!r}" in text
    text = raised(lambda: TrainerRank.build(checkpoint / "no" if odd() else checkpoint, rank))
    assert "FileNotFoundError" in text


def plans_of_one_rank(checkpoint: Path, rank: Any) -> None:
    """Functions that differ, fail or give a bad plan; the ranks of another batch go on."""
    from subjects.trainer import TrainerRank
    from subjects.trainer.plan import runs, uneven

    def failing(work: torch.Tensor, cp: int) -> Any:
        raise ZeroDivisionError(f"{len(work)} {cp}")

    def short(work: torch.Tensor, cp: int) -> Any:
        return [shard[1:] for shard in runs(work, cp)]

    ways: dict[str, Any] = {
        "plan is shards of": uneven,
        "1: ZeroDivisionError": failing,
        "ValueError: the plan's shards have": short,
    }
    for words, plan in ways.items():
        trainer = TrainerRank.build(checkpoint, rank, plan=plan if odd() else runs)
        request = scenario.requests()[0]
        text = raised(partial(trainer.forward, request), by="batch")
        assert (words in text) == touched(rank), text


def frozen_on_one_rank(trainer: Any, rank: Any) -> None:
    text = raised(lambda: trainer.freeze("head" if odd() else "decoder"))
    assert "freeze was given different things" in text
    text = raised(lambda: trainer.freeze("none" if odd() else "head"))
    assert "freeze was refused by some ranks" in text
    assert all(one.requires_grad for one in trainer.model.parameters())
    request = scenario.requests()[0]
    own = trainer.parameter("own frozen", lambda: torch.ones(3))
    for name, one in (
        ("lm_head.weight", trainer.model.output_layer.weight),
        ("own frozen", own),
    ):
        # A peer of the batch: told before the forward.
        one.requires_grad_(not odd())
        text = raised(lambda: trainer.forward(request), by="batch")
        assert (f"what is frozen is nothing on {_others(rank)}, {name} on " in text) == (
            touched(rank)
        ), text
        # Another batch: told before gradients are reduced. After it, all are trained again.
        one.requires_grad_(not touched(rank) or rank.group("dp").size() == 1)
        if rank.group("dp").size() > 1:
            trainer.forward(request).hidden_states.sum().backward()
            text = raised(lambda: list(trainer.named_gradients()))
            assert f"what is frozen is nothing on dp=0, cp=0 | dp=0, cp=1, {name} on dp=1" in text
        one.requires_grad_(True)
        trainer.zero_gradients()


def _others(rank: Any) -> str:
    return "cp=0" if rank.group("dp").size() > 1 else "cp=0, tp=0 | cp=0, tp=1 | cp=1, tp=0"


def late_backward(trainer: Any) -> None:
    """On one rank, or batch, alone: no rank returns gradients or a step, and none waits."""
    request = scenario.requests()[0]
    own = trainer.parameter("own late", lambda: torch.ones(3))
    optimizer = trainer.optimizer("sgd", lr=0.1)
    for read in (lambda: list(trainer.named_gradients()), optimizer.step):
        (own.sum() + trainer.forward(request).hidden_states.sum()).backward()
        list(trainer.named_gradients())
        if odd():
            own.sum().backward()
        text = raised(read)
        assert "reading or reducing gradients was refused by some ranks of this trainer" in text
        assert "1: ValueError: a backward has added" in text
        own.sum().backward()
        assert raised(read).startswith("ValueError: a backward has added to gradients")
        trainer.zero_gradients()
    # Zeroed on one rank alone.
    list(trainer.named_gradients())
    if odd():
        trainer.zero_gradients()
    text = raised(lambda: list(trainer.named_gradients()))
    assert "the state of gradients is reduced on" in text
    assert "not reduced yet on" in text
    trainer.zero_gradients()
    assert own.equal(torch.ones(3))


def other_calls(trainer: Any, rank: Any) -> None:
    """Calls of all ranks beside a forward of a batch; the other batch must not wait for them."""
    request = scenario.requests()[0]
    calls: dict[str, Callable[[], Any]] = {
        "reading or reducing gradients": lambda: list(trainer.named_gradients()),
        "add_slot": lambda: trainer.add_slot("slot"),
        "freeze": lambda: trainer.freeze("head"),
    }
    for words, call in calls.items():
        act = call if odd() else partial(trainer.forward, request)
        text = raised(act, by="batch")
        assert (f"out of step: forward on {_others(rank)}, {words} on" in text) == touched(rank), (
            text
        )
    # Two calls of all ranks: all of them are told.
    text = raised(calls["add_slot" if odd() else "freeze"])
    assert "the ranks of this trainer are out of step: freeze on" in text
    assert trainer.slots == ()
    trainer.zero_gradients()


def own_gradients(trainer: Any, checkpoint: Path, rank: Any) -> None:
    """Of the caller's parameters alone: the gradients of all outputs are the same."""
    from subjects.trainer import TrainerRank

    request = scenario.requests()[0]
    probe, scale = (
        trainer.parameter(name, lambda shape=shape: torch.ones(shape))
        for name, shape in (("own probe", (scenario.HIDDEN, 3)), ("own scale", ()))
    )

    def run(trainer: Any, *, sign: float, used: bool) -> str:
        output = trainer.forward(request)
        states = output.hidden_states.detach()
        loss = output.hidden_states.square().sum() + sign * (states @ probe).square().sum()
        (loss + scale * states.sum() if used else loss).backward()
        return raised(lambda: list(trainer.named_gradients()))

    last = "dp=1, cp=1" if rank.group("dp").size() > 1 else "cp=1, tp=1"
    text = run(trainer, sign=-1.0 if odd() else 1.0, used=True)
    assert "DisagreementError: the gradients of the caller's own parameters differ" in text
    assert "that of own probe has sum " in text
    assert f" on {last}" in text
    assert "own scale" not in text
    assert "dp=0" not in text
    trainer.zero_gradients()
    text = run(trainer, sign=1.0, used=not odd())
    assert "that of own scale has sum " in text
    assert f"none on {last}" in text
    assert "own probe" not in text
    trainer.zero_gradients()
    # Batches may have losses of their own, and none of a parameter.
    first = rank.coordinates["dp"] == 0
    assert run(trainer, sign=1.0 if first else -2.0, used=first) == ""
    trainer.zero_gradients()
    trusting = TrainerRank.build(checkpoint, rank, check_losses=False)
    probe, scale = (trusting.parameter(name, lambda: torch.ones(40, 1)) for name in ("a", "b"))
    probe.grad = torch.full((40, 1), 2.0 if odd() else 1.0, dtype=torch.float64)
    assert raised(lambda: list(trusting.named_gradients())) == ""


def values(trainer: Any, rank: Any) -> None:
    """An int that no 64 bits hold is refused by all that would sum it."""
    many = rank.group("dp").size() > 1
    text = raised(lambda: trainer.dp_reduce(2**63 if odd() else 1), by="batch")
    words = "ValueError: dp_reduce: 9223372036854775808 does not fit into 64 bits"
    place = rank.coordinates["cp"] == 1 and (many or odd())
    assert (words in text) == place, text
    trainer.dp_reduce(2**60)
