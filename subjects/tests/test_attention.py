from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core")

from subjects.tests import dense_attention
from subjects.trainer import allgather, attention, blocks, ring
from subjects.trainer.attention import (
    AttentionOptions,
    AttentionRows,
    ContextParallelAttention,
    RowAttention,
)
from subjects.trainer.blocks import Partial
from subjects.trainer.masks import (
    Block,
    VisibleBlocks,
    causal_mask,
    document_mask,
    visible_blocks,
    visible_keys,
)
from subjects.trainer.packing import PackedRows, pack

HEADS, GROUPS, SIZE = 6, 3, 4
STEM = [7, 8, 9, 1, 2]
TREE = [[*STEM, 5, 6], STEM, [*STEM, 5, 3, 3], [*STEM[:2], 4], [1], [*STEM, 5, 6]]


def packed_tree(sharing: Any = "full") -> PackedRows:
    return pack([torch.tensor(document) for document in TREE], sharing=sharing)


def tensors(rows: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, HEADS, SIZE), (rows, GROUPS, SIZE), (rows, GROUPS, SIZE))
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def everything(packed: PackedRows, size: int) -> VisibleBlocks:
    ids = packed.take(torch.arange(packed.rows))
    return visible_blocks(ids, ids, remote=False, size=size)


@pytest.mark.parametrize("block", [1, 3, 512])
def test_attention_of_packed_documents_is_that_of_each_alone(block: int) -> None:
    lengths = [5, 1, 7]
    packed = pack([torch.arange(n) for n in lengths], sharing="none")
    query, key, value = tensors(sum(lengths))
    out = blocks.attend(query, key, value, everything(packed, block), scale=0.3).out
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        for head in range(HEADS):
            scores = 0.3 * query[part, head] @ key[part, head // 2].T
            scores += torch.full_like(scores, float("-inf")).triu(1)
            expected = scores.softmax(-1) @ value[part, head // 2]
            torch.testing.assert_close(out[part, head], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sharing", ["none", "full"])
@pytest.mark.parametrize("block", [1, 2, 5, 512])
def test_gradients_are_those_of_the_definition(sharing: str, block: int) -> None:
    packed = packed_tree(sharing)
    ids = packed.take(torch.arange(packed.rows))
    query, key, value = (x.requires_grad_() for x in tensors(packed.rows))
    expected = dense_attention.attend(
        query, key, value, visible_keys(ids, ids, remote=False), scale=0.4
    )
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (query, key, value), gradient)
    seen = everything(packed, block)
    query, key, value = (x.detach() for x in (query, key, value))
    whole = blocks.attend(query, key, value, seen, scale=0.4)
    torch.testing.assert_close(whole.out, expected.detach(), rtol=1e-13, atol=1e-13)
    found = blocks.Gradients(*(torch.zeros_like(x) for x in (query, key, value)))
    products = blocks.row_products(gradient, whole.out)
    asked = blocks.Asked(query, gradient, whole.highest, whole.total, products)
    blocks.add_gradients(found, asked, key, value, seen, scale=0.4)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_partials_merge_in_any_order_and_where_nothing_is_seen() -> None:
    """exp(lse) would be infinite: scores lie far above what float64 can exponentiate."""
    packed = packed_tree()
    rows = packed.rows
    query, key, value = tensors(rows)
    query, key = query * 40, key * 40
    whole = blocks.attend(query, key, value, everything(packed, 512), scale=1.0)
    assert whole.lse.max() > 2000
    assert whole.lse.exp().isinf().any()
    queries = packed.take(torch.arange(rows))
    parts = []
    for keys in (torch.arange(1, rows, 2), torch.arange(0), torch.arange(0, rows, 2)):
        seen = visible_blocks(queries, packed.take(keys), remote=True, size=3)
        parts.append(blocks.attend(query, key[keys], value[keys], seen, scale=1.0))
    blind = parts[0].lse == float("-inf")
    assert blind.any()
    assert parts[0].out[blind].eq(0).all()
    assert parts[1].lse.eq(float("-inf")).all()
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        merged = blocks.nothing(query)
        for at in order:
            merged = blocks.merge(merged, parts[at])
        torch.testing.assert_close(merged.out, whole.out, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-14, atol=0)


def test_nothing_merged_with_nothing_is_nothing() -> None:
    nothing = blocks.nothing(torch.ones(2, HEADS, SIZE))
    merged = blocks.merge(nothing, nothing)
    assert merged.out.eq(0).all()
    assert merged.lse.eq(float("-inf")).all()


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


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_blocks_that_nobody_sees_are_left_out_and_no_others(size: int) -> None:
    packed = packed_tree()
    ids = packed.take(torch.arange(packed.rows))
    whole = visible_keys(ids, ids, remote=False)
    seen = visible_blocks(ids, ids, remote=False, size=size)
    found = torch.zeros_like(whole)
    for block in seen.blocks:
        mask = seen.mask(block)
        assert mask.any()
        found[block] |= mask
    assert found.equal(whole)
    assert len(seen.blocks) < (-(-packed.rows // size)) ** 2 or size == 100


def test_half_precision_is_summed_in_float32() -> None:
    packed = pack([torch.arange(9)], sharing="none")
    seen = everything(packed, 4)
    exact = blocks.attend(*tensors(9), seen, scale=1.0).out
    half = blocks.attend(*tensors(9, dtype=torch.bfloat16), seen, scale=1.0)
    assert half.out.dtype == half.lse.dtype == torch.float32
    torch.testing.assert_close(half.out.double(), exact, rtol=0.1, atol=0.1)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return found


def test_no_tensor_grows_with_the_square_of_the_rows(alone: Any) -> None:
    """Masks and scores live in one block; a dense mask alone would be far larger."""
    rows, block = 600, 32
    packed = pack([torch.arange(400), torch.arange(1, rows - 399)], sharing="none")
    query, key, value = (x.requires_grad_() for x in tensors(rows))
    bound = max(rows * HEADS * SIZE, rows * 2 * GROUPS * SIZE, HEADS * block * block)
    for exchange in ("gather", "ring"):
        largest = Largest()
        with largest:
            seen = everything(packed, block)
            given = AttentionRows(
                seen=(seen,),
                exchange=exchange,
                cp_group_of_rows=alone.group("cp"),
            )
            out: Any = RowAttention.apply(query, torch.stack((key, value), 1), given, 0.4)  # type: ignore[no-untyped-call]
            out.sum().backward()
        assert largest.elements <= bound
    largest = Largest()
    with largest:
        ids = packed.take(torch.arange(rows))
        mask = visible_keys(ids, ids, remote=False)
        dense_attention.attend(query, key, value, mask, scale=0.4).sum().backward()
    assert largest.elements >= HEADS * rows**2 > bound


def test_unseen_blocks_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 x 2 blocks of two documents of a block each, two are seen, and two are computed."""
    packed = pack([torch.arange(4), torch.arange(4)], sharing="none")
    seen = everything(packed, 4)
    assert seen.blocks == (
        Block(slice(0, 4), slice(0, 4)),
        Block(slice(4, 8), slice(4, 8)),
    )
    scored: list[Any] = []
    original = blocks.masked_scores

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        scored.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(blocks, "masked_scores", counted)
    blocks.attend(*tensors(8), seen, scale=1.0)
    assert len(scored) == 2


def test_the_exchange_is_chosen_by_size() -> None:
    width = 2 * 8 * 128
    assert attention.choose("auto", rows=32_768, width=width) is allgather
    assert attention.choose("auto", rows=32_769, width=width) is ring
    assert attention.choose("gather", rows=10**9, width=width) is allgather
    assert attention.choose("ring", rows=1, width=width) is ring
    assert attention.choose("auto", rows=1, width=1, limit=0) is ring
    assert attention.choose("auto", rows=0, width=1, limit=0) is allgather


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_the_width_of_no_rows_is_that_of_any(rows: int) -> None:
    assert attention.width_of(torch.empty(rows, 2, GROUPS, SIZE)) == 2 * GROUPS * SIZE


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"exchange": "rings"},
            ValueError,
            "attention is 'rings'; expected one of auto, gather, ring",
        ),
        ({"exchange": None}, ValueError, "attention is None; expected one of"),
        ({"block": 0}, ValueError, "attention_block is 0; expected at least one row"),
        (
            {"block": "x"},
            TypeError,
            "attention_block is 'x'; expected at least one row, an integer from 1",
        ),
        ({"block": 2.5}, TypeError, "attention_block is 2.5; expected at least one row"),
        ({"block": True}, TypeError, "attention_block is True; expected at least one row"),
        ({"block": 10**400}, ValueError, "attention_block is an integer of 1329 bits; expected"),
        (
            {"gather_limit": -1},
            ValueError,
            "gather_limit is -1; expected a number of keys and values",
        ),
        (
            {"gather_limit": None},
            TypeError,
            "gather_limit is None; expected a number of keys and values",
        ),
    ],
)
def test_options_that_can_not_be(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        AttentionOptions(**options)


def test_padding_comes_out_as_zeros_and_is_not_seen(alone: Any) -> None:
    class Config:
        kv_channels = SIZE

    packed = packed_tree()
    rows = packed.rows
    given = AttentionRows(
        seen=(everything(packed, 3),), exchange="ring", cp_group_of_rows=alone.group("cp")
    )
    module = ContextParallelAttention(Config())
    query, key, value = (
        torch.cat((x, torch.full((3, *x.shape[1:]), float("nan"), dtype=x.dtype)))[:, None]
        for x in tensors(rows)
    )
    out = module(query, key, value, None, packed_seq_params=given)
    assert out.shape == (rows + 3, 1, HEADS * SIZE)
    assert out[:rows].isfinite().all()
    assert out[rows:].eq(0).all()


@pytest.mark.parametrize("rows", [None, AttentionRows()])
def test_core_attention_without_rows_says_what_to_pass(rows: AttentionRows | None) -> None:
    class Config:
        kv_channels = 4

    module = ContextParallelAttention(Config())
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match="pass them to the decoder as packed_seq_params"):
        module(x, x, x, None, packed_seq_params=rows)


def test_a_partial_of_one_key_is_its_value() -> None:
    packed = pack([torch.tensor([5])], sharing="none")
    query, key, value = tensors(1)
    found = blocks.attend(query, key, value, everything(packed, 8), scale=0.5)
    score = 0.5 * (query * key.repeat_interleave(2, 1)).sum(-1)
    expected = Partial(value.repeat_interleave(2, 1), score, torch.ones_like(score))
    torch.testing.assert_close(found, expected)
