from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
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
        (np.array([1, 2], dtype=np.uint16), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
        ([np.int64(1), 2, torch.tensor(3)], [[1, 2, 3]]),
        ((range(1, 3), (3,)), [[1, 2], [3]]),
    ],
)
def test_documents_however_they_are_given(tokens: object, expected: list[list[int]]) -> None:
    request = ForwardInput(tokens)  # type: ignore[arg-type]
    for documents in (request.documents(), request.read().documents()):
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
        ([1, 2], np.array([5, 6]), [5, 6]),
        ([1, 2], [torch.tensor([5, 6]), np.array([7, 8])], [[5, 6], [7, 8]]),
        # Documents of one token: flat, nested, and where both would do nested.
        ([[1], [2]], [5, 6], [5, 6]),
        ([[1], [2]], (5, 6), [5, 6]),
        ([[1], [2]], torch.tensor([5, 6]), [5, 6]),
        ([[1]], [5], [5]),
        ([[1], [2]], [[5], [6]], [5, 6]),
        ([[1], [2]], torch.tensor([[5], [6]]), [5, 6]),
        ([[1], [2]], [[[5]], [[6]]], [[5], [6]]),
        ([[1], [2]], torch.tensor([[[5]], [[6]]]), [[5], [6]]),
        ([[1], [2]], [[5, 6], [7, 8]], [[5, 6], [7, 8]]),
        ([[1], [2]], torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([1], [[5]], [[5]]),
    ],
)
def test_targets_however_they_are_given(
    tokens: object, targets: object, expected: list[object]
) -> None:
    request = ForwardInput(tokens, targets)  # type: ignore[arg-type]
    # Once read, they are read in no other way.
    for one in (request, request.read(), request.read().read()):
        flat = one.targets()
        assert flat is not None
        assert flat.tolist() == expected


def test_no_targets() -> None:
    assert ForwardInput([1, 2]).targets() is None
    assert ForwardInput([1, 2]).read().targets() is None


def test_a_request_that_was_read_asks_for_the_same() -> None:
    request = ForwardInput([1, 2], [3, 4], top_k=2, entropy=True, logits="local", slot="a")
    read = request.read()
    assert isinstance(read.input_tokens, list)
    others = [one.name for one in fields(request) if not one.name.endswith("_tokens")]
    assert [getattr(read, name) for name in others] == [getattr(request, name) for name in others]


@pytest.mark.parametrize(
    ("tokens", "targets", "message"),
    [
        ([1, 2, 3], [5, 6], r"\(2,\) for 3 input tokens"),
        ([[1, 2], [3]], [[5, 6], [7, 8]], r"document 1 has 1 tokens"),
        ([1, 2], torch.tensor(5), r"one row of targets per token"),
        ([[1], [2]], [[5], [6, 7]], r"document 1 has 1 tokens"),
        ([[1], [2]], [[[5, 6]], [[7]]], r"document 1 of shape \[1\]; .*\(fill up with -100"),
        ([1, 2], [[5, 6], [7]], r"target_tokens\[1\] is of shape \[1\]; expected items of one"),
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
        (ForwardInput([1], top_k=np.int64(10)), "top_k is 10; expected"),  # type: ignore[arg-type]
        (ForwardInput([1], top_k=10**5000), "top_k is an integer of 16610 bits; expected 1 to 9"),
    ],
)
def test_what_no_trainer_can_answer(request_: ForwardInput, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, vocabulary=9)


