from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from oracles.checkpoints import tiny_checkpoint


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_zero_or_equal(tmp_path: Path, *, tied: bool) -> None:
    stored = load_file(tiny_checkpoint(tmp_path, tied=tied) / "model.safetensors")
    assert ("lm_head.weight" in stored) != tied
    for value in stored.values():
        assert value.ne(0).all()
        assert value.unique().numel() > 0.99 * value.numel()
    names = list(stored)
    for index, name in enumerate(names):
        for other in names[:index]:
            same = stored[name].shape == stored[other].shape
            assert not (same and stored[name].equal(stored[other]))


def test_the_same_seed_is_the_same_model(tmp_path: Path) -> None:
    files = [
        load_file(tiny_checkpoint(tmp_path / name, seed=seed) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert all(value.equal(files[1][name]) for name, value in files[0].items())
    assert not any(torch.equal(value, files[2][name]) for name, value in files[0].items())


def test_sizes_that_bugs_trip_over(tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint(tmp_path, layers=3) / "config.json").read_text())
    assert config["vocab_size"] % 2 == 1
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["num_hidden_layers"] == 3
