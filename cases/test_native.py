"""One layer at the true widths of Qwen3-0.6B, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cases.material import make_request
from subjects.types import IGNORED

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank

_OPTIONS = {
    "megatron": True,
    "dtype": "float32",
    "timeout": 600,
    "requires": ["megatron-core>=0.16", "transformers>=5"],
    "divisor_of": {"tp": 8},
}


def _run(rank: Rank, build: BuildTrainer, sharing: str, names: tuple[str, ...]) -> None:
    """Outputs and gradients of hidden 1024, 16 heads, 8 KV heads of 128, vocabulary 151936."""
    trainer = build(of="native", sharing=sharing)
    for request in rank.split(
        [make_request(rank, name, [(9, 14), (9, 8), (4, 15)]) for name in names]
    ):
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
def test_native_widths(rank: Rank, build: BuildTrainer) -> None:
    """In the gate: prefixes shared, two ranks."""
    assert rank.dtype == torch.float32
    _run(rank, build, "full", ("only",))


@pytest.mark.native
@pytest.mark.parity("cp4", "dp2xcp2", "tp2xcp2", **_OPTIONS)
def test_native_widths_everywhere(rank: Rank, build: BuildTrainer, sharing: str) -> None:
    """By hand (-m native): the other topologies, about 3 GB a process."""
    _run(rank, build, sharing, ("first", "second"))
