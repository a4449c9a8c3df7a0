from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from subjects.tests.allocations import Allocations
from subjects.trainer import head_rows, heads, packing, plan
from subjects.trainer.head_rows import HeadWeights, Place
from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.reductions import Groups
from subjects.types import ForwardInput, ForwardOutput

ROWS, HIDDEN, VOCABULARY = 46, 3, 997


def place_of(alone: Any, documents: list[Tensor], *, head_rows: int, sharing: Any) -> Place:
    packed = packing.pack(documents, sharing=sharing)
    order = list(range(packed.rows))[::-1]
    shards = plan.make_plan([order], work=torch.ones(packed.rows), cp=1)
    group = alone.group("tp")
    return Place(
        local=plan.local_rows(packed, shards, cp_rank=0, tp=1),
        part=VocabularySlice(start=0, columns=VOCABULARY, size=VOCABULARY, group=group),
        groups=Groups(tp=group, cp=alone.group("cp"), dp=alone.group("dp")),
        head_rows=head_rows,
    )


def request_of(**wanted: Any) -> ForwardInput:
    """Three documents of 46 tokens in all, 19 of them shared by two."""
    generator = torch.Generator().manual_seed(1)
    stem, *own = (torch.randint(0, VOCABULARY, (n,), generator=generator) for n in (19, 5, 3))
    return ForwardInput([torch.cat((stem, own[0])), torch.cat((stem, own[1]))], **wanted)


def states(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head and the factors of an adapter."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((rows + 2, 1, HIDDEN), (VOCABULARY + 3, HIDDEN), (2, HIDDEN), (VOCABULARY + 3, 2))
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    hidden, weight, down, up = [value.to(dtype).requires_grad_() for value in values]
    return hidden, weight, down, up


def floating(output: ForwardOutput) -> list[Tensor]:
    """What carries a gradient."""
    assert output.top_k is not None
    found = [output.target_logprobs, output.top_k.values, output.entropy]
    found += [output.logits] if output.local_logits is None else [output.local_logits.values]
    return [value for value in found if value is not None]


def run(
    alone: Any, *, head_rows: int, sharing: str = "full", logits: Any = True
) -> tuple[list[Tensor], list[Tensor]]:
    """All outputs and, from uneven gradients of them, those of the states and the weights."""
    targets = torch.arange(ROWS * 2).view(ROWS, 2) * 7 % VOCABULARY
    targets[::3, 0] = -100
    request = request_of(target_tokens=targets, top_k=4, entropy=True, logits=logits)
    place = place_of(alone, request.documents(), head_rows=head_rows, sharing=sharing)
    hidden, weight, down, up = states(len(place.local.rows))
    output = heads.outputs(request, hidden, HeadWeights(weight, down, up, 0.7), place)
    values = floating(output)
    weights = [torch.linspace(-1, 2, value.numel(), dtype=value.dtype) for value in values]
    gradients = torch.autograd.grad(
        [(value.flatten() * one).sum() for value, one in zip(values, weights, strict=True)],
        [hidden, weight, down, up],
    )
    return [*values, output.top_k.tokens], list(gradients)  # type: ignore[union-attr]


def expected(alone: Any, *, sharing: str = "full") -> tuple[list[Tensor], list[Tensor]]:
    """The same by plain autograd over the whole matrix of logits."""
    targets = torch.arange(ROWS * 2).view(ROWS, 2) * 7 % VOCABULARY
    targets[::3, 0] = -100
    place = place_of(alone, request_of().documents(), head_rows=1, sharing=sharing)
    hidden, weight, down, up = states(len(place.local.rows))
    rows = hidden[:, 0][place.local.source_rows]
    logits = rows @ (weight + 0.7 * up @ down)[:VOCABULARY].t()
    logp = logits.log_softmax(1)
    picked = logp.gather(1, targets.clamp(min=0)).where(targets >= 0, 0.0)
    top = logp.topk(4, dim=1)
    values = [picked, top.values, -(logp.exp() * logp).sum(1), logits]
    weights = [torch.linspace(-1, 2, value.numel(), dtype=value.dtype) for value in values]
    gradients = torch.autograd.grad(
        [(value.flatten() * one).sum() for value, one in zip(values, weights, strict=True)],
        [hidden, weight, down, up],
    )
    return [*values, top.indices], list(gradients)


@pytest.mark.parametrize("head_rows", [1, 5, 27, 1024])
@pytest.mark.parametrize("logits", [True, "local"])
def test_answers_and_gradients_of_all_kinds_together(
    alone: Any, head_rows: int, logits: Any
) -> None:
    """27 packed rows answer 46 positions; chunks of one, ragged, exact, and one of all."""
    found, truth = run(alone, head_rows=head_rows, logits=logits), expected(alone)
    for ours, theirs in zip(found[0], truth[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found[1], truth[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_ranges_end_with_what_is_left() -> None:
    assert head_rows.row_ranges(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert head_rows.row_ranges(6, 3) == [(0, 3), (3, 6)]
    assert head_rows.row_ranges(0, 3) == []


def test_each_question_belongs_to_the_chunk_of_its_row(alone: Any) -> None:
    place = place_of(alone, request_of().documents(), head_rows=4, sharing="full")
    seen = []
    for chunk in head_rows.chunks(place.local, 4):
        assert (place.local.source_rows[chunk.questions] - chunk.start).equal(chunk.rows)
        assert chunk.rows.lt(chunk.stop - chunk.start).all()
        assert all(len(questions) <= 4 for questions, _ in head_rows.pieces(chunk))
        seen += chunk.questions.tolist()
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(0, ValueError), (-3, ValueError), (2.5, TypeError), (None, TypeError), (True, TypeError)],
)
def test_chunks_hold_at_least_a_row(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"head_rows is {wrong}; expected how many rows"):
        heads.check_rows(wrong)


def held(alone: Any, *, head_rows: int) -> tuple[int, int]:
    """The largest allocation of forward and backward, and the largest tensor kept between them."""
    targets = torch.arange(ROWS) * 7
    request = request_of(target_tokens=targets, top_k=4, entropy=True)
    place = place_of(alone, request.documents(), head_rows=head_rows, sharing="none")
    hidden, weight, *_ = states(ROWS, torch.float32)
    kept = [0]

    def keep(value: Tensor) -> Tensor:
        kept.append(value.untyped_storage().nbytes())
        return value

    gc.collect()
    with Allocations() as allocations:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            output = heads.outputs(request, hidden, HeadWeights(weight), place)
        assert output.top_k is not None
        assert output.target_logprobs is not None
        assert output.entropy is not None
        loss = output.target_logprobs.sum() + output.top_k.values.sum() + output.entropy.sum()
        loss.backward()
    return allocations.largest, max(kept)


def test_no_matrix_of_all_rows_by_the_vocabulary(alone: Any) -> None:
    """The same measurement with one chunk of all rows shows that it would see such a matrix."""
    whole = ROWS * VOCABULARY * 4
    assert held(alone, head_rows=1000)[0] >= whole
    largest, kept = held(alone, head_rows=2)
    # The head's weight and its gradient are larger than two rows of logits.
    weight = (VOCABULARY + 3) * HIDDEN * 4
    assert largest <= max(weight, 2 * VOCABULARY * 8) < whole / 4
    assert kept <= weight
