from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from subjects.trainer.attention import (
    AttentionRows,
    ContextParallelAttention,
    attend,
    causal_mask,
    document_mask,
    visible_keys,
)
from subjects.trainer.packing import pack


def test_attention_of_packed_documents_is_that_of_each_alone() -> None:
    torch.manual_seed(0)
    lengths, heads, groups, size = [5, 1, 7], 6, 3, 4
    total = sum(lengths)
    packed = pack([torch.arange(n) for n in lengths], sharing="none")
    query = torch.randn(total, heads, size, dtype=torch.float64)
    key = torch.randn(total, groups, size, dtype=torch.float64)
    value = torch.randn(total, groups, size, dtype=torch.float64)
    ids = packed.take(torch.arange(total))
    out = attend(query, key, value, visible_keys(ids, ids, remote=False), scale=0.3)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        for head in range(heads):
            scores = 0.3 * query[part, head] @ key[part, head // 2].T
            scores += torch.full_like(scores, float("-inf")).triu(1)
            expected = scores.softmax(-1) @ value[part, head // 2]
            torch.testing.assert_close(out[part, head], expected, rtol=1e-13, atol=1e-13)


def test_neither_mask_alone_is_enough_with_shared_prefixes() -> None:
    packed = pack([torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])], sharing="full")
    ids = packed.take(torch.arange(packed.rows))
    visible = visible_keys(ids, ids, remote=True)
    assert visible.sum() < causal_mask(ids, ids).sum()
    assert visible.equal(document_mask(ids, ids, remote=True))
    assert visible.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]


def test_half_precision_scores_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, 1, 64) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool)
    exact = attend(query, key, value, mask, scale=1.0)
    half = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), mask, scale=1.0)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("rows", [None, AttentionRows()])
def test_core_attention_without_rows_says_what_to_pass(rows: AttentionRows | None) -> None:
    class Config:
        kv_channels = 4

    module = ContextParallelAttention(Config())
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match="pass them to the decoder as packed_seq_params"):
        module(x, x, x, None, packed_seq_params=rows)
