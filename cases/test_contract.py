"""What a trainer refuses, and how: the same clear error on every rank, and no rank left waiting."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases.material import (
    AGAINST_ORACLE,
    TOPOLOGIES,
    VOCABULARY,
    Request,
    factors,
    requests,
    spread,
    weighted_loss,
)
from subjects.types import ForwardInput, MicroBatch, Nested

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank
    from subjects.protocol import Trainer

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE)


def refused(rank: Rank, action: Callable[[], object]) -> str:
    """The error of ``action``, which all ranks of a batch must raise in the same words."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        action()
    text = f"{type(raised.value).__name__}: {raised.value}"
    if not rank.is_reference:
        said = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        for axis in ("tp", "cp"):
            lowest, highest = torch.tensor([said]), torch.tensor([said])
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=rank.group(axis))
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=rank.group(axis))
            assert lowest.equal(highest), f"along {axis} not all ranks raise {text!r}"
    return text


def every(trainer: Trainer, inputs: Sequence[Nested]) -> list[MicroBatch]:
    """All waves of this rank."""
    return list(trainer.forward_micro_batches(inputs))


def replicas(rank: Rank) -> int:
    """How many ranks hold one batch."""
    return rank.size("tp") * rank.size("cp")


def is_last(rank: Rank) -> bool:
    """Whether this is the last of the ranks of its batch."""
    return all(rank.coordinates[axis] == rank.size(axis) - 1 for axis in ("tp", "cp"))


def last_place(rank: Rank) -> str:
    """How an error names that rank."""
    axes = [axis for axis in ("cp", "tp") if rank.size(axis) > 1]
    return ", ".join(f"{axis}={rank.size(axis) - 1}" for axis in axes)


