"""The oracle's adapters: real PEFT, in float64 throughout, all of them trainable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from oracles.adapters import write_adapter
from oracles.checkpoints import tiny_checkpoint
from oracles.tests.watch import LowerPrecision
from oracles.transformers_oracle import TransformersTrainer
from subjects.tests.worlds import TestRank
from subjects.types import TARGETS, ForwardInput

ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"rank": 3, "alpha": 5, "targets": TARGETS, "seed": 1},
    "b": {"rank": 2, "alpha": 7, "targets": ("q_proj", "down_proj"), "rslora": True, "seed": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def written(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_adapter(tmp_path_factory.mktemp(name), checkpoint, **options)
        for name, options in ADAPTERS.items()
    }


@pytest.fixture
def oracle(checkpoint: Path, written: dict[str, Path]) -> TransformersTrainer:
    oracle = TransformersTrainer(checkpoint, TestRank(coordinates={}, groups={}))
    for name, directory in written.items():
        oracle.load_slot(name, directory)
    return oracle


def _logits(oracle: TransformersTrainer, slot: str | None) -> Tensor:
    logits = oracle.forward(ForwardInput([5, 6, 7, 9], logits=True, slot=slot)).logits
    assert logits is not None
    return logits


def test_written_factors_are_all_drawn(written: dict[str, Path]) -> None:
    """No number is zero, no two factors are equal, and slots differ."""
    found = {
        (adapter, name): value
        for adapter, directory in written.items()
        for name, value in load_file(directory / "adapter_model.safetensors").items()
    }
    assert len(found) == 2 * (2 * 7 + 1) + 2 * 2 * 2
    numbers = torch.cat([value.flatten() for value in found.values()])
    assert numbers.all()
    assert len(numbers.unique()) > 0.99 * len(numbers)


def test_each_slot_is_peft_with_that_adapter_alone(
    oracle: TransformersTrainer, checkpoint: Path, written: dict[str, Path]
) -> None:
    bare = Qwen3ForCausalLM.from_pretrained(str(checkpoint), attn_implementation="eager")
    expected: dict[str | None, Tensor] = {None: bare(torch.tensor([[5, 6, 7, 9]])).logits[0]}
    for name, directory in written.items():
        base = Qwen3ForCausalLM.from_pretrained(str(checkpoint), attn_implementation="eager")
        model = PeftModel.from_pretrained(base, str(directory))
        expected[name] = model(torch.tensor([[5, 6, 7, 9]])).logits[0]
    for slot in ("a", None, "b", "a", None):
        torch.testing.assert_close(
            _logits(oracle, slot).float(), expected[slot], rtol=1e-5, atol=1e-5
        )
    assert (expected["a"] - expected[None]).norm() > 0.1 * expected[None].norm()


def test_all_slots_and_the_model_train_at_once(oracle: TransformersTrainer) -> None:
    """PEFT alone would freeze the model and every adapter but the active one."""
    (_logits(oracle, "a").square().sum() + _logits(oracle, "b").square().sum()).backward()
    gradients = {name: gradient for name, gradient, _ in oracle.named_gradients()}
    assert all(gradient is not None for gradient in gradients.values())
    assert "model.layers.1.mlp.down_proj.weight" in gradients
    assert "lm_head.weight" in gradients
    assert "b/model.layers.1.mlp.down_proj.lora_A" in gradients
    assert not [name for name in gradients if "base_layer" in name]
    oracle.zero_gradients()
    _logits(oracle, None).square().sum().backward()
    for name, gradient, _ in oracle.named_gradients():
        assert (gradient is None) == ("/" in name)


def test_what_is_frozen_stays_frozen_when_slots_change(
    oracle: TransformersTrainer, written: dict[str, Path]
) -> None:
    oracle.freeze("base")
    oracle.load_slot("c", written["a"])
    _logits(oracle, "c").square().sum().backward()
    for name, gradient, _ in oracle.named_gradients():
        assert (gradient is not None) == name.startswith("c/")


def test_nothing_falls_below_float64(oracle: TransformersTrainer) -> None:
    with LowerPrecision() as watched:
        (_logits(oracle, "a").square().sum() + _logits(oracle, "b").square().sum()).backward()
    assert watched.sites == set()


def test_files_come_back(oracle: TransformersTrainer, tmp_path: Path) -> None:
    before = _logits(oracle, "a")
    oracle.save_slot("a", tmp_path)
    oracle.remove_slot("a")
    assert oracle.slots == ("b",)
    oracle.load_slot("a", tmp_path)
    assert _logits(oracle, "a").equal(before)


def test_a_snapshot_comes_back(oracle: TransformersTrainer) -> None:
    before, snapshot = _logits(oracle, "a"), oracle.snapshot_slot("a")
    with torch.no_grad():
        for _, parameter, _ in oracle.named_parameters():
            parameter.mul_(2)
    assert not _logits(oracle, "a").equal(before)
    oracle.restore_slot("a", snapshot)
    assert _logits(oracle, "a").equal(before)


def test_a_factory_gives_the_values(oracle: TransformersTrainer) -> None:
    shapes: dict[str, tuple[int, ...]] = {}

    def factory(name: str, shape: tuple[int, ...]) -> Tensor:
        shapes[name] = shape
        return torch.full(shape, float(len(shapes)))

    oracle.add_slot("c", rank=2, targets=("o_proj",), factory=factory)
    assert shapes == {
        f"model.layers.{layer}.self_attn.o_proj.lora_{which}": shape
        for layer in (0, 1)
        for which, shape in (("A", (2, 48)), ("B", (40, 2)))
    }
    found = {name: value for name, value, _ in oracle.named_parameters()}
    assert (found["c/model.layers.1.self_attn.o_proj.lora_B"] == 4).all()


def test_what_is_not_there_is_named(oracle: TransformersTrainer) -> None:
    with pytest.raises(ValueError, match=r"'c'; the oracle has \['a', 'b'\]"):
        _logits(oracle, "c")
    with pytest.raises(ValueError, match="exists"):
        oracle.add_slot("a")
