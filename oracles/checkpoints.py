"""Small Qwen3 checkpoints in which no bug can hide behind a zero, a one or a round number.

Every parameter is drawn at random, norms too: no two are equal. The vocabulary is odd, so that
tensor parallelism pads it; heads are grouped; the head size is not hidden / heads.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_checkpoint(
    directory: str | Path,
    *,
    tied: bool = False,
    layers: int = 2,
    qk_norm_scale: float = 1.0,
    file_size: int = 5_000_000_000,
    seed: int = 0,
) -> Path:
    """Write a Qwen3 of about 30,000 parameters, float32: vocabulary 131, hidden 40, 4 heads of 12.

    Scores of attention grow with the square of ``qk_norm_scale``. No file holds more bytes than
    ``file_size``, but for a tensor that does alone. Returns ``directory``.
    """
    return _write(
        Path(directory),
        seed=seed,
        qk_norm_scale=qk_norm_scale,
        file_size=file_size,
        dtype=torch.float32,
        vocab_size=131,
        hidden_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=56,
        num_hidden_layers=layers,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )


def equal_logits_checkpoint(directory: str | Path, *, seed: int = 0) -> Path:
    """Write the tiny model with six of ten rows of its head zero: their logits are exactly 0.

    Returns ``directory``.
    """
    path = tiny_checkpoint(directory, seed=seed)
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[torch.arange(len(head)) % 5 < 3] = 0
    model.save_pretrained(path)
    return path


def native_checkpoint(directory: str | Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Write one layer at the true widths of Qwen3-0.6B; bfloat16 and tied as it is published.

    Hidden 1024, 16 heads, 8 key-value heads of 128, MLP 3072, vocabulary 151936: 343 MB of
    weights, 654 MB untied. Returns ``directory``.
    """
    return _write(
        Path(directory),
        seed=seed,
        dtype=torch.bfloat16,
        vocab_size=151936,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        num_hidden_layers=1,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
    )


def _write(
    directory: Path,
    *,
    seed: int,
    dtype: torch.dtype,
    qk_norm_scale: float = 1.0,
    file_size: int = 5_000_000_000,
    **sizes: object,
) -> Path:
    config = Qwen3Config(use_sliding_window=False, attention_dropout=0.0, **sizes)
    # Built without memory first: the model's own initialisation would cost more than ours.
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Norms: around 1, none equal to it.
                parameter.uniform_(0.5, 1.5, generator=generator)
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.mul_(qk_norm_scale)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 1.0, generator=generator)
            else:
                # Keeps the scale of its input, so that no layer fades out.
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(directory, max_shard_size=file_size)
    return directory
