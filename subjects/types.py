"""What a trainer is asked and what it answers.

Sizes in the shapes below: T source positions (all documents of one forward, flattened in order),
H hidden size, V vocabulary, K the number asked of ``top_k``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from subjects.token_ids import Array, holds_parts, integers, is_list, shown, whole_number

IGNORED = -100
"""The target that asks for no log-probability; its output is exactly 0."""

TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "lm_head",
)
"""The projections that an adapter can change, in the order of a layer."""

Tokens = Tensor | Array | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor | Array]
Targets = Tensor | Array | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor | Array]


@dataclass(frozen=True)
class ForwardInput:
    """One forward: some documents, and which outputs are wanted.

    ``input_tokens`` is one document (a 1-D tensor or a list of ids) or several (a list of these, or
    a 2-D tensor with a document a row). Arrays and integers of numpy count as tensors and integers.
    Documents don't see each other; each counts its positions from 0.

    ``target_tokens`` asks for log-probabilities. It is nested like ``input_tokens`` or flat, and
    may have trailing dimensions: several targets for a position. The target at a position is what
    its own logits are asked for: no shift is applied. ``-100`` asks for nothing there. Where it
    can be read in both ways (``[[1], [2]]`` for two documents of one token each) it is nested, and
    answers have the shape that they have for longer documents: [T], not [T, 1].

    ``logits`` asks for those of all positions and the whole vocabulary, and ``logits="local"`` for
    the part of them that each rank computes, which is never gathered.

    ``slot`` names a set of adapter weights, and None the bare model.
    """

    input_tokens: Tokens
    target_tokens: Targets | None = None
    _: KW_ONLY
    top_k: int | None = None
    entropy: bool = False
    logits: bool | Literal["local"] = False
    hidden_states: bool = False
    no_grad: bool = False
    slot: str | None = None

    def documents(self) -> list[Tensor]:
        """The documents as 1-D int64 tensors on the CPU.

        Raises:
            ValueError: no document, an empty document, one that is not one-dimensional, or an id of
                more than 64 bits.
            TypeError: ids that are not integers, or no sequence of them.
        """
        parts = _documents(self.input_tokens)
        if not parts:
            raise ValueError("input_tokens holds no document; give at least one token")
        for index, part in enumerate(parts):
            if part.dim() != 1 or part.numel() == 0:
                raise ValueError(
                    f"input_tokens: document {index} has shape {tuple(part.shape)}; expected a "
                    "one-dimensional sequence of at least one token"
                )
        return parts

    def targets(self) -> Tensor | None:
        """The targets as int64 of shape [T, ...] on the CPU, or None where none were given.

        Raises:
            ValueError: they don't have one row per source position.
            TypeError: ids that are not integers.
        """
        return None if self.target_tokens is None else self._targets_of(self.documents())

    def read(self) -> ForwardInput:
        """The same request with a tensor for each document, which is quick to read once more.

        Raises:
            ValueError, TypeError: as ``documents`` and ``targets``.
        """
        documents = self.documents()
        if self.target_tokens is None:
            return replace(self, input_tokens=documents)
        targets = self._targets_of(documents)
        # By document they can be read in one way only, whatever their shape.
        parts = targets.split([len(document) for document in documents])
        return replace(self, input_tokens=documents, target_tokens=parts)

    def _targets_of(self, documents: Sequence[Tensor]) -> Tensor:
        lengths = [len(document) for document in documents]
        total, value = sum(lengths), self.target_tokens
        nested = len(lengths) > 1 or holds_parts(self.input_tokens)
        if nested and is_list(value) and len(value) == len(lengths):
            flat = _of_documents(value, lengths)
        else:
            flat = integers(value, "target_tokens")
            same = nested and len(set(lengths)) == 1
            if same and flat.shape[:2] == (len(lengths), lengths[0]):
                flat = flat.flatten(0, 1)
        if flat.dim() == 0 or flat.shape[0] != total:
            raise ValueError(
                f"target_tokens has shape {tuple(flat.shape)} for {total} input tokens; expected "
                f"[{total}, ...]: one row of targets per token, no shift"
            )
        return flat


class TopK(NamedTuple):
    """The K most probable tokens of each position, most probable first.

    ``values`` are log-probabilities [T, K]; ``tokens`` are ids [T, K], int64. Of tokens with equal
    logits the one with the lower id comes first.
    """

    values: Tensor
    tokens: Tensor


class LocalLogits(NamedTuple):
    """The part of the logits that this rank computes: some rows of some columns of [T, V].

    ``values`` [m, v] are in the dtype of the run and carry a gradient; ``positions`` [m], int64 and
    ascending, are the source positions of its rows; its columns are the tokens ``first_token`` to
    ``first_token + v``. All TP and CP ranks of a batch together hold each number once, so that what
    a rank adds to its loss from them is its own term of a sum over these ranks.
    """

    values: Tensor
    positions: Tensor
    first_token: int


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What was asked for; the rest is None.

    Every field but ``local_logits`` holds all T source positions in source order, on every TP and
    CP rank of a batch. ``target_logprobs`` [T, ...] has the shape of the targets, in float64 where
    the run is float64 and in float32 otherwise, as have the values of ``top_k`` and ``entropy`` [T]
    (of the softmax over the whole vocabulary, in nats). ``logits`` [T, V] and ``hidden_states``
    [T, H] (after the last norm) have the dtype of the run.
    """

    target_logprobs: Tensor | None = None
    top_k: TopK | None = None
    entropy: Tensor | None = None
    logits: Tensor | None = None
    local_logits: LocalLogits | None = None
    hidden_states: Tensor | None = None


