"""Weights as a checkpoint holds them, and as tensor parallelism and fused layers cut them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cases.material import AGAINST_ORACLE, TOPOLOGIES, requests

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE)


def test_a_checkpoint_in_several_files(rank: Rank, build: BuildTrainer) -> None:
    """Every rank loads its own slice of each tensor, q, k and v by heads, from whatever file."""
    trainer = build(layers=3, file_size=20_000)
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        rank.observe(f"{request.name}.hidden_states", output.hidden_states)
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)


@pytest.mark.parity("cp2", **AGAINST_ORACLE)
def test_the_first_layers_alone(rank: Rank, build: BuildTrainer) -> None:
    """A model that is cut runs, and reads, its first layers; the last norm comes right after."""
    trainer = build(layers=3, cut=1)
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(hidden_states=True))
        rank.observe(f"{request.name}.hidden_states", output.hidden_states)
    names = {name for name, _, _ in trainer.named_gradients()}
    rank.observe("parameters", len(names))
