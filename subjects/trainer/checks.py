"""Options of the public interface, refused by name before anything is made from them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

from subjects.token_ids import shown

LARGEST = 2**63 - 1
"""What ranks can tell one another, and tensors can be indexed by."""


def count(name: str, value: object, expected: str, *, least: int) -> None:
    """Refuse what is no integer from ``least`` up; ``expected`` says what it counts.

    Raises:
        TypeError: no integer; True and False are none.
        ValueError: an integer out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} is {shown(value)}; expected {expected}, an integer from {least} up"
        )
    if not least <= value <= LARGEST:
        raise ValueError(
            f"{name} is {shown(value)}; expected {expected}, an integer from {least} to 2^63 - 1"
        )


def one_of(name: str, value: object, known: Collection[str]) -> None:
    """Refuse a word that is none of those ``known``.

    Raises:
        ValueError: with all of them.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {shown(value)}; expected one of {', '.join(known)}")


def truth(name: str, value: object) -> None:
    """Refuse what is neither True nor False: any other text would count as True.

    Raises:
        TypeError: with what came.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}; expected True or False")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
