"""What ``--against`` asks for: checked before any rank starts, made ready, and cleaned up."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardproof.against.git import AgainstError, Revision, Worktree, find_revision
from shardproof.against.release import Release, parse_release
from shardproof.against.sides import Side
from shardproof.against.subject import Subject, is_library, module_names, real
from shardproof.fleet.cleanup import make_scratch, remove_scratch
from shardproof.options import SETTINGS

CONTROL = pytest.StashKey["Control"]()
_SHOWN_FILES = 5


class Control:
    """A control against a revision or a release: its two sides, and the folder of the other one."""

    def __init__(self, config: pytest.Config, text: str, declared: tuple[str, ...]) -> None:
        self.text = text
        self.root = Path(real(str(config.rootpath)))
        self.paths = tuple(self.root / path for path in declared)
        self.declared = declared
        self.problem = ""  # why the control as a whole has failed, known at its end
        self._config = config
        self._scratch: Path | None = None
        self._worktree: Worktree | None = None
        self.release: Release | None = parse_release(text)
        self.revision: Revision | None = None
        if self.release is None:
            self.revision = find_revision(self.root, text, declared)

    # Words ------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """REV in words: ``HEAD~1 (1a2b3c4d5e)`` or ``mytrainer 1.2.3``."""
        if self.revision is not None:
            return f"{self.revision.text} ({self.revision.commit[:10]})"
        return str(self.release)

    def header(self) -> list[str]:
        """What the run compares, for pytest's header."""
        subject = ", ".join(self.declared) or "the modules of the release"
        if self.revision is None:
            return [f"shardproof: against {self.label}, subject: {subject}"]
        revision = self.revision
        lines = [f"shardproof: against {self.label} {revision.summary!r}, subject: {subject}"]
        if revision.differing:
            lines.append(f"  what differs in the subject: {_files(revision.differing)}")
        else:
            lines.append(
                "  the subject is the same in both, so that no case can catch anything: name an "
                "earlier revision"
            )
        if revision.changed:
            lines.append(
                "  here is the checkout as it is now, uncommitted changes included: "
                f"{_files(revision.changed)}"
            )
        return lines

    def record(self) -> dict[str, Any]:
        """The control as run.jsonl documents it."""
        record: dict[str, Any] = {"text": self.text, "paths": list(self.declared)}
        if self.revision is not None:
            record.update(commit=self.revision.commit, changed=list(self.revision.changed))
        if self.release is not None:
            record.update(package=self.release.name, version=self.release.version)
        return record

    def shorten(self, text: str) -> str:
        """``text`` with files of the other side named by the revision they are of."""
        for folder in self._folders:
            text = text.replace(f"{folder}/", f"{self.text}:")
        return text

    def _spellings(self, folder: Path) -> tuple[str, ...]:
        """A folder as tracebacks name it: from where pytest was started, when that is shorter."""
        return str(folder), os.path.relpath(folder, self._config.invocation_params.dir)

    # Making ready -----------------------------------------------------------------------------

    _folders: tuple[str, ...] = ()

    def open(self, files: Iterable[Path]) -> tuple[Side, Side]:
        """Fetch REV's files and return both sides. ``files`` hold the cases that will run.

        Raises:
            AgainstError: a case's file that REV would supply, or what git or pip said.
        """
        kept = self._kept(files)
        if self.release is not None:
            return self._open_release(self.release, kept)
        if self.revision is None:
            raise RuntimeError("neither a revision nor a release")
        self._worktree = Worktree(self.revision)
        self._worktree.make()
        there = Path(real(str(self._worktree.root)))
        self._folders = self._spellings(there)
        pairs = [(path, there / path.relative_to(self.root)) for path in self.paths]
        return self._here(kept), Side("there", self._subject(pairs, kept), redirected=True)

    def _open_release(self, release: Release, kept: tuple[str, ...]) -> tuple[Side, Side]:
        folder = Path(real(str(release.install(self._releases()))))
        self._folders = self._spellings(folder)
        modules = release.modules(folder)
        if not modules:
            raise AgainstError(f"--against {self.text}: {release} installs no module")
        moved: list[tuple[str, str]] = []
        names = {name: str(place) for name, place in modules.items()} if not self.paths else {}
        for path in self.paths:
            imported = module_names(path, path)
            found = [(name, here, release.place(modules, name)) for name, here in imported]
            if not any(place for _, _, place in found):
                known = " or ".join(name for name, _ in imported) or "nothing"
                raise AgainstError(
                    f"--against {self.text}: {path.relative_to(self.root)} (shardproof_subject) is "
                    f"imported as {known}, and {release} installs {', '.join(modules)}"
                )
            moved += [(here, str(place)) for _, here, place in found if place]
            names |= {name: str(place) for name, _, place in found if place}
        subject = Subject(self.label, tuple(moved), tuple(names.items()), kept, (str(folder),))
        here = self._here(kept) if self.paths else Side("here", None)
        return here, Side("there", subject, redirected=True)

    def _here(self, kept: tuple[str, ...]) -> Side:
        pairs = [(path, path) for path in self.paths]
        subject = self._subject(pairs, kept)
        return Side("here", Subject("the checkout", subject.moved, subject.names, kept))

    def _subject(self, pairs: list[tuple[Path, Path]], kept: tuple[str, ...]) -> Subject:
        names: dict[str, str] = {}
        for path, there in pairs:
            names.update(module_names(path, there))
        return Subject(
            label=self.label,
            moved=tuple((str(path), str(there)) for path, there in pairs),
            names=tuple(names.items()),
            kept=kept,
        )

    def _kept(self, files: Iterable[Path]) -> tuple[str, ...]:
        """Folders of today's cases that lie inside declared paths.

        Raises:
            AgainstError: a case lies in a declared path itself.
        """
        folders: dict[str, None] = {}
        for file in dict.fromkeys(files):
            place = Path(real(str(file)))
            for path in self.paths:
                if path in (place, place.parent):
                    raise AgainstError(
                        f"--against {self.text}: {place.relative_to(self.root)} holds cases, and "
                        f"{path.relative_to(self.root)} (shardproof_subject) would come from "
                        f"{self.label}; today's cases judge: move them into a folder of their own, "
                        "or declare narrower paths"
                    )
                if place.is_relative_to(path):
                    folders[str(place.parent)] = None
        return tuple(folders)

    def _releases(self) -> Path:
        """Where installed releases are kept: with pytest's cache, where it has one."""
        cache = getattr(self._config, "cache", None)
        if cache is not None:
            return Path(cache.mkdir("shardproof-releases"))
        self._scratch = make_scratch(root=Path(os.path.realpath(tempfile.gettempdir())))
        return self._scratch

    def close(self) -> None:
        """Remove what the run made. May be called again."""
        if self._worktree is not None:
            self._worktree.remove()
        if self._scratch is not None:
            remove_scratch(self._scratch)
            self._scratch = None


