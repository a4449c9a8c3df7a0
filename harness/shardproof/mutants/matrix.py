"""The kill matrix in the terminal, and what survived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from shardproof.mutants.campaign import Result
from shardproof.mutants.survivors import (
    REASONS,
    SHOWN,
    Listed,
    needless,
    reason_of,
    unlisted,
)
from shardproof.mutants.target import KINDS

# From the best that a mutant may come to on any cell to what says least.
RESULTS: Final[Sequence[Result]] = get_args(Result)
_TELLING: Final = ("killed", "refused", "survived")
APART: Final = 100.0
"""How many times further from the reference than clean runs killed mutants must be."""
_UNSEEN: Final = "no case that was tried observes what changes here"
UNJUDGED: Final = 0.1
"""The largest share of mutants that may end without a judgement."""

Record = Mapping[str, Any]


def telling(cells: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The trial of each mutant that says most of it, with its ``case`` and ``topology``."""
    best: dict[tuple[str, str], Record] = {}
    for cell in cells:
        for trial in cell.get("mutants", ()):
            place = {"case": cell["case"], "topology": cell["topology"]}
            key = trial["mutant"], trial["site"]
            known = best.get(key)
            if known is None or _rank(trial) < _rank(known):
                best[key] = {**trial, **place}
    return list(best.values())


def _rank(trial: Record) -> int:
    return RESULTS.index(trial["result"])


def problems_of(
    cells: Iterable[Mapping[str, Any]], listed: Sequence[Listed], *, sampled: bool = False
) -> list[str]:
    """What fails a run: survivors without a reason, or nothing that says anything.

    A sample may be empty.
    """
    cells = list(cells)
    trials = telling(cells)
    if not trials:
        text = "no mutant was tried: no cell that passed calls a collective that was chosen"
        return [] if sampled else [text]
    if not sampled and all(trial["result"] not in _TELLING for trial in trials):
        return [f"none of {len(trials)} mutants was judged by an observation"]
    problems = []
    unjudged = sum(trial["result"] == "not judged" for trial in trials)
    if not sampled and unjudged > UNJUDGED * len(trials):
        problems.append(
            f"{unjudged} of {len(trials)} mutants were not judged, expected at most "
            f"{UNJUDGED:.0%}: see what each ended by"
        )
    apart = _separation(cells)
    if apart is not None and apart.factor < APART:
        problems.append(
            f"clean runs and killed mutants are {apart.factor:.2g} times apart, expected "
            f"{APART:g}: {apart.clean}, {apart.mutant}; either a clean run is nearly a fault, or "
            "a fault is nearly rounding: run these cases in float64, or look at what they observe"
        )
    names = unlisted(trials, listed)
    if names:
        listing = "".join(f"\n  {name}" for name in names)
        reasons = "; ".join(f"{reason}: {meaning}" for reason, meaning in REASONS.items())
        problems.append(
            f"{len(names)} survived without a reason: observe what they change, or list them in "
            "the file that the ini's shardproof_survivors names, as lines 'reason | name':"
            f"{listing}\nreasons are {reasons}"
        )
    return problems


@dataclass(frozen=True)
class Separation:
    """The largest ratio of error to floor in clean runs, and the least of a killed mutant."""

    worst: float
    least: float
    clean: str
    mutant: str

    @property
    def factor(self) -> float:
        """How many times further from the reference the mutant is."""
        return self.least / max(self.worst, 1.0)

    def __str__(self) -> str:
        return (
            f"ratios of clean runs are at most {self.worst:.2g}, of killed mutants at least "
            f"{self.least:.2g}: {self.factor:.1g} times apart"
        )


def _separation(cells: Iterable[Mapping[str, Any]]) -> Separation | None:
    """None where either has no ratio, as with differences of shape."""
    clean: list[tuple[float, str]] = []
    killed: list[tuple[float, str]] = []
    for cell in cells:
        if cell.get("outcome", "passed") != "passed":
            continue
        where = f"{cell['case']} on {cell['topology']}"
        for seen in cell.get("observations", ()):
            ratios = [float(seen[key] or 0.0) for key in ("ratio", "row_ratio")]
            clean.append((max(ratios), f"{seen['name']} in {where}"))
        killed += [
            (float(trial["ratio"]), f"{trial['mutant']} in {where}")
            for trial in cell.get("mutants", ())
            if trial["result"] == "killed" and trial["ratio"] is not None
        ]
    if not clean or not killed:
        return None
    (worst, at), (least, mutant) = max(clean), min(killed)
    return Separation(worst, least, at, mutant)


