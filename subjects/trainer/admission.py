"""Whether the outputs of a forward fit, before any of them is allocated.

Predicted is what the head and the outputs take: what a rank computes of its own rows, the outputs
that every rank holds in full, and in backward their gradients. The layers' activations are not in
it. The prediction depends only on what all ranks of a batch share and is that of the largest shard,
so that all of them refuse, or none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from subjects.trainer import checks, collectives
from subjects.trainer.head_rows import HeadWeights, Place
from subjects.trainer.plan import LocalRows
from subjects.trainer.precision import working_dtype
from subjects.types import ForwardInput, logprob_dtype

_INDEX = 8
"""Bytes of an id or a position."""


class AdmissionError(MemoryError):
    """A forward whose outputs would not fit; raised on every rank of the batch, before it runs.

    ``parts`` are the bytes that each part would take on the rank with the largest shard,
    ``allowed`` those that may be used, ``head_rows`` the rows of a chunk of the head.
    """

    def __init__(self, parts: Mapping[str, int], allowed: int, head_rows: int) -> None:
        super().__init__(parts, allowed, head_rows)
        self.parts = parts
        self.allowed = allowed
        self.head_rows = head_rows

    def __str__(self) -> str:
        return refusal(self.parts, self.allowed, head_rows=self.head_rows)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the memory of one forward depends on, the same on all ranks of the batch.

    ``rows`` (padding included), ``answered`` and ``chunk`` are those of the largest shard;
    ``element`` and ``wide`` are the bytes of a number of the run and of a log-probability, ``sum``
    those of one in a sum over chunks.
    """

    total: int
    rows: int
    answered: int
    chunk: int
    hidden: int
    vocabulary: int
    columns: int
    element: int
    wide: int
    sum: int
    tp: int


