"""The dtype in which sensitive sums are computed."""

from __future__ import annotations

import torch


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms, softmax, rotary tables and log-probabilities of a run in ``dtype``.

    The run's own from float32 up, float32 for the half precisions.
    """
    return torch.promote_types(dtype, torch.float32)
