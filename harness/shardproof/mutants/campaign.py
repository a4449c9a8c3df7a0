"""The mutants of a run: each tried on cells that reach it until one of them notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardproof.mutants.target import Mutant, is_the_cases_own, mutants_of, targets_of

if TYPE_CHECKING:
    from shardproof.controller.drive import Drive
    from shardproof.controller.outcome import Ending
    from shardproof.controller.traces import RankTrace
    from shardproof.mutants.choice import Choice

Result = Literal["killed", "refused", "survived", "not judged", "equivalent", "not reached"]
TRIES = 3
"""Test functions with which a mutant is tried before it counts as survived, or as equivalent."""
REFUSED = 6
"""Those in which it may be refused: a later one may let it through to what it observes, soon."""
UNJUDGED = 2
"""Those on which it may not be judged: what crashes or hangs does so again, and slowly."""

LIMIT_TIMES = 5.0
LIMIT_LEAST = 10.0
"""Seconds; slower than this and so many times its cell, a mutant counts as hung."""


def limit_of(seconds: float) -> float:
    """Seconds that a mutant may take on a cell that takes ``seconds`` without one."""
    return LIMIT_LEAST + LIMIT_TIMES * seconds


@dataclass(frozen=True)
class Trial:
    """A mutant on one cell.

    ``killed``: an observation diverges, or the case itself asserts what does not hold. ``refused``:
    the system under test raised.
    ``not judged``: it ended by a crash, a hang or collectives that do not match, which says nothing
    of what observations see, or the mutant itself failed. ``survived``: numbers changed and nobody
    noticed. ``equivalent``: no number changed. ``not reached``: it was not called this time. ``by``
    are the observations or the words by which it was noticed.
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
    """Which mutants are tried, and what came of each so far.

    ``subject`` are absolute paths of the system under test in the project at ``root``: collectives
    that cases call by themselves are left as they are. When empty, all are tried.
    """

    choice: Choice
    root: Path
    subject: tuple[Path, ...] = ()
    tries: int = TRIES
    trials: dict[tuple[str, str], list[Trial]] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)

    def open_on(self, drive: Drive, case: str) -> list[Mutant]:
        """What is still to be tried on a cell that has just passed."""
        return [
            mutant
            for target in targets_of(_places(drive), drive.fleet.size)
            if not is_the_cases_own(target.site, self.subject, self.root)
            for mutant in mutants_of(target)
            if self.choice.takes(mutant) and self._open(mutant, case)
        ]

    def newly_reached(self, drive: Drive) -> list[str]:
        """Call sites from which ranks communicated for the first time in this process's run."""
        found = {site for (*_, site, _), size, _ in _places(drive) if size > 1} - self.reached
        self.reached |= found
        return sorted(found)

    def take(
        self, mutant: Mutant, case: str, topology: str, drive: Drive, ending: Ending
    ) -> dict[str, Any]:
        """Take down how a cell ended with a mutant; the record of it."""
        return self._keep(self._judged(mutant, case, topology, drive, ending))

    def pass_over(self, mutant: Mutant, case: str, topology: str, *, calls: int) -> dict[str, Any]:
        """Take down that a mutant would change none of so many calls; the record of it."""
        trial = Trial(mutant, case, topology, "equivalent", "passed", calls, 0, None, 0.0)
        return self._keep(trial)

    def give_up(
        self, mutants: Sequence[Mutant], case: str, topology: str, why: str
    ) -> list[dict[str, Any]]:
        """Take down that mutants could not be tried on a cell; the records of them."""
        by = (" ".join(why.split())[:_WORDS],)
        return [
            self._keep(Trial(mutant, case, topology, "not judged", "", 0, 0, None, 0.0, by))
            for mutant in mutants
        ]

    def _keep(self, trial: Trial) -> dict[str, Any]:
        self.trials.setdefault(_key(trial.mutant), []).append(trial)
        return trial.record()

    def _judged(
        self, mutant: Mutant, case: str, topology: str, drive: Drive, ending: Ending
    ) -> Trial:
        said = [trace.done.get("mutant") for trace in drive.traces if trace.done is not None]
        reports = [report for report in said if report is not None]
        reached, changed = (sum(report[at] for report in reports) for at in (0, 1))
        broken = [report[2] for report in reports if report[2]]
        failed = [one for one in drive.verdicts or [] if one["outcome"] != "passed"]
        by: tuple[str, ...] = tuple(one["name"] for one in failed[:3])
        result: Result
        if broken:
            result, by = "not judged", (f"the mutant itself failed: {broken[0]}"[:_WORDS],)
        elif failed and changed:
            result = "killed"
        elif ending.outcome == "passed" or failed:
            # Without a change nothing that fails can be put down to the mutant.
            result = "survived" if changed else "equivalent" if reached else "not reached"
        elif ending.outcome in _RAISED and changed:
            trace = drive.traces[ending.root or 0]
            result = "killed" if self._asserted(trace, case) else "refused"
            by = (trace.describe()[:_WORDS],)
        else:
            result, by = "not judged", (" ".join(ending.headline.split()),)
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

    def _asserted(self, trace: RankTrace, case: str) -> bool:
        """Whether a rank ended by an assertion of the case, or of a helper beside it."""
        report = trace.failed_body or {}
        longrepr = report.get("longrepr")
        crash = longrepr.get("reprcrash") if isinstance(longrepr, Mapping) else None
        if report.get("when") != "call" or not crash:
            return False
        path = Path(str(crash.get("path", ""))).resolve()
        folder = (self.root / case.partition("::")[0]).resolve().parent
        if path.parent != folder or any(path.is_relative_to(part) for part in self.subject):
            return False
        return str(crash.get("message", "")).startswith(_ASSERTIONS)

    def _open(self, mutant: Mutant, case: str) -> bool:
        trials = self.trials.get(_key(mutant), [])
        if any(trial.result == "killed" for trial in trials):
            return False
        # Where no bit changed, other parameters of the same function may have changed one.
        if sum(trial.result == "equivalent" for trial in trials) >= self.tries:
            return False
        limits = {"survived": self.tries, "refused": REFUSED, "not judged": UNJUDGED}
        tried = {
            result: {_function(trial.case) for trial in trials if trial.result == result}
            for result in limits
        }
        if any(len(tried[result]) >= limit for result, limit in limits.items()):
            return False
        return not any(_function(case) in functions for functions in tried.values())


