"""Token ids as callers give them, made int64 tensors; what is wrong is told by its path."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor


class Array(Protocol):
    """An array of numpy, or what can become one."""

    def __array__(self) -> Any:
        """The array."""


DEEPEST = 20
"""Lists within lists of ids: more than any batch has, and far below where Python gives up."""


def integers(value: object, path: str, depth: int = 0) -> Tensor:
    """``value`` as int64 on the CPU, its shape from how it is nested; ``path`` is its name.

    Tensors and numpy arrays of integers, single ids, and lists and tuples of all these.

    Raises:
        TypeError: something else, with its path.
        ValueError: items of different shapes, or an id of more than 64 bits.
    """
    if isinstance(value, Tensor):
        return _of_tensor(value, path)
    if is_list(value):
        if depth == DEEPEST:
            raise TypeError(
                f"{path[:80]}... is nested more than {DEEPEST} deep; expected token ids"
            )
        return _of_list(value, path, depth)
    if hasattr(value, "__array__"):
        return _of_array(value.__array__(), path)
    number = whole_number(value)
    if number is None:
        raise TypeError(
            f"{path} is {shown(value)}; expected integer token ids, as a tensor, an array, a list "
            f"or a tuple{_remedy(value, path)}"
        )
    return _int64([number], path)[0]


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether ``value`` is a list, a tuple or the like, whose items are ids or hold some."""
    text = isinstance(value, str | bytes | bytearray | memoryview)
    return isinstance(value, Sequence) and not text


def holds_parts(value: object) -> bool:
    """Whether ``value`` is nested: its items hold ids, and are none."""
    if is_list(value):
        return len(value) > 0 and (is_list(value[0]) or _dimensions(value[0]) > 0)
    return _dimensions(value) > 1


def whole_number(value: object) -> int | None:
    """``value`` where it is one integer, also numpy's or a tensor without dimensions."""
    if type(value) is int:
        return value
    # True is an index to Python, and a tensor of one element to torch.
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if truth or _dimensions(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def shown(value: object) -> str:
    """What a message says of ``value``: the same on every rank, and short."""
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"an integer of {value.bit_length()} bits"
    # Of others the words could hold an address, or be pages long.
    few = type(value) in (list, tuple) and len(value) <= 4  # type: ignore[arg-type]
    if _is_plain(value) or (few and all(map(_is_plain, value))):  # type: ignore[call-overload]
        return repr(value)
    return f"of type {type(value).__name__}"


_BITS = 128


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= 40
    if isinstance(value, int):
        return value.bit_length() <= _BITS
    return value is None or isinstance(value, float)


def _of_tensor(value: Tensor, path: str) -> Tensor:
    other = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    # An empty one is floating unless it was told otherwise: its length is what is wrong.
    if other and value.numel():
        raise TypeError(f"{path} has dtype {value.dtype}; expected integer token ids")
    if value.layout != torch.strided:
        raise TypeError(f"{path} has layout {value.layout}; expected a dense tensor of token ids")
    if value.is_meta:
        raise TypeError(f"{path} lies on meta, without values; expected token ids")
    return value.detach().to(device="cpu", dtype=torch.int64)


def _of_array(value: Any, path: str) -> Tensor:
    if value.dtype.kind not in "iu" and value.size:
        raise TypeError(f"{path} is an array of dtype {value.dtype}; expected integer token ids")
    return torch.from_numpy(value.astype("int64"))


def _of_list(value: Sequence[object], path: str, depth: int) -> Tensor:
    numbers = [whole_number(one) for one in value]
    found = [number for number in numbers if number is not None]
    if len(found) == len(numbers):
        return _int64(found, path)
    parts = [integers(one, f"{path}[{at}]", depth + 1) for at, one in enumerate(value)]
    for at, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise ValueError(
                f"{path}[0] is {_form(parts[0])}, {path}[{at}] is {_form(part)}; expected items "
                "of one shape: ids alone, or sequences of one length"
            )
    return torch.stack(parts)


def _form(part: Tensor) -> str:
    return f"of shape {list(part.shape)}" if part.dim() else "a single id"


def _dimensions(value: object) -> int:
    found = getattr(value, "ndim", 0)
    return found if isinstance(found, int) else 0


def _int64(numbers: list[int], path: str) -> Tensor:
    for at in (numbers.index(edge(numbers)) for edge in (min, max) if numbers):
        if not -(2**63) <= numbers[at] < 2**63:
            raise ValueError(
                f"{path} has {numbers[at]} at {at}; expected integer token ids, none of which "
                "needs more than 64 bits"
            )
    return torch.tensor(numbers, dtype=torch.int64)


def _remedy(value: object, path: str) -> str:
    if value is None and path.startswith("target_tokens"):
        return " (-100 leaves a position out)"
    if isinstance(value, str | bytes):
        return " (run the tokenizer first)"
    if hasattr(value, "__iter__"):
        return " (make a list of it, so that the ids have a length and an order)"
    return ""
