"""One layer at the true widths of Qwen3-0.6B, in float32; or the first ones of ``--model``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from cases.material import make_request
from cases.test_combinations import SLOTS, all_combinations
from subjects.types import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cases.conftest import BuildTrainer
    from cases.material import Request
    from shardproof import Rank

_OPTIONS: dict[str, Any] = {
    "megatron": True,
    "dtype": "float32",
    "timeout": 600,
    "requires": ["megatron-core>=0.16", "transformers>=5"],
    "divisor_of": {"tp": 8},
}


def _requests(rank: Rank, directory: Path, names: tuple[str, ...]) -> list[Request]:
    """Documents whose ids lie all over the vocabulary of the checkpoint."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    vocabulary = config["vocab_size"]

    def spread(ids: Tensor) -> Tensor:
        elsewhere: Tensor = (ids * 7919 + 113) % vocabulary
        return elsewhere.where(ids != IGNORED, IGNORED)

    made = [make_request(rank, name, [(9, 14), (9, 8), (4, 15)]) for name in names]
    return [
        replace(
            one,
            documents=tuple(spread(document) for document in one.documents),
            targets=spread(one.targets),
        )
        for one in made
    ]


def _run(rank: Rank, build: BuildTrainer, directory: Path, sharing: str, *names: str) -> None:
    """Outputs and gradients of hidden 1024, 16 heads, 8 KV heads of 128, vocabulary 151936."""
    trainer = build(of="native", sharing=sharing)
    for request in rank.split(_requests(rank, directory, names)):
        output = trainer.forward(
            request.ask(target_tokens=request.targets, hidden_states=True, top_k=4)
        )
        assert output.target_logprobs is not None
        assert output.top_k is not None
        rank.observe(f"{request.name}.hidden_states", output.hidden_states)
        rank.observe(f"{request.name}.logprobs", output.target_logprobs)
        rank.observe(f"{request.name}.top_values", output.top_k.values)
        rank.observe(f"{request.name}.top_tokens", output.top_k.tokens)
        (output.target_logprobs.sum() / int((request.targets != IGNORED).sum())).neg().backward()
    rank.observe_gradients(trainer.named_gradients())


@pytest.mark.parity("cp2", **_OPTIONS)
def test_native_widths(rank: Rank, build: BuildTrainer, checkpoint: Callable[..., Path]) -> None:
    """In the gate: prefixes shared, two ranks."""
    assert rank.dtype == torch.float32
    _run(rank, build, checkpoint("native"), "full", "only")


@pytest.mark.native
@pytest.mark.parity("cp4", "dp2xcp2", "tp2xcp2", **_OPTIONS)
def test_native_widths_everywhere(
    rank: Rank, build: BuildTrainer, checkpoint: Callable[..., Path], sharing: str
) -> None:
    """By hand (-m native): the other topologies, about 3 GB a process."""
    _run(rank, build, checkpoint("native"), sharing, "first", "second")


@pytest.mark.native
@pytest.mark.parity(
    "cp2",
    **{**_OPTIONS, "requires": [*_OPTIONS["requires"], "peft>=0.18"]},
    reference_ignores=["sharing"],
)
def test_native_combinations(
    rank: Rank, build: BuildTrainer, checkpoint: Callable[..., Path], sharing: str
) -> None:
    """By hand: sixteen combinations of outputs, of the bare model and two slots.

    The head works in two chunks a rank.
    """
    trainer = build(of="native", sharing=sharing, only={"head_rows": 16})
    for index, (slot, targets) in enumerate(_TARGETS.items()):
        trainer.add_slot(
            slot, rank=3 + 2 * index, alpha=5, targets=targets, factory=_factory(rank, slot)
        )
    (request,) = _requests(rank, checkpoint("native"), ("only",))
    for slot_or_none in SLOTS:
        all_combinations(rank, trainer, request, slot_or_none)


_TARGETS = {
    "all": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"),
    "few": ("k_proj", "up_proj"),
}


def _factory(rank: Rank, slot: str) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Values of factors, none of them zero, that move what they are added to by about a tenth."""

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        generator = rank.generator(f"{slot}/{name}")
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float32)
        scaled: Tensor = 0.2 * drawn / shape[1] ** 0.5
        return scaled.to(rank.dtype)

    return values
