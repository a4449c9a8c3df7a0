"""The table at the end of a run with ``--against``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shardproof.against.conclusion import (
    CAUGHT,
    CONCLUSIONS,
    ERROR_THERE,
    FAILS_ON_BOTH,
    NOT_RUNNABLE,
    VACUOUS,
)

Shown = Callable[[dict[str, Any]], str]

_TOLD = (CAUGHT, FAILS_ON_BOTH, ERROR_THERE, NOT_RUNNABLE)


def lines_of(
    cells: Sequence[dict[str, Any]], *, label: str, shown: Shown, short: Callable[[str], str]
) -> list[str]:
    """Case, topology, how it ended there and here, and the conclusion; then what failed there.

    ``shown`` makes a result one entry of a table, ``short`` a case's id.
    """
    rows = [["case", "topology", "there", "here", "conclusion"]]
    for cell in cells:
        against = cell["against"]
        there = against.get("there")
        word = against["conclusion"]
        if "fixes" in against:
            word += f" (fixes {against['fixes']})"
        rows.append(
            [
                short(cell["case"]),
                cell["topology"],
                shown(there) if there is not None else "-",
                shown(cell),
                word,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"there: {label}; here: the checkout", ""]
    lines += [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [*_failures(cells, short), "", counts(cells)]
    if all(cell["against"]["conclusion"] == VACUOUS for cell in cells):
        lines.append("no case of this run notices what differs: all pass there as they do here")
    lines += unmet(cells)
    return lines


def _failures(cells: Sequence[dict[str, Any]], short: Callable[[str], str]) -> list[str]:
    """What failed there, once for all topologies where it reads the same."""
    told: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        against = cell["against"]
        text = against.get("there", {}).get("text", "")
        if against["conclusion"] in _TOLD and text:
            key = (against["conclusion"], short(cell["case"]), text)
            told.setdefault(key, []).append(cell["topology"])
    lines = []
    for (conclusion, case, text), topologies in told.items():
        lines += ["", f"{conclusion}: {case}, {', '.join(topologies)}"]
        lines += [f"  {line}" for line in text.splitlines()]
    return lines


def counts(cells: Sequence[dict[str, Any]]) -> str:
    """How many cells came to what."""
    found = Counter(cell["against"]["conclusion"] for cell in cells)
    parts = [f"{found[word]} {word}" for word in CONCLUSIONS if found[word]]
    return f"{', '.join(parts)} (of {len(cells)})"


def unmet(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Cases that had to be caught and were not."""
    return [
        f"not caught: {cell['case']} (fixes {cell['against']['fixes']})"
        for cell in cells
        if cell["against"].get("unmet")
    ]
