"""A float64 oracle computes nothing in a lower precision, and transformers alone would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from oracles import precise
from oracles.checkpoints import tiny_checkpoint
from oracles.tests.watch import LowerPrecision
from oracles.transformers_oracle import TransformersTrainer
from subjects.tests.worlds import TestRank
from subjects.types import ForwardInput

REQUEST = ForwardInput(
    [[1, 2, 3], [4, 5]], [6, -100, 7, 8, 9], top_k=3, logits=True, hidden_states=True
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def oracle(checkpoint: Path, dtype: torch.dtype = torch.float64) -> TransformersTrainer:
    return TransformersTrainer(checkpoint, TestRank(coordinates={}, groups={}, dtype=dtype))


def lowered(trainer: TransformersTrainer) -> set[str]:
    with LowerPrecision() as watch:
        output = trainer.forward(REQUEST)
        assert output.target_logprobs is not None
        assert output.hidden_states is not None
        assert output.logits is not None
        assert output.top_k is not None
        loss = output.target_logprobs.sum() + output.hidden_states.sum()
        (loss + output.logits.sum() + output.top_k.values.sum()).backward()
    return {site.split()[0] for site in watch.sites}


def test_nothing_falls_below_float64(checkpoint: Path) -> None:
    assert lowered(oracle(checkpoint)) == set()


def test_what_transformers_alone_computes_in_float32(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same watch sees the pieces that are replaced."""
    monkeypatch.setattr("oracles.transformers_oracle.keep_float64", lambda _: None)
    found = lowered(oracle(checkpoint))
    assert {"forward", "eager_attention_forward"} <= found


@pytest.mark.parametrize("left_out", ["rms_norm", "rotary_tables", "eager_attention"])
def test_each_replacement_is_needed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    originals = {
        "rms_norm": modeling.Qwen3RMSNorm.forward,
        "rotary_tables": modeling.Qwen3RotaryEmbedding.forward,
        "eager_attention": modeling.eager_attention_forward,
    }
    monkeypatch.setattr(precise, left_out, originals[left_out])
    assert lowered(oracle(checkpoint))


def test_replacements_are_what_they_replace(checkpoint: Path) -> None:
    """In float32, where transformers' own pieces are no detour, both give the same numbers."""
    plain, replaced = oracle(checkpoint, torch.float32), oracle(checkpoint, torch.float32)
    precise.keep_float64(replaced.model)
    for ours, theirs in zip(_step(replaced), _step(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _step(trainer: TransformersTrainer) -> list[torch.Tensor]:
    output = trainer.forward(REQUEST)
    assert output.target_logprobs is not None
    assert output.hidden_states is not None
    output.target_logprobs.sum().backward()
    gradients = [value for _, value, _ in trainer.named_gradients() if value is not None]
    return [output.target_logprobs.detach(), output.hidden_states.detach(), *gradients]
