from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from subjects.trainer.logprobs import (
    VocabularySlice,
    log_normalizer,
    lowest_first,
    target_logprobs,
    top_tokens,
)


@pytest.fixture
def part(alone: Any) -> VocabularySlice:
    """One rank holds all 11 ids; its matrix has two columns of padding more."""
    return VocabularySlice(start=0, columns=11, size=11, group=alone.group("tp"))


@pytest.fixture
def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = 9 * torch.randn(5, 13, dtype=torch.float64, generator=generator)
    # Padding that would win every softmax and every ranking, if it were looked at.
    values[:, 11:] = 1e6
    return values.requires_grad_()


def test_padding_of_the_vocabulary_is_never_seen(
    logits: torch.Tensor, part: VocabularySlice
) -> None:
    real = logits[:, :11]
    normalizer = log_normalizer(logits, part)
    torch.testing.assert_close(normalizer, real.logsumexp(1), rtol=1e-14, atol=0)
    assert int(top_tokens(logits, 11, part).max()) == 10
    rows = torch.arange(5)
    target_logprobs(logits, normalizer, rows, rows, part).sum().backward()
    assert logits.grad is not None
    assert logits.grad[:, 11:].eq(0).all()


def test_values_and_gradients_against_log_softmax(
    logits: torch.Tensor, part: VocabularySlice
) -> None:
    rows = torch.tensor([0, 3, 3, 4, 1, 1])
    targets = torch.tensor([[0, -100], [10, 10], [2, 2], [-100, -100], [5, 0], [5, 7]])
    weight = torch.randn(6, 2, dtype=torch.float64)
    values = target_logprobs(logits, log_normalizer(logits, part), rows, targets, part)
    whole = logits[:, :11].log_softmax(1)[rows].gather(1, targets.clamp(min=0))
    expected = whole.where(targets != -100, 0.0)
    torch.testing.assert_close(values, expected, rtol=1e-14, atol=1e-14)
    assert values[targets == -100].eq(0).all()
    (ours,) = torch.autograd.grad((values * weight).sum(), logits)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


def test_rows_without_a_question(part: VocabularySlice) -> None:
    logits = torch.randn(0, 13, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    values = target_logprobs(logits, log_normalizer(logits, part), none, none.view(0, 1), part)
    values.sum().backward()
    assert values.shape == (0, 1)
    assert logits.grad is not None
    assert top_tokens(logits, 3, part).shape == (0, 3)


def test_very_large_logits_do_not_overflow(part: VocabularySlice) -> None:
    logits = torch.full((1, 13), 1e4, dtype=torch.float64)
    assert log_normalizer(logits, part).item() == pytest.approx(1e4 + 2.3978952727983707)


def test_equal_logits_come_in_the_order_of_their_ids() -> None:
    values = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0]])
    for k, expected in ((1, [1]), (2, [1, 3]), (3, [1, 3, 0]), (4, [1, 3, 0, 2])):
        assert lowest_first(values, k).tolist() == [expected]
    assert lowest_first(torch.zeros(2, 50), 7).tolist() == [list(range(7))] * 2


def test_a_nan_is_no_reason_to_fail_in_the_ranking() -> None:
    values = torch.tensor([[float("nan"), 1.0, 2.0]])
    assert lowest_first(values, 3).tolist() == [[2, 1, 0]]
