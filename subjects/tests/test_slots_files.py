"""PEFT's file format: what is read, what is refused by name, what is written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from subjects.trainer import adapters
from subjects.trainer.adapters import AdapterFile, adapter_config, read_config, write
from subjects.types import TARGETS

NAME = "model.layers.0.self_attn.q_proj.lora_A"


def _config(directory: Path, **changes: object) -> Path:
    found = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["v_proj", "q_proj"],
        "bias": "none",
        "lora_dropout": 0.0,
        "rank_pattern": {},
        "task_type": "CAUSAL_LM",
        "peft_version": "0.21",
    }
    (directory / "adapter_config.json").write_text(json.dumps({**found, **changes}))
    return directory


def _tensors(directory: Path, tensors: Mapping[str, Tensor]) -> AdapterFile:
    named = {f"base_model.model.{name}.weight": value for name, value in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return AdapterFile(directory)


def test_a_plain_adapter_is_read(tmp_path: Path) -> None:
    config = read_config(_config(tmp_path))
    assert config == adapter_config(rank=3, alpha=5, targets=("q_proj", "v_proj"))
    assert config.scale == 5 / 3


def test_a_rank_stabilised_adapter_has_another_scale(tmp_path: Path) -> None:
    assert read_config(_config(tmp_path, use_rslora=True)).scale == 5 / math.sqrt(3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_pattern", {"q_proj": 5}),
        ("alpha_pattern", {"q_proj": 5}),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_dropout", 0.1),
        ("layers_to_transform", [1]),
        ("layer_replication", [[0, 1]]),
        ("target_parameters", ["mlp.down_proj.weight"]),
        ("trainable_token_indices", [3]),
        ("exclude_modules", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("peft_type", "LOHA"),
        ("of_a_later_version", 7),
    ],
)
def test_what_would_be_computed_wrongly_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        read_config(_config(tmp_path, **{key: value}))
    assert repr(value) in str(caught.value)
    assert "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("target_modules", ["q_proj", "embed_tokens"], r"unknown: \['embed_tokens'\]"),
        ("target_modules", "q_proj", "targets is 'q_proj'; expected a list or tuple"),
        ("target_modules", [], "at least one"),
        ("target_modules", None, "at least one"),
        ("target_modules", 5, r"targets is 5; expected a list or tuple"),
        ("target_modules", {"q_proj": 1}, "targets is of type dict"),
        ("use_rslora", "no", "rslora is 'no'; expected True or False"),
        ("r", 0, "rank is 0"),
        ("lora_alpha", "high", "alpha is 'high'"),
    ],
)
def test_what_can_not_be_is_named(tmp_path: Path, key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_config(_config(tmp_path, **{key: value}))
    assert str(caught.value).startswith(str(tmp_path / "adapter_config.json"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"peft_type": "LO', "is no JSON (Unterminated string"),
        (b"", "is no JSON"),
        (b"\xff\xfe{}", "is no JSON ('utf-8' codec"),
        (b"[]", "holds []; expected a JSON object"),
        (b"5", "holds 5; expected a JSON object"),
    ],
)
def test_a_broken_configuration_is_told_by_its_path(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(ValueError, match="adapter_config") as caught:
        read_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'adapter_config.json'} {words}")


@pytest.mark.parametrize("size", [0, 7, -1])
def test_broken_tensors_are_told_by_their_path(tmp_path: Path, size: int) -> None:
    path = _tensors(tmp_path, {NAME: torch.ones(3, 40)}).path
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="cut short: copy or save it again") as caught:
        AdapterFile(tmp_path)
    assert str(caught.value).startswith(f"{path} is no safetensors file that can be read")


def test_a_missing_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        read_config(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="safe_serialization"):
        AdapterFile(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, rf"lacks {NAME}"),
        ({NAME: (3, 64)}, r"is \[3, 64\] and should be \[3, 40\]"),
        ({NAME: (3, 40), "lm_head.lora_A": (3, 40)}, "has also lm_head.lora_A"),
        ({NAME: (3, 40), "model.layers.0.self_attn.q_proj.lora_magnitude_vector": (48,)}, "also"),
    ],
)
def test_other_tensors_are_named(
    tmp_path: Path, tensors: Mapping[str, tuple[int, ...]], words: str
) -> None:
    file = _tensors(tmp_path, {name: torch.ones(shape) for name, shape in tensors.items()})
    with pytest.raises(ValueError, match=words):
        file.check({NAME: (3, 40)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_factors_of_a_dtype_that_nobody_trains_are_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    file = _tensors(tmp_path, {NAME: torch.ones(3, 40).to(dtype)})
    with pytest.raises(ValueError, match=rf"{NAME} in \w+; expected factors in F64, F32, F16, BF"):
        file.check({NAME: (3, 40)})
    for good in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        _tensors(tmp_path, {NAME: torch.ones(3, 40, dtype=good)}).check({NAME: (3, 40)})


def test_nothing_is_replaced_where_one_file_can_not_be(tmp_path: Path) -> None:
    config = adapter_config(rank=2, alpha=1, targets=["up_proj"])
    write(tmp_path, config, {NAME: torch.ones(2, 2)}, base_model=None)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "adapter_config.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"adapter_config\.json is a directory; expected"):
        write(tmp_path, config, {NAME: torch.zeros(2, 2)}, base_model=None)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found[f"base_model.model.{NAME}.weight"].eq(1).all()


def test_slices_are_read_by_rows_and_by_columns(tmp_path: Path) -> None:
    value = torch.arange(35.0).view(5, 7)
    file = _tensors(tmp_path, {NAME: value})
    file.check({NAME: (5, 7)})
    assert file.read(NAME).equal(value)
    assert file.read(NAME, dim=0, part=(1, 2)).equal(value[3:])
    assert file.read(NAME, dim=1, part=(1, 2)).equal(value[:, 4:])


def test_files_that_differ_in_a_number_have_other_digests(tmp_path: Path) -> None:
    value = torch.ones(5, 7)
    before = _tensors(tmp_path, {NAME: value}).digest()
    assert _tensors(tmp_path, {NAME: value}).digest() == before
    value[3, 4] = 2
    assert _tensors(tmp_path, {NAME: value}).digest() != before


@pytest.mark.parametrize(("alpha", "stored"), [(8.0, 8), (2.5, 2.5)])
def test_what_is_written_is_read_again(tmp_path: Path, alpha: float, stored: float) -> None:
    config = adapter_config(rank=2, alpha=alpha, targets=["up_proj"], rslora=True)
    factor = torch.randn(9, 4)[:, :2]
    directory = tmp_path / "deep" / "down"
    for _ in range(2):
        write(directory, config, {NAME: factor}, base_model="base")
    assert sorted(path.name for path in directory.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert read_config(directory) == config
    text = json.loads((directory / "adapter_config.json").read_text())
    assert text["lora_alpha"] == stored
    assert text["base_model_name_or_path"] == "base"
    found = load_file(directory / "adapter_model.safetensors")
    assert found[f"base_model.model.{NAME}.weight"].equal(factor)


def test_peft_reads_what_is_written(tmp_path: Path) -> None:
    import peft

    config = adapter_config(rank=2, alpha=7, targets=TARGETS)
    adapters.write(tmp_path, config, {NAME: torch.ones(2, 2)}, base_model=None)
    found = peft.LoraConfig.from_pretrained(str(tmp_path))
    assert (found.r, found.lora_alpha, found.lora_dropout, found.bias) == (2, 7, 0.0, "none")
    assert set(found.target_modules) == set(TARGETS)