def idle_in(rehearsed: Sequence[Mutant], drive: Drive) -> dict[Mutant, int]:
    """Mutants that would have changed no bit in a run, with how many calls they had reached."""
    reports = [(trace.done or {}).get("rehearsal") for trace in drive.traces]
    found: dict[Mutant, int] = {}
    for at, mutant in enumerate(rehearsed):
        seen = [report[at] for report in reports if report is not None]
        calls, changed = (sum(one[what] for one in seen) for what in (0, 1))
        failed = len(seen) < len(reports) or any(one[2] for one in seen)
        if calls and not changed and not failed:
            found[mutant] = calls
    return found


def _places(drive: Drive) -> list[Any]:
    reports = [trace.done["ledger"] for trace in drive.traces if trace.done is not None]
    return [place for report in reports for place in report["places"]]


def _function(case: str) -> str:
    return case.partition("[")[0]


def _key(mutant: Mutant) -> tuple[str, str]:
    """Two lines of one function are two call sites, though their mutants have one name."""
    return mutant.name, mutant.target.site


_WORDS = 200
# Also those of pytest.raises and pytest.fail.
_ASSERTIONS = ("AssertionError", "assert ", "Failed")
_RAISED = ("raised", "ranks disagree", "skipped", "xfailed")


def _largest(verdicts: Sequence[dict[str, Any]]) -> float | None:
    ratios = [one[key] for one in verdicts for key in ("ratio", "row_ratio")]
    known = [float(one) for one in ratios if isinstance(one, int | float)]
    return max(known, default=None)
