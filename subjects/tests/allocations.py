"""What is allocated while something runs: a mode that follows the storages of all results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations return, while they live.

    ``peak`` is the most of them at once and ``largest`` the largest of all. What an operation
    allocates inside itself and gives back is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.largest = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        # A storage's address is its own as long as a weak reference to it is kept.
        self._outside: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        for storage in _storages((args, kwargs)):
            # Not ours: it was there before.
            if storage._cdata not in self._live:
                self._outside[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._outside and storage._cdata not in self._live:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self._outside = {key: one for key, one in self._outside.items() if not one.expired()}
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)
    ]
