"""docs/catalogue.md as data: its rows, and why some of them do not apply."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).parents[2] / "docs/catalogue.md"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One public bug: faults with their cases, or the reason that it does not apply.

    ``family`` is a letter, ``words`` what it stands for.
    """

    number: int
    family: str
    words: str
    faults: tuple[tuple[str, str], ...]
    reason: str


def read(text: str) -> list[Row]:
    """The rows of the page, in their order."""
    rows = []
    for line in text.splitlines():
        found = re.match(
            r"\| (\d+) \| ([A-Z]) ([^|]+) \| \[[^|]+\]\(https://[^|]+\)[^|]* \| [^|]+ \| (.+) \|$",
            line,
        )
        if found:
            faults = re.findall(r"`([^`]+)` \(`([^`]+)`\)", found[4])
            _, _, reason = found[4].partition("not here: ")
            rows.append(
                Row(
                    number=int(found[1]),
                    family=found[2],
                    words=found[3],
                    faults=tuple(faults),
                    reason=reason.partition(";")[0],
                )
            )
    return rows


def explained(text: str) -> dict[str, str]:
    """What the page says of each reason for which a row does not apply."""
    return dict(re.findall(r"^- ([^:]+): (.+?)\.?$", text, re.MULTILINE))
