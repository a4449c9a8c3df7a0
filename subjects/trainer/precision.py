"""The dtype in which sensitive sums are computed, and the mode in which tensors are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms, softmax, rotary tables and log-probabilities of a run in ``dtype``.

    The run's own from float32 up, float32 for the half precisions.
    """
    return torch.promote_types(dtype, torch.float32)


def outside_inference(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` outside of ``torch.inference_mode``, whose tensors can never be trained."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(mode=False):
            return function(*args, **kwargs)

    return run
