"""Attention in blocks, with keys and values gathered or sent round a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from cases.material import (
    AGAINST_ORACLE,
    TOPOLOGIES,
    Request,
    make_request,
    request_of,
    requests,
    spread,
)

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank
    from subjects.protocol import Trainer

parity = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE)
exchanged = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE, reference_ignores=["attention"])
exchanges = pytest.mark.parametrize("attention", ["gather", "ring"])
BLOCK = 5
"""Rows of a block: several in each shard, and a last one that is shorter."""


def _observe_step(rank: Rank, trainer: Trainer, batches: list[Request]) -> None:
    """Outputs of ``batches``, and the gradients of all of them together."""
    for request in rank.split(batches):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        states, logprobs = output.hidden_states, output.target_logprobs
        assert states is not None
        assert logprobs is not None
        rank.observe(f"{request.name}.hidden_states", states)
        rank.observe(f"{request.name}.logprobs", logprobs)
        weights = request.weights
        (spread(states) * weights - logprobs * weights).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


@exchanged
@exchanges
def test_exchanges(rank: Rank, build: BuildTrainer, attention: str) -> None:
    """Partial results merged without their log-sum-exp, and gradients of keys not brought home."""
    trainer = build(sharing="full", only={"attention": attention, "attention_block": BLOCK})
    _observe_step(rank, trainer, requests(rank))


@exchanged
@exchanges
def test_large_logits(rank: Rank, build: BuildTrainer, attention: str) -> None:
    """exp(log-sum-exp) overflows in both dtypes; what is merged must not form it."""
    trainer = build(
        sharing="full", only={"attention": attention, "attention_block": BLOCK}, qk_norm_scale=20.0
    )
    _observe_step(rank, trainer, requests(rank))


@parity
def test_deep_prefix_trees(rank: Rank, build: BuildTrainer) -> None:
    """A tree that branches below branches, documents that end at a branch, and duplicates."""
    trainer = build(sharing="full", only={"attention": "ring", "attention_block": BLOCK})
    _observe_step(rank, trainer, [_tree(rank, "wide", 4), _tree(rank, "narrow", 2)])


@exchanged
@pytest.mark.parametrize("attention", ["ring", "auto"])
def test_empty_shard_in_a_ring(rank: Rank, build: BuildTrainer, attention: str) -> None:
    """A rank without rows takes the ring as others do, and passes on what it holds.

    So it does with the gradients that come with it.
    """
    options = {"attention": attention, "gather_limit": 0, "attention_block": BLOCK}
    trainer = build(sharing="full", plan=_first_is_empty, only=options)
    _observe_step(rank, trainer, requests(rank))


@parity
def test_one_row_a_shard(rank: Rank, build: BuildTrainer) -> None:
    """Shards of a single row, which sees nothing of most others, and more ranks than rows."""
    trainer = build(plan=_single_rows, only={"attention": "ring", "attention_block": BLOCK})
    batches = [make_request(rank, "few", [(0, 2)]), make_request(rank, "more", [(3, 4), (0, 6)])]
    _observe_step(rank, trainer, batches)


def _tree(rank: Rank, name: str, step: int) -> Request:
    """Documents of one stem: each joins it, or a branch of it, at another depth."""
    ids = rank.generator(f"tree/{name}")
    one, two, three = (torch.randint(0, 131, (count,), generator=ids) for count in (17, 9, 5))
    branch = torch.cat((one[: 2 * step], two))
    twig = torch.cat((branch[: 2 * step + 3], three))
    other = torch.cat((one[: 2 * step], three, one))
    documents = (one, branch, twig, one[: 2 * step], twig[:-2], branch, other, one[:step], two)
    return request_of(rank, name, documents)


def _first_is_empty(work: Tensor, cp: int) -> list[list[int]]:
    rows = list(range(len(work)))
    return [[], *(rows[::-1][at :: cp - 1] for at in range(cp - 1))] if cp > 1 else [rows]


def _single_rows(work: Tensor, cp: int) -> list[list[int]]:
    rows = list(range(len(work)))
    return [rows[cp - 1 :], *([row] for row in rows[: cp - 1]), *([] for _ in range(cp))][:cp]
