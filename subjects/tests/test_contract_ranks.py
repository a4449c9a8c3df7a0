"""Four ranks that are told different things: all raise the same, none waits, and then they work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from subjects.tests import scenario, worlds


@pytest.mark.slow
def test_four_ranks_that_disagree(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    from oracles.checkpoints import tiny_checkpoint

    tiny_checkpoint(tmp_path / "checkpoint")
    worlds.spawn(body, tmp_path, ranks=4)


def body(directory: Path) -> None:
    from subjects.trainer import TrainerRank

    for name in ("tp2xcp2", "dp2xcp2"):
        rank = worlds.make_rank(name)
        worlds.make_parallel_state(rank)
        trainer = TrainerRank.build(directory / "checkpoint", rank)
        before = step(trainer)
        trainer.zero_gradients()
        replicas = 4 // rank.group("dp").size()
        odd = dist.get_rank() == 3
        bad_input_on_one_rank(trainer, odd=odd, replicas=replicas)
        out_of_step(trainer, odd=odd, replicas=replicas)
        different_losses(trainer, odd=odd, replicas=replicas)
        backward_twice(trainer)
        trainer.zero_gradients()
        assert step(trainer) == before, "the trainer has kept something of what it refused"
        if name == "tp2xcp2":
            no_comparison(TrainerRank.build(directory / "checkpoint", rank, check_losses=False))


def step(trainer: Any) -> dict[str, float]:
    """The norms of the gradients of one right step."""
    output = trainer.forward(scenario.requests()[0])
    (output.target_logprobs.sum() + output.hidden_states.square().sum()).backward()
    return {n: g.norm().item() for n, g, _ in trainer.named_gradients() if g is not None}


def raised(action: Callable[[], object], *, replicas: int) -> str:
    """The error of ``action`` on this rank's batch, the same on all ``replicas``; "" for none."""
    text = ""
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    everyone = [""] * 4
    dist.all_gather_object(everyone, text)
    first = dist.get_rank() // replicas * replicas
    assert len(set(everyone[first : first + replicas])) == 1, everyone
    return text


def bad_input_on_one_rank(trainer: Any, *, odd: bool, replicas: int) -> None:
    good = scenario.requests()[0]
    bad: list[tuple[Any, str]] = [
        (replace(good, input_tokens=[]), "input_tokens holds no document"),
        (replace(good, target_tokens=torch.zeros(3, dtype=torch.int64)), "target_tokens has shape"),
        (replace(good, top_k=132), "top_k is 132; expected 1 to 131"),
        (replace(good, input_tokens=[[131]]), "token 131 is outside the vocabulary"),
        (replace(good, slot="nobody"), "'nobody'"),
        (None, "the request is of type NoneType"),
    ]
    mistyped: list[tuple[dict[str, Any], str]] = [
        ({"input_tokens": "hello"}, "input_tokens is 'hello'"),
        ({"input_tokens": (at for at in (1, 2))}, "input_tokens is of type generator"),
        ({"input_tokens": [2**70]}, "input_tokens has 1180591620717411303424 at 0"),
        ({"target_tokens": [None, 3]}, "target_tokens[0] is None"),
        ({"top_k": "3"}, "top_k is '3'"),
        ({"entropy": torch.ones(2)}, "entropy is of type Tensor"),
        ({"slot": ["a"]}, "slot is ['a']"),
    ]
    bad += [(replace(good, **given), words) for given, words in mistyped]
    place = "cp=1, tp=1" if replicas == 4 else "cp=1"
    for request, words in bad:
        # On all ranks: each raises its own error.
        assert words in raised(partial(trainer.forward, request), replicas=replicas)
        # On one rank alone: so do its peers, which were given nothing wrong; other batches go on.
        given = request if odd else good
        text = raised(partial(trainer.forward, given), replicas=replicas)
        touched = dist.get_rank() >= 4 - replicas
        assert bool(text) == touched, text
        if touched:
            assert text.startswith("DisagreementError: forward was refused by some ranks")
            assert f"{place}: " in text
            assert words in text
    nested = [good, "text"] if odd else [good]
    text = raised(lambda: trainer.forward_micro_batches(nested), replicas=4)
    assert "TypeError: inputs[1] is of type str" in text


def out_of_step(trainer: Any, *, odd: bool, replicas: int) -> None:
    """Calls that would never return are refused, also between a forward and a backward."""
    good = scenario.requests()[0]
    first = dist.get_rank() >= 4 - replicas
    other = trainer.dp_rank_forward if odd else trainer.forward
    text = raised(lambda: other(good), replicas=replicas)
    assert ("out of step: forward on" in text) == first, text
    output = trainer.forward(good)
    loss = output.hidden_states.sum()
    act = (lambda: trainer.forward(good)) if odd else loss.backward
    text = raised(act, replicas=replicas)
    assert ("out of step: the backward of forward" in text) == first, text
    assert (", forward on" in text) == first, text
    one, two = trainer.forward(good), trainer.forward(good)
    text = raised((two if odd else one).hidden_states.sum().backward, replicas=replicas)
    assert (text.count("the backward of forward") == 2) == first, text
    trainer.zero_gradients()


def different_losses(trainer: Any, *, odd: bool, replicas: int) -> None:
    touched = dist.get_rank() >= 4 - replicas
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda scores, _: scores.sum() * (1 + 1e-6 * odd),
        lambda scores, states: scores.sum() if odd else scores.sum() + states.sum(),
        lambda scores, states: states.sum() if odd else scores.sum(),
    ]
    for wrong in losses:
        output = trainer.forward(scenario.requests()[0])
        loss = wrong(output.target_logprobs, output.hidden_states)
        text = raised(loss.backward, replicas=replicas)
        assert ("DisagreementError: the losses differ" in text) == touched, text
        assert ("of dp=1" in text) == (touched and replicas == 2), text
        trainer.zero_gradients()


def backward_twice(trainer: Any) -> None:
    loss = trainer.forward(scenario.requests()[0]).hidden_states.sum()
    loss.backward()
    text = raised(loss.backward, replicas=4)
    assert "RuntimeError: backward ran a second time through the outputs of one forward" in text


def no_comparison(trainer: Any) -> None:
    output = trainer.forward(scenario.requests()[0])
    loss = output.hidden_states.sum() * (1 + dist.get_rank())
    assert raised(loss.backward, replicas=1) == ""