def runs(work: Tensor, cp: int) -> list[list[int]]:
    """Rows in runs, as a plan of the caller's."""
    rows = len(work)
    return [list(range(rows * at // cp, rows * (at + 1) // cp)) for at in range(cp)]


def reversed_runs(work: Tensor, cp: int) -> list[list[int]]:
    """Shards of the same rows, in another order."""
    return [shard[::-1] for shard in runs(work, cp)]


def observe_step(rank: Rank, trainer: Trainer, mine: list[Request]) -> None:
    """One right step: the trainer works, and nothing of what was refused is left in it."""
    trainer.zero_gradients()
    for request in mine:
        output = trainer.forward(request.ask(target_tokens=request.targets))
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)
        weighted_loss(request, output).backward()
    rank.observe_gradients(one for one in trainer.named_gradients() if "layers.1" not in one[0])


def test_requests_without_meaning_are_refused(rank: Rank, build: BuildTrainer) -> None:
    """Bad input goes no further than the check: not into the collectives of a layer."""
    trainer = build()
    request = requests(rank, 1)[0]
    good = request.ask(target_tokens=request.targets)
    count = 0
    bad: dict[str, Any] = {
        "holds no document": replace(good, input_tokens=[]),
        "document 1 has shape (0,)": replace(good, input_tokens=[[5, 6], []], target_tokens=None),
        "one row of targets per token": replace(good, target_tokens=request.targets[1:]),
        f"top_k is {VOCABULARY + 1}": replace(good, top_k=VOCABULARY + 1),
        f"token {VOCABULARY} is outside": replace(good, input_tokens=[[VOCABULARY]]),
        "token -7 is outside": ForwardInput([3, 4], [-7, 5]),
        "integer token ids": replace(good, input_tokens=torch.ones(5), target_tokens=None),
        "'nobody'": replace(good, slot="nobody"),
    }
    for words, wrong in bad.items():
        assert words in refused(rank, partial(trainer.forward, wrong)), words
        count += 1
    nestings: dict[str, Any] = {
        "str": ["text"],
        "Tensor": [good, {"a": (torch.ones(3),)}],
        "ForwardInput": good,
    }
    for words, wrong in nestings.items():
        text = refused(rank, partial(every, trainer, wrong))
        assert words in text, words
        count += 1
    if not rank.is_reference:
        text = refused(rank, lambda: trainer.dp_rank_forward({"a": [good, bad["'nobody'"]]}))
        assert "inputs['a'][1]: " in text
    rank.observe("refused", count)
    observe_step(rank, trainer, rank.split(requests(rank)))


def test_what_one_rank_alone_is_told_is_refused_by_all(rank: Rank, build: BuildTrainer) -> None:
    """One rank raises, or asks for something else, and its peers wait: all of them must raise."""
    trainer = build()
    mine = rank.split(requests(rank))
    good = mine[0].ask(target_tokens=mine[0].targets)
    trainer.add_slot("one", rank=2, targets=("q_proj",), factory=factors(rank, "one"))
    if replicas(rank) > 1:
        told: dict[str, Any] = {
            "top_k is 999": replace(good, top_k=999),
            "input_tokens holds no document": replace(good, input_tokens=[]),
            "TypeError: the request is of type str": "text",
            "target_tokens is": replace(good, target_tokens=mine[0].targets.flip(0)),
            "top_k is None": replace(good, top_k=3),
            "no_grad is": replace(good, no_grad=True),
            "slot is None on": replace(good, slot="one"),
        }
        for words, other in told.items():
            given = other if is_last(rank) else good
            text = refused(rank, partial(trainer.forward, given))
            assert words in text, (words, text)
            assert last_place(rank) in text, (words, text)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_last(rank)):
            text = refused(rank, partial(trainer.forward, good))
        assert "torch.autocast is off on" in text, text
        assert f"bfloat16 on cpu on {last_place(rank)}" in text, text
        text = refused(
            rank,
            lambda: list(trainer.named_gradients()) if is_last(rank) else trainer.forward(good),
        )
        assert "out of step: forward on" in text, text
        inputs: list[Nested] = [good, [good]] if is_last(rank) else [good]
        text = refused(rank, lambda: trainer.dp_rank_forward(inputs))
        assert "inputs[1][0].input_tokens is nothing on" in text, text
        text = refused(rank, partial(build, only={"head_rows": 6 if is_last(rank) else 5}))
        assert "head_rows is 5 on" in text, text
        uncertain = build(plan=reversed_runs if is_last(rank) else runs)
        text = refused(rank, lambda: uncertain.forward(good))
        assert "plan is shards of" in text, text
        uncertain = build()
        uncertain.parameter("half", lambda: torch.ones(3)).requires_grad_(not is_last(rank))
        text = refused(rank, lambda: uncertain.forward(good))
        assert "what is frozen is nothing on" in text, text
        assert f"half on {last_place(rank)}" in text, text
    if rank.world_size > 1:
        text = refused(rank, lambda: trainer.freeze("head" if rank.index else "base"))
        assert "part is 'base' on" in text, text
        lr = 0.2 if rank.index else 0.1
        text = refused(rank, lambda: trainer.optimizer("sgd", lr=lr))
        assert "lr is 0.1 on" in text, text
        sequence = [good] * (2 if rank.index else 3)
        text = refused(rank, lambda: trainer.forward_micro_batches(sequence))
        assert "len(inputs) is 3 on" in text, text
    if rank.size("dp") > 1:
        value: Any = 1.5 if rank.coordinates["dp"] else 1
        text = refused(rank, lambda: trainer.dp_reduce(value))
        assert "value is int on dp=0, float on dp=1" in text, text
    observe_step(rank, trainer, mine)


def test_losses_that_differ_are_refused(rank: Rank, build: BuildTrainer) -> None:
    """Replicas with different losses would give gradients that are wrong without a sign."""
    trainer = build()
    mine = rank.split(requests(rank))
    request = mine[0]
    little = 1e-6 if rank.dtype == torch.float64 else 1e-4

    def run(loss: Callable[[Tensor, Tensor], Tensor]) -> str:
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        assert output.target_logprobs is not None
        assert output.hidden_states is not None
        return refused(rank, loss(output.target_logprobs, output.hidden_states).backward)

    weights, last = request.weights, is_last(rank)
    if replicas(rank) > 1:
        text = run(lambda scores, _: (scores * weights).sum() * (1 + little * last))
        assert "the gradient that reached target_logprobs has sum" in text
        assert f" on {last_place(rank)}" in text
        assert "hidden_states" not in text
        # As many, as large and as heavy, but not in the same order.
        text = run(lambda scores, _: (scores * (weights.flip(0) if last else weights)).sum())
        assert "projection" in text
        # On the others it is a gradient of zeros, which is not the same as none.
        text = run(lambda scores, states: scores.sum() + (0 if last else 0 * states.sum()))
        assert "hidden_states has sum" in text
        assert f"none on {last_place(rank)}" in text
        text = run(lambda scores, _: scores.sum() * (float("nan") if last else 1.0))
        assert "norm nan" in text
        # Nothing of it reaches the outputs, but a parameter of the caller's.
        trainer.zero_gradients()
        probe = trainer.parameter("probe", lambda: torch.ones(40))
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        assert output.hidden_states is not None
        read = (output.hidden_states.detach() @ probe).sum()
        (weighted_loss(request, output) + read * (-1 if last else 1)).backward()
        text = refused(rank, lambda: list(trainer.named_gradients()))
        assert "that of probe has sum" in text
        # Whoever must take unequal losses can say so, and answers for the gradients.
        trainer = build(only={"check_losses": False})
        probe = trainer.parameter("probe", lambda: torch.ones(40))
        output = trainer.forward(request.ask(target_tokens=request.targets))
        factor = 2 if last else 1
        (weighted_loss(request, output) * factor + probe.sum() * factor).backward()
        assert len(list(trainer.named_gradients())) > 1
        trainer = build()
    observe_step(rank, trainer, mine)


def test_a_loss_may_leave_outputs_out(rank: Rank, build: BuildTrainer) -> None:
    """What no rank's loss depends on has no gradient: neither one of zeros nor an error."""
    trainer = build()
    mine = rank.split(requests(rank))
    for request in mine:
        output = trainer.forward(
            request.ask(target_tokens=request.targets, hidden_states=True, top_k=3)
        )
        assert output.hidden_states is not None
        (spread(output.hidden_states) * request.weights).sum().backward()
    rank.observe_gradients(trainer.named_gradients(), prefix="of states alone")
    trainer.zero_gradients()
    for request in mine:
        output = trainer.forward(
            request.ask(target_tokens=request.targets, hidden_states=True, top_k=3)
        )
        assert output.top_k is not None
        (weighted_loss(request, output) + output.top_k.values.square().mean()).backward()
    rank.observe_gradients(trainer.named_gradients(), prefix="of scores")


def test_a_kept_graph_is_run_twice(rank: Rank, build: BuildTrainer) -> None:
    """Two losses of one forward, each with its own backward, add up; of a freed graph, none.

    What comes after the reduction would be of one rank alone, and is refused.
    """
    trainer = build()
    mine = rank.split(requests(rank))
    again = mine[0].ask(target_tokens=mine[0].targets)
    late = trainer.forward(again)
    for request in mine:
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        assert output.hidden_states is not None
        both = weighted_loss(request, output) + spread(output.hidden_states).mean()
        weighted_loss(request, output).backward(retain_graph=True)
        both.backward(retain_graph=True)
        # Nothing in this one remembers by itself that its graph is gone.
        scale = len(request.goals)
        (output.hidden_states / scale).sum().backward()
        text = refused(rank, (output.hidden_states / scale).sum().backward)
        assert rank.is_reference or "backward ran a second time through the outputs" in text
    rank.observe_gradients(trainer.named_gradients())
    # One device reduces nothing, and has nothing to refuse.
    if not rank.is_reference:
        text = refused(rank, partial(trainer.forward, again))
        assert "call zero_gradients() before the next forward" in text, text
        weighted_loss(mine[0], late).backward()
        text = refused(rank, lambda: list(trainer.named_gradients()))
        assert "a backward has added to gradients that were reduced" in text, text


def test_outputs_belong_to_the_caller(rank: Rank, build: BuildTrainer) -> None:
    """Outputs may be changed in place, sliced and used many times, as tensors of one's own."""
    trainer = build()
    for request in rank.split(requests(rank)):
        states = trainer.forward(request.ask(hidden_states=True)).hidden_states
        assert states is not None
        states.mul_(1 + request.goals[:, :1].abs())
        states[3:5].add_(0.25)
        rank.observe(f"{request.name}.states", states)
        (spread(states[1:][request.mask]).mean() + states[-1].sum()).backward()
        logprobs = trainer.forward(request.ask(target_tokens=request.targets)).target_logprobs
        assert logprobs is not None
        logprobs[2:].mul_(request.goals[2:, 0])
        rank.observe(f"{request.name}.logprobs", logprobs)
        logprobs.sum().backward()
    rank.observe_gradients(trainer.named_gradients())
