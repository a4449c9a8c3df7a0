"""Where an operation was called: the first frame outside torch, this plugin and other libraries."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

_TORCH: Final = ("torch", "typing_extensions")
_LIBRARIES: Final = ("megatron",)
_REMEMBERED: Final = 20_000
_RUNNERS: Final = ("_pytest", "pluggy")
CALLERS: Final = 4
"""Frames of user code by which a call site is told apart where its callers count."""

SHOWN: Final = 3
"""Frames of user code that messages show: a helper that calls for many says little by itself."""

JOINED: Final = " < "
"""Between a call site and its caller."""

_USER, _INNER, _OUTER = 0, 1, 2


class Sites:
    """Finds call sites; what a code object is and what a line is called is looked up once.

    Those of user code, or with ``libraries`` those of the library that user code calls: where it
    calls an operation in backward, user code says no more than where backward began.
    """

    def __init__(self, *, libraries: bool = False) -> None:
        self._inner = _inner_folders(_TORCH if libraries else (*_TORCH, *_LIBRARIES))
        self._outer = _places_of(_RUNNERS)
        # By identity: the hash of a code object is made of all its instructions, each time. What
        # is remembered keeps its code, so that no other takes its place.
        self._kinds: dict[int, tuple[int, CodeType]] = {}
        self._texts: dict[tuple[CodeType, int], str] = {}
        self._here = ""
        self.begin()

    def begin(self, root: Path | None = None) -> None:
        """Paths below ``root`` are relative to it.

        By default it is the present working directory, wherever a case goes.
        """
        here = f"{root or os.getcwd()}{os.sep}"  # noqa: PTH109 - a prefix of strings is wanted
        if here != self._here:
            self._here = here
            self._texts.clear()

    def path(
        self, frame: FrameType | None, most: int, *, one_folder: bool = False
    ) -> tuple[tuple[CodeType, int], ...]:
        """Code and line of the first frame to be named from ``frame`` outwards, then its callers.

        ``most`` in all, up to pytest, which called the case; with ``one_folder`` as long as they
        are of one folder. Empty where there is none, as on a thread of the autograd engine.
        """
        kinds = self._kinds
        found: list[tuple[CodeType, int]] = []
        while frame is not None:
            code = frame.f_code
            kind = (kinds.get(id(code)) or self._learn(code))[0]
            if kind == _OUTER and found:
                break
            if kind != _INNER:
                if one_folder and found and _folder(code) != _folder(found[0][0]):
                    break
                found.append((code, frame.f_lineno))
                if len(found) == most or kind == _OUTER:
                    break
            frame = frame.f_back
        return tuple(found)

    def path_text(self, path: tuple[tuple[CodeType, int], ...], *, most: int | None = None) -> str:
        """The texts of a call site and its callers, innermost first; callers up to ``most``."""
        texts = list(map(self._text, path))
        while most is not None and len(texts) > 1 and len(JOINED.join(texts)) > most:
            texts.pop()
        return JOINED.join(texts) or "a thread without user code"

    def _text(self, site: tuple[CodeType, int]) -> str:
        """``file:line in function``, the file relative to what :meth:`begin` was told if below."""
        found = self._texts.get(site)
        if found is None:
            code, line = site
            path = code.co_filename
            found = f"{path.removeprefix(self._here)}:{line} in {code.co_qualname}"
            if len(self._texts) >= _REMEMBERED:
                self._texts.clear()
            self._texts[site] = found
        return found

    def _learn(self, code: CodeType) -> tuple[int, CodeType]:
        if len(self._kinds) >= _REMEMBERED:
            self._kinds.clear()
        path, kind = code.co_filename, _USER
        # <frozen importlib>, <string>, <eval_with_key>: code that somebody generated.
        if path.startswith(("<", *self._inner)) or "torchinductor_" in path:
            kind = _INNER
        elif path.startswith(self._outer):
            kind = _OUTER
        known = self._kinds[id(code)] = (kind, code)
        return known


def _folder(code: CodeType) -> str:
    return os.path.dirname(code.co_filename)  # noqa: PTH120 - called for each operation


def _inner_folders(packages: Sequence[str]) -> tuple[str, ...]:
    """Folders of code that calls operations for others; the standard library passes calls on."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    library = sysconfig.get_path("stdlib")
    # site-packages lies below the standard library, and is user code.
    passing = (os.path.join(library, part) for part in _LIBRARY)  # noqa: PTH118
    return (here + os.sep, *_places_of(packages), *passing)


def _places_of(packages: Sequence[str]) -> tuple[str, ...]:
    """Where the code of packages and modules lies, of those that are installed."""
    folders: list[str] = []
    files = []
    for package in packages:
        try:
            spec = importlib.util.find_spec(package) if package not in sys.modules else None
            module = sys.modules.get(package)
            places = list(getattr(module, "__path__", ())) if module is not None else []
            if module is not None and not places and module.__file__ is not None:
                files.append(module.__file__)
            if spec is not None:
                places = list(spec.submodule_search_locations or ())
        except (ImportError, ValueError):
            places = []
        folders += places
    return (*files, *(folder + os.sep for folder in folders))


_LIBRARY: Final = ("contextlib.py", "functools.py", "concurrent" + os.sep, "threading.py")
