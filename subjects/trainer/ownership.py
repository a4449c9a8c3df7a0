"""Tensors of the caller's own that know whether they still belong to the trainer.

A head that belonged to a slot is worthless once the slot holds other weights: it would be trained
by nobody and nobody would notice. So each of its tensors refuses to be used from then on, whoever
holds a reference to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


@dataclass(eq=False)
class Owner:
    """What a tensor was registered as; ``gone`` says why it is no longer, once it is not."""

    what: str
    gone: str = ""

    def check(self) -> None:
        """Refuse the use of what no longer belongs to the trainer.

        Raises:
            RuntimeError: it was retired.
        """
        if self.gone:
            raise RuntimeError(
                f"{self.what} was used after {self.gone}: it is neither trained nor reduced any "
                "more. Register it anew, from a factory that makes a new one, and use what that "
                "returns"
            )

    def check_gradient(self, gradient: Tensor) -> None:
        """Refuse a gradient of what no longer belongs to the trainer; a hook of its parameters.

        Raises:
            RuntimeError: it was retired between forward and backward.
        """
        del gradient
        if self.gone:
            raise RuntimeError(
                f"{self.what} was given a gradient after {self.gone}: nobody would step it. "
                "Finish the backward of what used it before its slot is replaced, restored or "
                "removed; call zero_gradients() before going on"
            )


def check_fresh(values: Iterable[object]) -> None:
    """Refuse stale tensors among the arguments of an operation, lists and mappings included."""
    for value in values:
        if isinstance(value, CustomParameter | CustomBuffer):
            owner = owner_of(value)
            if owner is not None:
                owner.check()
        elif isinstance(value, list | tuple):
            check_fresh(value)
        elif isinstance(value, dict):
            check_fresh(value.values())


def owner_of(value: Tensor) -> Owner | None:
    """Whom a tensor belongs to; None for a plain one."""
    found = vars(value).get("_owner")
    return found if isinstance(found, Owner) else None


def _checked(
    cls: type,  # noqa: ARG001
    func: Callable[..., Any],
    types: Iterable[type],  # noqa: ARG001
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Refuse stale tensors, and run as on plain ones, whose results are plain."""
    named = kwargs or {}
    check_fresh((*args, *named.values()))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **named)


def _describe(value: Tensor) -> str:
    owner = owner_of(value)
    with torch._C.DisableTorchFunctionSubclass():
        text = str(Tensor.__repr__(value))  # type: ignore[no-untyped-call]
    return f"{text} (stale: {owner.gone})" if owner is not None and owner.gone else text


class CustomParameter(torch.nn.Parameter):
    """A parameter that raises on use once its owner is gone; else it behaves as a plain one.

    Results of operations are plain tensors. A deep copy and what comes out of a pickle are plain
    parameters, which belong to nobody.
    """

    __torch_function__: Any = classmethod(_checked)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A plain parameter with the same values."""
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickled as a plain parameter."""
        return torch.nn.Parameter(self.data, self.requires_grad).__reduce_ex__(proto)

    def __repr__(self) -> str:  # type: ignore[override]
        """Of a stale one too, so that it can be shown."""
        return f"Parameter containing:\n{_describe(self)}"


class CustomBuffer(Tensor):
    """A tensor that raises on use once its owner is gone; else it behaves as a plain one.

    Copies and pickles are plain tensors.
    """

    __torch_function__: Any = classmethod(_checked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor with the same values."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickled as a plain tensor."""
        return self.detach().__reduce_ex__(proto)

    def __repr__(self) -> str:  # type: ignore[override]
        """Of a stale one too, so that it can be shown."""
        return _describe(self)


def own(value: Tensor, owner: Owner) -> None:
    """Make ``value`` belong to ``owner``, in place: every reference to it knows from now on."""
    # The way in which torch turns an uninitialized parameter into one: identity stays.
    is_parameter = isinstance(value, torch.nn.Parameter)
    value.__class__ = CustomParameter if is_parameter else CustomBuffer
    value._owner = owner  # type: ignore[attr-defined]


class StaleGuard:
    """A forward pre-hook that refuses a module whose owner is gone; a copy guards nothing."""

    def __init__(self, owner: Owner | None) -> None:
        self.owner = owner

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        """Check before the module runs."""
        del module, args
        if self.owner is not None:
            self.owner.check()

    def __deepcopy__(self, memo: dict[int, Any]) -> StaleGuard:
        """A guard of nothing, since a copied module belongs to nobody."""
        return StaleGuard(None)

    def __reduce__(self) -> tuple[type[StaleGuard], tuple[None]]:
        """As for a copy."""
        return StaleGuard, (None,)


def guard(module: torch.nn.Module, owner: Owner) -> RemovableHandle:
    """Refuse ``module`` as a whole too: not every module uses a tensor of its own."""
    return module.register_forward_pre_hook(StaleGuard(owner))


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of every parameter, then buffer; shared ones under each name."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer
