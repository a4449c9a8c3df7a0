"""Every output holds the full source sequence, in source order, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from cases.material import AGAINST_ORACLE, TOPOLOGIES, VOCABULARY, multi_targets, requests, spread
from subjects.types import IGNORED, ForwardInput

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank
    from subjects.protocol import Trainer

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE, reference_ignores=["sharing"])


def test_hidden_states(rank: Rank, trainer: Trainer) -> None:
    """A rank that returns its own rows, or rows in the order of the plan, shows here."""
    for request in rank.split(requests(rank)):
        states = trainer.forward(request.ask(hidden_states=True)).hidden_states
        assert states is not None
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
        rank.observe(f"{request.name}.logprobs", logprobs)
        ignored = logprobs[request.targets == IGNORED]
        rank.observe(f"{request.name}.ignored", ignored, exact=True, zero=True)


def test_targets_pick_from_their_own_logits(rank: Rank, trainer: Trainer) -> None:
    """Labels shifted inside a shard: a log-probability is that of its own row's logits."""
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, logits=True))
        assert output.target_logprobs is not None
        assert output.logits is not None
        asked = request.targets != IGNORED
        picked = output.logits.log_softmax(-1)[asked].gather(1, request.targets[asked][:, None])
        shift = output.target_logprobs[asked] - picked[:, 0]
        rank.observe(f"{request.name}.logprob_off_its_own_logits", shift, zero=True)
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)


def test_documents_do_not_see_each_other(rank: Rank, trainer: Trainer) -> None:
    """A document mask dropped for remote keys: other documents' tokens change nothing."""
    for request in rank.split(requests(rank)):
        states = trainer.forward(request.ask(hidden_states=True)).hidden_states
        for changed in (0, len(request.documents) - 1):
            others = list(request.documents)
            others[changed] = (others[changed] + 1) % VOCABULARY
            again = trainer.forward(ForwardInput(others, hidden_states=True)).hidden_states
            assert states is not None
            assert again is not None
            before, after = request.by_document(states), request.by_document(again)
            leaks = [after[at] - before[at] for at in range(len(before)) if at != changed]
            rank.observe(f"{request.name}.leak_of_document_{changed}", torch.cat(leaks), zero=True)
            rank.observe(f"{request.name}.document_{changed}", after[changed])


def test_a_document_is_the_same_wherever_it_lies(rank: Rank, trainer: Trainer) -> None:
    """Positions restarted in each shard: twins that straddle shards at other rows differ then."""
    generator = rank.generator("twins")
    one, two, filler = (
        torch.randint(0, VOCABULARY, (count,), generator=generator) for count in (17, 13, 7)
    )
    for number, order in enumerate(rank.split([(0, 1, 2, 0, 1), (2, 0, 0, 1), (1, 2, 1, 0, 0)])):
        documents = [(one, two, filler)[at] for at in order]
        name = f"batch{rank.coordinates['dp'] + number * rank.size('dp')}"
        states = trainer.forward(ForwardInput(documents, hidden_states=True)).hidden_states
        assert states is not None
        rows = states.split([len(document) for document in documents])
        for which in (0, 1):
            twins = [part for part, at in zip(rows, order, strict=True) if at == which]
            rank.observe(f"{name}.{which}", twins[0])
            if len(twins) > 1:
                rank.observe(f"{name}.{which}.twin_differs", twins[1] - twins[0], zero=True)


def test_multi_target_logprobs(rank: Rank, trainer: Trainer) -> None:
    """Targets with trailing dimensions: several for a position, each ignored on its own.

    Those of the second batch have two, which answers that are flat or in another order show.
    """
    for request in rank.split(requests(rank)):
        targets = multi_targets(rank, request)
        if request.name == "second":
            targets = torch.stack([targets, targets.roll(1, 0)], 1)
        logprobs = trainer.forward(request.ask(target_tokens=targets)).target_logprobs
        assert logprobs is not None
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
        (output.target_logprobs.sum() + spread(output.hidden_states).mean()).backward()
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


@pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE, reference_ignores=["sharing", "plan"])
@pytest.mark.parametrize("plan", ["balanced", "empty", "one_rank", "interleaved"])
def test_plans(rank: Rank, build: BuildTrainer, sharing: str, plan: str) -> None:
    """Whatever rows a rank computes, in whatever order, and when it computes none."""
    policies: dict[str, Callable[[Tensor, int], list[list[int]]]] = {
        "one_rank": lambda work, cp: [[]] * (cp - 1) + [list(range(len(work)))],
        "interleaved": lambda work, cp: [list(range(len(work)))[::-1][at::cp] for at in range(cp)],
    }
    trainer = build(sharing=sharing, plan=policies.get(plan, plan))
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)
        rank.observe(f"{request.name}.hidden_states", output.hidden_states)
