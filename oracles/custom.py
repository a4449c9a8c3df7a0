"""A caller's own modules, parameters and buffers on one device: nothing but torch's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from subjects.protocol import OwnModule


class CustomParts:
    """What the caller registered, by slot (None: owned by none) and name."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._parts: dict[tuple[str | None, str], torch.nn.Module | Tensor] = {}

    def module(self, name: str, factory: Callable[[], OwnModule], slot: str | None) -> OwnModule:
        """The module, in the dtype of the run."""
        made = factory().to(device=self.device, dtype=self.dtype)
        self._parts[slot, name] = made
        return made

    def parameter(
        self, name: str, factory: Callable[[], Tensor], slot: str | None
    ) -> torch.nn.Parameter:
        """The tensor, as a parameter in the dtype of the run."""
        value = factory().detach().to(device=self.device, dtype=self.dtype, copy=True)
        made = torch.nn.Parameter(value)
        self._parts[slot, name] = made
        return made

    def buffer(self, name: str, factory: Callable[[], Tensor], slot: str | None) -> Tensor:
        """The tensor, in the dtype of the run if it is floating."""
        value = factory().detach()
        dtype = self.dtype if value.is_floating_point() else value.dtype
        made = value.to(device=self.device, dtype=dtype, copy=True)
        self._parts[slot, name] = made
        return made

    def drop(self, slot: str) -> None:
        """Forget what ``slot`` owns."""
        self._parts = {key: part for key, part in self._parts.items() if key[0] != slot}

    def check_free(self, name: str, slot: str | None, taken: Collection[str]) -> None:
        """Refuse a name that something else has.

        Raises:
            ValueError: the name is taken.
        """
        if (slot, name) in self._parts or (slot is None and name in taken):
            raise ValueError(f"{name!r}: the name is taken; give each its own")

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter by the name of its gradient; a shared one by its first name."""
        for (slot, name), part in self._parts.items():
            full = name if slot is None else f"{slot}/{name}"
            if isinstance(part, torch.nn.Module):
                for inner, parameter in part.named_parameters():
                    yield f"{full}.{inner}", parameter
            elif isinstance(part, torch.nn.Parameter):
                yield full, part