def _hints(trials: Sequence[Record], listed: Sequence[Listed]) -> list[str]:
    """Reasons that nothing needed here: other cells may need them still."""
    return [
        f"line {one.line} of shardproof_survivors is about mutants that were killed here: take it "
        f"out unless others survive ({one.pattern})"
        for one in needless(trials, listed)
    ]


def lines_of(
    cells: Iterable[Mapping[str, Any]], listed: Sequence[Listed], *, sampled: bool = False
) -> list[str]:
    """Kinds by results, the share that was killed, and each that was not, with its call site."""
    cells = list(cells)
    trials = telling(cells)
    if not trials:
        return ["no mutant was tried: no cell that passed calls a collective that was chosen"]
    lines = table_of(trials)
    lines += shares_of(trials, listed)
    apart = _separation(cells)
    if apart is not None:
        lines.append(str(apart))
    left = sum(cell.get("outcome") == "skipped" and "mutants" in cell for cell in cells)
    if left:
        lines.append(
            f"{left} of {len(cells)} cells were not compared: nothing was left to try where they "
            "ended well"
        )
    lines += unkilled(trials, listed)
    problems = problems_of(cells, listed, sampled=sampled)
    lines += _hints(trials, listed) + [line for text in problems for line in text.split("\n")]
    if problems:
        lines.append("the run fails by its mutants, whatever the last line says of the cases")
    return lines


def table_of(trials: Sequence[Record]) -> list[str]:
    """Kinds by results, with a row of all, from what ``telling`` returns."""
    counts = Counter((trial["kind"], trial["result"]) for trial in trials)
    rows = [["mutant", *RESULTS]]
    rows += [
        [kind, *(str(counts[kind, result] or "-") for result in RESULTS)]
        for kind in KINDS
        if any(counts[kind, result] for result in RESULTS)
    ]
    totals = Counter(trial["result"] for trial in trials)
    rows.append(["all", *(str(totals[result] or "-") for result in RESULTS)])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, columns below one another; all rows have as many."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def changing(trials: Iterable[Record]) -> list[Record]:
    """Mutants that change a number, or may: all but the equivalent and those not reached."""
    return [trial for trial in trials if trial["result"] not in ("equivalent", "not reached")]


def shares_of(trials: Sequence[Record], listed: Sequence[Listed]) -> list[str]:
    """How many mutants were noticed, of those that change a number and of those that matter."""
    totals = Counter(trial["result"] for trial in trials)
    changes = len(changing(trials))
    if not changes:
        return []
    killed, noticed = totals["killed"], totals["killed"] + totals["refused"]
    text = f"{killed} of {changes} mutants that change a number are killed"
    text += f" ({100 * killed / changes:.1f} %)"
    if noticed > killed:
        text += f", {noticed - killed} more refused ({100 * noticed / changes:.1f} %)"
    lines = ["", f"{text}; {len({trial['site'] for trial in trials})} places"]
    matter = mattering(trials, listed)
    idle = changes - matter
    if idle and matter:
        lines.append(
            f"{noticed} of the {matter} that make a difference are killed or refused "
            f"({100 * noticed / matter:.1f} %); {idle} survive with a reason why they make none"
        )
    return lines


def mattering(trials: Iterable[Record], listed: Sequence[Listed]) -> int:
    """Mutants that change a number and make a difference: no listed reason says why they don't."""
    return sum(reason_of(trial, listed) in (None, SHOWN) for trial in changing(trials))


def unkilled(trials: Iterable[Record], listed: Sequence[Listed]) -> list[str]:
    """A line for each mutant that was neither killed nor equivalent, with its call site."""
    known = list(trials)
    return [
        _line(trial, listed)
        for result in ("survived", "not judged", "refused", "not reached")
        for trial in known
        if trial["result"] == result
    ]


def _line(trial: Record, listed: Sequence[Listed]) -> str:
    said = "; ".join(trial["by"])
    if trial["result"] == "survived":
        reason = reason_of(trial, listed)
        said = _UNSEEN if reason is None else REASONS[reason]
    phase = "backward" if trial["backward"] else "forward"
    where = f"{trial['operation']} over {trial['axis']} in {phase}, {trial['site']}"
    tried = f"{trial['case'].partition('::')[2]} on {trial['topology']}"
    return f"{trial['result']}: {trial['kind']}: {where}: {said} ({tried})"
