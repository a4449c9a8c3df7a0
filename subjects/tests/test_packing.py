from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subjects.trainer.packing import PackedRows, Sharing, pack

# Few ids and short documents, so that prefixes are shared often.
documents_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5)


def visible(packed: PackedRows) -> torch.Tensor:
    enter, leave = packed.enter, packed.leave
    return (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])


@given(documents=documents_of, sharing=st.sampled_from(["none", "full"]))
def test_a_row_sees_its_own_prefix_and_nothing_else(
    documents: list[list[int]], sharing: Sharing
) -> None:
    packed = pack([torch.tensor(document) for document in documents], sharing=sharing)
    seen = visible(packed)
    start = 0
    for document in documents:
        rows = packed.source[start : start + len(document)]
        start += len(document)
        assert packed.tokens[rows].tolist() == document
        assert packed.positions[rows].tolist() == list(range(len(document)))
        for depth, row in enumerate(rows):
            keys = seen[row].nonzero().flatten()
            assert sorted(keys.tolist()) == sorted(rows[: depth + 1].tolist())


@given(documents=documents_of)
def test_full_sharing_computes_each_distinct_prefix_once(documents: list[list[int]]) -> None:
    prefixes = {tuple(d[: n + 1]) for d in documents for n in range(len(d))}
    tensors = [torch.tensor(document) for document in documents]
    assert pack(tensors, sharing="full").rows == len(prefixes)
    assert pack(tensors, sharing="none").rows == sum(map(len, documents))


def test_a_document_longer_than_the_recursion_limit() -> None:
    long = torch.arange(5000) % 7
    packed = pack([long, long[:4000], torch.tensor([1])], sharing="full")
    assert packed.rows == 5001
    assert packed.source[5000:9000].equal(packed.source[:4000])


def test_unknown_sharing() -> None:
    with pytest.raises(ValueError, match="'some'; expected one of none, full"):
        pack([torch.tensor([1])], sharing="some")  # type: ignore[arg-type]
