"""The trivial case that every contender of the benchmark runs: one all-reduce of four numbers.

As a program it is one rank under torchrun.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def all_reduce_case(*, rank: int, size: int) -> None:
    """Sum four float64 numbers over the default group; raise RuntimeError when the sum is wrong."""
    value = torch.arange(4, dtype=torch.float64) + rank
    dist.all_reduce(value)
    expected = size * torch.arange(4, dtype=torch.float64) + size * (size - 1) / 2
    if not torch.equal(value, expected):
        message = f"rank {rank}: expected {expected.tolist()}, got {value.tolist()}"
        raise RuntimeError(message)


def in_new_group(rank: int, size: int, store: str) -> None:
    """Run the case in a Gloo group made for it, rendezvous through the file `store`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        all_reduce_case(rank=rank, size=size)
    finally:
        dist.destroy_process_group()


def fresh_store(folder: str) -> str:
    """Return a path in `folder` that no store has used."""
    handle, path = tempfile.mkstemp(dir=folder, prefix="store-")
    os.close(handle)
    Path(path).unlink()
    return path


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    all_reduce_case(rank=dist.get_rank(), size=dist.get_world_size())
    dist.destroy_process_group()
