"""The reference of a case and its noise floor: made once, used by every topology."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardproof.controller.drive import Drive, drive_all, run_to_end
from shardproof.controller.fleets import FleetPool, StartError
from shardproof.controller.outcome import ending_of
from shardproof.controller.reports import failing_text
from shardproof.controller.traces import raised_of, skip_reason
from shardproof.fleet import Exited, Fleet, Message
from shardproof.rank.work import Run
from shardproof.verdict import reference_needs


@dataclass
class Reference:
    """What came of a case's reference: files, or why there are none.

    ``problem`` is (outcome, text); ``skip`` a reason to skip every topology, ``xfail`` one to
    expect its failure (``pytest.xfail`` in the body). ``raised`` describes the exception behind a
    problem, where a control asks for it. ``fallen`` are the places where a float64 reference fell
    to a lower precision. ``rest`` is what is left to do before candidates can be judged.
    """

    directory: Path
    case_dir: Path
    problem: tuple[str, str] | None = None
    skip: str | None = None
    xfail: str | None = None
    raised: Mapping[str, Any] | None = None
    fallen: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    rest: Callable[[], None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether candidates can be judged by it, as far as that will ever be."""
        return self.rest is None

    def finish(self) -> None:
        """Repeat it and run it under noise, where that is still to be done."""
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()

    @property
    def _before(self) -> Path:
        return self.case_dir.with_name(f"{self.case_dir.name}-before")

    def keep_files(self) -> None:
        """Keep a copy of the case's files as the next cell finds them."""
        shutil.rmtree(self._before, ignore_errors=True)
        shutil.copytree(self.case_dir, self._before, symlinks=True)

    def kept_files(self, directory: Path) -> Path:
        """Put the files that were kept into an empty directory, and return it."""
        shutil.copytree(self._before, directory, dirs_exist_ok=True, symlinks=True)
        return directory

    def restore_files(self) -> None:
        """Let the case find the files that were kept."""
        shutil.rmtree(self.case_dir, ignore_errors=True)
        shutil.copytree(self._before, self.case_dir, symlinks=True)

    @property
    def files_of_noise(self) -> Path:
        """Where noise runs of later find the case's files as its first run left them."""
        return self.case_dir.with_name(f"{self.case_dir.name}-noise")

    def remove(self) -> None:
        """Remove all its files."""
        for path in (self.directory, self.case_dir, self._before, self.files_of_noise):
            shutil.rmtree(path, ignore_errors=True)


def make_reference(
    pool: FleetPool,
    item: pytest.Item,
    make_run: Callable[..., Run],
    *,
    limit: float,
    most: int | None = None,
    later: bool = False,
) -> Reference:
    """Run the reference, repeat it, run it under noise, and have the floors computed.

    ``most`` limits the noise runs: fewer make wider gates. With ``later`` all but the first run
    waits for :meth:`Reference.finish`.
    ``make_run(role=..., noise=..., tmp_path=..., rendezvous=..., reference_dir=..., cell_dir=...,
    case_dir=...)`` makes one run of the item.
    """
    reference = Reference(
        pool.directory(f"reference-{item.name}"), pool.directory(f"case-{item.name}")
    )

    files = reference.case_dir

    def start(label: str, role: str, noise: int) -> Drive:
        fleet = pool.get(label, 1)
        run = make_run(
            role=role,
            noise=noise,
            tmp_path=pool.tmp_path(item, f"-{role}"),
            rendezvous=str(fleet.directory),
            reference_dir=str(reference.directory),
            cell_dir=str(reference.directory),  # one rank has nobody to share with
            case_dir=str(files),
        )
        return Drive(fleet, run, limit=limit, reproduce="")

    labels = [f"reference{number}" for number in range(_width())]

    def attempt(step: Callable[[], None]) -> None:
        try:
            step()
        except StartError as error:
            reference.problem = ("not started", str(error))
            reference.raised = error.raised

    attempt(lambda: _account(pool, reference, run_to_end(start(labels[0], "reference", 0))))
    if (reference.problem, reference.skip, reference.xfail) == (None, None, None):
        reference.rest = lambda: attempt(lambda: _floors(pool, reference, start, labels, most))
    if not later:
        reference.finish()
    elif not reference.is_finished:
        # Candidates write there before: a floor must not come of what they write.
        files = reference.files_of_noise
        shutil.copytree(reference.case_dir, files, symlinks=True)
    return reference


