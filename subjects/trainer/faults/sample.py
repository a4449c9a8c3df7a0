"""Which faults a run puts in: all of them, or some of every family."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from subjects.trainer.faults.fault import Fault

SHARE = 1 / 4
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
    kind, colon, seed = words.partition(":")
    if words == "all":
        return {name: fault for faults in families.values() for name, fault in faults.items()}
    if kind != "sample" or not colon or not seed:
        raise ValueError(
            "expected CONTROLS=all or CONTROLS=sample:SEED (any word, such as a commit), "
            f"got {words!r}"
        )
    found: dict[str, Fault] = {}
    for family, faults in families.items():
        groups: dict[str, list[str]] = {}
        for name, fault in faults.items():
            groups.setdefault(f"{fault.case} {sorted(fault.params.items())}", []).append(name)
        order = sorted(groups)
        random.Random(f"{seed}/{family}").shuffle(order)
        taken: list[str] = []
        for group in order:
            if len(taken) >= math.ceil(share * len(faults)):
                break
            taken += groups[group]
        found |= {name: fault for name, fault in faults.items() if name in taken}
    return found
