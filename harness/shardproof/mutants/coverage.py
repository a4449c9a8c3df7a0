"""Which call sites of the system under test a run reached and broke, of all that its source has.

What is found by reading (:mod:`shardproof.mutants.reading`) is compared with what ranks reached:
a collective that no case calls has no mutant, and would be missing from the matrix without a word.
The other way round, a place from which ranks communicate and that reading did not find is named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardproof.mutants.reading import CallSite, read_sites

_FRAME: Final = re.compile(r"(?P<file>.+):(?P<line>\d+) in (?P<function>.+)")
_UNREAD: Final = (
    "not found by reading: {}: a library communicates there, or an operation is called by a name "
    "that only the run knows"
)


class Frame(NamedTuple):
    """One frame of a call site's text."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def frames_of(text: str) -> list[Frame]:
    """The frames in the text of a call site, innermost first; none where no user code is named."""
    parts = (_FRAME.fullmatch(part) for part in text.split(" < "))
    return [Frame(one["file"], int(one["line"]), one["function"]) for one in parts if one]


def hit_by(text: str, sites: Iterable[CallSite]) -> frozenset[CallSite]:
    """The call sites that ranks went through when they communicated from ``text``.

    A frame means the call that has its line, in its function; of several, one within another, the
    inner one. A wrapper is meant only where the frames inside are its own, so two on one line are
    told apart; two operations on one line are not.
    """
    frames = frames_of(text)
    known = list(sites)
    found: set[CallSite] = set()
    for at, frame in enumerate(frames):
        here = [site for site in known if _holds(site, frame)]
        wrappers = [site for site in here if _is_called(site, frames[:at])]
        # A method may be of the subject's own: the operation is called further in.
        kinds = ("method",) if at else ("operation", "method")
        called = _innermost(wrappers) or _innermost(one for one in here if one.kind in kinds)
        if not called and not (found and at):
            called = _innermost(one for one in here if one.kind == "passed on")
        found |= called
    return frozenset(found)


def _holds(site: CallSite, frame: Frame) -> bool:
    same = site.file == frame.file and site.function == frame.function
    return same and site.first <= frame.line <= site.last


def _is_called(site: CallSite, inside: Sequence[Frame]) -> bool:
    """Whether one of the frames inside is of the wrapper, or of a function in it."""
    return site.kind == "wrapper" and any(
        frame.file == site.home
        and (frame.function == site.name or frame.function.startswith(f"{site.name}.<locals>."))
        for frame in inside
    )


def _innermost(sites: Iterable[CallSite]) -> set[CallSite]:
    found = list(sites)
    least = min((site.last - site.first for site in found), default=0)
    return {site for site in found if site.last - site.first == least}


@dataclass(frozen=True)
class Covered:
    """What a run reached. ``unread`` are places that it found and reading did not.

    ``sites`` are all that were read, ``reached`` and ``killed`` those of them that ranks called,
    and on which an observation noticed a mutant. ``elsewhere`` says that ranks communicated, and
    never from the subject.
    """

    subject: tuple[str, ...]
    sites: tuple[CallSite, ...]
    reached: frozenset[CallSite]
    killed: frozenset[CallSite]
    unread: tuple[Frame, ...]
    elsewhere: bool

    @property
    def counted(self) -> list[CallSite]:
        """Call sites of which ranks can tell that they were reached."""
        return [site for site in self.sites if site.is_told]

    @property
    def missing(self) -> list[CallSite]:
        """Call sites that were not reached."""
        return [site for site in self.counted if site not in self.reached]

    def record(self) -> dict[str, Any]:
        """A JSON-able form of it."""
        return {
            "subject": list(self.subject),
            "sites": [
                asdict(site)
                | {
                    "counted": site.is_told,
                    "reached": site in self.reached,
                    "killed": site in self.killed,
                }
                for site in self.sites
            ],
            "unread": [one._asdict() for one in self.unread],
        }


def covered(
    subject: Iterable[str],
    sites: Sequence[CallSite],
    reached: Iterable[str],
    killed: Iterable[str] = (),
    *,
    root: Path | None = None,
) -> Covered:
    """Compare what was read with the texts of call sites that ranks reached.

    ``killed`` are the texts of those where a mutant was killed, ``subject`` the declared paths; all
    are relative to ``root`` (the working directory by default).
    """
    declared = tuple(subject)
    above = root or Path.cwd()
    places = tuple(os.path.abspath(above / path) for path in declared)  # noqa: PTH100
    broken = set(killed)
    texts = broken.union(reached)
    hits = {text: hit_by(text, sites) for text in texts}
    unread, any_inside = set(), False
    for text, found in hits.items():
        frame = next(iter(frames_of(text)), None)
        if frame is None:
            continue
        path = os.path.abspath(above / frame.file)  # noqa: PTH100 - links stay as they are
        inside = any(path == place or path.startswith(place + os.sep) for place in places)
        any_inside |= inside
        if inside and not _is_read(frame, found):
            unread.add(frame)
    return Covered(
        declared,
        tuple(sites),
        frozenset().union(*hits.values()),
        frozenset().union(*(hits[text] for text in broken)),
        tuple(sorted(unread)),
        elsewhere=bool(texts) and not any_inside,
    )


def _is_read(frame: Frame, found: Iterable[CallSite]) -> bool:
    """Whether reading explains the innermost frame: an operation there, or one passed on to it."""
    return any(
        site.kind == "passed on" or (site.kind != "wrapper" and _holds(site, frame))
        for site in found
    )


def lines_of(result: Covered) -> list[str]:
    """How many call sites were reached and broken, and each that was not reached or not read."""
    name, counted = ", ".join(result.subject), result.counted
    said = "nothing that communicates was found by reading"
    if counted:
        reached, killed = (
            sum(site in group for site in counted) for group in (result.reached, result.killed)
        )
        said = f"{reached} of {len(counted)} call sites reached, {killed} with a killed mutant"
    lines = [f"collective coverage of {name}: {said}"]
    if result.elsewhere:
        lines.append(
            f"ranks communicated, and never from {name}: expected them to run that source; is it "
            "imported from elsewhere?"
        )
    lines += [f"not reached: {site}" for site in result.missing]
    left = len(result.sites) - len(counted)
    if left:
        lines.append(
            f"not counted: {left} calls of wrappers from another folder than the wrapper's, which "
            "ranks do not tell"
        )
    return lines + [_UNREAD.format(frame) for frame in result.unread]


class Coverage:
    """Gathers what a run reaches of the subject.

    ``paths`` are files or folders, relative to ``root``, the working directory by default.

    Raises:
        ReadingError: the subject can't be read.
    """

    def __init__(self, paths: Iterable[str | Path], *, root: Path | None = None) -> None:
        self._root = root
        self._subject = tuple(map(str, paths))
        self.sites = read_sites(self._subject, root)
        self._seen: set[str] = set()
        self._killed: set[str] = set()

    def see(self, text: str) -> None:
        """Ranks communicated from the call site of this text."""
        self._seen.add(text)

    def kill(self, text: str) -> None:
        """An observation noticed a mutant there."""
        self._killed.add(text)

    def result(self) -> Covered:
        """What was reached so far."""
        return covered(self._subject, self.sites, self._seen, self._killed, root=self._root)

    def lines(self) -> list[str]:
        """Text for the terminal summary."""
        return lines_of(self.result())

    def record(self) -> dict[str, Any]:
        """A JSON-able form of the result."""
        return self.result().record()
