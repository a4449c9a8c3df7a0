"""What the controller knows of each rank during and after one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardproof.against.raised import RAISED

Phase = Literal["setup", "call", "teardown"]


@dataclass
class RankTrace:
    """One rank's share of a run. Times are seconds of the controller's monotonic clock."""

    rank: int
    phase: str = "not started"
    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reported_at: dict[str, float] = field(default_factory=dict)
    sealed: Mapping[str, Any] | None = None
    judged: list[dict[str, Any]] | None = None
    done: Mapping[str, Any] | None = None
    exit_text: str | None = None
    exited_at: float | None = None
    stack: str | None = None
    loaded: Mapping[str, Any] | None = None
    stdout: str = ""
    stderr: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will come from this rank."""
        return self.done is not None or self.exit_text is not None

    @property
    def body_over(self) -> bool:
        """Whether the case's own code ended here, in any way."""
        return self.over or "call" in self.reports or self._ended_in_setup()

    def _ended_in_setup(self) -> bool:
        report = self.reports.get("setup")
        return report is not None and report["outcome"] != "passed"

    def first(self, outcome: str) -> Mapping[str, Any] | None:
        """The first set-up or call report with ``outcome``."""
        for phase in ("setup", "call"):
            report = self.reports.get(phase)
            if report is not None and report["outcome"] == outcome:
                return report
        return None

    @property
    def failed_body(self) -> Mapping[str, Any] | None:
        """The report of a failed set-up or call, expected failures included."""
        report = self.first("failed")
        if report is None:
            skipped = self.first("skipped")
            report = skipped if skipped is not None and "wasxfail" in skipped else None
        return report

    @property
    def skipped_body(self) -> Mapping[str, Any] | None:
        """The report of a skip, expected failures excluded."""
        skipped = self.first("skipped")
        return skipped if skipped is not None and "wasxfail" not in skipped else None

    def describe(self) -> str:
        """How this rank ended, in one line."""
        if self.exit_text is not None:
            return f"{self.exit_text} during {self.phase}"
        failed = self.failed_body
        if failed is not None:
            return f"raised in {failed['when']}: {crash_line(failed)}"
        skipped = self.skipped_body
        if skipped is not None:
            return f"skipped in {skipped['when']}: {skip_reason(skipped)}"
        if self.done is not None:
            return "ended" if "missing" not in self.done else str(self.done["missing"])
        if self.sealed is not None and self.phase == "call":
            return "ended its body, waiting for the verdict"
        return f"still in {self.phase}"


def crash_line(report: Mapping[str, Any]) -> str:
    """The last line of a failure: the exception's text."""
    longrepr = report.get("longrepr")
    if isinstance(longrepr, Mapping) and longrepr.get("reprcrash"):
        text = str(longrepr["reprcrash"].get("message", ""))
    else:
        text = str(longrepr or "")
    lines = text.strip().splitlines()
    return lines[0] if lines else "no message"


def skip_reason(report: Mapping[str, Any]) -> str:
    """Why a report says that it was skipped."""
    longrepr = report.get("longrepr")
    if isinstance(longrepr, list | tuple) and len(longrepr) == 3:
        return str(longrepr[2]).removeprefix("Skipped: ")
    return str(longrepr)


def raised_of(trace: RankTrace) -> Mapping[str, Any] | None:
    """What a rank's exception was, where a control asks ranks for it."""
    report: Mapping[str, Any] = trace.failed_body or trace.done or {}
    found: Mapping[str, Any] | None = report.get(RAISED)
    return found
