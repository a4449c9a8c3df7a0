"""What the head answers when it works a chunk of rows at a time, and what stays on its shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from cases.material import AGAINST_ORACLE, TOPOLOGIES, VOCABULARY, multi_targets, requests, spread

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from cases.material import Request
    from shardproof import Rank
    from subjects.protocol import Trainer
    from subjects.types import ForwardInput, ForwardOutput

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE, reference_ignores=["sharing"])

# Three rows a chunk: several of them, and a ragged last one, on every rank of every topology.
SMALL = {"head_rows": 3}


def _everything(rank: Rank, request: Request) -> ForwardInput:
    return request.ask(
        target_tokens=multi_targets(rank, request),
        top_k=4,
        entropy=True,
        logits=True,
        hidden_states=True,
    )


def _values(output: ForwardOutput) -> dict[str, Tensor]:
    """All floating outputs by name."""
    found = {
        "logprobs": output.target_logprobs,
        "top_values": None if output.top_k is None else output.top_k.values,
        "entropy": output.entropy,
        "logits": output.logits,
        "hidden_states": output.hidden_states,
    }
    return {name: value for name, value in found.items() if value is not None}


def _joint_loss(values: dict[str, Tensor], request: Request) -> Tensor:
    """All outputs multiplied with one another, with unequal weights of rows."""
    rows = [
        values["logprobs"].sum(1),
        values["top_values"].square().mean(1),
        values["entropy"],
        values["logits"].tanh().mean(1),
        spread(values["hidden_states"]),
    ]
    weights = request.weights
    return sum(
        ((1 + one.tanh()) * other * weights).sum()
        for one, other in zip(rows, rows[1:] + rows[:1], strict=True)
    )  # type: ignore[return-value]


def test_entropy(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """Entropy of one slice of the vocabulary, or one without a gradient (an entropy bonus is)."""
    trainer = build(sharing=sharing, only=SMALL)
    for request in rank.split(requests(rank)):
        entropy = trainer.forward(request.ask(entropy=True)).entropy
        assert entropy is not None
        rank.observe(f"{request.name}.entropy", entropy)
        (entropy * request.goals[:, 1]).sum().backward()
    rank.observe_gradients(trainer.named_gradients())


@pytest.mark.parametrize("sharing", ["full"])
def test_consumers_of_one_normalizer(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """Backward with the gradient of one output lost, or of the last chunk alone."""
    trainer = build(sharing=sharing, only=SMALL)
    for request in rank.split(requests(rank)):
        values = _values(trainer.forward(_everything(rank, request)))
        rank.observe(request.name, values)
        _joint_loss(values, request).backward()
    rank.observe_gradients(trainer.named_gradients())


@pytest.mark.parametrize("sharing", ["full"])
def test_empty_shard_of_the_head(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """A rank without rows has no chunk, and takes part in every collective all the same."""
    trainer = build(sharing=sharing, plan="empty", only=SMALL, tied=True)
    for request in rank.split(requests(rank)):
        values = _values(trainer.forward(_everything(rank, request)))
        rank.observe(request.name, values)
        _joint_loss(values, request).backward()
    rank.observe_gradients(trainer.named_gradients())


@pytest.mark.parametrize("sharing", ["none"])
def test_chunks_of_any_size(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """Chunks that drop, repeat or shift rows: two trainers differ in the size of chunks alone."""
    chunked = build(sharing=sharing, only=SMALL)
    whole = build(sharing=sharing, only={"head_rows": 1000})
    for request in rank.split(requests(rank)):
        found = [_values(_backward(one, rank, request)) for one in (chunked, whole)]
        rank.observe(f"{request.name}.chunked", found[0])
        for name, value in found[0].items():
            rank.observe(f"{request.name}.{name}_differ", value - found[1][name], zero=True)
    unchunked = {name: gradient for name, gradient, _ in whole.named_gradients()}
    for name, gradient, placement in chunked.named_gradients():
        assert gradient is not None
        other = unchunked[name]
        assert other is not None
        rank.observe(f"grad.{name}", gradient, **placement)  # type: ignore[arg-type]
        rank.observe(f"differ.{name}", gradient - other, zero=True, **placement)  # type: ignore[arg-type]


def _backward(trainer: Trainer, rank: Rank, request: Request) -> ForwardOutput:
    output = trainer.forward(_everything(rank, request))
    _joint_loss(_values(output), request).backward()
    return output


@pytest.mark.parametrize("sharing", ["full"])
def test_local_logits(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """Logits that stay on their shard: rows and columns that are not those they are said to be.

    Each rank adds the terms of its own part to a loss that all have in common.
    """
    trainer = build(sharing=sharing, only=SMALL)
    tokens = torch.linspace(0.4, 1.9, VOCABULARY, dtype=torch.float32).to(rank.dtype)
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, logits="local"))
        assert output.logits is None
        assert output.local_logits is not None
        assert output.target_logprobs is not None
        values, positions, first = output.local_logits
        rank.observe(f"{request.name}.logits", values, rows=positions, shard={"tp": 1})
        columns = tokens[first : first + values.shape[1]]
        own = (values.tanh() * columns * request.goals[positions, 1:2]).sum()
        rank.observe(f"{request.name}.loss", own, partial=("cp", "tp"))
        (own - (output.target_logprobs * request.goals[:, 0]).sum()).backward()
    rank.observe_gradients(trainer.named_gradients())


@pytest.mark.parametrize("sharing", ["none"])
def test_equal_logits_in_the_order_of_their_ids(
    rank: Rank, build: BuildTrainer, sharing: str
) -> None:
    """Six of ten rows of the head are zero: ties inside slices of the vocabulary, and across."""
    trainer = build(sharing=sharing, of="equal_logits", only=SMALL)
    for request in rank.split(requests(rank)):
        # More than one slice holds, so that ties go on in the next.
        top = trainer.forward(request.ask(top_k=80, no_grad=True)).top_k
        assert top is not None
        rank.observe(f"{request.name}.tokens", top.tokens)
        rank.observe(f"{request.name}.values", top.values)


@pytest.mark.parametrize("sharing", ["none"])
def test_what_does_not_fit_is_refused(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """One rank has less memory: all refuse the full logits alike, and go on to what fits.

    A prediction that leaves the gathered output out would let them pass.
    """
    least = 62_000 * rank.dtype.itemsize // 8
    last = rank.coordinates["cp"] == rank.size("cp") - 1
    trainer = build(
        sharing=sharing, plan="runs", only={**SMALL, "memory_limit": least if last else 1 << 40}
    )
    request = requests(rank)[0]
    # The oracle has the memory, and the answer is known.
    refused = rank.is_reference
    try:
        trainer.forward(request.ask(logits=True, no_grad=True))
    except MemoryError:
        refused = True
    rank.observe("refused", refused)
    output = trainer.forward(request.ask(target_tokens=request.targets, no_grad=True))
    rank.observe("logprobs", output.target_logprobs)


@pytest.mark.parametrize("sharing", ["none"])
def test_the_least_memory_is_told_to_all(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """Every rank has other memory, and none enough: all of a batch tell the same number."""
    least = 1000
    own = least + sum(rank.size(axis) - 1 - rank.coordinates[axis] for axis in ("tp", "cp"))
    trainer = build(sharing=sharing, only={"memory_limit": own})
    # The oracle has the memory, and the answer is known.
    allowed = least
    try:
        trainer.forward(requests(rank)[0].ask(logits=True, no_grad=True))
    except MemoryError as error:
        allowed = vars(error)["allowed"]
    rank.observe("allowed", allowed)