def _files(names: Sequence[str]) -> str:
    """How many files, and the first few by name."""
    shown = ", ".join(names[:_SHOWN_FILES]) + (", ..." if len(names) > _SHOWN_FILES else "")
    return f"{len(names)} file{'s' if len(names) > 1 else ''} ({shown})"


def prepare(config: pytest.Config, text: str) -> Control:
    """The control against the revision or release that ``text`` names.

    Raises:
        pytest.UsageError: it can't be run; nothing was started or written.
    """
    settings = config.stash[SETTINGS]
    if getattr(config.option, "tx", None) or getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(
            f"--against {text} can't be used with pytest-xdist: both sides of a case are compared "
            "in one process; leave -n out (ranks of both sides use the cores already)"
        )
    try:
        _check_paths(text, config.rootpath, settings.subject)
        control = Control(config, text, tuple(os.path.normpath(p) for p in settings.subject))
    except AgainstError as error:
        raise pytest.UsageError(str(error)) from error
    config.add_cleanup(control.close)
    return control


def _check_paths(text: str, root: Path, declared: tuple[str, ...]) -> None:
    if not text.strip():
        raise AgainstError("--against: expected a revision or 'package==1.2.3', got nothing")
    if not declared and parse_release(text) is None:
        raise AgainstError(
            f"--against {text}: nothing says which paths are under test; set them in the ini, "
            "relative to the rootdir: shardproof_subject = src/mytrainer"
        )
    for path in declared:
        place = root / path
        normal = Path(os.path.normpath(path))
        if Path(path).is_absolute() or normal.parts[:1] in ((), ("..",)):
            raise AgainstError(
                f"shardproof_subject: expected paths below the rootdir ({root}), got {path!r}"
            )
        if not place.exists():
            raise AgainstError(f"shardproof_subject: there is no {path!r} in the rootdir ({root})")
        if place.is_file() and place.suffix != ".py":
            raise AgainstError(
                f"shardproof_subject: expected folders and Python modules, got {path!r}"
            )
        inner = real(str(root)) + os.sep + str(normal)
        if os.path.realpath(place) != inner:
            raise AgainstError(
                f"shardproof_subject: {path!r} is or lies behind a symbolic link; declare where "
                f"it leads: {os.path.realpath(place)}"
            )
        if is_library(inner):
            raise AgainstError(f"shardproof_subject: {path!r} is an installed package, no source")
