"""The Qwen3 block on megatron-core: its layers, our norm and our core attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from subjects.trainer.architecture import Architecture
from subjects.trainer.attention import ContextParallelAttention
from subjects.trainer.precision import working_dtype


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.

    Megatron's own refuses sequence parallelism without Transformer Engine. The weight is the same
    on every tensor-parallel rank, but each rank normalises its own rows (or, for q and k, its own
    heads), so its gradients are to be summed over them: ``sequence_parallel`` marks that.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.epsilon = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise; [..., size] -> [..., size], squares summed in float32 or better."""
        wide = hidden.to(working_dtype(hidden.dtype))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).to(hidden.dtype)


def transformer_config(
    architecture: Architecture, *, tp: int, cp: int, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's configuration: no fusion, no dropout, sequence parallel wherever tp > 1."""
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.mlp,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        context_parallel_size=cp,
        use_cpu_initialization=True,
        # Every weight is overwritten by the checkpoint's.
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=False,
    )


def block_spec(architecture: Architecture) -> TransformerBlockSubmodules:
    """Megatron's local layers with our norm and core attention in their places."""
    options = {"qk_layernorm": True, "normalization": "RMSNorm"}
    known = inspect.signature(get_gpt_layer_local_spec).parameters
    layer = get_gpt_layer_local_spec(**{k: v for k, v in options.items() if k in known})
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = RMSNorm
    attention.k_layernorm = RMSNorm
    attention.core_attention = ContextParallelAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * architecture.layers, layer_norm=RMSNorm)


def build_model(
    architecture: Architecture, *, tp: int, cp: int, dtype: torch.dtype, device: torch.device
) -> GPTModel:
    """The model with weights that are not yet set."""
    model = GPTModel(
        config=transformer_config(architecture, tp=tp, cp=cp, dtype=dtype),
        transformer_layer_spec=block_spec(architecture),
        vocab_size=architecture.padded_vocabulary(tp),
        # Positions are not learned, so this bounds nothing.
        max_sequence_length=1,
        # Rotary angles are made by rope.angles for each row's own position.
        position_embedding_type="none",
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
    )
    return model.to(device)
