"""pytest reports of a cell, made from the reports of its ranks."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from shardproof.cells import cell_of
from shardproof.controller.drive import Drive
from shardproof.controller.outcome import Ending
from shardproof.controller.traces import RankTrace
from shardproof.fleet.stacks import shortened
from shardproof.options import DEFAULT_TIMEOUT, Settings

_PHASES = ("setup", "call", "teardown")


def reproduce_line(item: pytest.Item, settings: Settings, topology: str) -> str:
    """The one line that runs this cell again with the same dtype and seed, from where pytest ran.

    The node id is relative to the rootdir; when pytest was started elsewhere the path is made so.
    """
    path, sep, rest = item.nodeid.partition("::")
    cell = cell_of(item)
    seed = settings.seeds[0] if cell is None else cell.seed
    if cell is not None:
        rest = rest.replace(cell.id, cell.label, 1)  # alone it needs no name
    started = item.config.invocation_params.dir
    absolute = item.config.rootpath / path
    if started != item.config.rootpath and absolute.is_relative_to(started):
        path = str(absolute.relative_to(started))
    elif started != item.config.rootpath:
        path = str(absolute)
    words = ["pytest", f"{path}{sep}{rest}", "--topology", topology]
    if settings.dtype != "float64":
        words += ["--parity-dtype", settings.dtype]
    if seed != 0:
        words += ["--parity-seed", str(seed)]
    if not settings.ledger:
        words += ["--parity-ledger", "off"]
    if settings.against is not None:
        words += ["--against", settings.against]
    if settings.timeout != DEFAULT_TIMEOUT:
        words += ["--parity-timeout", f"{settings.timeout:g}"]
    return shlex.join(words)


def simple_report(
    item: pytest.Item, *, when: str, outcome: str, longrepr: Any = None, seconds: float = 0.0
) -> pytest.TestReport:
    """A report that no rank made."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=longrepr,
        when=when,  # type: ignore[arg-type]
        sections=[],
        duration=seconds,
        user_properties=item.user_properties,
    )


def skip_report(item: pytest.Item, reason: str) -> pytest.TestReport:
    """A skip before any rank started."""
    path, line, _ = item.location
    where = (str(item.config.rootpath / path), (line or 0) + 1, f"Skipped: {reason}")
    return simple_report(item, when="setup", outcome="skipped", longrepr=where)


def cell_reports(item: pytest.Item, drive: Drive, ending: Ending, footer: str) -> list[Any]:
    """Set-up, call and teardown reports of a finished drive, with the root's failure first."""
    phase = _failing_phase(drive, ending)
    reports: list[pytest.TestReport | None] = []
    for when in _PHASES:
        if when == phase:
            reports.append(_failure(item, drive, ending, when, footer))
        elif when == "teardown":
            reports.append(_teardown(item, drive))
        elif phase is None or _PHASES.index(when) < _PHASES.index(phase):
            reports.append(_merged(item, drive, when))
    return [report for report in reports if report is not None]


def _failing_phase(drive: Drive, ending: Ending) -> str | None:
    if ending.outcome in ("passed", "skipped"):
        skipped = drive.traces[0].skipped_body
        return str(skipped["when"]) if skipped is not None else None
    root = drive.traces[ending.root or 0]
    report = root.failed_body or root.skipped_body
    if report is not None:
        return str(report["when"])
    if ending.outcome == "mismatched collectives" and root.done is not None:
        return "call"  # found when all was over, most often of the body
    if root.phase in ("setup", "not started") and root.reports.get("setup") is None:
        return "setup"
    return "call" if root.phase != "teardown" or "call" not in root.reports else "teardown"


def _merged(item: pytest.Item, drive: Drive, when: str) -> pytest.TestReport | None:
    """The first rank's report, with the longest duration of all."""
    found = [trace.reports[when] for trace in drive.traces if when in trace.reports]
    if not found:
        return simple_report(item, when=when, outcome="passed")
    report = _from_rank(item, found[0])
    report.duration = max(float(other["duration"]) for other in found)
    _add_output(report, drive)
    return report


def _failure(
    item: pytest.Item, drive: Drive, ending: Ending, when: str, footer: str
) -> pytest.TestReport:
    root = drive.traces[ending.root or 0]
    data = root.reports.get(when)
    split = ending.outcome == "ranks disagree" and drive.verdicts is None
    if ending.outcome == "mismatched collectives":
        report = _mismatch(item, drive, ending, when, footer)
    elif data is not None and data["outcome"] != "passed" and not split:
        report = _from_rank(item, data)
        if report.outcome == "failed" and drive.verdicts is None:
            report.longrepr = _annotated(report.longrepr, _summary(drive, ending, footer))
        elif report.outcome == "failed":
            # Every rank raised the same verdict: what the case is about says more than their list.
            report.longrepr = _purpose(item) + str(report.longrepr)
    else:
        text = f"{ending.outcome}: {ending.headline}\n\n{_summary(drive, ending, footer)}"
        report = simple_report(item, when=when, outcome="failed", longrepr=text)
        report.duration = drive.seconds
    _add_output(report, drive)
    return report