Nested = ForwardInput | Sequence["Nested"] | Mapping[Any, "Nested"]
"""A request, or lists, tuples and dicts of them, nested as the caller likes."""


@dataclass(frozen=True)
class MicroBatch:
    """One element of a sequence of inputs, run.

    ``index`` is the element's place in the sequence. ``output`` is nested as the element was, with
    a ``ForwardOutput`` in place of each ``ForwardInput``. Both are None where this rank had nothing
    to run in a wave.
    """

    index: int | None
    output: Any


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step of an optimizer did.

    ``norms`` are L2 norms of the reduced gradients before clipping, by slot; "" stands for what
    belongs to no slot. Where one is not finite ``stepped`` is false: nothing has changed.
    """

    stepped: bool
    norms: Mapping[str, float]


def check_request(request: ForwardInput, *, vocabulary: int) -> None:
    """Refuse what no trainer could answer.

    Raises:
        ValueError: an id outside the vocabulary, a ``top_k`` outside 1..V, a way of returning
            logits that there is not, or what ``documents`` and ``targets`` refuse.
        TypeError: a field of another type than its own, or ids that are not integers.
    """
    _check_fields(request)
    documents = request.documents()
    for index, document in enumerate(documents):
        _check_ids(document, vocabulary, f"input_tokens, document {index}")
    if request.target_tokens is not None:
        targets = request._targets_of(documents)
        _check_ids(targets[targets != IGNORED], vocabulary, "target_tokens")
    if request.top_k is not None and not 1 <= request.top_k <= vocabulary:
        raise ValueError(
            f"top_k is {shown(whole_number(request.top_k))}; expected 1 to {vocabulary}, the size "
            "of the vocabulary"
        )


def logprob_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-probabilities in a run of ``dtype``: never below float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_fields(request: ForwardInput) -> None:
    logits: object = request.logits
    if not isinstance(logits, bool) and not (isinstance(logits, str) and logits == "local"):
        raise ValueError(
            f"logits is {shown(logits)}; expected False, True (all of them on every rank) or "
            "'local' (on each rank what it computes)"
        )
    for name in ("entropy", "hidden_states", "no_grad"):
        flag = getattr(request, name)
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {shown(flag)}; expected True or False")
    top_k: object = request.top_k
    if top_k is not None and whole_number(top_k) is None:
        raise TypeError(
            f"top_k is {shown(top_k)}; expected an integer, how many tokens to return for each "
            "position, or None for no such output"
        )
    slot: object = request.slot
    if slot is not None and not isinstance(slot, str):
        raise TypeError(
            f"slot is {shown(slot)}; expected the name of one slot, or None for the bare model"
        )


def _check_ids(ids: Tensor, vocabulary: int, where: str) -> None:
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if wrong.numel():
        raise ValueError(
            f"{where}: token {int(wrong[0])} is outside the vocabulary of {vocabulary} "
            f"({IGNORED} is allowed as a target, to leave a position out)"
        )


def _documents(value: object) -> list[Tensor]:
    if is_list(value) and holds_parts(value):
        return [integers(part, f"input_tokens[{at}]") for at, part in enumerate(value)]
    if is_list(value) and not value:
        return []
    whole = integers(value, "input_tokens")
    return list(whole) if whole.dim() == 2 and not is_list(value) else [whole]


def _of_documents(value: Sequence[object], lengths: Sequence[int]) -> Tensor:
    """Targets with an item for each document -> [T, ...]."""
    rows = [integers(part, f"target_tokens[{at}]") for at, part in enumerate(value)]
    fitting = [row.dim() > 0 and len(row) == size for row, size in zip(rows, lengths, strict=True)]
    if not all(fitting):
        if len(rows) == sum(lengths) and not any(fitting):
            return integers(value, "target_tokens")  # flat: every document has one token
        at = fitting.index(False)
        raise ValueError(
            f"target_tokens: document {at} has {lengths[at]} tokens, its targets have shape "
            f"{tuple(rows[at].shape)}; give one row of targets per token"
        )
    for at, row in enumerate(rows):
        if row.shape[1:] != rows[0].shape[1:]:
            raise ValueError(
                f"target_tokens: a position of document 0 has targets of shape "
                f"{list(rows[0].shape[1:])}, one of document {at} of shape {list(row.shape[1:])}; "
                f"expected as many for every position (fill up with {IGNORED})"
            )
    return torch.cat(rows)