def sizes(place: Place, head: HeadWeights) -> Sizes:
    """The sizes of a forward whose rows are at ``place``."""
    local, part, dtype = place.local, place.part, head.weight.dtype
    tp = place.groups.tp.size()
    rows = max(local.plan.sizes)
    return Sizes(
        total=local.total,
        rows=-(-max(rows, 1) // tp) * tp,
        answered=most_answered(local),
        chunk=min(place.head_rows, rows),
        hidden=head.weight.shape[1],
        vocabulary=part.size,
        columns=part.widest,
        element=dtype.itemsize,
        wide=logprob_dtype(dtype).itemsize,
        sum=working_dtype(dtype).itemsize,
        tp=tp,
    )


def most_answered(local: LocalRows) -> int:
    """The most source positions that a shard answers: more than its rows where rows are shared."""
    shard = torch.zeros(local.packed.rows, dtype=torch.int64)
    for index, rows in enumerate(local.plan.shards):
        shard[rows.cpu()] = index
    return int(shard[local.packed.source.cpu()].bincount().max())


def predict(
    request: ForwardInput, found: Sizes, *, grad: bool, head_grad: bool
) -> Mapping[str, int]:
    """Bytes of each part of a forward and its backward on the rank with the largest shard.

    ``grad``: a graph is kept; ``head_grad``: the head's weight is trained. Outputs count what a
    rank finds of its own rows and the sequence that is scattered into and summed in place.
    """
    outputs = output_bytes(request, found)
    head = any(name != "hidden_states" for name in outputs)
    parts = dict(outputs)
    if outputs:
        parts["hidden states of the shard"] = found.rows * found.hidden * found.element
    if head:
        parts["one chunk of the head"] = chunk_bytes(request, found, grad=grad)
    if grad and outputs:
        parts["gradients of outputs"] = gradient_bytes(request, found)
        # Of the gathered rows, whole and, under tensor parallelism, this rank's share of a sum.
        parts["gradient of hidden states"] = 2 * parts["hidden states of the shard"]
    if grad and head and head_grad:
        weight = found.columns * found.hidden
        narrow = 0 if found.sum == found.element else found.element
        parts["gradient of the head"] = weight * (found.sum + narrow)
    return parts


def output_bytes(request: ForwardInput, found: Sizes) -> dict[str, int]:
    """Bytes of the outputs themselves, by name."""
    everywhere, own = found.total, found.answered
    asked: dict[str, int] = {}
    targets = request.targets()
    if targets is not None:
        each = math.prod(targets.shape[1:])
        # Logits of the targets as found here and as merged, and their ids.
        asked["target_logprobs"] = each * (
            (everywhere + 3 * own) * found.wide + (everywhere + own) * _INDEX
        )
    if request.top_k is not None:
        k, width = request.top_k, min(request.top_k, found.columns)
        pair = found.wide + _INDEX
        # Candidates of this slice, those of all slices side by side, and the chosen ones.
        candidates = found.rows * width * (1 + (2 * found.tp if found.tp > 1 else 0))
        asked["top_k"] = pair * (candidates + (2 * found.rows + own + everywhere) * k)
    if request.entropy:
        asked["entropy"] = found.wide * (6 * found.rows + own + everywhere)
    if request.logits == "local":
        asked["local_logits"] = own * found.columns * found.element
    elif request.logits:
        asked["logits"] = everywhere * found.vocabulary * found.element
    if request.hidden_states:
        asked["hidden_states"] = (own + everywhere) * found.hidden * found.element
    return asked


def chunk_bytes(request: ForwardInput, found: Sizes, *, grad: bool) -> int:
    """Bytes that one chunk of logits takes at its height, in forward or in backward."""
    e, w = found.element, found.wide
    widened = w if w != e else 0
    normalized = request.targets() is not None or request.top_k is not None or request.entropy
    # Beside the logits: rows of them that are handed out, or what is exponentiated.
    beside = e if request.logits else 0
    if normalized:
        beside = max(beside, widened + w * (2 if request.entropy else 1))
    if request.top_k is not None:
        # Ranking: a copy without NaN, four masks, and counts in int32.
        beside = max(beside, widened + w + 4 + 4)
    if grad:
        # The logits, or their wide copy, become the gradient, which is then narrowed.
        narrowed = e if normalized and widened else 0
        block = e + (widened if normalized else 0) if request.logits else 0
        backward = max(w if request.entropy else 0, block, narrowed)
        beside = max(beside, (widened if normalized else 0) + backward)
    return found.chunk * found.columns * (e + beside)


def gradient_bytes(request: ForwardInput, found: Sizes) -> int:
    """Bytes of one gradient for each output, gathered and of this rank's rows."""
    everywhere, own = found.total, found.answered
    total = 0
    targets = request.targets()
    if targets is not None:
        total += (everywhere + 2 * own) * math.prod(targets.shape[1:]) * found.wide
    if request.top_k is not None:
        total += (everywhere + own + found.rows) * request.top_k * found.wide
    if request.entropy:
        total += (everywhere + own + found.rows) * found.wide
    if request.logits == "local":
        total += own * found.columns * found.element
    elif request.logits:
        total += everywhere * found.vocabulary * found.element
    if request.hidden_states:
        total += (everywhere + own + found.rows) * found.hidden * found.element
    return total


def limit_of(limit: int | None, device: torch.device) -> int | None:
    """The bytes that a forward may take: ``limit``, or what is free on a GPU; None: no limit.

    Free is what the device has left and what torch has reserved and not given out.
    """
    if limit is not None or device.type != "cuda":
        return limit
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_limit(limit: int | None) -> None:
    """Refuse a limit that is no number of bytes.

    Raises:
        ValueError: it is negative.
        TypeError: it is no integer, and not None.
    """
    if limit is not None:
        checks.count("memory_limit", limit, "a number of bytes, or None", least=0)


def admit(request: ForwardInput, head: HeadWeights, place: Place, *, limit: int | None) -> None:
    """Refuse a forward that would not fit; where there is a limit, a collective of the batch.

    The least limit of its ranks counts for all of them. Gradients count where they are enabled.

    Raises:
        AdmissionError: on every rank, with bytes for each output and a way out.
    """
    device = head.weight.device
    here = limit_of(limit, device)
    if here is None:
        return
    allowed = least(here, place, device)
    parts = predict(
        request,
        sizes(place, head),
        grad=torch.is_grad_enabled(),
        head_grad=head.weight.requires_grad,
    )
    if sum(parts.values()) > allowed:
        raise AdmissionError(parts, allowed, place.head_rows)


def least(limit: int, place: Place, device: torch.device) -> int:
    """The smallest limit of the TP and CP ranks of the batch."""
    value: Tensor = torch.tensor(limit, dtype=torch.int64, device=device)
    for group in (place.groups.tp, place.groups.cp):
        collectives.all_reduce(value, group, op="min")
    return int(value)


def refusal(parts: Mapping[str, int], allowed: int, *, head_rows: int) -> str:
    """What to tell: the bytes of each part, the largest first, and what to change."""
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {size:,}" for name, size in ranked if size)
    ways = []
    if "logits" in parts:
        ways.append("ask for logits='local', which stay on their shard")
    if "one chunk of the head" in parts:
        ways.append(f"build the trainer with fewer head_rows than {head_rows}")
    if "gradients of outputs" in parts:
        ways.append("pass no_grad=True where no gradient is needed")
    ways.append("run fewer tokens in one forward, or on more CP or TP ranks")
    return (
        f"this forward's head and outputs take about {sum(parts.values()):,} bytes on the rank "
        f"with the most rows, and {allowed:,} may be used: {told}. To fit, {'; or '.join(ways)}"
    )
