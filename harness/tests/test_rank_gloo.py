"""All Gloo groups of a rank share one device, and with it one thread that wakes."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from shardproof.rank import gloo


@pytest.fixture
def torchs_own() -> Iterator[None]:
    """torch's own class in its place at first, and what was there back afterwards."""
    kept = dist.distributed_c10d.ProcessGroupGloo
    vars(dist.distributed_c10d)["ProcessGroupGloo"] = gloo.SharedDeviceGloo.__mro__[1]
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    vars(dist.distributed_c10d)["ProcessGroupGloo"] = kept


def loops() -> int:
    """Threads of Gloo's devices in this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def make_groups(count: int) -> int:
    """How many threads of devices ``count`` groups add."""
    before = loops()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(count - 1):
        dist.new_group([0])
    time.sleep(0.2)
    return loops() - before


@pytest.mark.usefixtures("torchs_own")
@pytest.mark.parametrize(("prepare", "added"), [(gloo.share_device, 0), (lambda: None, 5)])
def test_five_groups(prepare: Callable[[], None], added: int) -> None:
    """Without it each has a thread, so that this count can fail."""
    gloo._device()
    time.sleep(0.2)  # a thread names itself when it begins
    prepare()
    assert make_groups(5) == added


@pytest.mark.usefixtures("torchs_own")
def test_groups_are_torchs_own() -> None:
    gloo.share_device()
    limit = dt.timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, ProcessGroupGloo)
    assert dist.get_backend() == "gloo"
    assert backend.options._timeout == limit
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert cast("Any", backend)._get_sequence_number_for_group() == 1


def test_options_of_the_caller_are_kept() -> None:
    options = cast("Any", ProcessGroupGloo)._Options()
    options._timeout = dt.timedelta(seconds=5)
    options._devices = [ProcessGroupGloo.create_default_device()]
    time.sleep(0.2)
    before = loops()
    made = gloo.SharedDeviceGloo(dist.HashStore(), 0, 1, options)
    assert made.options._timeout == dt.timedelta(seconds=5)
    assert loops() == before
    assert gloo.SharedDeviceGloo(
        dist.HashStore(), 0, 1, dt.timedelta(seconds=9)
    ).options._timeout == dt.timedelta(seconds=9)
