"""What probes of process groups are made of: a rank's world, and answers that can be compared."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class BatteryError(Exception):
    """A probe that is not made as it must be; never an answer."""


@dataclass
class World:
    """One rank of the battery."""

    rank: int
    size: int
    group: Any
    mesh: DeviceMesh

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(17 + self.rank)
        return torch.randint(-9, 10, shape or (6,), generator=generator).to(dtype)


Probe = Callable[[World], Any]
"""What it returns or raises is its answer."""


class Probes(dict[str, Probe]):
    """Probes by name; called as a decorator, it takes one in."""

    def __call__(self, function: Probe) -> Probe:
        self[function.__name__] = function
        return function


def trial(call: Callable[[], Any]) -> Any:
    """What a call returns, or the type and the text of what it raises.

    Raises:
        BatteryError: the failure came inside a worker of Gloo, which is for :func:`trial_apart`.
    """
    try:
        return call()
    except BatteryError:
        raise
    except Exception as error:
        if _raised_by_wait(error):
            raise BatteryError(
                f"{error!r} was raised by the wait for a work, so it failed inside a worker: "
                "the next barrier of its group may raise it again. Run it with trial_apart"
            ) from error
        return _answer(error)


def trial_apart(world: World, call: Callable[..., Any]) -> Any:
    """The answer of a call that may fail inside a worker of Gloo, on a group of its own.

    With it comes the group's sequence number, which counts calls that fail too. A failed work stays
    in its group's list of works in progress for a moment, and a barrier waits for all in the list
    of its own group and raises what they raised.
    """
    group: Any = dist.new_group(list(range(world.size)))
    try:
        answer = call(group=group)
    except Exception as error:  # noqa: BLE001 - the error is the answer
        answer = _answer(error)
    sequence = group._get_sequence_number_for_group()
    dist.barrier()  # of the world: until then another rank may need this one's connections
    dist.destroy_process_group(group)
    return answer, sequence


def _raised_by_wait(error: Exception) -> bool:
    """Whether the innermost expression that raised is a call of ``wait``."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = linecache.getline(frame.filename, frame.end_lineno or 0).encode()
    return re.search(rb"\.wait\([^()]*\)$", text[: frame.end_colno]) is not None


def _answer(error: Exception) -> tuple[str, str]:
    return type(error).__name__, plain(str(error))


def plain(text: str) -> str:
    """Without addresses, ports and lines of torch's own C++ frames."""
    text = text.partition("\nException raised from")[0]
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"\[?127\.0\.0\.1\]?:\d+", "host", text)
    return re.sub(r"\d+(\.\d+)? ?ms", "ms", text)
