from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from subjects.trainer import logprobs
from subjects.trainer.logprobs import VocabularySlice, lowest_first


@pytest.fixture
def part(alone: Any) -> VocabularySlice:
    """One rank holds all 11 ids."""
    return VocabularySlice(start=0, columns=11, size=11, group=alone.group("tp"))


def _logits(rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 9 * torch.randn(rows, 11, dtype=torch.float64, generator=generator)


def _merged(logits: Tensor, part: VocabularySlice) -> tuple[Tensor, Tensor]:
    return logprobs.merge_moments(logprobs.slice_moments(logits, entropy=True), part.group)


def test_normalizer_and_entropy(part: VocabularySlice) -> None:
    logits = _logits()
    normalizer, entropy = _merged(logits, part)
    logp = logits.log_softmax(1)
    torch.testing.assert_close(normalizer, logits.logsumexp(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(1), rtol=1e-13, atol=0)


def test_slices_of_the_vocabulary_merge_into_the_whole(part: VocabularySlice) -> None:
    """What the TP group adds up, slice by slice: their sums about one maximum, one slice empty."""
    logits = _logits()
    slices = [logits[:, :4], logits[:, 4:4], logits[:, 4:]]
    each = [logprobs.slice_moments(piece.clone(), entropy=True) for piece in slices]
    highest = torch.stack([one.highest for one in each]).amax(0)
    sums = [logprobs.shared_sums(one, highest, part.group) for one in each]
    total = torch.stack([one for one, _ in sums]).sum(0)
    weighted = torch.stack([one for _, one in sums]).sum(0)
    torch.testing.assert_close(highest + total.log(), logits.logsumexp(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(
        total.log() - weighted / total, _merged(logits, part)[1], rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("scale", [1e4, 1e-9])
def test_entropy_keeps_its_digits(part: VocabularySlice, scale: float) -> None:
    """Nearly certain and nearly uniform rows, where log(S) - E[l] of raw logits would cancel."""
    logits = torch.full((1, 11), scale, dtype=torch.float64)
    assert _merged(logits, part)[0].item() == pytest.approx(scale + 2.3978952727983707, rel=1e-15)
    assert _merged(logits, part)[1].item() == pytest.approx(2.3978952727983707, rel=1e-14)
    logits[0, 3] += 40
    p = 10 * torch.tensor(-40.0, dtype=torch.float64).exp()
    assert _merged(logits, part)[1].item() == pytest.approx(p.item() * 41, rel=1e-4)


def test_gradient_of_picked_and_entropy_together(part: VocabularySlice) -> None:
    logits = _logits().requires_grad_()
    weights = torch.linspace(0.3, 1.7, 5, dtype=torch.float64)
    columns = torch.tensor([[0, 3], [-1, 10], [2, 2], [-1, -1], [5, 0]])
    picked = torch.linspace(-1.0, 2.0, 10, dtype=torch.float64).view(5, 2)
    logp = logits.log_softmax(1)
    chosen = logp.gather(1, columns.clamp(min=0)).where(columns >= 0, 0.0)
    entropy = -(logp.exp() * logp).sum(1)
    (expected,) = torch.autograd.grad((chosen * picked).sum() + (entropy * weights).sum(), logits)
    known = logits.detach()
    normalizer, value = _merged(known.clone(), part)
    asked = picked.where(columns >= 0, 0.0)
    found = logprobs.softmax_gradient(known.clone(), normalizer, asked.sum(1), (value, weights))
    logprobs.add_at(found, torch.arange(5), columns, picked)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_targets_of_other_slices_and_of_nobody() -> None:
    part = VocabularySlice(start=4, columns=3, size=11, group=None)  # type: ignore[arg-type]
    targets = torch.tensor([[0, 4, 6, 7], [-100, 10, 5, 3]])
    assert logprobs.target_columns(targets, part).tolist() == [[-1, 0, 2, -1], [-1, -1, 1, -1]]
    logits = torch.arange(6.0).view(2, 3)
    columns = logprobs.target_columns(targets, part)
    found = logprobs.own_logits(logits, torch.tensor([1, 0]), columns)
    assert found.tolist() == [[0.0, 3.0, 5.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    assert logprobs.own_logits(logits[:, :0], torch.tensor([1, 0]), columns).eq(0).all()


def test_candidates_of_all_slices(part: VocabularySlice) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    for k, expected in ((1, [1]), (2, [1, 3]), (4, [1, 3, 6, 0]), (5, [1, 3, 6, 0, 2])):
        candidates = logprobs.top_candidates(logits, k, part)
        assert logprobs.merge_candidates(*candidates, k, part.group)[1].tolist() == [expected]


def test_a_slice_with_fewer_ids_than_are_asked() -> None:
    class Three:
        def size(self) -> int:
            return 3

    part = VocabularySlice(start=8, columns=2, size=10, group=Three())  # type: ignore[arg-type]
    value, token = logprobs.top_candidates(torch.tensor([[1.0, 2.0]]), 4, part)
    assert value.tolist() == [[2.0, 1.0, float("-inf"), float("-inf")]]
    assert token.tolist() == [[9, 8, 10, 10]]


def test_equal_logits_come_in_the_order_of_their_ids() -> None:
    values = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0]])
    for k, expected in ((1, [1]), (2, [1, 3]), (3, [1, 3, 0]), (4, [1, 3, 0, 2])):
        assert lowest_first(values, k).tolist() == [expected]
    assert lowest_first(torch.zeros(2, 50), 7).tolist() == [list(range(7))] * 2
    assert lowest_first(torch.zeros(0, 50), 7).shape == (0, 7)


def test_a_nan_is_no_reason_to_fail_in_the_ranking() -> None:
    values = torch.tensor([[float("nan"), 1.0, 2.0]])
    assert lowest_first(values, 3).tolist() == [[2, 1, 0]]
