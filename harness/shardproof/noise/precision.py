"""Where a run in float64 falls to a lower precision."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from .pool import coarser

_TORCH: Final = str(Path(torch.__file__).parent) + os.sep
_SELF: Final = str(Path(__file__).parent.parent) + os.sep
_ENGINE: Final = str(Path(torch.autograd.graph.__file__))
_BELOW_FLOAT64: Final = frozenset({torch.float32, torch.float16, torch.bfloat16}) | {
    dtype for name in dir(torch) if name.startswith("float8") and (dtype := getattr(torch, name))
}
BACKWARD: Final = "backward"
"""The site of an operation that the autograd engine runs itself."""


@dataclass(frozen=True, slots=True)
class Fall:
    """An operation whose result has a lower precision than it should."""

    op: str
    """Such as ``aten._to_copy.default``."""
    source: str
    """Dtype of the widest tainted input, such as ``float64``."""
    target: str
    """Dtype of the result, such as ``float32``."""
    site: str
    """``file:line`` of the innermost frame outside torch and shardproof, or ``backward``."""
    count: int
    """How often this came from the same site."""

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count} times)"
        return f"{self.op}: {self.source} -> {self.target} at {self.site}{times}"


def call_site() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor shardproof's own."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _ENGINE and frame.f_code.co_name == "_engine_run_backward":
            return BACKWARD
        if not name.startswith((_TORCH, _SELF, "<")):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    # A thread of the engine has no Python frame of its own below the operation.
    return BACKWARD


class PrecisionWatch:
    """Collects falls, one record for each operation, pair of dtypes and site."""

    def __init__(self, expected: torch.dtype | None) -> None:
        self._expected = expected
        self._fallen: dict[tuple[str, str, str, str], int] = {}
        self._lower: dict[tuple[str, str, str, str], int] = {}

    @property
    def fallen(self) -> list[Fall]:
        """float64 values that became something coarser, in the order first seen."""
        return [Fall(*key, count) for key, count in self._fallen.items()]

    @property
    def lower(self) -> list[Fall]:
        """Operations computed below the expected dtype from the start, in the order first seen."""
        return [Fall(*key, count) for key, count in self._lower.items()]

    def see(self, op: object, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Look at one operation: its tainted inputs, and what it returned or wrote."""
        coarse = [out for out in outputs if out.dtype in _BELOW_FLOAT64]
        if not coarse:
            return
        source = _finest(inputs)
        for out in coarse:
            if source is torch.float64:
                self._record(self._fallen, str(op), source, out.dtype)
            elif self._expected is not None and coarser(out.dtype, self._expected):
                self._record(self._lower, str(op), source or out.dtype, out.dtype)

    @staticmethod
    def _record(
        into: dict[tuple[str, str, str, str], int],
        op: str,
        source: torch.dtype,
        target: torch.dtype,
    ) -> None:
        key = (op, _short(source), _short(target), call_site())
        into[key] = into.get(key, 0) + 1


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finest(inputs: Sequence[Tensor]) -> torch.dtype | None:
    finest: torch.dtype | None = None
    for value in inputs:
        dtype = value.dtype.to_real() if value.is_complex() else value.dtype
        if dtype.is_floating_point and (finest is None or coarser(finest, dtype)):
            finest = dtype
    return finest
