"""Worlds of ranks for the trainer's own tests: one rank in this process, or four spawned."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ProcessGroup

from shardproof.topology import parse_topology

WAIT = timedelta(seconds=60)
"""How long a rank waits for its peers: a test of ranks that part must end, not hang."""


@dataclass(frozen=True)
class TestRank:
    """A ``RankContext``."""

    __test__ = False

    coordinates: Mapping[str, int]
    groups: Mapping[str, ProcessGroup]
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def group(self, axis: str) -> ProcessGroup:
        return self.groups[axis]


def make_rank(name: str, *, dtype: torch.dtype = torch.float64) -> TestRank:
    """This process's rank of topology ``name``, which is repeated until it fills the world."""
    topology = parse_topology(name)
    size, rank = topology.world_size, dist.get_rank()
    groups: dict[str, ProcessGroup] = {}
    for first in range(0, dist.get_world_size(), size):
        for axis in ("tp", "cp", "dp"):
            for members in topology.groups(axis):
                ranks = [first + member for member in members]
                group = dist.new_group(ranks, timeout=WAIT)
                if rank in ranks:
                    groups[axis] = group
    return TestRank(coordinates=topology.coordinates(rank % size), groups=groups, dtype=dtype)


def make_parallel_state(rank: TestRank) -> None:
    """Megatron's parallel state, anew, for a topology that fills the world."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=rank.group("tp").size(),
        context_parallel_size=rank.group("cp").size(),
    )


def start_alone(directory: Path) -> TestRank:
    """A world of one rank in this process, with Megatron's parallel state."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(directory / "store"), 1), rank=0, world_size=1
    )
    rank = make_rank("single")
    make_parallel_state(rank)
    return rank


def end() -> None:
    """Take the world of this process down."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def spawn(body: Callable[[Path], None], directory: Path, *, ranks: int) -> None:
    """Run ``body(directory)`` on ``ranks`` new processes; what one raises is raised here."""
    # Imported once and forked, since importing takes longer than all that the ranks do.
    multiprocessing.set_forkserver_preload(["megatron.core.models.gpt.gpt_model"])
    mp.start_processes(_run, args=(body, directory, ranks), nprocs=ranks, start_method="forkserver")


def _run(index: int, body: Callable[[Path], None], directory: Path, ranks: int) -> None:
    join(index, directory / "ranks", ranks=ranks)
    body(directory)
    dist.barrier()
    dist.destroy_process_group()


def join(index: int, store: Path, *, ranks: int) -> None:
    """Make this process, on one thread, rank ``index`` of a world that meets in ``store``."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), ranks),
        rank=index,
        world_size=ranks,
        timeout=WAIT,
    )
