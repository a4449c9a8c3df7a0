"""Mutants that may survive, each with one of a few reasons; any other one fails the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

REASONS: Final[Mapping[str, str]] = {
    "compared": "ranks compare what they gathered, and only a difference means anything",
    "flag": "only whether a number is zero is used, and the change keeps that",
    "own part": "a rank uses its own part of the result, and the change is in the others'",
    "padding": "the element that changes is padding",
    "cancels": "it is taken off and put back: any number near does",
    "elsewhere": "only another rank uses what is wrong on this one",
    "reported": "what comes of it is shown to people alone",
    "redundant": "another collective brings the same numbers",
}
"""Why a mutant may survive."""

SHOWN: Final = "reported"
"""The one reason of a mutant that makes a difference, to people; what has another makes none."""


class SurvivorsError(ValueError):
    """The list can't be read."""


@dataclass(frozen=True)
class Listed:
    """A line of the list: a pattern over names of mutants."""

    reason: str
    pattern: str
    line: int

    def means(self, name: str) -> bool:
        """Whether this line is about a mutant."""
        return fnmatchcase(name, self.pattern)


def read_survivors(path: Path) -> list[Listed]:
    """The lines ``reason | name`` of a file; empty ones and comments (#) are left out.

    Raises:
        SurvivorsError: no such file, another form, or a reason that is none of ``REASONS``.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SurvivorsError(f"cannot read {path}: {error}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        reason, bar, pattern = (part.strip() for part in words.partition("|"))
        if not bar or not pattern or reason not in REASONS:
            raise SurvivorsError(
                f"{path}:{number}: expected 'reason | name of a mutant' with one of the reasons "
                f"{', '.join(REASONS)}, got {words!r}"
            )
        found.append(Listed(reason, pattern, number))
    return found


def reason_of(trial: Mapping[str, Any], listed: Iterable[Listed]) -> str | None:
    """Why this mutant survived; None where it did not, or no line is about it."""
    if trial["result"] != "survived":
        return None
    return next((one.reason for one in listed if one.means(trial["mutant"])), None)


def unlisted(trials: Iterable[Mapping[str, Any]], listed: Iterable[Listed]) -> list[str]:
    """Names of survivors that no line is about."""
    known = list(listed)
    return [
        str(trial["mutant"])
        for trial in trials
        if trial["result"] == "survived" and reason_of(trial, known) is None
    ]


def needless(trials: Iterable[Mapping[str, Any]], listed: Iterable[Listed]) -> list[Listed]:
    """Lines about mutants that were tried, none of which survived: they hide the next one."""
    tried = list(trials)
    found = []
    for one in listed:
        results = [trial["result"] for trial in tried if one.means(trial["mutant"])]
        if "killed" in results and "survived" not in results:
            found.append(one)
    return found
