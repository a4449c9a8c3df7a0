"""The sizes of a Qwen3 model, read from a transformers checkpoint's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subjects.trainer import checks


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A Qwen3 decoder: grouped-query attention, q/k norms, RoPE, SwiGLU, full attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    norm_epsilon: float
    rope_base: float
    tied: bool

    def padded_vocabulary(self, tp: int) -> int:
        """The vocabulary rounded up to a multiple of ``tp``; Megatron splits it evenly."""
        return -(-self.vocabulary // tp) * tp

    def check_tp(self, tp: int) -> None:
        """Refuse a tensor-parallel size that the layers can't be cut by.

        Raises:
            ValueError: with the sizes that don't divide.
        """
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "mlp": self.mlp}
        wrong = {name: size for name, size in sizes.items() if size % tp}
        if wrong:
            raise ValueError(f"tensor parallelism over {tp} ranks does not divide {wrong}")


def read_architecture(checkpoint: Path, *, layers: int | None = None) -> Architecture:
    """Read ``config.json`` of a checkpoint directory; ``layers`` keeps the first ones alone.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the model is no Qwen3, uses a feature that the trainer has not, or has no such
            number of layers.
        TypeError: ``layers`` is no integer.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no config.json in {checkpoint}; expected a directory written by save_pretrained"
        )
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5 writes rope_parameters; before that rope_theta stood beside rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _refuse(path, config, rope)
    heads = int(config["num_attention_heads"])
    there = int(config["num_hidden_layers"])
    if layers is not None:
        checks.count("layers", layers, "how many of the first layers to run", least=1)
        if layers > there:
            raise ValueError(f"layers is {layers}; expected 1 to {there}, which {checkpoint} has")
    return Architecture(
        layers=there if layers is None else layers,
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config["num_key_value_heads"]),
        head_size=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        mlp=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        norm_epsilon=float(config["rms_norm_eps"]),
        rope_base=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse(path: Path, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Name everything in ``config`` that would be computed wrongly."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    layers = set(config.get("layer_types") or ["full_attention"])
    problems = [
        (config.get("model_type") != "qwen3", f"model_type {config.get('model_type')!r}"),
        (kind != "default", f"rotary embedding {kind!r}"),
        (layers != {"full_attention"}, f"layer types {sorted(layers)}"),
        (bool(config.get("use_sliding_window")), "sliding windows"),
        (bool(config.get("attention_bias")), "attention biases"),
        (bool(config.get("attention_dropout")), "attention dropout"),
        (config.get("hidden_act", "silu") != "silu", f"activation {config.get('hidden_act')!r}"),
    ]
    found = [text for wrong, text in problems if wrong]
    if found:
        raise ValueError(
            f"{path}: the trainer runs Qwen3 with full attention, default RoPE, no biases and "
            f"SwiGLU; this checkpoint has {', '.join(found)}"
        )
