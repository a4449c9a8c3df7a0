"""The controller of a run with ``--against``: every cell on both sides, and what follows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shardproof.against.conclusion import (
    CAUGHT,
    NOT_JUDGED,
    VACUOUS,
    WRONG_CODE,
    Half,
    conclude,
    half_of,
)
from shardproof.against.control import Control
from shardproof.against.git import AgainstError
from shardproof.against.sides import WrongCodeError
from shardproof.cells import PAYLOAD, CaseError, Cell, case_id, cell_of, read_options
from shardproof.controller.protocol import Controller
from shardproof.controller.reports import simple_report
from shardproof.options import Settings

_NOT_RUN = ("skipped", "xfailed")


class AgainstController(Controller):
    """Runs a cell here as any other, then there, on ranks that import REV's subject.

    What pytest reports of the cell is how it ended here, unless the control itself fails: a case
    that must be caught was not, or a rank had the wrong code.
    """

    def __init__(
        self, config: pytest.Config, settings: Settings, items: list[pytest.Item], control: Control
    ) -> None:
        cells = [item for item in items if cell_of(item)]
        try:
            self._here_side, self._there_side = control.open(item.path for item in cells)
        except AgainstError as error:
            raise pytest.UsageError(str(error)) from error
        here = replace(settings, against=None)
        super().__init__(config, here, items, side=self._here_side)
        self._control = control
        self._session = cells[0].session
        self._there = Controller(config, settings, items, side=self._there_side)
        # Cells of each case that are still to come, and what the others came to.
        self._to_come = Counter(case_id(item, self._cell(item)) for item in cells)
        self._came_to: dict[str, list[tuple[str, str]]] = {}
        self._ran_there = False

    def reports_of(
        self, item: pytest.Item, cell: Cell, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        """Run a cell on both sides; the reports of the one here, with what both say together."""
        try:
            reports = super().reports_of(item, cell, nextitem)
            here = half_of(reports)
            if here.outcome in _NOT_RUN:
                self._there.pass_over(item)
                return self._end(item, cell, reports, NOT_JUDGED, None)
            found = self._there.reports_of(item, cell, nextitem)
        except WrongCodeError as error:
            return self._stop(item, cell, self._control.shorten(str(error)))
        there = half_of(found)
        self._ran_there = self._ran_there or there.passed or there.how == "verdict"
        conclusion = conclude(here, there, self._expected(item))
        return self._end(item, cell, reports, conclusion, there)

    def _expected(self, item: pytest.Item) -> tuple[str, ...]:
        try:
            return read_options(item).raises_there
        except CaseError:
            return ()

    def _fixes(self, item: pytest.Item) -> str | None:
        try:
            return read_options(item).fixes
        except CaseError:
            return None

    def _end(
        self,
        item: pytest.Item,
        cell: Cell,
        reports: list[pytest.TestReport],
        conclusion: str,
        there: Half | None,
    ) -> list[pytest.TestReport]:
        """Note what a cell came to, and fail it where the control has failed."""
        decisive = next(report for report in reports if hasattr(report, PAYLOAD))
        result: dict[str, Any] = getattr(decisive, PAYLOAD)
        record: dict[str, Any] = {"conclusion": conclusion}
        fixes = self._fixes(item)
        if fixes is not None:
            record["fixes"] = fixes
        if there is not None:
            record["there"] = self._record(there)
        result["against"] = record
        if there is not None and not there.passed:
            said = self._control.shorten(str(there.result.get("message", there.text)))
            if decisive.outcome == "failed":
                decisive.sections.append((f"against {self._control.label}: {conclusion}", said))
        elif decisive.outcome == "failed" and there is not None:
            text = f"the case passes at {self._control.label}, on {cell.label}"
            decisive.sections.append((f"against {self._control.label}: {conclusion}", text))
        unmet = self._unmet(item, cell, conclusion, fixes)
        if unmet is not None:
            record["unmet"] = True
            if decisive.outcome != "failed":
                decisive.outcome = "failed"
                decisive.longrepr = unmet
                vars(decisive).pop("wasxfail", None)
            else:
                decisive.sections.append(("fixes", unmet))
        return reports

    def _record(self, there: Half) -> dict[str, Any]:
        """The other side of a cell as run.jsonl documents it."""
        kept = ("outcome", "seconds", "observations", "reference_seconds")
        record = {key: there.result[key] for key in kept if key in there.result}
        if not there.passed:
            message = str(there.result.get("message", there.text))
            record.update(
                how=there.how,
                text=self._control.shorten(there.text),
                message=self._control.shorten(message),
            )
        return record

    def _unmet(
        self, item: pytest.Item, cell: Cell, conclusion: str, fixes: str | None
    ) -> str | None:
        """With the last cell of a case that must be caught and was on no topology: why it fails."""
        case = case_id(item, cell)
        came_to = self._came_to.setdefault(case, [])
        came_to.append((cell.label, conclusion))
        self._to_come[case] -= 1
        if fixes is None or self._to_come[case] > 0:
            return None
        if any(known == CAUGHT for _, known in came_to):
            return None
        ends = "\n".join(f"  {topology}: {known}" for topology, known in came_to)
        if any(known == VACUOUS for _, known in came_to):
            advice = (
                "it passes there as it does here: observe what the change mends, or run it on a "
                "topology that shows it"
            )
        else:
            advice = (
                "only a verdict, an assertion of the case or an exception named by fixes_raises "
                "is a catch: write the case so that REV's code can run it"
            )
        return (
            f"not caught: {case} says fixes={fixes!r}, so it must fail at "
            f"{self._control.label} by a verdict, and it does on no topology of this run\n{ends}\n"
            f"{advice}"
        )

    def _stop(self, item: pytest.Item, cell: Cell, text: str) -> list[pytest.TestReport]:
        """The wrong code was under test: nothing that follows would prove anything."""
        item.session.shouldfail = text.splitlines()[0]
        report = simple_report(item, when="call", outcome="failed", longrepr=text)
        result = {
            "case": case_id(item, cell),
            "topology": cell.label,
            "outcome": "not started",
            "dtype": self._settings.dtype,
            "seconds": 0.0,
            "observations": [],
            "root": None,
            "ranks": [],
            "message": text,
            "reproduce": "",
            "against": {"conclusion": WRONG_CODE},
        }
        setattr(report, PAYLOAD, result)
        return [report]

    # Hooks ------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """With -v, a passed cell shows what it came to."""
        against = getattr(report, PAYLOAD, {}).get("against")
        if against is None or report.outcome != "passed" or hasattr(report, "wasxfail"):
            return None
        word = str(against["conclusion"])
        return "passed", "." if word == CAUGHT else word[0], word.upper()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End the ranks of both sides; fail a control that never had REV's code under test."""
        self._there._pool.close(gently=True)  # what REV's fixtures say as they end concerns nobody
        super().pytest_sessionfinish()
        if self._ran_there and not self._there_side.modules:
            names = ", ".join(name for name, _ in self._names()) or "none that can be imported"
            self._control.problem = (
                f"wrong code under test: no rank imported a module of the subject ({names}), so "
                "nothing of REV was under test; correct shardproof_subject, or select cases that "
                "use it"
            )
            self._session.testsfailed += 1
            self._session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _names(self) -> tuple[tuple[str, str], ...]:
        subject = self._there_side.subject
        return subject.names if subject is not None else ()

    def pytest_keyboard_interrupt(self) -> None:
        """Ctrl-C: end the ranks of both sides at once."""
        self._there._pool.close(gently=False)
        super().pytest_keyboard_interrupt()

    def pytest_unconfigure(self) -> None:
        """Nothing survives, however the session ended."""
        try:
            self._there._pool.close(gently=False)
            super().pytest_unconfigure()
        finally:
            self._control.close()
