"""Every combination of outputs, of the bare model and of slots, asked together and alone."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from cases.material import AGAINST_ORACLE, TOPOLOGIES, requests

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
    """All that came back, by name."""
    top = output.top_k
    found = {
        "logprobs": output.target_logprobs,
        "top_values": None if top is None else top.values,
        "top_tokens": None if top is None else top.tokens,
        "entropy": output.entropy,
        "logits": output.logits,
        "local_logits": None if output.local_logits is None else output.local_logits.values,
        "hidden_states": output.hidden_states,
    }
    return {name: value for name, value in found.items() if value is not None}


def all_combinations(rank: Rank, trainer: Trainer, request: Request, slot: str | None) -> None:
    """Observe each output alone; what every combination holds, and how far it is from that."""
    name = f"{request.name}.{slot or 'bare'}"
    alone: dict[str, Tensor] = {}
    for index in range(len(OUTPUTS)):
        wanted = tuple(index == at for at in range(len(OUTPUTS)))
        alone |= parts(ask(trainer, request, slot, wanted))
    for part, value in alone.items():
        rank.observe(f"{name}.{part}", value)
    present = torch.zeros(len(COMBINATIONS), len(alone), dtype=torch.bool)
    furthest = torch.zeros(len(COMBINATIONS), len(alone), dtype=rank.dtype)
    # One device computes each output by itself: there is nothing that a combination could change.
    for row, wanted in enumerate(COMBINATIONS):
        found = (
            _chosen(alone, wanted)
            if rank.is_reference
            else parts(ask(trainer, request, slot, wanted))
        )
        assert set(found) <= set(alone)
        for column, (part, value) in enumerate(alone.items()):
            if part in found:
                present[row, column] = True
                furthest[row, column] = (found[part] - value).abs().max()
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


@pytest.mark.parity(*TOPOLOGIES, **_OPTIONS, reference_ignores=["sharing"])
def test_combinations(rank: Rank, build: BuildTrainer, adapter: Adapter, sharing: str) -> None:
    """An output that changes, comes unasked or stays away because of what is asked beside it.

    The bare model and two slots, each of the sixteen combinations of four outputs (the empty one
    among them). What comes together must be what comes alone bit for bit.
    """
    trainer = build(sharing=sharing)
    for name, options in ADAPTERS.items():
        trainer.load_slot(name, adapter(name, **options))
    for request in rank.split(requests(rank)):
        for slot in SLOTS:
            all_combinations(rank, trainer, request, slot)
