"""From this rank's rows to the full source sequence on every rank, and back.

Each rank writes its rows into zeros in source order and the context-parallel ranks sum, so that
rows come out where they belong whatever the plan was. Every rank then computes the same loss from
the same sequence, and its gradient is the whole gradient already: an owner takes its rows of it,
once and unscaled.

Full logits follow the same rule a chunk of rows at a time: ``head_chunks.write_block`` and
``sum_blocks`` gather them, ``head_gradients.read_block`` takes an owner's rows of their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from subjects.trainer import collectives
from subjects.trainer.plan import LocalRows


def gather_rows(values: Tensor, local: LocalRows, group: ProcessGroup) -> Tensor:
    """``values`` [m, ...] of the source positions that this rank answers -> [T, ...] on every rank.

    Also for integers, which have no gradient. A rank that answers nothing (m = 0) takes part all
    the same, here and in backward.
    """
    gathered: Tensor = GatherRows.apply(  # type: ignore[no-untyped-call]
        values, local.sources, local.total, group
    )
    return gathered


class GatherRows(torch.autograd.Function):
    """Scatter into zeros and sum over the context-parallel ranks."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, sources: Tensor, total: int, group: ProcessGroup
    ) -> Tensor:
        """[m, ...] -> [total, ...]."""
        ctx.group = group
        # An output that the loss ignores sends None, and what is behind it gets no gradient.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sources)
        return collectives.all_reduce(scatter_rows(values, sources, total), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """[total, ...] -> [m, ...]."""
        if gradient is None:
            return None, None, None, None
        (sources,) = ctx.saved_tensors
        return rows_of_gradient(gradient, sources, ctx.group), None, None, None


def scatter_rows(values: Tensor, sources: Tensor, total: int) -> Tensor:
    """Zeros [total, ...] with ``values`` [m, ...] at ``sources`` [m]."""
    full = values.new_zeros((total, *values.shape[1:]))
    return full.index_copy_(0, sources, values)


def rows_of_gradient(gradient: Tensor, sources: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG001
    """The rows [m, ...] that this rank owns of the replicated ``gradient`` [total, ...].

    The ranks of ``group`` hold the same gradient, so nothing is reduced and nothing is scaled.
    """
    return gradient.index_select(0, sources)
