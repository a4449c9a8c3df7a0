"""What may be observed, and how a value is taken apart into tensors.

A value is a tensor, a numpy array or number, a Python number, ``None``, or a mapping, sequence or
dataclass of these. Containers become one leaf for each item, named ``name.key``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Kind = Literal["tensor", "scalar", "none", "empty"]

MOST_LEVELS = 16
"""Containers inside containers: more than this is taken for a cycle."""

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


class BadValueError(TypeError):
    """A value that cannot be observed; the text says what can."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One value, as found: ``tensor`` may live on any device and is not copied.

    ``tensor`` is real (complex numbers are pairs along a last dimension), strided and detached;
    ``dtype`` and ``shape`` say what the caller passed. A Python number is a 0-dimensional
    ``scalar`` whose dtype (float64, int64, bool, complex128) is a form, not a promise.
    """

    kind: Kind
    tensor: torch.Tensor | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    floating: bool = False


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float64`` -> ``float64``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that ``dtype_name`` named.

    Raises:
        BadValueError: torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BadValueError(f"expected the name of a torch dtype, got {name!r}")
    return found


def real_dtype(name: str) -> torch.dtype:
    """The dtype of the stored numbers: that of each part for complex values."""
    return dtype_of(name).to_real()


def flatten(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The leaves of ``value`` with their names, in the order of the container.

    Raises:
        BadValueError: a key is neither text nor an integer, or containers nest too deeply.
    """
    yield from _flatten(name, value, 0)


def _flatten(name: str, value: object, level: int) -> Iterator[tuple[str, object]]:
    items = _items(value)
    if items is None:
        yield name, value
        return
    if level == MOST_LEVELS:
        raise BadValueError(
            f"{name} nests more than {MOST_LEVELS} containers: a container that holds itself "
            "cannot be observed"
        )
    if not items:
        yield name, ()
    for key, item in items:
        if not isinstance(key, str | int):
            raise BadValueError(
                f"{name} is a mapping with the key {key!r} of type {type(key).__name__}: expected "
                "keys that are text or integers, since they become part of the name"
            )
        yield from _flatten(f"{name}.{key}", item, level + 1)


def _items(value: object) -> list[tuple[object, object]] | None:
    """Keys and items of a container, None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, str | bytes | bytearray | memoryview | torch.Tensor):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, Sequence):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def capture(value: object) -> Leaf:
    """Describe one leaf; a tensor is not copied.

    Raises:
        BadValueError: the value is of a type that cannot be compared.
    """
    if value is None:
        return Leaf("none")
    if isinstance(value, tuple) and not value:
        return Leaf("empty")
    if isinstance(value, bool | int | float | complex):
        return _number(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _of_numpy(value, numpy)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    raise BadValueError(
        f"expected a tensor, a numpy array, a number, None, or a mapping or sequence of these, got "
        f"{type(value).__name__}: {_short(value)}. Observe the numbers that it holds"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(value: complex) -> Leaf:
    if isinstance(value, bool):
        tensor = torch.tensor(value)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise BadValueError(f"expected an integer of at most 64 bits, got {value}")
        tensor = torch.tensor(value, dtype=torch.int64)
    elif isinstance(value, float):
        tensor = torch.tensor(value, dtype=torch.float64)
    else:
        tensor = torch.tensor(value, dtype=torch.complex128)
    leaf = _of_tensor(tensor)
    return dataclasses.replace(leaf, kind="scalar")


def _of_numpy(value: object, numpy: object) -> Leaf:
    if isinstance(value, numpy.ma.MaskedArray):  # type: ignore[attr-defined]
        raise BadValueError(
            "expected a plain array, got a masked one: observe its filled() data and its mask"
        )
    array = numpy.array(value)  # type: ignore[attr-defined]  # a module that is optional here
    try:
        return _of_tensor(torch.from_numpy(array))
    except TypeError:
        raise BadValueError(
            f"expected a numpy array of numbers, got one of dtype {array.dtype}"
        ) from None


def _of_tensor(value: torch.Tensor) -> Leaf:
    value = value.detach()
    if hasattr(value, "trigger_wait"):  # a functional collective that may still be under way
        value = value.trigger_wait()
    if value.device.type == "meta":
        raise BadValueError("expected a tensor with data, got one on the meta device")
    if value.is_quantized:
        value = value.dequantize()
    if value.layout == torch._mkldnn:  # type: ignore[attr-defined]  # torch exports no public name
        value = value.to_dense()
    if value.is_nested or value.layout != torch.strided:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise BadValueError(
            f"expected a dense tensor, got one of layout {layout}: observe value.to_dense(), or "
            "its indices and values"
        )
    if is_traceable_wrapper_subclass(value):
        raise BadValueError(
            f"expected a plain tensor or a DTensor, got {type(value).__name__}: observe the "
            "tensors that it wraps"
        )
    if type(value) is not torch.Tensor:
        value = value.as_subclass(torch.Tensor)
    value = value.resolve_neg()
    dtype, shape = value.dtype, tuple(value.shape)
    if dtype.is_complex:
        value = torch.view_as_real(value.resolve_conj())
    else:
        value = value.view(_SIGNED.get(dtype, dtype))
    floating = dtype.is_floating_point or dtype.is_complex
    return Leaf("tensor", value, dtype_name(dtype), shape, floating)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the unit of rounding of a floating dtype."""
    return torch.finfo(dtype.to_real()).eps / 2
