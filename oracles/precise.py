"""float64 all the way through transformers' Qwen3.

Four of its pieces compute in float32 whatever the model's dtype: RMSNorm, the rotary tables, the
softmax of eager attention, and the loss. This module replaces the first three on one model; the
loss is never called, since the oracle takes log-probabilities from logits itself. Nothing else
falls: a test watches every operation, forward and backward.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    repeat_kv,
)

_ATTENTION = "eager_without_float32"


def keep_float64(model: Qwen3ForCausalLM) -> None:
    """Make a float64 ``model`` compute in float64 throughout, in place."""
    AttentionInterface.register(_ATTENTION, eager_attention)
    AttentionMaskInterface.register(_ATTENTION, eager_mask)
    model.set_attn_implementation(_ATTENTION)
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = MethodType(rms_norm, module)
        elif isinstance(module, Qwen3RotaryEmbedding):
            module.forward = MethodType(rotary_tables, module)


def rms_norm(module: Any, hidden: Tensor) -> Tensor:
    """Qwen3RMSNorm.forward without the detour through float32."""
    mean = hidden.square().mean(dim=-1, keepdim=True)
    normal: Tensor = module.weight * (hidden * torch.rsqrt(mean + module.variance_epsilon))
    return normal


def rotary_tables(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3RotaryEmbedding.forward for default RoPE, with its frequencies in the dtype of ``x``."""
    config = module.config
    size = config.head_dim
    exponent = torch.arange(0, size, 2, device=x.device).to(x.dtype) / size
    frequency = 1.0 / (config.rope_parameters["rope_theta"] ** exponent)
    angle = position_ids[..., None].to(x.dtype) * frequency
    table = torch.cat((angle, angle), dim=-1)
    return table.cos(), table.sin()


def eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Eager attention with its softmax in the dtype of the query; no dropout."""
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights
