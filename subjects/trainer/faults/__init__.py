"""Faults to put into the trainer on purpose, so that a check can show that it would notice.

Each replaces one function that its caller looks up at call time. What they break is what public
bugs broke; the case that a fault names must fail while it is in. A family is a module with
``FAULTS: dict[str, Fault]``, by what is wrong.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager

from subjects.trainer.faults.fault import Fault, merged, replaced
from subjects.trainer.faults.sample import chosen

FAMILIES = (
    "attention",
    "outputs",
    "gradients",
    "heads",
    "weights",
    "rows",
    "slots",
    "kept_slots",
    "reductions",
    "custom",
    "optimizer",
    "batches",
    "contract",
    "losses",
)
"""Modules of this package; a new one is a line here."""

OF_FAMILY: dict[str, dict[str, Fault]] = {
    family: importlib.import_module(f"{__name__}.{family}").FAULTS for family in FAMILIES
}
FAULTS: dict[str, Fault] = merged(OF_FAMILY)
"""By what is wrong."""


def inject(name: str) -> AbstractContextManager[None]:
    """Put a fault in for the duration of a ``with`` block, backward passes included.

    Raises:
        KeyError: no fault of this name.
    """
    if name not in FAULTS:
        raise KeyError(f"no fault {name!r}; there are {', '.join(FAULTS)}")
    return replaced(FAULTS[name])


__all__ = ["FAMILIES", "FAULTS", "OF_FAMILY", "Fault", "chosen", "inject", "replaced"]
