from __future__ import annotations

import pytest
import torch

from subjects.types import ForwardInput, check_request, logprob_dtype


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        (torch.tensor([1, 2, 3]), [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3])], [[1, 2], [3]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    ],
)
def test_documents_however_they_are_given(tokens: object, expected: list[list[int]]) -> None:
    documents = ForwardInput(tokens).documents()  # type: ignore[arg-type]
    assert [document.tolist() for document in documents] == expected
    assert all(document.dtype == torch.int64 for document in documents)


@pytest.mark.parametrize("tokens", [[], [[]], [[1], []], torch.zeros(0, dtype=torch.int64)])
def test_nothing_to_run_is_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"at least one token"):
        ForwardInput(tokens).documents()  # type: ignore[arg-type]


def test_three_dimensions_are_no_documents() -> None:
    with pytest.raises(ValueError, match=r"document 0 has shape \(1, 2, 3\)"):
        ForwardInput(torch.zeros(1, 2, 3, dtype=torch.int64)).documents()


@pytest.mark.parametrize("tokens", [torch.tensor([0.5]), [1.5], [[True, False]]])
def test_ids_are_integers(tokens: object) -> None:
    with pytest.raises(TypeError, match="integer token ids"):
        ForwardInput(tokens).documents()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "targets", "expected"),
    [
        ([1, 2], [5, -100], [5, -100]),
        ([1, 2], torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([1, 2], [[5, 6], [7, 8]], [[5, 6], [7, 8]]),
        ([[1, 2], [3]], [[5, 6], [7]], [5, 6, 7]),
        ([[1, 2], [3]], [5, 6, 7], [5, 6, 7]),
        ([[1, 2], [3]], [torch.tensor([[5], [6]]), torch.tensor([[7]])], [[5], [6], [7]]),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]]), [5, 6, 7, 8]),
        ([[1, 2, 3]], torch.tensor([[5, 6, 7]]), [5, 6, 7]),
        ([[1, 2], [3, 4]], torch.arange(12).view(4, 3), torch.arange(12).view(4, 3).tolist()),
    ],
)
def test_targets_however_they_are_given(
    tokens: object, targets: object, expected: list[object]
) -> None:
    flat = ForwardInput(tokens, targets).targets()  # type: ignore[arg-type]
    assert flat is not None
    assert flat.tolist() == expected


def test_no_targets() -> None:
    assert ForwardInput([1, 2]).targets() is None


@pytest.mark.parametrize(
    ("tokens", "targets", "message"),
    [
        ([1, 2, 3], [5, 6], r"\(2,\) for 3 input tokens"),
        ([[1, 2], [3]], [[5, 6], [7, 8]], r"document 1 has 1 tokens"),
        ([1, 2], torch.tensor(5), r"one row of targets per token"),
    ],
)
def test_targets_must_fit(tokens: object, targets: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForwardInput(tokens, targets).targets()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ForwardInput([1, 9]), "input_tokens, document 0: token 9"),
        (ForwardInput([[1], [-100]]), "document 1: token -100"),
        (ForwardInput([1], [9]), "target_tokens: token 9"),
        (ForwardInput([1], [-1]), "target_tokens: token -1"),
        (ForwardInput([1], top_k=0), "top_k is 0"),
        (ForwardInput([1], top_k=10), "expected 1 to 9"),
    ],
)
def test_what_no_trainer_can_answer(request_: ForwardInput, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, vocabulary=9)


def test_a_good_request_is_let_through() -> None:
    check_request(ForwardInput([[1, 8], [0]], [8, -100, 0], top_k=9), vocabulary=9)


def test_log_probabilities_are_never_below_float32() -> None:
    assert logprob_dtype(torch.float64) == torch.float64
    assert logprob_dtype(torch.bfloat16) == torch.float32
