"""Watches a computation for anything below float64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LowerPrecision(TorchDispatchMode):
    """Records ``function operation`` of each operation whose result is a lower float than float64.

    Forward and backward; ``function`` is the innermost one outside of torch. Results count, not
    falls alone, so that a table computed in float32 from integers is seen too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            low = isinstance(value, torch.Tensor) and value.is_floating_point()
            if low and value.dtype != torch.float64:
                self.sites.add(f"{_caller()} {func}")
        return out


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_name
