"""The few collectives that the trainer calls itself, each named by what it does.

A group of one rank calls nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def all_reduce(value: Tensor, group: ProcessGroup, *, op: str = "sum") -> Tensor:
    """Reduce ``value`` in place over ``group`` and return it."""
    return _in_place(value, group, lambda dense: dist.all_reduce(dense, op=_OPS[op], group=group))


def all_gather_rows(value: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    """The rows of all ranks, [sum(sizes), ...], in rank order; ``sizes[r]`` is what rank r has.

    Shards are padded to the longest, since Gloo gathers equal sizes only.
    """
    if group.size() == 1:
        return value
    longest = max(sizes)
    mine = value.new_zeros((longest, *value.shape[1:]))
    mine[: len(value)] = value
    everyone = value.new_empty((group.size() * longest, *value.shape[1:]))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    return torch.cat([everyone[at * longest :][:size] for at, size in enumerate(sizes)])


def rotate(value: Tensor, rows: int, group: ProcessGroup) -> Callable[[], Tensor]:
    """Send ``value`` [n, ...] to the next rank of the group and receive [rows, ...] from the last.

    Returns at once; call the result to wait for what was received. It is an all-to-all in which
    each rank has one partner on either side: Gloo aborts point-to-point calls on some devices.
    """
    if group.size() == 1:
        return lambda: value
    before, after = (group.rank() - 1) % group.size(), (group.rank() + 1) % group.size()
    received = value.new_empty((rows, *value.shape[1:]))
    work = dist.all_to_all_single(
        received,
        value.contiguous(),
        [rows if at == before else 0 for at in range(group.size())],
        [len(value) if at == after else 0 for at in range(group.size())],
        group=group,
        async_op=True,
    )

    def wait() -> Tensor:
        work.wait()
        return received

    return wait


def broadcast_first(value: Tensor, group: ProcessGroup) -> Tensor:
    """Overwrite ``value`` in place with that of the group's first rank and return it."""
    return _in_place(value, group, lambda dense: dist.broadcast(dense, group=group, group_src=0))


def _in_place(value: Tensor, group: ProcessGroup, call: Callable[[Tensor], object]) -> Tensor:
    """Let ``call`` overwrite ``value`` and return it; nothing for a group of one rank.

    Ranks may hold it in memory of different strides: what is sent is in the order of its elements.
    """
    if group.size() > 1:
        dense = value.contiguous()
        call(dense)
        if dense is not value:
            value.copy_(dense)
    return value


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
