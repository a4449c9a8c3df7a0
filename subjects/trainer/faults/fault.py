"""What a fault is, and how it is put in and taken out again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Literal, get_args

Axis = Literal["cp", "tp", "dp", "any"]
_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``function`` stands in for ``module.name``; ``case`` is about it and must fail.

    ``module`` is a module or, for a method, a class; a static or class method stays one. ``axis``
    is the axis that must have several ranks for the fault to show, "any" where one rank suffices.

    ``case`` is ``test_module.test_function`` of ``cases/``. ``shows`` is an fnmatch pattern over
    the names of its observations, at least one of which must diverge; ``"raised: words"`` says
    that the case itself must fail, with these words in its message. ``params`` fixes parameters of
    the case, by value or id; the others have their first value. ``topology`` names where it is
    shown, by default the smallest topology of the axis.

    ``catalogue`` are the rows of ``docs/catalogue.md`` whose mechanism it re-creates.

    Raises:
        ValueError: nothing of this name can be replaced, an unknown axis, or a case that is not
            ``test_module.test_function``.
    """

    module: ModuleType | type
    name: str
    function: Callable[..., object]
    axis: Axis
    case: str
    shows: str
    catalogue: tuple[int, ...] = ()
    topology: str | Sequence[str] | None = None
    params: Mapping[str, object] = field(default_factory=lambda: _NOTHING)

    def __post_init__(self) -> None:
        where = self.module.__name__
        if not hasattr(self.module, self.name):
            raise ValueError(
                f"a fault replaces {where}.{self.name}, which does not exist; name a function "
                "that its caller looks up when it is called"
            )
        if self.axis not in get_args(Axis):
            raise ValueError(
                f"fault of {where}.{self.name}: axis is {self.axis!r}; expected one of "
                f"{', '.join(get_args(Axis))}"
            )
        parts = self.case.split(".")
        if len(parts) != 2 or not all(part.startswith("test_") for part in parts):
            raise ValueError(
                f"fault of {where}.{self.name}: case is {self.case!r}; expected "
                "'test_module.test_function', of cases/"
            )
        if not self.shows:
            raise ValueError(
                f"fault of {where}.{self.name}: shows is empty; name the observations that must "
                "diverge, as a pattern, or 'raised: words'"
            )

    @property
    def topologies(self) -> tuple[str, ...]:
        """Where it is shown."""
        if self.topology is None:
            return ("cp2" if self.axis == "any" else f"{self.axis}2",)
        return (self.topology,) if isinstance(self.topology, str) else tuple(self.topology)


@contextmanager
def replaced(fault: Fault) -> Iterator[None]:
    """Put ``fault`` in for the duration of the block, backward passes included."""
    own = vars(fault.module)
    had, original = fault.name in own, own.get(fault.name)
    kind = type(inspect.getattr_static(fault.module, fault.name))
    wrap = kind if kind in (staticmethod, classmethod) else None
    setattr(fault.module, fault.name, wrap(fault.function) if wrap else fault.function)
    try:
        yield
    finally:
        if had:
            setattr(fault.module, fault.name, original)
        else:  # a method that the class inherits
            delattr(fault.module, fault.name)


def merged(families: Mapping[str, Mapping[str, Fault]]) -> dict[str, Fault]:
    """The faults of all ``families``, by what is wrong.

    Raises:
        ValueError: two families have a fault of one name.
    """
    found: dict[str, Fault] = {}
    owner: dict[str, str] = {}
    for family, faults in families.items():
        for name, fault in faults.items():
            if name in found:
                raise ValueError(
                    f"fault {name!r} is in {owner[name]} and in {family}; give each its own name"
                )
            found[name], owner[name] = fault, family
    return found
