"""The subject: the files under test, the modules that they are, and where they must come from."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_SOURCE_SUFFIX = ".py"


@dataclass(frozen=True)
class Subject:
    """What is under test on one side of a control. Paths are absolute and real (no links).

    Attributes:
        label: the revision or release in words, for messages.
        moved: pairs of a declared path in the checkout and the path that stands for it. On the
            side of the checkout the two are the same.
        names: dotted names of modules that belong to the subject, with the folder or file that
            each must come from; their submodules belong to it too.
        kept: folders of today's cases inside declared paths: they stay the checkout's, as every
            ``conftest.py`` does.
        distributions: folders whose installed distributions are known before all others.
    """

    label: str
    moved: tuple[tuple[str, str], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    kept: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    _target_of: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._target_of.update(self.names)

    @property
    def targets(self) -> tuple[str, ...]:
        """Where the subject's files may come from."""
        places = (*(there for _, there in self.moved), *(there for _, there in self.names))
        return tuple(dict.fromkeys(places))

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Where its files must not come from."""
        return tuple(here for here, there in self.moved if here != there)

    def belongs(self, module: str) -> str | None:
        """The name of the subject that ``module`` is, or is a submodule of."""
        name = module
        while name:
            if name in self._target_of:
                return name
            name = name.rpartition(".")[0]
        return None

    def target(self, name: str) -> str | None:
        """Where the module of exactly this name must come from."""
        return self._target_of.get(name)

    def supplied(self, path: str) -> bool:
        """Whether ``path`` lies where the subject's files come from."""
        return any(inside(path, target) for target in self.targets)

    def stays(self, path: str) -> bool:
        """Whether ``path`` is one of today's cases or a conftest file, whatever lies around it."""
        conftest = path.endswith(("/conftest", "/conftest.py"))
        return conftest or any(inside(path, folder) for folder in self.kept)

    def there(self, path: str) -> str | None:
        """What stands for a path of the checkout; None where the checkout's own is right."""
        if self.stays(path):
            return None
        for here, there in self.moved:
            if here != there and inside(path, here):
                return there + path[len(here) :]
        return None

    def here(self, path: str) -> str | None:
        """The path of the checkout that ``path`` stands for."""
        for here, there in self.moved:
            if here != there and inside(path, there):
                return here + path[len(there) :]
        return None


def to_data(subject: Subject) -> dict[str, Any]:
    """A subject as JSON-able data."""
    data = asdict(subject)
    del data["_target_of"]
    return data


def from_data(data: Mapping[str, Any]) -> Subject:
    """The subject in data that went through JSON."""
    return Subject(
        label=data["label"],
        moved=tuple((here, there) for here, there in data["moved"]),
        names=tuple((name, there) for name, there in data["names"]),
        kept=tuple(data["kept"]),
        distributions=tuple(data["distributions"]),
    )


def inside(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies in it, by their text."""
    return path == folder or path.startswith(folder + os.sep)


@cache
def real(path: str) -> str:
    """``path`` without links, for comparisons. Libraries are left as they are: there are many."""
    return path if is_library(path) else os.path.realpath(path)


@cache
def _libraries() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))


def is_library(path: str) -> bool:
    """Whether a file is installed: the standard library's, or a package's."""
    installed = "/site-packages/" in path or "/dist-packages/" in path
    return installed or any(inside(path, folder) for folder in _libraries())


def module_names(
    declared: Path, there: Path, import_path: Sequence[str] | None = None
) -> list[tuple[str, str]]:
    """The names under which a declared path can be imported, with what stands for each.

    A name follows from every folder of the import path (``sys.path`` by default) above the
    declared path, ``src/trainer`` with ``src`` on it being ``trainer``; the modules in a folder of
    the import path at or below the declared path belong to it too. Where neither is so, the name is
    taken from the packages around it (folders with ``__init__.py``): an editable install may map
    that name by a finder of its own.
    """
    found: dict[str, str] = {}
    entries = sys.path if import_path is None else import_path
    roots = [Path(real(str(Path(entry).absolute()))) for entry in dict.fromkeys(entries)]
    for root in roots:
        if declared != root and declared.is_relative_to(root):
            if name := _dotted(declared.relative_to(root)):
                found[name] = str(there)
        elif root.is_relative_to(declared):
            mirrored = there / root.relative_to(declared)
            for name in _top_level((root, mirrored)):
                found[name] = str(_existing(mirrored, name))
    base = declared.parent
    while (base / "__init__.py").exists():
        base = base.parent
    if (not found or base in roots) and (name := _dotted(declared.relative_to(base))):
        found.setdefault(name, str(there))
    return list(found.items())


def _dotted(relative: Path) -> str:
    """The module that a path below a folder of the import path is, or nothing."""
    parts = [*relative.parts[:-1], relative.name.removesuffix(_SOURCE_SUFFIX)]
    return ".".join(parts) if all(part.isidentifier() for part in parts) else ""


def _top_level(folders: Iterable[Path]) -> Iterator[str]:
    """Modules and packages in folders. Folders without any Python file are none."""
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = path.name.removesuffix(_SOURCE_SUFFIX)
            source = path.suffix == _SOURCE_SUFFIX
            if name.isidentifier() and (source or (path.is_dir() and any(path.rglob("*.py")))):
                yield name


def _existing(folder: Path, name: str) -> Path:
    file = folder / (name + _SOURCE_SUFFIX)
    return file if file.is_file() else folder / name
