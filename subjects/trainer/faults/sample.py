"""Which faults a run puts in: all of them, or some of every family."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import TypeVar

from subjects.trainer.faults.fault import Fault

Name = TypeVar("Name", str, tuple[str, tuple[str, ...]])
SHARE = 1 / 8
"""The part of each family that a sample takes, at least."""


def chosen(
    families: Mapping[str, Mapping[str, Fault]], words: str, *, share: float = SHARE
) -> dict[str, Fault]:
    """The faults that ``words`` ask for: ``all``, or ``sample:SEED`` for some of each family.

    A sample takes whole cases, since the faults of a case share its reference, one after the other
    until it has ``share`` of the family's faults. Each seed takes others, and the same ones always.

    Raises:
        ValueError: other words.
    """
    seed = seed_of(words, "CONTROLS")
    if seed is None:
        return {name: fault for faults in families.values() for name, fault in faults.items()}
    found: dict[str, Fault] = {}
    for family, faults in families.items():
        groups = by_case(faults)
        order = shuffled(groups, f"{seed}/{family}")
        taken: list[str] = []
        for group in order:
            if len(taken) >= math.ceil(share * len(faults)):
                break
            taken += groups[group]
        found |= {name: fault for name, fault in faults.items() if name in taken}
    return found


def by_case(faults: Mapping[str, Fault]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Names of faults by case and choice of its parameters."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, fault in faults.items():
        params = tuple(f"{key}={value}" for key, value in sorted(fault.params.items()))
        groups.setdefault((fault.case, params), []).append(name)
    return groups


def seed_of(words: str, variable: str) -> str | None:
    """The seed of ``sample:SEED``, None for ``all``.

    Raises:
        ValueError: other words; the text names the variable that they come from.
    """
    kind, _, seed = words.partition(":")
    if words == "all":
        return None
    if kind != "sample" or not seed:
        raise ValueError(
            f"expected {variable}=all or {variable}=sample:SEED (any word, such as a commit), "
            f"got {words!r}"
        )
    return seed


def shuffled(names: Iterable[Name], seed: str) -> list[Name]:
    """The names in an order that the seed alone decides."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    return order
