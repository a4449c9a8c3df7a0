"""Every combination of outputs, of the bare model and of slots, asked together and alone."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from cases.material import AGAINST_ORACLE, requests

if TYPE_CHECKING:
    from cases.conftest import Adapter, BuildTrainer
    from cases.material import Request
    from shardproof import Rank
    from subjects.protocol import Trainer
    from subjects.types import ForwardOutput

_OPTIONS: dict[str, Any] = {
    **AGAINST_ORACLE,
    "requires": [*AGAINST_ORACLE["requires"], "peft>=0.18"],  # type: ignore[misc]
}
OUTPUTS = ("target_logprobs", "top_k", "logits", "hidden_states")
PARTS = (
    "logprobs",
    "top_values",
    "top_tokens",
    "logits",
    "hidden_states",
    "entropy",
    "local_logits",
)
COMBINATIONS = tuple(product((False, True), repeat=len(OUTPUTS)))
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {
        "rank": 3,
        "alpha": 5,
        "targets": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"),
        "seed": 11,
    },
    "few": {"rank": 5, "alpha": 3, "targets": ("k_proj", "up_proj"), "seed": 12},
}
SLOTS = (None, *ADAPTERS)


def ask(
    trainer: Trainer, request: Request, slot: str | None, wanted: tuple[bool, ...]
) -> ForwardOutput:
    """A forward of the outputs in ``wanted``, in the order of ``OUTPUTS``."""
    targets, top, logits, states = wanted
    return trainer.forward(
        request.ask(
            target_tokens=request.targets if targets else None,
            top_k=3 if top else None,
            logits=logits,
            hidden_states=states,
            slot=slot,
            no_grad=True,
        )
    )


def parts(output: ForwardOutput) -> dict[str, Tensor]:
    """All that came back, by the names in ``PARTS``."""
    top, local = output.top_k, output.local_logits
    found = (
        output.target_logprobs,
        None if top is None else top.values,
        None if top is None else top.tokens,
        output.logits,
        output.hidden_states,
        output.entropy,
        None if local is None else local.values,
    )
    return {name: value for name, value in zip(PARTS, found, strict=True) if value is not None}


def all_combinations(rank: Rank, trainer: Trainer, request: Request, slot: str | None) -> None:
    """Observe each output alone; what every combination holds, and how far it is from that."""
    name = f"{request.name}.{slot or 'bare'}"
    alone: dict[str, Tensor] = {}
    for index in range(len(OUTPUTS)):
        wanted = tuple(index == at for at in range(len(OUTPUTS)))
        alone |= parts(ask(trainer, request, slot, wanted))
    for part, value in alone.items():
        rank.observe(f"{name}.{part}", value)
    present = torch.zeros(len(COMBINATIONS), len(PARTS), dtype=torch.bool)
    furthest = torch.zeros(len(COMBINATIONS), len(PARTS), dtype=rank.dtype)
    for row, wanted in enumerate(COMBINATIONS):
        # One device computes each output by itself: a combination can't change any.
        found = (
            _chosen(alone, wanted)
            if rank.is_reference
            else parts(ask(trainer, request, slot, wanted))
        )
        for part, value in found.items():
            column = PARTS.index(part)
            present[row, column] = True
            if part in alone:
                furthest[row, column] = (value - alone[part]).abs().max()
    rank.observe(f"{name}.present", present)
    rank.observe(f"{name}.change_beside_others", furthest, zero=True)


def _chosen(alone: dict[str, Tensor], wanted: tuple[bool, ...]) -> dict[str, Tensor]:
    targets, top, logits, states = wanted
    asked = {
        "logprobs": targets,
        "top_values": top,
        "top_tokens": top,
        "logits": logits,
        "hidden_states": states,
    }
    return {part: value for part, value in alone.items() if asked[part]}


# What is asked of the head does not meet data parallelism, nor a fourth shard.
@pytest.mark.parity("cp2", "tp2xcp2", **_OPTIONS, reference_ignores=["sharing"])
def test_combinations(rank: Rank, build: BuildTrainer, adapter: Adapter, sharing: str) -> None:
    """An output that changes, comes unasked or stays away because of what is asked beside it.

    The bare model and two slots, each of the sixteen combinations of four outputs (the empty one
    among them). What comes together must be what comes alone bit for bit.
    """
    trainer = build(sharing=sharing)
    for name, options in ADAPTERS.items():
        trainer.load_slot(name, adapter(name, **options))
    # The same on every data-parallel rank: batches are other cases' business.
    request = requests(rank)[0]
    for slot in SLOTS:
        all_combinations(rank, trainer, request, slot)
