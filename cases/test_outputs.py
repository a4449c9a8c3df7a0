"""Every output holds the full source sequence, in source order, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cases.material import TOPOLOGIES, multi_targets, requests
from subjects.types import IGNORED

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank
    from subjects.protocol import Trainer

pytestmark = pytest.mark.parity(
    *TOPOLOGIES,
    megatron=True,
    full_precision=True,
    requires=["megatron-core>=0.16", "transformers>=5"],
    divisor_of={"tp": 2},
)


def test_hidden_states(rank: Rank, trainer: Trainer) -> None:
    """A rank that returns its own rows, or rows in the order of the plan, shows here."""
    for request in rank.split(requests(rank)):
        states = trainer.forward(request.ask(hidden_states=True)).hidden_states
        assert states is not None
        assert states.shape == (request.length, 40)
        rank.observe(f"{request.name}.hidden_states", states)


def test_every_document_is_where_the_caller_put_it(rank: Rank, trainer: Trainer) -> None:
    """Order: each document's rows, read on their own, and the rows that end and begin it."""
    for request in rank.split(requests(rank)):
        states = trainer.forward(request.ask(hidden_states=True)).hidden_states
        assert states is not None
        for number, rows in enumerate(request.by_document(states)):
            rank.observe(f"{request.name}.{number}.mean", rows.mean(0))
            rank.observe(f"{request.name}.{number}.edges", torch.stack([rows[0], rows[-1]]))


def test_masked_readout(rank: Rank, trainer: Trainer) -> None:
    """``hidden_states[1:][mask]`` as a caller writes it: it is right on full sequences alone."""
    for request in rank.split(requests(rank)):
        states = trainer.forward(request.ask(hidden_states=True)).hidden_states
        assert states is not None
        rank.observe(f"{request.name}.readout", states[1:][request.mask])
        rank.observe(f"{request.name}.chosen", int(request.mask.sum()))


def test_target_logprobs(rank: Rank, trainer: Trainer) -> None:
    """No shift, also at the edges of shards and documents; exactly 0 where ignored."""
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets))
        logprobs = output.target_logprobs
        assert logprobs is not None
        assert logprobs.shape == (request.length,)
        assert bool((logprobs[request.targets == IGNORED] == 0).all())
        rank.observe(f"{request.name}.logprobs", logprobs)


def test_multi_target_logprobs(rank: Rank, trainer: Trainer) -> None:
    """Targets with a trailing dimension: several for a position, each ignored on its own."""
    for request in rank.split(requests(rank)):
        targets = multi_targets(rank, request)
        logprobs = trainer.forward(request.ask(target_tokens=targets)).target_logprobs
        assert logprobs is not None
        assert logprobs.shape == targets.shape
        rank.observe(f"{request.name}.logprobs", logprobs)


def test_all_targets_ignored(rank: Rank, trainer: Trainer) -> None:
    """Nothing is asked: exact zeros, and gradients of zero, not NaN from an empty mean."""
    for request in rank.split(requests(rank)):
        targets = torch.full_like(request.targets, IGNORED)
        output = trainer.forward(request.ask(target_tokens=targets, hidden_states=True))
        assert output.target_logprobs is not None
        assert output.hidden_states is not None
        rank.observe(f"{request.name}.logprobs", output.target_logprobs, exact=True, zero=True)
        # The states keep the graph alive, so that gradients exist.
        (output.target_logprobs.sum() + output.hidden_states.square().mean()).backward()
    rank.observe_gradients(
        triple for triple in trainer.named_gradients() if triple[0].startswith("model.layers.0")
    )


def test_top_k(rank: Rank, trainer: Trainer) -> None:
    """Values and tokens over the whole vocabulary, not over one shard of it."""
    for request in rank.split(requests(rank)):
        top = trainer.forward(request.ask(top_k=5)).top_k
        assert top is not None
        rank.observe(f"{request.name}.values", top.values)
        rank.observe(f"{request.name}.tokens", top.tokens)


def test_logits(rank: Rank, trainer: Trainer) -> None:
    """The whole vocabulary, without the columns that pad it."""
    for request in rank.split(requests(rank)):
        logits = trainer.forward(request.ask(logits=True)).logits
        assert logits is not None
        rank.observe(f"{request.name}.logits", logits)


def test_all_outputs_at_once(rank: Rank, trainer: Trainer) -> None:
    """Outputs asked for together are those asked for alone."""
    for request in rank.split(requests(rank)):
        output = trainer.forward(
            request.ask(target_tokens=request.targets, top_k=3, logits=True, hidden_states=True)
        )
        assert output.top_k is not None
        rank.observe(
            request.name,
            {
                "logprobs": output.target_logprobs,
                "top": {"values": output.top_k.values, "tokens": output.top_k.tokens},
                "logits": output.logits,
                "hidden_states": output.hidden_states,
            },
        )


def test_no_grad(rank: Rank, trainer: Trainer) -> None:
    """The same numbers without a graph, and no gradient of anything afterwards."""
    for request in rank.split(requests(rank)):
        output = trainer.forward(
            request.ask(target_tokens=request.targets, hidden_states=True, no_grad=True)
        )
        assert output.target_logprobs is not None
        assert output.hidden_states is not None
        assert not output.target_logprobs.requires_grad
        assert not output.hidden_states.requires_grad
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)
        rank.observe(f"{request.name}.hidden_states", output.hidden_states)
    rank.observe_gradients(trainer.named_gradients())


@pytest.mark.parametrize("plan", ["balanced", "empty", "one_rank", "interleaved"])
def test_plans(rank: Rank, build: BuildTrainer, sharing: str, plan: str) -> None:
    """Whatever rows a rank computes, in whatever order, and when it computes none."""
    policies = {
        "one_rank": lambda rows, cp: [[]] * (cp - 1) + [list(range(rows))],
        "interleaved": lambda rows, cp: [list(range(rows))[::-1][at::cp] for at in range(cp)],
    }
    trainer = build(sharing=sharing, plan=policies.get(plan, plan))
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)
        rank.observe(f"{request.name}.hidden_states", output.hidden_states)
