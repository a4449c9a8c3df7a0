from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Qwen3ForCausalLM

from oracles.checkpoints import tiny_checkpoint
from oracles.transformers_oracle import TransformersTrainer, pick_targets, pick_top
from subjects.tests.worlds import TestRank
from subjects.types import ForwardInput


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def oracle(checkpoint: Path) -> TransformersTrainer:
    return TransformersTrainer(checkpoint, TestRank(coordinates={}, groups={}))


def test_documents_run_alone(oracle: TransformersTrainer, checkpoint: Path) -> None:
    """Against a plain call of transformers on each document."""
    documents = [[5, 6, 7], [8], [9, 5]]
    output = oracle.forward(ForwardInput(documents, logits=True, hidden_states=True))
    model = Qwen3ForCausalLM.from_pretrained(str(checkpoint), attn_implementation="eager")
    expected = torch.cat([model(torch.tensor([d])).logits[0] for d in documents])
    assert output.logits is not None
    assert output.hidden_states is not None
    assert output.hidden_states.shape == (6, 40)
    torch.testing.assert_close(output.logits.float(), expected, rtol=1e-5, atol=1e-5)


def test_weights_are_those_of_the_checkpoint_exactly(
    oracle: TransformersTrainer, checkpoint: Path
) -> None:
    from safetensors.torch import load_file

    stored = load_file(checkpoint / "model.safetensors")
    for name, parameter in oracle.model.named_parameters():
        assert parameter.dtype == torch.float64
        assert parameter.equal(stored[name].double())


def test_targets_left_out_are_exactly_zero() -> None:
    logprobs = torch.randn(2, 5, dtype=torch.float64).log_softmax(1)
    targets = torch.tensor([[3, -100], [-100, 0]])
    picked = pick_targets(logprobs, targets)
    assert picked.tolist() == [[logprobs[0, 3].item(), 0.0], [0.0, logprobs[1, 0].item()]]


def test_of_equal_tokens_the_lower_id_comes_first() -> None:
    logprobs = torch.tensor([[0.1, 0.5, 0.5, 0.2, 0.5], [0.0] * 5])
    assert pick_top(logprobs, 2, logprobs).tokens.tolist() == [[1, 2], [0, 1]]
    assert pick_top(logprobs, 4, logprobs).tokens.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]


def test_no_grad_and_frozen_parts(oracle: TransformersTrainer) -> None:
    output = oracle.forward(ForwardInput([1, 2], [3, 4], no_grad=True))
    assert output.target_logprobs is not None
    assert not output.target_logprobs.requires_grad
    oracle.freeze("decoder")
    output = oracle.forward(ForwardInput([1, 2], [3, 4]))
    assert output.target_logprobs is not None
    output.target_logprobs.sum().backward()
    assert [n for n, g, _ in oracle.named_gradients() if g is not None] == ["lm_head.weight"]
    oracle.zero_gradients()
    assert all(g is None for _, g, _ in oracle.named_gradients())


def test_what_the_oracle_refuses(oracle: TransformersTrainer) -> None:
    with pytest.raises(ValueError, match="the oracle has"):
        oracle.forward(ForwardInput([1], slot="a"))
    with pytest.raises(ValueError, match="outside the vocabulary of 131"):
        oracle.forward(ForwardInput([131]))
    with pytest.raises(ValueError, match="expected 'decoder', 'head' or 'base'"):
        oracle.freeze("norms")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected sum, max or min"):
        oracle.dp_reduce(1.0, "mean")  # type: ignore[arg-type]
    oracle.parameter("probe", lambda: torch.zeros(2))
    for name in ("probe", "model.norm.weight"):
        with pytest.raises(ValueError, match="the name is taken"):
            oracle.parameter(name, lambda: torch.zeros(2))


def test_a_registered_parameter_is_a_copy_in_the_dtype_of_the_run(
    oracle: TransformersTrainer,
) -> None:
    made = torch.ones(2, dtype=torch.float64)
    parameter = oracle.parameter("probe", lambda: made)
    parameter.data += 1
    assert made.tolist() == [1, 1]
    assert oracle.parameter("other", lambda: torch.ones(1)).dtype == torch.float64
