"""From the hidden states of this rank's rows to the outputs of the full sequence."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from subjects.trainer import checks, gather, head_chunks, plan
from subjects.trainer.head_rows import Answers, Asked, HeadWeights, Place
from subjects.types import ForwardInput, ForwardOutput, LocalLogits, TopK


def check_rows(head_rows: int) -> None:
    """Refuse chunks that hold no row.

    Raises:
        ValueError: ``head_rows`` is below 1.
        TypeError: it is no integer.
    """
    checks.count("head_rows", head_rows, "how many rows the head computes at a time", least=1)


def outputs(
    request: ForwardInput, hidden: Tensor, head: HeadWeights, place: Place
) -> ForwardOutput:
    """Everything that ``request`` asks, from hidden states of the decoder [p / tp, 1, H].

    A collective of the TP and CP ranks of a batch.
    """
    local, groups = place.local, place.groups
    rows = gather_hidden(hidden, groups.tp)
    targets = request.targets()
    targets = None if targets is None else targets.to(hidden.device)
    asked = Asked(
        targets=None if targets is None else _by_row(plan.targets_for(targets, local)),
        top_k=request.top_k,
        entropy=request.entropy,
        logits="none" if not request.logits else "local" if request.logits == "local" else "full",
    )
    found = Answers(None, None, None, None, None)
    if found_by_head(asked):
        found = head_chunks.answer(rows[: len(local.rows)], head, asked, place)
    logprobs = top = entropy = states = part = None
    if found.logprobs is not None and targets is not None:
        own = found.logprobs.view(len(local.sources), *targets.shape[1:])
        logprobs = gather.gather_rows(own, local, groups.cp)
    if found.top_values is not None and found.top_tokens is not None:
        top = TopK(_full(found.top_values, place), _full(found.top_tokens, place))
    if found.entropy is not None:
        entropy = _full(found.entropy, place)
    if request.hidden_states:
        states = _full(replicated_use(rows, groups.tp), place)
    if asked.logits == "local" and found.logits is not None:
        part = local_part(found.logits, place)
    return ForwardOutput(
        target_logprobs=logprobs,
        top_k=top,
        entropy=entropy,
        logits=found.logits if asked.logits == "full" else None,
        local_logits=part,
        hidden_states=states,
    )


def local_part(values: Tensor, place: Place) -> LocalLogits:
    """Logits [m, v] of this rank alone, with the rows and the columns that they are."""
    return LocalLogits(values, place.local.sources, place.part.start)


def found_by_head(asked: Asked) -> bool:
    """Whether anything is asked that the head must be computed for."""
    return (
        asked.targets is not None
        or asked.top_k is not None
        or asked.entropy
        or asked.logits != "none"
    )


def gather_hidden(hidden: Tensor, group: ProcessGroup) -> Tensor:
    """Hidden states [p / tp, 1, H] of the sequence-parallel region -> [p, H].

    Each rank of ``group`` (TP) goes on with its own slice of the vocabulary, so that what comes
    back is its share of the gradient: backward sums the shares and scatters the rows.
    """
    if group.size() > 1:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=group
        )
    return hidden[:, 0]


def replicated_use(rows: Tensor, group: ProcessGroup) -> Tensor:
    """The gathered rows [p, H], for a use that is the same on all ranks of ``group`` (TP).

    What comes back is then the whole gradient on every rank, where ``gather_hidden`` sums shares:
    each rank's share is that of the rows that it gave, so that each row counts once.
    """
    if group.size() == 1:
        return rows
    used: Tensor = ReplicatedUse.apply(rows, group)  # type: ignore[no-untyped-call]
    return used


class ReplicatedUse(torch.autograd.Function):
    """Identity, whose backward keeps this rank's block of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        """[p, H] -> [p, H]."""
        ctx.group = group
        ctx.set_materialize_grads(False)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        """[p, H] -> [p, H], zero but for this rank's block."""
        if gradient is None:
            return None, None
        block = len(gradient) // ctx.group.size()
        start = block * ctx.group.rank()
        share = torch.zeros_like(gradient)
        share[start : start + block] = gradient[start : start + block]
        return share, None


def _full(values: Tensor, place: Place) -> Tensor:
    """Values [p or n, ...] of this rank's rows -> [T, ...] of all source positions."""
    own = values.index_select(0, place.local.source_rows)
    return gather.gather_rows(own, place.local, place.groups.cp)


def _by_row(targets: Tensor) -> Tensor:
    """Targets [m, ...] -> [m, t]."""
    return targets.reshape(len(targets), math.prod(targets.shape[1:]))
