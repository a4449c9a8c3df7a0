from __future__ import annotations

import json
from pathlib import Path

import pytest

from subjects.trainer.architecture import read_architecture

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 56,
    "vocab_size": 131,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": True,
}


def write(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


def test_sizes_are_read(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path))
    assert (found.head_size, found.kv_heads, found.rope_base, found.tied) == (12, 2, 500.0, True)


def test_the_older_place_of_the_rope_base(tmp_path: Path) -> None:
    older = write(tmp_path, rope_parameters=None, rope_theta=1e6, rope_scaling=None)
    assert read_architecture(older).rope_base == 1e6


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embedding 'yarn'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer types"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"attention_bias": True}, "attention biases"),
        ({"attention_dropout": 0.1}, "attention dropout"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        read_architecture(write(tmp_path, **changes))


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_architecture(tmp_path)


def test_tensor_parallelism_that_does_not_divide(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path))
    found.check_tp(2)
    with pytest.raises(ValueError, match=r"over 4 ranks does not divide {'kv_heads': 2}"):
        found.check_tp(4)
    assert found.padded_vocabulary(2) == 132
