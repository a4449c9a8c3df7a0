"""What a rank really imported of the subject."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from shardproof.against.subject import Subject, inside, real


@dataclass(frozen=True)
class Loaded:
    """Modules of the subject in this process.

    ``right`` is how many come from where they should; ``wrong`` names the others, each with the
    file or folder that it came from.
    """

    right: int
    wrong: tuple[tuple[str, str], ...]

    def data(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


def loaded(subject: Subject) -> Loaded:
    """Look at every module of this process.

    Wrong is a module whose name belongs to the subject and whose file does not come from its
    place, and one of any name that comes from a declared path which something else stands for.
    A folder without ``__init__.py`` may be a namespace with parts elsewhere, so its name alone
    condemns no module; nor does one that the subject gives to a module of another package.
    """
    right = 0
    wrong: list[tuple[str, str]] = []
    for name, module in list(sys.modules.items()):
        places = _places(module)
        if not places:
            continue
        belongs = subject.belongs(name)
        strict = belongs is not None and not _namespace(belongs) and _own_name(module) == name
        for place in places:
            if subject.stays(place):
                continue
            if subject.supplied(place):
                right += 1
            elif strict or any(inside(place, folder) for folder in subject.forbidden):
                wrong.append((name, place))
    return Loaded(right, tuple(wrong))


def _places(module: object) -> list[str]:
    """The file of a module, or the folders of a namespace. Looks at nothing that may be lazy."""
    values = getattr(module, "__dict__", {})
    file = values.get("__file__")
    if isinstance(file, str):
        return [real(file)]
    try:
        return [real(where) for where in values.get("__path__") or () if isinstance(where, str)]
    except TypeError:
        return []


def _own_name(module: object) -> object:
    return getattr(module, "__dict__", {}).get("__name__")


def _namespace(name: str) -> bool:
    values = getattr(sys.modules.get(name), "__dict__", {})
    return values.get("__file__") is None and values.get("__path__") is not None