def _mismatch(
    item: pytest.Item, drive: Drive, ending: Ending, when: str, footer: str
) -> pytest.TestReport:
    """What ranks called comes first; what they raised or computed is its consequence."""
    text = f"{ending.outcome}: {ending.headline}\n\n{_summary(drive, ending, footer)}"
    failed = [trace for trace in drive.traces if trace.failed_body is not None]
    if failed:
        text += f"\n\nrank {failed[0].rank} then failed:\n{failing_text(failed[0])}"
    report = simple_report(item, when=when, outcome="failed", longrepr=text)
    report.duration = drive.seconds
    return report


def _purpose(item: pytest.Item) -> str:
    """The first line of the case's docstring, with what it is called."""
    doc = inspect.getdoc(getattr(item, "obj", None))
    line = doc.strip().splitlines()[0] if doc else ""
    return f"{item.name}: {line}\n" if line else ""


def _teardown(item: pytest.Item, drive: Drive) -> pytest.TestReport | None:
    failed = [
        (trace, trace.reports["teardown"])
        for trace in drive.traces
        if "teardown" in trace.reports and trace.reports["teardown"]["outcome"] == "failed"
    ]
    if not failed:
        return _merged(item, drive, "teardown")
    trace, data = failed[0]
    report = _from_rank(item, data)
    others = ", ".join(str(other.rank) for other, _ in failed[1:])
    text = f"teardown failed on rank {trace.rank}" + (f", also on {others}" if others else "")
    report.longrepr = _annotated(report.longrepr, text)
    _add_output(report, drive)
    return report


def _from_rank(item: pytest.Item, data: Mapping[str, Any]) -> pytest.TestReport:
    report = item.config.hook.pytest_report_from_serializable(config=item.config, data=dict(data))
    if not isinstance(report, pytest.TestReport):
        raise TypeError(f"{item.nodeid}: a rank sent no test report but {type(report).__name__}")
    if isinstance(report.longrepr, list):
        report.longrepr = tuple(report.longrepr)
    report.nodeid = item.nodeid
    report.user_properties = [tuple(pair) for pair in report.user_properties]  # type: ignore[misc]
    return report


def _annotated(longrepr: Any, text: str) -> Any:
    """A failure with the ranks' ends below it, in a form that survives serialisation."""
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("ranks", text)
        return longrepr
    return f"{longrepr}\n\n{text}"


def _summary(drive: Drive, ending: Ending, footer: str) -> str:
    lines = [f"outcome: {ending.outcome}"]
    if ending.root is not None and ending.headline:
        lines.append(f"root: rank {ending.root}; {ending.headline.splitlines()[0]}")
    lines += ending.ranks
    lines += ending.details
    for trace in drive.traces:
        if trace.stack is not None:
            lines += [f"stack of rank {trace.rank}:", shortened(trace.stack).rstrip()]
    lines.append(f"reproduce: {footer}")
    return "\n".join(lines)


def _add_output(report: pytest.TestReport, drive: Drive) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    for trace in drive.traces:
        for stream, text in _written(trace):
            report.sections.append((f"Captured {stream} rank {trace.rank}", text))


def failing_text(trace: RankTrace) -> str:
    """Everything that a failed rank said, for runs whose reports are not shown (the reference)."""
    report = trace.failed_body
    parts = [_longrepr_text(report)] if report is not None else [trace.describe()]
    if trace.stack:
        parts.append(f"stack:\n{shortened(trace.stack).rstrip()}")
    parts += [f"captured {stream}:\n{text.rstrip()}" for stream, text in _written(trace)]
    return "\n".join(parts)


def _written(trace: RankTrace) -> list[tuple[str, str]]:
    """The streams that a rank wrote to, with what to show of each."""
    streams = (("stdout", trace.stdout), ("stderr", shortened(trace.stderr)))
    return [(stream, text) for stream, text in streams if text.strip()]


def _longrepr_text(report: Mapping[str, Any]) -> str:
    longrepr = report.get("longrepr")
    if not isinstance(longrepr, Mapping):
        return str(longrepr)
    rebuilt = pytest.TestReport._from_json(dict(report))
    return rebuilt.longreprtext
