"""The mutants of a run: each tried on cells that reach it until one of them notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardproof.mutants.target import Mutant, mutants_of, targets_of

if TYPE_CHECKING:
    from shardproof.controller.drive import Drive
    from shardproof.controller.outcome import Ending
    from shardproof.mutants.choice import Choice

Result = Literal["killed", "refused", "not judged", "survived", "equivalent"]
TRIES = 3
"""Cells on which a mutant is tried before it counts as survived."""


@dataclass(frozen=True)
class Trial:
    """A mutant on one cell.

    ``killed``: an observation diverges. ``refused``: the system under test or the case raised.
    ``not judged``: it ended by a crash, a hang or collectives that do not match, which says nothing
    of what observations see. ``survived``: numbers changed and nobody noticed. ``equivalent``: no
    number changed. ``by`` are the observations or the words by which it was noticed.
    """

    mutant: Mutant
    case: str
    topology: str
    result: Result
    outcome: str
    reached: int
    changed: int
    ratio: float | None
    seconds: float
    by: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """What run.jsonl has of it."""
        target = self.mutant.target
        return {
            "mutant": self.mutant.name,
            "kind": self.mutant.kind,
            "operation": target.operation,
            "axis": target.axis,
            "backward": target.backward,
            "site": target.site,
            "result": self.result,
            "outcome": self.outcome,
            "calls": self.reached,
            "changed": self.changed,
            "ratio": self.ratio,
            "by": list(self.by),
            "seconds": round(self.seconds, 4),
        }


@dataclass
class Campaign:
    """Which mutants are tried, and what came of each so far."""

    choice: Choice
    tries: int = TRIES
    trials: dict[str, list[Trial]] = field(default_factory=dict)

    def after(
        self,
        case: str,
        topology: str,
        drive: Drive,
        run: Callable[[Mutant], tuple[Drive, Ending]],
    ) -> list[dict[str, Any]]:
        """Try what is still open on a cell that has just passed; what came of it, as records."""
        reports = [trace.done["ledger"] for trace in drive.traces if trace.done is not None]
        places = [place for report in reports for place in report["places"]]
        records = []
        for target in targets_of(places, drive.fleet.size):
            for mutant in mutants_of(target):
                if self.choice.takes(mutant) and self._open(mutant):
                    trial = _judged(mutant, case, topology, *run(mutant))
                    self.trials.setdefault(mutant.name, []).append(trial)
                    records.append(trial.record())
        return records

    def _open(self, mutant: Mutant) -> bool:
        trials = self.trials.get(mutant.name, [])
        if any(trial.result == "killed" for trial in trials):
            return False
        return sum(trial.result != "equivalent" for trial in trials) < self.tries


_WORDS = 200
_RAISED = ("raised", "ranks disagree", "skipped", "xfailed")


def _judged(mutant: Mutant, case: str, topology: str, drive: Drive, ending: Ending) -> Trial:
    said = [trace.done.get("mutant") for trace in drive.traces if trace.done is not None]
    counts = [count for count in said if count is not None]
    reached, changed = (sum(count[at] for count in counts) for at in (0, 1))
    failed = [one for one in drive.verdicts or [] if one["outcome"] != "passed"]
    by: tuple[str, ...] = tuple(one["name"] for one in failed[:3])
    result: Result
    if failed:
        result = "killed"
    elif ending.outcome == "passed":
        result = "survived" if changed else "equivalent"
    elif ending.outcome in _RAISED:
        result, by = "refused", (drive.traces[ending.root or 0].describe()[:_WORDS],)
    else:
        result, by = "not judged", (ending.headline,)
    return Trial(
        mutant,
        case,
        topology,
        result,
        ending.outcome,
        reached,
        changed,
        _largest(failed),
        drive.seconds,
        by,
    )


def _largest(verdicts: Sequence[dict[str, Any]]) -> float | None:
    ratios = [one[key] for one in verdicts for key in ("ratio", "row_ratio")]
    known = [float(one) for one in ratios if isinstance(one, int | float)]
    return max(known, default=None)
