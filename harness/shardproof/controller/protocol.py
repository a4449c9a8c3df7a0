"""pytest hooks of the controller: each parity item becomes a cell run by ranks."""

from __future__ import annotations

import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks

from shardproof.against.sides import Side
from shardproof.cells import (
    MARKER,
    Case,
    CaseError,
    CaseOptions,
    Cell,
    case_id,
    cell_of,
    describe,
    reference_key,
)
from shardproof.controller.drive import Drive, run_to_end
from shardproof.controller.fleets import FleetPool, StartError
from shardproof.controller.outcome import Ending, ending_of
from shardproof.controller.payload import CellReports, note_raised
from shardproof.controller.reference import Reference, make_reference
from shardproof.controller.reports import cell_reports, reproduce_line, simple_report
from shardproof.controller.traces import raised_of
from shardproof.mutants.campaign import Campaign, idle_in, limit_of
from shardproof.mutants.target import REHEARSED, Mutant
from shardproof.options import Settings
from shardproof.rank.groups import same_counts
from shardproof.rank.work import Run
from shardproof.results import describe_fall
from shardproof.topology import Topology
from shardproof.verdict import FEW_RUNS

_REFUSED = {
    "usepdb": "--pdb",
    "trace": "--trace",
    "setupplan": "--setup-plan",  # implies the next
    "setuponly": "--setup-only",
}
# Reference files that may stay in shared memory while other cases run (xdist, reordered tests).
_REFERENCES_KEPT = 4


