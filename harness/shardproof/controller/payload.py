"""Reports of a cell with its machine-readable result on the one that decides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from shardproof.against.raised import RAISED
from shardproof.cells import PAYLOAD, Case
from shardproof.controller.drive import Drive
from shardproof.controller.outcome import Ending
from shardproof.controller.reference import Reference
from shardproof.controller.reports import reproduce_line, simple_report, skip_report
from shardproof.controller.watch import collectives_of
from shardproof.options import Settings

_PUBLIC: Final = (
    *("name", "kind", "numel", "ratio", "row_ratio", "gate", "row_gate", "floor", "norm"),
    "outcome",
)
"""The fields of a verdict that run.jsonl documents."""

NOT_COMPARED: Final = (
    "not compared: it ends well, and calls nothing of which a mutant is still to be tried; run it "
    "without --mutants to have it judged"
)
"""Why a cell of a run with mutants is skipped after it ran."""


class CellReports:
    """What cells of a run come to, as pytest's reports with a result each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def bad(
        self,
        item: pytest.Item,
        case: Case,
        outcome: str,
        text: str,
        raised: Mapping[str, Any] | None = None,
    ) -> pytest.TestReport:
        """A failure of the cell that no rank reported."""
        footer = reproduce_line(item, self._settings, case.cell.label)
        report = simple_report(
            item,
            when="setup",
            outcome="failed",
            longrepr=f"{outcome}: {text}\n\nreproduce: {footer}",
        )
        self.attach([report], case, Ending(outcome), None, None, footer)
        note_raised([report], raised)
        return report

    def skipped(self, item: pytest.Item, case: Case, reason: str) -> pytest.TestReport:
        """A cell that was not run."""
        report = skip_report(item, reason)
        self.attach([report], case, Ending("skipped"), None, None, "")
        return report

    def not_compared(
        self, item: pytest.Item, case: Case, drive: Drive, more: Mapping[str, Any]
    ) -> pytest.TestReport:
        """A cell that ran on ranks to its end, and was judged by nothing."""
        report = skip_report(item, NOT_COMPARED)
        self.attach([report], case, Ending("skipped"), drive, None, "", more)
        return report

    def xfailed(self, item: pytest.Item, case: Case, reason: str) -> pytest.TestReport:
        """A cell that failed as its case expects, without a run on ranks."""
        report = skip_report(item, reason)
        report.wasxfail = reason
        self.attach([report], case, Ending("xfailed"), None, None, "")
        return report

    def attach(
        self,
        reports: list[pytest.TestReport],
        case: Case,
        ending: Ending,
        drive: Drive | None,
        reference: Reference | None,
        footer: str,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Put the machine-readable result, with what ``more`` has, on the decisive report."""
        decisive = next((r for r in reports if r.outcome == "failed"), None)
        decisive = decisive or next((r for r in reports if r.when == "call"), reports[0])
        outcome = ending.outcome
        if outcome in ("passed", "skipped") and decisive.outcome == "failed":
            outcome = "raised"
        if hasattr(decisive, "wasxfail"):
            outcome = "xpassed" if decisive.outcome == "passed" else "xfailed"
        result: dict[str, Any] = {
            "case": case.case,
            "topology": case.cell.label,
            "seed": case.cell.seed,
            "outcome": outcome,
            "dtype": case.options.dtype or self._settings.dtype,
            "seconds": round(drive.seconds, 4) if drive else 0.0,
            "observations": [_public(verdict) for verdict in (drive and drive.verdicts) or []],
        }
        if drive is not None and drive.run.ledger:
            result["collectives"] = collectives_of(drive)
        result |= more or {}
        if reference is not None:
            result["reference_seconds"] = round(reference.seconds, 4)
            if reference.fallen:
                result["lower_precision"] = reference.fallen
        if outcome == "skipped" and isinstance(decisive.longrepr, tuple):
            result["reason"] = decisive.longrepr[2].removeprefix("Skipped: ")
        if outcome not in ("passed", "skipped"):
            result.update(
                root=ending.root,
                ranks=ending.ranks,
                message=decisive.longreprtext,
                reproduce=footer,
            )
        setattr(decisive, PAYLOAD, result)


def note_raised(reports: list[pytest.TestReport], raised: Mapping[str, Any] | None) -> None:
    """Put what was raised on the report of a failure that no rank reported."""
    if raised is not None:
        for report in reports:
            if report.outcome == "failed":
                setattr(report, RAISED, dict(raised))


def _public(verdict: dict[str, Any]) -> dict[str, Any]:
    return {key: verdict.get(key) for key in _PUBLIC}
