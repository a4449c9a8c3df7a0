"""Whether a case noticed the fault that it is about, from the line that its control left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subjects.trainer.faults import Fault

LEAST = 1e4
"""In float64 a fault scores at least this, so that no gate is tuned to it."""

CAUGHT = ("diverged", "nan", "replicas differ", "missing", "extra", "coverage")
"""Outcomes of an observation that say that its value is wrong."""

_RAISED = "raised: "
# Where nothing was refused, ranks may go on to call different things: that is named first, and what
# the case then says stands below it.
_FAILED = ("raised", "mismatched collectives")


def judge(fault: Fault, cell: Mapping[str, Any]) -> str:
    """``killed``, or what is wrong with this control, beginning with one word.

    *survived*: the case passed. *misattributed*: it failed, but not where the fault shows. *weak*:
    too near to what rounding could do. *misjudged*: it ended in a way that proves nothing (hung,
    crashed, invalid, raised where a value was to diverge).
    """
    outcome, message = cell["outcome"], str(cell.get("message", ""))
    if outcome == "passed":
        return "survived: the case passed with the fault in"
    if fault.shows.startswith(_RAISED):
        words = fault.shows.removeprefix(_RAISED)
        if outcome not in _FAILED:
            return f"misjudged: the case ended as {outcome}, expected raised\n{message}"
        return "killed" if words in message else f"misattributed: not {words!r} in\n{message}"
    if outcome != "diverged":
        return f"misjudged: the case ended as {outcome}, expected diverged\n{message}"
    failed = [seen for seen in cell["observations"] if seen["outcome"] != "passed"]
    shown = [
        seen
        for seen in failed
        if seen["outcome"] in CAUGHT and fnmatchcase(seen["name"], fault.shows)
    ]
    if not shown:
        names = ", ".join(f"{seen['name']} ({seen['outcome']})" for seen in failed)
        return f"misattributed: nothing like {fault.shows!r} diverged, but {names}"
    if not any(_far(seen) for seen in shown):
        ratios = {seen["name"]: (seen["ratio"], seen["row_ratio"]) for seen in shown}
        return f"weak: expected a ratio above {LEAST:g}, got {ratios}"
    return "killed"


def _far(seen: Mapping[str, Any]) -> bool:
    """Whether no rounding explains it; exact values and other shapes have no ratio."""
    known = [float(seen[key]) for key in ("ratio", "row_ratio") if seen[key] is not None]
    return seen["outcome"] != "diverged" or not known or max(known) > LEAST


def of_fault(cells: Sequence[Mapping[str, Any]], name: str) -> dict[str, Mapping[str, Any]]:
    """The controls of one fault, by topology; each topology once.

    Raises:
        ValueError: one topology has several, as when a case has a parameter that is not fixed.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for cell in cells:
        if str(cell["case"]).partition("[")[2].removesuffix("]") == name:
            if cell["topology"] in found:
                raise ValueError(f"fault {name!r} ran more than once on {cell['topology']}")
            found[cell["topology"]] = cell
    return found
