"""State of a process that a case may change, taken before the case and put back after it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class ProcessState:
    """A snapshot of the process-wide settings that cases are known to change.

    Environment, working directory, ``sys.path``, torch's default dtype and device, grad and anomaly
    mode, deterministic flags, thread count and matmul precision. Random generators are not part of
    it: :func:`seed_everything` sets them before each case.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = Path.cwd()
        self._path = list(sys.path)
        self._device = torch.get_default_device()
        self._settings: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
            (torch.set_default_dtype, (torch.get_default_dtype(),), {}),
            (torch._C._set_grad_enabled, (torch.is_grad_enabled(),), {}),
            (
                torch.use_deterministic_algorithms,
                (torch.are_deterministic_algorithms_enabled(),),
                {"warn_only": torch.is_deterministic_algorithms_warn_only_enabled()},
            ),
            (torch.set_num_threads, (torch.get_num_threads(),), {}),
            (torch.set_float32_matmul_precision, (torch.get_float32_matmul_precision(),), {}),
            (torch.set_anomaly_enabled, (torch.is_anomaly_enabled(),), {}),
        ]

    def restore(self) -> None:
        """Put everything back; what did not change is left alone."""
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        os.chdir(self._directory)
        if sys.path != self._path:
            sys.path[:] = self._path
        for setter, args, kwargs in self._settings:
            setter(*args, **kwargs)
        if torch.get_default_device() != self._device:
            # None takes away the mode that a default device installs; a named device adds one.
            torch.set_default_device(None if self._device.type == "cpu" else self._device)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, torch and (when loaded) NumPy, equally on all ranks."""
    random.seed(seed)
    # torch.manual_seed would queue a call, with a traceback, for a device that is not in use.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