class Controller:
    """Runs parity items on ranks; everything else is left to pytest."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        items: list[pytest.Item],
        *,
        side: Side | None = None,
    ) -> None:
        for option, name in _REFUSED.items():
            if getattr(config.option, option, False):
                raise pytest.UsageError(
                    f"{name} can't be used with parity cases yet: their code runs in rank "
                    "processes without a terminal; leave it out, or deselect parity cases with "
                    f"-m 'not {MARKER}'"
                )
        self._config = config
        self._settings = settings
        self._pool = FleetPool(config, settings, side)
        self._campaign: Campaign | None = None
        if settings.mutants is not None:
            subject = tuple(config.rootpath / path for path in settings.subject)
            self._campaign = Campaign(settings.mutants, config.rootpath, subject)
        self._write = CellReports(settings)
        # What mutants import beyond what untouched ranks have, in the order in which it came.
        self._imports: dict[str, None] = {}
        self._references: OrderedDict[str, Reference] = OrderedDict()
        self._unclean: set[int] = set()
        self._last: pytest.Item | None = None
        # Ctrl-C among the mutants of a cell: what is known of the cell is told first.
        self._interrupt: KeyboardInterrupt | None = None
        self._order = [item for item in items if cell_of(item)]
        self._at = {item.nodeid: number for number, item in enumerate(self._order)}
        self._pool.files = list(dict.fromkeys(str(item.path) for item in self._order))
        # Cells that each reference still serves, so that it can go after the last.
        self._left = Counter(map(reference_key, self._order))

    # Running ----------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run one cell in place of pytest's own protocol."""
        cell = cell_of(item)
        if cell is None:
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self.reports_of(item, cell, nextitem)
        teardown = self._own_teardown(item, nextitem)
        if teardown is not None:
            reports = [report for report in reports if report.when != "teardown"]
            reports.append(teardown)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._last = item
        if self._interrupt is not None:
            raise self._interrupt
        return True

    def _own_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> pytest.TestReport | None:
        """End fixtures that plain tests before this item left for the next one.

        Returns a report when one of them failed.
        """
        state: Any = item.session._setupstate
        call = pytest.CallInfo.from_call(
            lambda: state.teardown_exact(nextitem),
            when="teardown",
            reraise=(KeyboardInterrupt, pytest.exit.Exception),
        )
        if call.excinfo is None:
            return None
        report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
        return report

    def reports_of(
        self, item: pytest.Item, cell: Cell, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        """Run a cell; its reports by phase, of which one carries the result."""
        try:
            case = describe(item, cell)
        except CaseError as error:
            case = Case(case_id(item, cell), cell, CaseOptions())
            return [self._write.bad(item, case, "invalid", str(error))]
        skip = evaluate_skip_marks(item)
        xfail = evaluate_xfail_marks(item)
        if skip is not None:
            return [self._write.skipped(item, case, skip.reason)]
        if xfail is not None and not xfail.run and not item.config.option.runxfail:
            return [self._write.xfailed(item, case, f"[NOTRUN] {xfail.reason}")]
        topology = cell.topology
        if topology is None:
            return [self._write.bad(item, case, "invalid", str(cell.problem))]
        misfit = case.options.misfit(topology)
        if misfit is not None:
            return [
                self._write.bad(item, case, "invalid", f"{topology.name} does not fit: {misfit}")
            ]
        missing = case.options.missing()
        if missing is not None:
            return [self._write.skipped(item, case, missing)]
        if topology.world_size > self._settings.max_ranks:
            reason = (
                f"{topology.name} needs {topology.world_size} ranks, at most "
                f"{self._settings.max_ranks} are allowed (shardproof_max_ranks)"
            )
            return [self._write.skipped(item, case, reason)]
        try:
            return self._run_cell(item, case, topology, nextitem)
        except (StartError, OSError) as error:
            # OSError: a full device, or a case that removed the directories of others.
            raised = getattr(error, "raised", None)
            return [self._write.bad(item, case, "not started", str(error), raised)]
        finally:
            self._done_with(reference_key(item))

    def _run_cell(
        self,
        item: pytest.Item,
        case: Case,
        topology: Topology,
        nextitem: pytest.Item | None,
    ) -> list[pytest.TestReport]:
        limit = case.options.timeout or self._settings.timeout
        reference = self._reference(item, case, limit)
        unfit = self._unfit(item, case, reference)
        if unfit is not None:
            return [unfit]
        following = self._next(item, topology.world_size, nextitem)
        footer = reproduce_line(item, self._settings, topology.name)

        def run() -> tuple[Drive, Ending, list[pytest.TestReport]]:
            drive, ending, errors = self._run_ranks(
                item, case, topology, reference, following, limit=limit
            )
            reports = cell_reports(item, drive, ending, footer)
            if ending.outcome == "not started":
                note_raised(reports, raised_of(drive.traces[ending.root or 0]))
            if errors:
                reports = [report for report in reports if report.when != "teardown"]
                reports.append(_late_teardown(item, errors))
            return drive, ending, reports

        drive, ending, reports = run()
        campaign = self._campaign
        if campaign is not None and not drive.run.compared and _all_passed(reports):
            if not campaign.open_on(drive, case.case):
                more = {"mutants": [], "call_sites": campaign.newly_reached(drive)}
                return [self._write.not_compared(item, case, drive, more)]
            # Something can be tried here: now the clean run counts, and needs its floors.
            reference.finish()
            self._end_if_fresh()
            unfit = self._unfit(item, case, reference)
            if unfit is not None:
                return [unfit]
            reference.restore_files()
            drive, ending, reports = run()
        if drive.verdicts == [] and ending.outcome == "passed":
            return [self._write.bad(item, case, "invalid", _OBSERVES_NOTHING)]
        tried: dict[str, Any] = {}
        if campaign is not None and _all_passed(reports):
            tried = self._try_mutants(campaign, item, case, topology, reference, drive)
        self._write.attach(reports, case, ending, drive, reference, footer, tried)
        return reports

    def _unfit(
        self, item: pytest.Item, case: Case, reference: Reference
    ) -> pytest.TestReport | None:
        """What a cell comes to that has no reference to be compared with."""
        if reference.skip is not None:
            return self._write.skipped(item, case, f"the reference skipped: {reference.skip}")
        if reference.xfail is not None:
            return self._write.xfailed(item, case, reference.xfail)
        if reference.problem is None and reference.fallen and case.options.full_precision:
            places = "\n".join(describe_fall(fall) for fall in reference.fallen)
            reference.problem = (
                "reference failed",
                f"the case asks for full precision, but its reference fell below it:\n{places}",
            )
        if reference.problem is None:
            return None
        outcome, text = reference.problem
        return self._write.bad(item, case, outcome, text, reference.raised)

    def _try_mutants(
        self,
        campaign: Campaign,
        item: pytest.Item,
        case: Case,
        topology: Topology,
        reference: Reference,
        passed: Drive,
    ) -> dict[str, Any]:
        """Run mutants on a cell that has just passed; what came of each, and what it reached.

        Each on ranks as new: what a broken collective leaves in caches and fixtures would speak in
        the next run, and what is made once must be made again to be broken. On such ranks the case
        must pass by itself, or what is not the mutant's would be put down to it. That run tells
        too which mutants would change no bit, and need no run of their own.
        """
        limit = limit_of(passed.seconds)
        mutants = campaign.open_on(passed, case.case)
        records: list[dict[str, Any]] = []

        def attempt(
            mutant: Mutant | None, rehearsed: Sequence[Mutant] = ()
        ) -> tuple[Drive, Ending]:
            drive, ending, _ = self._run_ranks(
                item,
                case,
                topology,
                reference,
                None,
                limit=limit,
                mutant=mutant,
                rehearsed=rehearsed,
                apart=True,
            )
            ends = [trace.done or {} for trace in drive.traces]
            if any(end.get("used", True) for end in ends):
                self._pool.drop(drive.fleet)
            found = (name for end in ends for name in end.get("imported", ()))
            self._imports.update(dict.fromkeys(found))
            return drive, ending

        known = -1
        rehearsed = [mutant for mutant in mutants if mutant.kind in REHEARSED]
        idle: dict[Mutant, int] = {}
        try:
            while mutants and known < len(self._imports):
                # Once more with what it imports there beforehand, as its mutants will have it.
                known = len(self._imports)
                drive, ending = attempt(None, rehearsed)
                idle = idle_in(rehearsed, drive)
                if ending.outcome != "passed":
                    why = "the case fails on untouched ranks without a mutant: "
                    why += f"{ending.outcome} {ending.headline}".strip()
                    records += campaign.give_up(mutants, case.case, topology.name, why)
                    mutants = []
            for mutant in mutants:
                place = mutant, case.case, topology.name
                if mutant in idle:
                    records.append(campaign.pass_over(*place, calls=idle[mutant]))
                else:
                    records.append(campaign.take(*place, *attempt(mutant)))
        except StartError as error:
            left = mutants[len(records) :]
            records += campaign.give_up(left, case.case, topology.name, str(error))
        except KeyboardInterrupt as interrupt:
            self._interrupt = interrupt
        return {"mutants": records, "call_sites": campaign.newly_reached(passed)}

    def _run_ranks(
        self,
        item: pytest.Item,
        case: Case,
        topology: Topology,
        reference: Reference,
        following: str | None,
        *,
        limit: float,
        mutant: Mutant | None = None,
        rehearsed: Sequence[Mutant] = (),
        apart: bool = False,
    ) -> tuple[Drive, Ending, list[str]]:
        """Run the cell on ranks once; also what fixtures of ended ranks said.

        With ``apart`` the ranks are as new, and so are the files of the case.
        """
        size = topology.world_size
        cell_dir = self._pool.directory("cell")
        fleet = self._pool.get(f"untouched{size}" if apart else f"ranks{size}", size)
        case_dir = reference.case_dir
        if apart:
            case_dir = reference.kept_files(self._pool.directory("case"))
        elif self._campaign is not None:
            reference.keep_files()
        new_groups = not self._settings.keep_groups or size in self._unclean
        run = Run(
            nodeid=item.nodeid,
            next_nodeid=following,
            topology=topology.name,
            role="candidate",
            noise=0,
            reference_dir=str(reference.directory),
            cell_dir=str(cell_dir),
            case_dir=str(case_dir),
            tmp_path=self._pool.tmp_path(item),
            rendezvous=str(cell_dir if apart else fleet.directory),
            dtype=case.options.dtype or self._settings.dtype,
            seed=case.cell.seed,
            megatron=case.options.megatron,
            new_groups=new_groups,
            ledger=self._settings.ledger,
            callers=self._campaign is not None,
            mutant=None if mutant is None else mutant.message(),
            rehearsed=[one.message() for one in rehearsed],
            apart=apart,
            imports=tuple(self._imports) if apart else (),
            compared=reference.is_finished,
        )
        footer = reproduce_line(item, self._settings, topology.name)
        drive = run_to_end(Drive(fleet, run, limit=limit, reproduce=footer))
        if self._pool.side is not None:
            self._pool.side.look(trace.loaded for trace in drive.traces)
        ending = ending_of(drive)
        errors = [] if apart else self._after(drive, size)
        shutil.rmtree(cell_dir, ignore_errors=True)
        if apart:
            shutil.rmtree(case_dir, ignore_errors=True)
        return drive, ending, errors

    def _after(self, drive: Drive, size: int) -> list[str]:
        """Keep the ranks and their groups only while they are as good as new.

        Returns what fixtures of higher scope said when ranks were ended (``--parity-fresh``).
        """
        self._unclean.discard(size)
        if drive.killed or any(trace.exit_text is not None for trace in drive.traces):
            self._pool.drop(drive.fleet)
            return []
        states = [(trace.done or {}).get("groups") for trace in drive.traces]
        same = all(states) and same_counts([state for state in states if state])
        # Ranks that called different things may leave as many operations behind on each of them.
        if drive.difference is not None or not same:
            self._unclean.add(size)
        return self._pool.retire(drive.fleet) if self._settings.fresh else []

    def _reference(self, item: pytest.Item, case: Case, limit: float) -> Reference:
        key = reference_key(item)
        if key in self._references:
            self._references.move_to_end(key)
            return self._references[key]

        def make_run(**paths: Any) -> Run:
            return Run(
                nodeid=item.nodeid,
                # It runs several times in a row; fixtures of higher scope end when another
                # item needs others.
                next_nodeid=item.nodeid,
                topology="single",
                dtype=case.options.dtype or self._settings.dtype,
                seed=case.cell.seed,
                megatron=case.options.megatron,
                new_groups=False,
                ledger=False,
                **paths,
            )

        # Mutants are far from every gate, also from the wide ones of few noise runs.
        most = None if self._campaign is None else FEW_RUNS
        reference = make_reference(
            self._pool, item, make_run, limit=limit, most=most, later=self._campaign is not None
        )
        self._end_if_fresh()
        self._references[key] = reference
        while len(self._references) > _REFERENCES_KEPT:
            _, oldest = self._references.popitem(last=False)
            oldest.remove()
        return reference

    def _end_if_fresh(self) -> None:
        """References end as their ranks do."""
        if self._settings.fresh:
            self._pool.end_references()

    def pass_over(self, item: pytest.Item) -> None:
        """Say that a cell will not be run."""
        self._done_with(reference_key(item))

    def _done_with(self, key: str) -> None:
        """Free a reference after its last cell."""
        self._left[key] -= 1
        if self._left[key] <= 0 and key in self._references:
            self._references.pop(key).remove()

    def _next(self, item: pytest.Item, size: int, nextitem: pytest.Item | None) -> str | None:
        """The item that ranks of this size run next, so that higher-scoped fixtures end in time."""

        def same_size(other: pytest.Item) -> bool:
            topology = self._cell(other).topology
            return topology is not None and topology.world_size == size

        return self._following(item, nextitem, same_size)

    def _following(
        self,
        item: pytest.Item,
        nextitem: pytest.Item | None,
        wanted: Callable[[pytest.Item], bool],
    ) -> str | None:
        if nextitem is None:
            return None
        start = self._at.get(nextitem.nodeid, self._at[item.nodeid] + 1)
        for other in self._order[start:]:
            if wanted(other):
                return other.nodeid
        return None

    @staticmethod
    def _cell(item: pytest.Item) -> Cell:
        cell = cell_of(item)
        if cell is None:
            raise RuntimeError(f"{item.nodeid} is no parity case")
        return cell

    # The end ----------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Tear down what ranks still hold; what fails there is an error of the last cell."""
        errors = self._pool.close(gently=True)
        if errors and self._last is not None:
            report = _late_teardown(self._last, errors)
            self._last.ihook.pytest_runtest_logreport(report=report)

    def pytest_keyboard_interrupt(self) -> None:
        """Ctrl-C: end the ranks at once; nobody waits for their fixtures."""
        self._pool.close(gently=False)

    def pytest_unconfigure(self) -> None:
        """Nothing survives, however the session ended."""
        self._pool.close(gently=False)


_OBSERVES_NOTHING = (
    "the case observed nothing, so nothing was compared; call rank.observe(name, value) or "
    "rank.observe_gradients(...) on the reference and on every rank"
)


def _all_passed(reports: Sequence[pytest.TestReport]) -> bool:
    return all(report.passed for report in reports)


def _late_teardown(item: pytest.Item, errors: list[str]) -> pytest.TestReport:
    text = "fixtures of higher scope failed as the ranks ended\n" + "\n".join(errors)
    return simple_report(item, when="teardown", outcome="failed", longrepr=text)
