"""Gradients of decoder, head and probe, as one device has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cases.material import (
    AGAINST_ORACLE,
    TOPOLOGIES,
    logprobs_of,
    probe_weight,
    request_of,
    requests,
    spread,
    states_of,
)
from oracles.analytic import probe_gradient, probe_loss

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank
    from subjects.protocol import Trainer

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE, reference_ignores=["sharing"])


def test_decoder_and_head_gradients(rank: Rank, trainer: Trainer) -> None:
    """Each row's gradient reaches its owner once, unscaled; replicated weights are summed."""
    for request in rank.split(requests(rank, 3)):
        output = trainer.forward(request.ask(target_tokens=request.targets))
        (logprobs_of(output) * request.weights).sum().neg().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_nonlinear_loss_across_items(rank: Rank, trainer: Trainer) -> None:
    """A loss that no shard could compute: documents of a batch compete with one another."""
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        scores = torch.stack([part.mean() for part in request.by_document(logprobs_of(output))])
        norms = torch.stack(
            [spread(part).mean() for part in request.by_document(states_of(output))]
        )
        loss = (scores.softmax(0) * norms).sum() + scores.logsumexp(0)
        rank.observe(f"{request.name}.loss", loss)
        loss.backward()
    rank.observe_gradients(trainer.named_gradients())


def test_masked_readout_gradients(rank: Rank, trainer: Trainer) -> None:
    """Backward of ``hidden_states[1:][mask]`` with a gradient that differs from row to row."""
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(hidden_states=True))
        rows = states_of(output)[1:][request.mask]
        (spread(rows) * request.weights[1:][request.mask]).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_logits_gradients(rank: Rank, trainer: Trainer) -> None:
    """Backward through logits gathered over the vocabulary and over the sequence."""
    for request in rank.split(requests(rank)):
        logits = trainer.forward(request.ask(logits=True)).logits
        assert logits is not None
        (logits.log_softmax(-1)[:, ::7] * request.weights[:, None]).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_top_k_value_gradients(rank: Rank, trainer: Trainer) -> None:
    """Backward through the values of the most probable tokens, whichever shard holds them."""
    for request in rank.split(requests(rank)):
        top = trainer.forward(request.ask(top_k=4)).top_k
        assert top is not None
        (top.values.square() * request.weights[:, None]).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_probe_gradient(rank: Rank, trainer: Trainer) -> None:
    """Every replica computes the whole probe gradient: averaged over CP and TP, summed over DP."""
    probe = trainer.parameter("probe", lambda: probe_weight(rank))
    seen = []
    for request in rank.split(requests(rank)):
        states = states_of(trainer.forward(request.ask(hidden_states=True)))[1:][request.mask]
        goals = request.goals[1:][request.mask]
        probe_loss(states, probe, goals).backward()
        seen.append((states.detach(), goals))
    gradients = {name: gradient for name, gradient, _ in trainer.named_gradients()}
    rank.observe("grad/probe", gradients["probe"])
    # The formula judges both: on the reference it stands in for autograd.
    by_formula = probe_gradient(seen, probe.detach()) if rank.is_reference else gradients["probe"]
    rank.observe("analytic/probe", by_formula)
    rank.observe("grad/decoder", gradients["model.layers.0.input_layernorm.weight"])


def test_empty_shard_gradients(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """A rank without rows takes part in every collective of the backward pass."""
    trainer = build(sharing=sharing, plan="empty")
    probe = trainer.parameter("probe", lambda: probe_weight(rank))
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        read = probe_loss(states_of(output), probe, request.goals)
        (read - (logprobs_of(output) * request.weights).sum()).backward()
    rank.observe_gradients(trainer.named_gradients())


def test_frozen_decoder(rank: Rank, trainer: Trainer) -> None:
    """Head and probe learn; a frozen parameter has no gradient, which is not a gradient of 0."""
    trainer.freeze("decoder")
    probe = trainer.parameter("probe", lambda: probe_weight(rank))
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        read = probe_loss(states_of(output), probe, request.goals)
        (read - (logprobs_of(output) * request.weights).sum()).backward()
    rank.observe_gradients(trainer.named_gradients())


def test_frozen_head(rank: Rank, trainer: Trainer) -> None:
    """The decoder learns through a head that does not."""
    trainer.freeze("head")
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets))
        (logprobs_of(output) * request.weights).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_tied_embeddings(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """One matrix at both ends: its gradient is the sum of both uses, once each."""
    trainer = build(sharing=sharing, tied=True)
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets))
        (logprobs_of(output) * request.weights).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_equal_documents_with_equal_targets(rank: Rank, trainer: Trainer) -> None:
    """Documents given twice, targets and all: what both send back meets in one element.

    With shared prefixes both ask the same row of the head for the same token.
    """
    for request in rank.split(requests(rank)):
        twice = request_of(rank, f"{request.name}-twice", request.documents * 2)
        output = trainer.forward(twice.ask(target_tokens=request.targets.repeat(2)))
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)
        (logprobs_of(output) * twice.weights).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_a_token_asked_for_twice(rank: Rank, trainer: Trainer) -> None:
    """Targets of one position that are equal: each has a weight of its own."""
    for request in rank.split(requests(rank)):
        targets = torch.stack([request.targets, request.targets.roll(3), request.targets], 1)
        output = trainer.forward(request.ask(target_tokens=targets))
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)
        (logprobs_of(output) * request.goals).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_gradients_accumulate(rank: Rank, trainer: Trainer) -> None:
    """Two forwards of each batch, one of them through the states, add up before one reduction."""
    for request in rank.split(requests(rank)):
        first = trainer.forward(request.ask(target_tokens=request.targets))
        (logprobs_of(first) * request.weights).sum().backward()
        second = trainer.forward(request.ask(hidden_states=True))
        spread(states_of(second)).mean().backward()
    rank.observe_gradients(trainer.named_gradients())


def test_gradients_after_zeroing(rank: Rank, trainer: Trainer) -> None:
    """A second step starts from nothing: what the first one reduced is not reduced again."""
    for step in range(2):
        trainer.zero_gradients()
        for request in rank.split(requests(rank)):
            output = trainer.forward(request.ask(target_tokens=request.targets))
            (logprobs_of(output) * request.weights * (step + 1)).sum().backward()
        rank.observe_gradients(trainer.named_gradients(), prefix=f"step{step}")


@pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE)
def test_gradients_are_reduced_once(rank: Rank, build: BuildTrainer) -> None:
    """Read twice, they are the same: a second reduction would count each rank once more."""
    trainer = build()
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets))
        (logprobs_of(output) * request.weights).sum().backward()
    rank.observe_gradients(trainer.named_gradients())
    rank.observe_gradients(trainer.named_gradients(), prefix="again")