IDS = "expected integer token ids"
WRONG: list[tuple[dict[str, object], tuple[str, ...]]] = [
    ({"input_tokens": None}, ("input_tokens is None", IDS)),
    ({"input_tokens": (at for at in (1, 2))}, ("input_tokens is of type generator", "make a list")),
    ({"input_tokens": {1, 2}}, ("input_tokens is of type set", IDS, "make a list")),
    ({"input_tokens": {1: 2}}, ("input_tokens is of type dict", IDS, "make a list")),
    ({"input_tokens": "hello"}, ("input_tokens is 'hello'", IDS, "run the tokenizer")),
    ({"input_tokens": "hello " * 99}, ("input_tokens is of type str", IDS)),
    ({"input_tokens": b"hello"}, ("input_tokens is of type bytes", "run the tokenizer")),
    ({"input_tokens": ["1", "2"]}, ("input_tokens[0] is '1'", IDS)),
    ({"input_tokens": [[1], "ab"]}, ("input_tokens[1] is 'ab'", IDS)),
    ({"input_tokens": [1, True]}, ("input_tokens[1] is True", IDS)),
    ({"input_tokens": [np.True_]}, ("input_tokens[0]", "dtype bool", IDS)),
    ({"input_tokens": [torch.tensor(True)]}, ("input_tokens[0] has dtype torch.bool", IDS)),
    ({"input_tokens": np.array([1.5])}, ("array of dtype float64", IDS)),
    ({"input_tokens": np.array(["a"])}, ("array of dtype <U1", IDS)),
    ({"input_tokens": torch.tensor([1, 0]).to_sparse()}, ("torch.sparse_coo", "a dense tensor")),
    ({"input_tokens": 5}, ("document 0 has shape ()", "one-dimensional")),
    ({"input_tokens": [[1, 2], [3, [4]]]}, ("input_tokens[1][1] is of shape [1]", "of one shape")),
    ({"input_tokens": [1, [2]]}, ("input_tokens[0] is a single id", "of one shape")),
    ({"input_tokens": [[1], 2]}, ("document 1 has shape ()", "one-dimensional")),
    ({"input_tokens": [1, 2**70]}, (f"input_tokens has {2**70} at 1", "64 bits")),
    ({"input_tokens": [[1, -(2**70)]]}, (f"input_tokens[0] has -{2**70} at 1", "64 bits")),
    ({"target_tokens": [None, 3]}, ("target_tokens[0] is None", "-100 leaves a position out")),
    ({"target_tokens": "ab"}, ("target_tokens is 'ab'", IDS)),
    ({"target_tokens": {3, 4}}, ("target_tokens is of type set", "make a list")),
    ({"top_k": 2.5}, ("top_k is 2.5", "expected an integer")),
    ({"top_k": True}, ("top_k is True", "expected an integer")),
    ({"top_k": "3"}, ("top_k is '3'", "expected an integer")),
    ({"top_k": [3]}, ("top_k is [3]", "expected an integer")),
    ({"entropy": torch.tensor([1, 0])}, ("entropy is of type Tensor", "True or False")),
    ({"hidden_states": "yes"}, ("hidden_states is 'yes'", "True or False")),
    ({"no_grad": None}, ("no_grad is None", "True or False")),
    ({"logits": np.array([1, 2])}, ("logits is of type ndarray", "'local'")),
    ({"slot": ["a"]}, ("slot is ['a']", "the name of one slot")),
    ({"slot": 3}, ("slot is 3", "the name of one slot")),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[row[1][0] for row in WRONG])
def test_a_bad_field_is_told_by_name_with_what_came(
    given: dict[str, object], words: tuple[str, ...]
) -> None:
    """And refused before anything could fail in words of torch's or Python's own."""
    assert set(given) <= {field.name for field in fields(ForwardInput)}
    asked = ForwardInput(**{"input_tokens": [1, 2], **given})  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)) as raised:
        check_request(asked, vocabulary=9)
    for word in words:
        assert word in str(raised.value)
    assert raised.value.__cause__ is None


def test_what_is_said_of_a_value_is_the_same_on_every_rank() -> None:
    """No address: ranks that refuse in the same words raise their own error."""
    messages = []
    for _ in range(2):
        with pytest.raises(TypeError) as raised:
            ForwardInput(at for at in (1, 2)).documents()  # type: ignore[arg-type]
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "0x" not in messages[0]


def test_a_good_request_is_let_through() -> None:
    check_request(ForwardInput([[1, 8], [0]], [8, -100, 0], top_k=9), vocabulary=9)
    check_request(ForwardInput([1], top_k=np.int64(3)), vocabulary=9)  # type: ignore[arg-type]


def test_log_probabilities_are_never_below_float32() -> None:
    assert logprob_dtype(torch.float64) == torch.float64
    assert logprob_dtype(torch.bfloat16) == torch.float32


def test_ids_that_have_no_end_or_no_values_are_refused() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    with pytest.raises(TypeError, match="nested more than 20 deep; expected token ids"):
        check_request(ForwardInput(endless), vocabulary=9)
    with pytest.raises(TypeError, match="input_tokens lies on meta, without values"):
        check_request(ForwardInput(torch.ones(3, dtype=torch.int64, device="meta")), vocabulary=9)
