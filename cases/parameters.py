"""Parameters of a case for those who call it themselves: one set of values of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import pytest


def marks_of(body: Callable[..., None], source: ModuleType) -> list[pytest.Mark]:
    """The marks of a case and, behind them, those of its module."""
    module: Any = getattr(source, "pytestmark", [])
    listed: Iterable[Any] = module if isinstance(module, list | tuple) else [module]
    own: list[pytest.Mark] = getattr(body, "pytestmark", [])
    return own + [getattr(mark, "mark", mark) for mark in listed]


def names_of(mark: pytest.Mark) -> list[str]:
    """Names of the arguments that a ``parametrize`` mark gives."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def values_of(mark: pytest.Mark, params: Mapping[str, object]) -> tuple[Any, ...]:
    """The first set of values of a ``parametrize`` mark with ``params``, given by value or id.

    Raises:
        LookupError: no set has them.
    """
    names = names_of(mark)
    given = [(names.index(name), wanted) for name, wanted in params.items() if name in names]
    for values in mark.args[1]:
        marked = hasattr(values, "marks")
        row = tuple(values.values) if marked else tuple(values) if len(names) > 1 else (values,)
        name = values.id if marked else None
        if all(_is(row[at], wanted, name) for at, wanted in given):
            return row
    raise LookupError(f"no parameter set of its case has {dict(params)}")


def _is(value: object, wanted: object, name: object) -> bool:
    return value is wanted or value == wanted or (name is not None and name == wanted)
