"""From the hidden states of this rank's rows to the outputs of the full sequence."""

from __future__ import annotations

from typing import NamedTuple

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


class Scored(NamedTuple):
    """This rank's logits [n, v] in the dtype of log-probabilities, and their normalizer [n]."""

    logits: Tensor
    normalizer: Tensor


def score(logits: Tensor, part: VocabularySlice) -> Scored:
    """What log-probabilities of targets and of top tokens both start from."""
    wide = logits.to(logprob_dtype(logits.dtype))
    return Scored(wide, logprobs.log_normalizer(wide, part))


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
    scored: Scored, targets: Tensor, local: LocalRows, part: VocabularySlice, groups: Groups
) -> Tensor:
    """Log-probabilities of the targets [T, ...] of the whole sequence -> [T, ...]."""
    own = plan.targets_for(targets, local)
    values = logprobs.target_logprobs(
        scored.logits, scored.normalizer, local.source_rows, own, part
    )
    return gather.gather_rows(values, local, groups.cp)


def full_top_k(
    scored: Scored, k: int, local: LocalRows, part: VocabularySlice, groups: Groups
) -> TopK:
    """The k most probable tokens of every position, [T, k] twice."""
    tokens = logprobs.top_tokens(scored.logits, k, part)
    every_row = torch.arange(len(tokens), device=tokens.device)
    values = logprobs.target_logprobs(scored.logits, scored.normalizer, every_row, tokens, part)
    return TopK(
        gather.gather_rows(values.index_select(0, local.source_rows), local, groups.cp),
        gather.gather_rows(tokens.index_select(0, local.source_rows), local, groups.cp),
    )
