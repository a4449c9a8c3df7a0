"""From the hidden states of this rank's rows to the outputs of the full sequence."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from subjects.trainer import gather, logprobs, plan
from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.plan import LocalRows
from subjects.trainer.reductions import Groups
from subjects.types import TopK, logprob_dtype


def full_hidden_states(hidden: Tensor, local: LocalRows, groups: Groups) -> Tensor:
    """Hidden states of the decoder [p / tp, 1, H] -> [T, H], the same on every rank.

    The rows come together over TP first; all its ranks then use them alike, so backward splits.
    """
    if groups.tp.size() > 1:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=groups.tp
        )
    rows = hidden[: len(local.rows), 0]
    return gather.gather_rows(rows.index_select(0, local.source_rows), local, groups.cp)


def full_logits(logits: Tensor, local: LocalRows, part: VocabularySlice, groups: Groups) -> Tensor:
    """Logits [n, v] of this rank's slice -> [T, V], without the padding."""
    whole = gather_from_tensor_model_parallel_region(logits, group=groups.tp)[:, : part.size]
    return gather.gather_rows(whole.index_select(0, local.source_rows), local, groups.cp)


def full_target_logprobs(
    logits: Tensor, targets: Tensor, local: LocalRows, part: VocabularySlice, groups: Groups
) -> Tensor:
    """Logits [n, v] and targets [T, ...] of the whole sequence -> log-probabilities [T, ...]."""
    wide = logits.to(logprob_dtype(logits.dtype))
    own = plan.targets_for(targets, local)
    values = logprobs.target_logprobs(
        wide, logprobs.log_normalizer(wide, part), local.source_rows, own, part
    )
    return gather.gather_rows(values, local, groups.cp)


def full_top_k(
    logits: Tensor, k: int, local: LocalRows, part: VocabularySlice, groups: Groups
) -> TopK:
    """Logits [n, v] -> the k most probable tokens of every position, [T, k] twice."""
    wide = logits.to(logprob_dtype(logits.dtype))
    tokens = logprobs.top_tokens(wide, k, part)
    every_row = torch.arange(len(wide), device=wide.device)
    values = logprobs.target_logprobs(
        wide, logprobs.log_normalizer(wide, part), every_row, tokens, part
    )
    return TopK(
        gather.gather_rows(values.index_select(0, local.source_rows), local, groups.cp),
        gather.gather_rows(tokens.index_select(0, local.source_rows), local, groups.cp),
    )
