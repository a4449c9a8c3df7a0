"""Micro-batches dealt over data parallelism: none twice, none left out, sums as of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import Tensor

from cases.material import AGAINST_ORACLE, TOPOLOGIES, Request, make_request, normal, weighted_loss
from subjects.types import IGNORED, ForwardInput, Nested

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank
    from subjects.protocol import Trainer

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE)

LENGTHS = ([(5, 8), (5, 2)], [(3, 4)], [(0, 11), (6, 1)], [(4, 9)], [(2, 3), (2, 5)])
"""(shared, own) tokens of the documents of five micro-batches: an odd number, no two alike."""


class Pair(NamedTuple):
    """A nesting of a caller's own."""

    chosen: ForwardInput
    rejected: tuple[ForwardInput, ...]


def micro_batches(rank: Rank) -> list[Request]:
    """Five of different sizes, with unequal shares of ignored targets."""
    return [make_request(rank, f"micro{at}", lengths) for at, lengths in enumerate(LENGTHS)]


def asked(requests: Sequence[Request]) -> list[ForwardInput]:
    """What is run of each."""
    return [request.ask(target_tokens=request.targets) for request in requests]


def tokens(requests: Sequence[Request]) -> int:
    """Targets that count."""
    return sum(int((request.targets != IGNORED).sum()) for request in requests)


def one_batch(trainer: Trainer, requests: Sequence[Request]) -> tuple[Tensor, int]:
    """All documents in a single forward and backward: the loss and the count of its tokens."""
    documents = [document for request in requests for document in request.documents]
    targets = torch.cat([request.targets for request in requests])
    output = trainer.forward(ForwardInput(documents, targets))
    assert output.target_logprobs is not None
    weights = torch.cat([request.weights for request in requests])
    count = tokens(requests)
    loss = -(output.target_logprobs * weights).sum() / count
    loss.backward()
    return loss.detach(), count


def accumulated(rank: Rank, trainer: Trainer, requests: Sequence[Request]) -> tuple[Tensor, int]:
    """The same loss by waves: what this rank counted and lost, reduced over data parallelism."""
    count = trainer.dp_reduce(tokens(rank.split(requests)))
    total = torch.zeros((), dtype=rank.dtype)
    for micro in trainer.forward_micro_batches(asked(requests), yield_empty=True):
        if micro.index is None:
            continue
        loss = weighted_loss(requests[micro.index], micro.output) / count
        loss.backward()
        total += loss.detach()
    return trainer.dp_reduce(total), count


def test_accumulation_over_uneven_waves_is_one_batch(rank: Rank, build: BuildTrainer) -> None:
    """Means of means, local counts, a wave dropped or run twice: the reference has one batch."""
    trainer = build(sharing="full")
    step = one_batch(trainer, micro_batches(rank)) if rank.is_reference else None
    loss, count = step or accumulated(rank, trainer, micro_batches(rank))
    rank.observe("loss", loss)
    rank.observe("count", count)
    rank.observe_gradients(trainer.named_gradients())


def test_last_window_of_a_loop_is_shorter(rank: Rank, build: BuildTrainer) -> None:
    """Each step is normalised by its own tokens, also the last one, in which a rank has nothing."""
    trainer = build(sharing="full")
    every = micro_batches(rank)
    for step, window in enumerate((every[:4], every[4:])):
        trainer.zero_gradients()
        done = one_batch(trainer, window) if rank.is_reference else None
        loss, _ = done or accumulated(rank, trainer, window)
        rank.observe(f"step{step}.loss", loss)
        rank.observe_gradients(
            (one for one in trainer.named_gradients() if "layers.1" not in one[0]),
            prefix=f"step{step}",
        )


def test_every_element_is_run_once(rank: Rank, build: BuildTrainer) -> None:
    """Each under its own index, in its own nesting; with ``yield_empty`` all loop equally often."""
    trainer = build(sharing="full")
    first, second, third, *rest = micro_batches(rank)
    inputs: list[Nested] = [
        {"states": first.ask(hidden_states=True), "score": asked([first])},
        Pair(second.ask(hidden_states=True), (first.ask(hidden_states=True),)),
        [third.ask(hidden_states=True), *asked([third])],
        *asked(rest),
    ]
    with torch.no_grad():
        seen, loops = 0, 0
        for micro in trainer.forward_micro_batches(inputs, yield_empty=True):
            loops += 1
            if micro.index is None:
                assert micro.output is None
                continue
            seen += 1
            wave = (loops - 1) * rank.size("dp") + rank.coordinates["dp"]
            rank.observe(f"element{micro.index}.place in the order", wave)
            if isinstance(inputs[micro.index], Pair):
                assert type(micro.output) is Pair
            rank.observe(f"element{micro.index}", micro.output)
        plain = len(list(trainer.forward_micro_batches(inputs)))
    assert plain == seen
    assert trainer.dp_reduce(loops, "max") == trainer.dp_reduce(loops, "min")
    rank.observe("run", trainer.dp_reduce(seen))


def test_waves_run_when_they_are_asked_for(rank: Rank, build: BuildTrainer) -> None:
    """Waves run ahead of the loop would hold every graph at once: a later wave sees the present."""
    trainer = build(sharing="full")
    inputs = [[one] for one in asked(micro_batches(rank)[:4])]
    waves = trainer.forward_micro_batches(inputs)
    graphs, scores = 0, torch.zeros((), dtype=rank.dtype)
    for number in range(4 // rank.size("dp")):
        with torch.set_grad_enabled(number < 2 // rank.size("dp")):
            micro = next(waves)
        logprobs = micro.output[0].target_logprobs
        graphs += int(logprobs.requires_grad)
        scores += logprobs.detach().sum()
    rank.observe("scores", trainer.dp_reduce(scores))
    rank.observe("half have a graph", trainer.dp_reduce(graphs))


def test_elements_choose_their_slots(rank: Rank, build: BuildTrainer) -> None:
    """Each request of an element runs with its own adapter; their losses meet in one backward."""
    trainer = build(sharing="full")

    def factor(name: str, shape: tuple[int, ...]) -> Tensor:
        return normal(rank, rank.generator(name), *shape) / 4

    trainer.freeze("base")
    trainer.add_slot("policy", rank=3, targets=("q_proj", "down_proj"), factory=factor)
    trainer.add_slot("critic", rank=2, targets=("v_proj", "lm_head"), factory=factor)
    every = micro_batches(rank)[:3]
    inputs = [
        {
            slot or "bare": one.ask(target_tokens=one.targets, slot=slot)
            for slot in ("critic", None, "policy")
        }
        for one in every
    ]
    for micro in trainer.forward_micro_batches(inputs):
        assert micro.index is not None
        request = every[micro.index]
        scores = {name: weighted_loss(request, output) for name, output in micro.output.items()}
        rank.observe(f"element{micro.index}", scores)
        margin = (scores["policy"] - scores["bare"]) / len(request.goals)
        (margin.exp() + scores["critic"].square() / 100).backward()
    rank.observe_gradients(one for one in trainer.named_gradients() if "/" in one[0])


def test_inputs_of_this_rank_alone(rank: Rank, build: BuildTrainer) -> None:
    """``dp_rank_forward`` deals nothing out: other ranks may have more, or nothing at all."""
    trainer = build(sharing="full")
    every = micro_batches(rank)
    for step, window in enumerate((every[:3], every[3:4])):
        own = rank.split(window)
        nested = {"scores": asked(own), "states": tuple(one.ask(hidden_states=True) for one in own)}
        answered = trainer.dp_rank_forward(nested)
        for at, request in enumerate(own):
            name = f"step{step}.{request.name}"
            rank.observe(f"{name}.states", answered["states"][at].hidden_states)
            loss = weighted_loss(request, answered["scores"][at])
            rank.observe(f"{name}.loss", loss)
            loss.backward()
    assert trainer.dp_rank_forward([]) == []
    rank.observe_gradients(one for one in trainer.named_gradients() if "layers.1" not in one[0])
