"""Imports of the subject's modules are answered from where REV's files are.

The finder stands before all others. By name: a module that belongs to the subject is looked for at
its own place and nowhere else. By place: what any other finder (the import path, an editable
install, a namespace package) would load from a declared path of the checkout is looked for at the
path that stands for it. So neither the order of ``sys.path`` nor the kind of install matters.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Final

from shardproof.against.subject import Subject, from_data, real

VARIABLE: Final = "SHARDPROOF_SUBJECT"
"""Environment of a fork server: the subject that its ranks import, as JSON."""


class Redirect:
    """The finder, a member of ``sys.meta_path``."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Where the module comes from, or None where the checkout's own is right.

        Raises:
            ModuleNotFoundError: the subject has no such module there.
        """
        kept = self._kept(fullname, path)
        if kept is not None:
            return kept
        place = self.subject.target(fullname)
        if place is not None:
            return self._at(fullname, [place], self._others(fullname, path, target))
        found = self._others(fullname, path, target)
        if found is None:
            return None
        places = [self.subject.there(real(where)) for where in locations(found)]
        if not any(places):
            return None
        return self._at(fullname, [place for place in places if place], found)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """A release's own metadata, before that of what is installed."""
        asked = DistributionFinder.Context() if context is None else context
        if "path" in vars(asked):  # somebody looks into one folder alone
            return ()
        return PathFinder.find_distributions(
            DistributionFinder.Context(name=asked.name, path=list(self.subject.distributions))
        )

    def _kept(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Today's cases and conftest files inside a package of the subject."""
        tail = fullname.rpartition(".")[2]
        for entry in path or ():
            here = self.subject.here(real(entry))
            if here is not None and self.subject.stays(f"{here}/{tail}"):
                return self._others(fullname, [here], None)  # pytest's own, for its assertions
        return None

    def _at(self, fullname: str, places: list[str], found: ModuleSpec | None) -> ModuleSpec:
        spec = PathFinder.find_spec(fullname, [str(Path(place).parent) for place in places])
        if spec is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r} in {self.subject.label}: {places[0]} is not there",
                name=fullname,
            )
        if spec.loader is None or spec.origin is None:
            # A namespace: its other parts stay. A plain list, since the import system's own would
            # be looked for on sys.path again whenever that changes.
            others = locations(found) if found is not None and found.origin is None else []
            rest = [where for where in others if self.subject.there(real(where)) is None]
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = list(dict.fromkeys([*places, *rest]))
        return spec

    def _others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if isinstance(finder, Redirect) or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                return spec
        return None


def locations(spec: ModuleSpec | None) -> list[str]:
    """The folders of a package, or the file of a module."""
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [spec.origin] if spec.has_location and spec.origin else []


def install() -> None:
    """Redirect imports of this process as its environment says; for a fork server, at its start."""
    text = os.environ.get(VARIABLE)
    if text:
        importlib.invalidate_caches()
        sys.meta_path.insert(0, Redirect(from_data(json.loads(text))))


def keep_first() -> None:
    """Put the finder before those that were installed since, pytest's own among them."""
    first = [finder for finder in sys.meta_path if isinstance(finder, Redirect)]
    if first:
        rest = [finder for finder in sys.meta_path if not isinstance(finder, Redirect)]
        sys.meta_path[:] = [*first, *rest]