def _floors(
    pool: FleetPool,
    reference: Reference,
    start: Callable[..., Drive],
    labels: list[str],
    most: int | None,
) -> None:
    """Repeat the reference, run it under noise, and compute what errors are measured in."""

    def limited(runs: int) -> int:
        return runs if most is None else min(runs, most)

    wanted = limited(reference_needs(reference.directory))
    _run_all(pool, reference, start, labels, [("repeat", 0), *_noise(0, wanted)])
    while reference.problem is None:
        answer = _ask(
            pool.get(labels[0], 1),
            {"do": "finish_reference", "dir": str(reference.directory), "noise_runs": wanted},
        )
        if "error" in answer:
            reference.problem = ("reference failed", str(answer["error"]))
            return
        summary = answer["summary"]
        if summary["outcome"] != "passed":
            reference.problem = _what_failed(summary["failures"])
            return
        more = limited(summary["wanted"])
        if more <= wanted:
            return
        # So few runs would need a wide gate somewhere.
        _run_all(pool, reference, start, labels, _noise(wanted, more))
        wanted = more


def _noise(first: int, end: int) -> list[tuple[str, int]]:
    return [("noise", number) for number in range(first, end)]


def _run_all(
    pool: FleetPool,
    reference: Reference,
    start: Callable[..., Drive],
    labels: list[str],
    jobs: list[tuple[str, int]],
) -> None:
    free = list(labels)

    def begin(role: str, number: int) -> Callable[[], Drive]:
        return lambda: start(free.pop(0), role, number)

    def ended(drive: Drive) -> None:
        free.append(drive.fleet.label)
        _account(pool, reference, drive)

    drive_all([begin(role, number) for role, number in jobs], width=len(labels), ended=ended)


def _what_failed(failures: list[dict[str, str]]) -> tuple[str, str]:
    """Outcome and text: bad input of the case is told apart from a reference that misbehaves."""
    reasons = {failure["reason"] for failure in failures}
    outcome = "invalid" if reasons <= {"invalid", "nothing observed"} else "reference failed"
    return outcome, "\n".join(failure["message"] for failure in failures)


def _account(pool: FleetPool, reference: Reference, drive: Drive) -> None:
    """Take over what one run of the reference said; the first problem is kept."""
    reference.seconds += drive.seconds
    if pool.side is not None:
        pool.side.look(trace.loaded for trace in drive.traces)
    ending = ending_of(drive)
    trace = drive.traces[0]
    if drive.killed or trace.exit_text is not None:
        pool.drop(drive.fleet)
    what = {
        "reference": "the reference run",
        "repeat": "the second run of the reference",
        "noise": f"noise run {drive.run.noise} of the reference",
    }[drive.run.role]
    if reference.problem is not None:
        return
    if ending.outcome == "skipped":
        report = trace.skipped_body
        reference.skip = skip_reason(report) if report is not None else "skipped"
        return
    report = trace.failed_body
    if report is not None and "wasxfail" in report:
        reference.xfail = str(report["wasxfail"])
        return
    if ending.outcome != "passed":
        outcome = ending.outcome if ending.outcome == "not started" else "reference failed"
        text = ending.headline if outcome == "not started" else failing_text(trace)
        reference.problem = (outcome, f"{what} did not end well ({ending.outcome})\n{text}")
        reference.raised = raised_of(trace)
        return
    teardown = trace.reports.get("teardown")
    if teardown is not None and teardown["outcome"] == "failed":
        reference.problem = ("reference failed", f"{what}: teardown failed\n{failing_text(trace)}")
    if trace.done is not None:
        for fall in trace.done.get("fallen", []):
            if fall not in reference.fallen:
                reference.fallen.append(fall)


def _ask(fleet: Fleet, message: dict[str, Any]) -> dict[str, Any]:
    fleet.send(0, message)
    while True:
        for event in fleet.poll(None):
            match event:
                case Message() if event.payload.get("type") == "finished":
                    return event.payload
                case Exited():
                    return {"error": f"the reference process ended: {json.dumps(str(event))}"}


def _width() -> int:
    """How many reference processes run side by side: one a free core, at most four."""
    return max(1, min(len(os.sched_getaffinity(0)), 4))
