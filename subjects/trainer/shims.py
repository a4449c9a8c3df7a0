"""What megatron-core needs to run where it was not meant to: on a CPU, without its launcher.

Megatron allocates the buffers of sequence parallelism on ``torch.cuda.current_device()`` and has no
public switch for it. Only its own modules' view of ``torch`` is changed, never torch itself.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from subjects.protocol import RankContext

_MODULES = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.utils",
)


class _Cuda(ModuleType):
    """torch.cuda, with the CPU as the current device."""

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """torch, with ``torch.cuda`` as above."""

    cuda = _Cuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_ON_CPU = _Torch("torch")


def place_buffers(device: torch.device) -> None:
    """Let Megatron allocate its communication buffers on ``device``.

    Holds until the next call, for backward passes too, which run after the trainer has returned.
    """
    view = _ON_CPU if device.type == "cpu" else torch
    for name in _MODULES:
        module = importlib.import_module(name)
        # A version that has moved its buffers elsewhere needs nothing here.
        if hasattr(module, "torch"):
            module.torch = view  # type: ignore[attr-defined]


def quiet_rng() -> None:
    """Replace Megatron's CUDA random streams, which a CPU lacks, by the one that does nothing.

    Nothing is drawn from them: dropout is 0 and weights come from a checkpoint.
    """
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def check_parallel_state(rank: RankContext) -> None:
    """Refuse to build on a missing parallel state of Megatron's, or on one of another topology.

    Raises:
        ValueError: with what is there and what this rank's groups are.
    """
    expected = {axis: rank.group(axis).size() for axis in ("tp", "cp", "dp")}
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "megatron-core's parallel state does not exist; whoever owns the process groups makes "
            "it first: parallel_state.initialize_model_parallel with sizes "
            f"{expected} and order 'tp-cp-ep-dp-pp' (a parity case asks for it in its marker: "
            "megatron=True)"
        )
    found = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }
    if found != expected:
        raise ValueError(
            f"megatron-core's parallel state is for {found}, this rank's groups are {expected}; "
            "destroy the state of the last topology before a trainer is built on this one"
        )
