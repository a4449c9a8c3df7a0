"""One Gloo device for all groups of a rank.

torch gives every Gloo group a device of its own, and each device a thread that wakes a hundred
times a second, busy or not. A rank that keeps megatron-core's groups for three topologies has some
seventy of them: idle ranks would take more of the cores than the ones that work.
"""

from __future__ import annotations

import datetime as dt
from functools import cache
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

_DEFAULT_TIMEOUT = dt.timedelta(seconds=1800)


class SharedDeviceGloo(ProcessGroupGloo):
    """torch's own backend, on the one device of this process where it would make another."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Any = None,
        *,
        timeout: dt.timedelta = _DEFAULT_TIMEOUT,
    ) -> None:
        if isinstance(options, dt.timedelta):
            timeout, options = options, None
        if options is None:
            options = cast("Any", ProcessGroupGloo)._Options()
            options._timeout = timeout
            options._devices = [_device()]
            # As torch does: two for each device.
            options._threads = 2
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """Have torch make its Gloo groups on one device from here on; holds for this process."""
    vars(dist.distributed_c10d)["ProcessGroupGloo"] = SharedDeviceGloo


@cache
def _device() -> Any:
    return ProcessGroupGloo.create_default_device()
