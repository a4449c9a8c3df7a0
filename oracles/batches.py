"""Sequences and nestings of requests on one device: every wave holds one element, and all run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from subjects.types import ForwardInput, ForwardOutput, MicroBatch, Nested


def answer(nested: Nested, forward: Callable[[ForwardInput], ForwardOutput]) -> Any:
    """Every request in ``nested`` answered; NamedTuples stay what they are.

    Raises:
        TypeError: anything but requests, lists, tuples and dicts.
    """
    match nested:
        case ForwardInput():
            return forward(nested)
        case dict():
            return {key: answer(value, forward) for key, value in nested.items()}
        case tuple() if hasattr(nested, "_fields"):
            return type(nested)(*(answer(value, forward) for value in nested))
        case list() | tuple():
            return type(nested)(answer(value, forward) for value in nested)
    raise TypeError(f"expected requests in lists, tuples and dicts, got {type(nested).__name__}")


def one_by_one(
    inputs: Sequence[Nested], forward: Callable[[ForwardInput], ForwardOutput]
) -> Iterator[MicroBatch]:
    """One element after another, each when it is asked for.

    Raises:
        TypeError: ``inputs`` is neither a list nor a tuple.
    """
    if not isinstance(inputs, list | tuple):
        raise TypeError(f"expected a list or tuple of inputs, got {type(inputs).__name__}")
    return (MicroBatch(index, answer(one, forward)) for index, one in enumerate(inputs))
