"""From verdicts to the outcome of a case and the text of its failure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardproof.topology import Topology

from .diagnosis import UNEXPLAINED

SHOWN_IN_FULL = 3
"""How many failing observations are shown with their evidence; the others take one line each."""

SHOWN_IN_SHORT = 40

TOLD_SCALE = 0.999
"""Share of the error from which on a scale that suggests nothing is told nevertheless."""

_DIVERGED = ("diverged", "nan", "replicas differ", "missing", "extra", "coverage")


def merge(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """All ranks' verdicts in the order of the reference's observations.

    Raises:
        ValueError: two verdicts on one observation, or one is lacking: a rank did not judge.
    """
    verdicts = sorted(
        (dict(verdict) for part in parts for verdict in part), key=lambda one: int(one["index"])
    )
    indices = [int(verdict["index"]) for verdict in verdicts]
    if indices != list(range(len(indices))):
        raise ValueError(
            f"expected one verdict for each of {len(indices)} observations, got those numbered "
            f"{indices}: every rank's part is needed once"
        )
    return verdicts


def failed(verdicts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any observation failed; a case that observes nothing has failed too."""
    return outcome(verdicts) != "passed"


def outcome(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The outcome of a case on a topology.

    ``diverged`` when any value is wrong, else ``ranks disagree``, ``invalid`` (an observation that
    cannot be made) or ``vacuous`` (nothing was observed, or only what any value would pass).
    """
    found = {verdict["outcome"] for verdict in verdicts}
    if not found:
        return "vacuous"
    if found & set(_DIVERGED):
        return "diverged"
    for word in ("ranks disagree", "invalid", "vacuous"):
        if word in found:
            return word
    return "passed"


def render(verdicts: Sequence[Mapping[str, Any]], *, reproduce: str, topology: Topology) -> str:
    """The failure message: the first failing observations in full, the others in a line each.

    They stand in the order in which the case observed them, since what is upstream of a fault is
    right and the first that fails is nearest to it.
    """
    wrong = [verdict for verdict in verdicts if verdict["outcome"] != "passed"]
    if not verdicts:
        lines = [
            f"The case observed nothing on {topology.name}, so it compared nothing.",
            "Call rank.observe(name, value) in its body.",
        ]
    else:
        lines = [f"{len(wrong)} of {len(verdicts)} observations failed on {topology.name}."]
    # What is vacuous gives way to what is wrong.
    ordered = sorted(wrong, key=lambda verdict: verdict["outcome"] == "vacuous")
    for verdict in ordered[:SHOWN_IN_FULL]:
        lines += ["", *_block(verdict, topology)]
    rest = ordered[SHOWN_IN_FULL:]
    if rest:
        lines += ["", f"{len(rest)} more:"]
        lines += [f"  {_line(verdict)}" for verdict in rest[:SHOWN_IN_SHORT]]
        if len(rest) > SHOWN_IN_SHORT:
            lines.append(f"  ... and {len(rest) - SHOWN_IN_SHORT} more")
    lines += ["", f"reproduce: {reproduce}"]
    return "\n".join(lines)


def _line(verdict: Mapping[str, Any]) -> str:
    name = str(verdict["name"])
    return (
        f"{name if name.isprintable() else repr(name)}: {verdict['outcome']}: {verdict['message']}"
    )


def _block(verdict: Mapping[str, Any], topology: Topology) -> list[str]:
    details: Mapping[str, Any] = verdict["details"]
    where = f"{verdict['kind']}, observed at {verdict['source']}"
    if "rank" in details:
        at = ", ".join(f"{axis}={index}" for axis, index in details["coordinates"].items())
        where = f"rank {details['rank']}{f' ({at})' if at else ''}; {where}"
    lines = [_line(verdict), f"on {topology.name}, {where}"]
    if "expected" in details:
        expected, actual = details["expected"], details["actual"]
        same = f"got {actual} as expected"
        if "part" in details:
            actual = f"{details['part']} ({actual})"
        lines.append(same if expected == actual else f"expected {expected}, got {actual}")
    measured = verdict["outcome"] == "diverged" and "explained" in details
    if verdict["gate"] and (measured or verdict["outcome"] == "vacuous"):
        lines.append(_ratios(verdict))
    lines += _values(verdict)
    # What was seen stands before what a scale suggests.
    lines += details.get("hints", [])
    if "alpha" in details:
        lines += _scale(verdict)
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _ratios(verdict: Mapping[str, Any]) -> str:
    """Errors beside their gates; that of the worst row where there are rows."""
    text = f"ratio {_number(verdict['ratio'])} (gate {_number(verdict['gate'])})"
    if verdict["shape"]:
        text += f", worst row {_number(verdict['row_ratio'])} (gate {_number(verdict['row_gate'])})"
    return f"{text}; norm {_number(verdict['norm'])}, floor {_number(verdict['floor'])}"


def _scale(verdict: Mapping[str, Any]) -> list[str]:
    """The scale that fits best, and what it suggests; nothing where it says little of the error.

    One number always has a scale that explains it: it is told where an axis has it too.
    """
    details: Mapping[str, Any] = verdict["details"]
    alpha, share, hint = details["alpha"], float(details["explained"]), details["alpha_hint"]
    if math.prod(verdict["shape"]) == 1:
        if hint in ("", UNEXPLAINED):
            return []
        return [f"{hint}; one number may be so by chance"]
    if not hint and share < TOLD_SCALE:
        return []
    explained = "all" if share > 0.9999 else f"{share:.1%}"
    text = f"scale α = {_number(alpha, 6)}, which explains {explained} of the error"
    return [f"{text}: {hint}" if hint else text]


def _values(verdict: Mapping[str, Any]) -> list[str]:
    """The worst row, with both values."""
    details: Mapping[str, Any] = verdict["details"]
    lines = []
    if "expected_values" in details:
        where = "worst"
        if verdict["shape"]:
            where += f" row {details['row']}"
        if len(verdict["shape"]) > 1:
            where += f", from element {details['column']}"
        lines.append(f"{where}: expected {' '.join(details['expected_values'])}")
        lines.append(f"{' ' * len(where)}    actual {' '.join(details['actual_values'])}")
    if details.get("failing_rows"):
        shown = ", ".join(map(str, details["rows"]))
        more = ", ..." if details["failing_rows"] > len(details["rows"]) else ""
        lines.append(f"{details['failing_rows']} of {verdict['shape'][0]} rows fail: {shown}{more}")
    return lines


def _number(value: object, digits: int = 3) -> str:
    return f"{float(str(value)):.{digits}g}"
