"""Which values depend on a parameter or on a floating input.

A rotary table is computed from integers alone. Every topology computes it in the same way, so
rounding never moves it from one to the other; perturbing it at position 20,000 would lift the
noise floor some hundredfold and hide real faults. So the mode asks here before it perturbs.

Known to be *clean* are storages that a factory (``arange``, ``zeros``, ...) made and that only
ever received clean values. Everything else is tainted, also what was made while no mode looked.
Taint is kept by storage: a tainted row copied into a buffer taints the buffer and all its views.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SWEEP_AT: Final = 1024

_WHOLE: Final = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint16, torch.uint32, torch.uint64}
)
"""Dtypes that do not round, and that break the trace of what does."""


class _StorageSet:
    """A set of storages held weakly.

    A weak reference keeps the address of its storage from being used again (its bytes are freed
    all the same), so an entry can never speak for another storage at the same address.
    """

    def __init__(self) -> None:
        self._entries: dict[int, StorageWeakRef] = {}
        self._sweep_at = _SWEEP_AT

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, key: int) -> bool:
        return key in self._entries

    def add(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._entries:
            return
        if len(self._entries) >= self._sweep_at:
            self.sweep()
        self._entries[key] = StorageWeakRef(storage)

    def discard(self, key: int) -> None:
        self._entries.pop(key, None)

    def sweep(self) -> None:
        """Drop what no longer lives."""
        self._entries = {k: ref for k, ref in self._entries.items() if not ref.expired()}
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._entries))


class TaintRegistry:
    """What is known of the storages of this process."""

    def __init__(self) -> None:
        self._clean = _StorageSet()
        # One number by itself counts as a constant, unless the mode saw it computed.
        self._computed = _StorageSet()

    def __len__(self) -> int:
        return len(self._clean) + len(self._computed)

    def sweep(self) -> None:
        """Forget storages that no longer live (also done now and then by itself)."""
        self._clean.sweep()
        self._computed.sweep()

    def tainted(self, value: Tensor) -> bool:
        """Whether ``value`` depends on a parameter or a floating input."""
        if value.dtype in _WHOLE:
            return False
        storage = storage_of(value)
        if storage is None:
            return True
        key = storage._cdata
        if value.requires_grad:
            # A parameter made by a factory (zeros, ones); its storage is known from here on, also
            # through a detached alias.
            self._clean.discard(key)
            if value.dim() == 0:
                self._computed.add(key, storage)
            return True
        if self._clean.has(key):
            return False
        alone = value.dim() == 0 and storage.nbytes() == value.element_size()
        return not (alone and not self._computed.has(key))

    def mark_clean(self, value: Tensor) -> None:
        """``value`` is a fresh result that depends on no parameter and on no floating input."""
        storage = storage_of(value)
        if storage is not None and value.dtype not in _WHOLE:
            key = storage._cdata
            if not self._computed.has(key):
                self._clean.add(key, storage)

    def mark_tainted(self, value: Tensor) -> None:
        """``value`` was computed from, or written with, something tainted."""
        if value.dtype in _WHOLE:
            return
        storage = storage_of(value)
        if storage is None:
            return
        key = storage._cdata
        self._clean.discard(key)
        if value.dim() == 0:
            self._computed.add(key, storage)


def storage_of(value: Tensor) -> torch.UntypedStorage | None:
    """The storage of ``value``; None for tensors without one (sparse layouts, wrappers)."""
    try:
        return value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


REGISTRY: Final = TaintRegistry()
"""The process's own registry: what one run learns of a session fixture holds for the next run."""
