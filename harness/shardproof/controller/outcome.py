"""From the traces of all ranks to one outcome, its root and the words for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from shardproof.controller.drive import Drive
from shardproof.controller.traces import RankTrace
from shardproof.ledger.words import columns, describe_rank, headline, tails
from shardproof.mutants.campaign import LIMIT_LEAST, LIMIT_TIMES
from shardproof.rank.work import Run
from shardproof.verdict import failed
from shardproof.verdict import outcome as verdict_outcome

# What a rank says when a peer's process is gone: the consequence of a crash, never its cause.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|peer closed",
    re.IGNORECASE,
)
_IN_COLLECTIVE = re.compile(r"torch/distributed/|torch/_ops\.py.*c10d")


@dataclass(frozen=True)
class Ending:
    """How a run ended: the outcome's name, the rank it is put down to, and a headline.

    ``details`` are lines for the message beside what each rank says.
    """

    outcome: str
    root: int | None = None
    headline: str = ""
    ranks: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)


def ending_of(drive: Drive) -> Ending:
    """The one outcome of a finished drive."""
    traces = drive.traces
    lines = [f"rank {trace.rank}: {_describe(drive, trace)}" for trace in traces]
    details = tails([ledger for ledger in drive.ledgers if not traces[ledger.rank].over])

    def end(outcome: str, root: RankTrace, headline: str) -> Ending:
        return Ending(outcome, root.rank, headline, lines, details)

    crashed = [trace for trace in traces if trace.exit_text is not None]
    trouble = sorted(
        (trace for trace in traces if _trouble_at(trace) is not None),
        key=lambda trace: _trouble_at(trace) or 0.0,
    )
    missing = [trace for trace in traces if trace.done is not None and "missing" in trace.done]
    if missing:
        return end("not started", missing[0], str(missing[0].done and missing[0].done["missing"]))
    difference = drive.difference
    if difference is not None:
        text = headline(difference)
        side_by_side = columns(difference)
        return Ending("mismatched collectives", difference.odd, text, lines, side_by_side + details)
    if crashed:
        first = min(crashed, key=lambda trace: trace.exited_at or 0.0)
        causes = [trace for trace in trouble if not _lost_peer(trace)]
        root = causes[0] if causes else first
        if root.exit_text is not None:
            return end("crashed", root, f"rank {root.rank} {root.exit_text} in {root.phase}")
        return end("raised", root, f"rank {root.rank} raised first")
    if trouble:
        return _disagreement_or_raise(drive, trouble, end)
    if drive.hung:
        root = _slowest(traces)
        return end(
            "hung",
            root,
            f"rank {root.rank} did not end within {drive.seconds:.1f} s{_limited_by(drive.run)}",
        )
    if drive.verdicts is not None and failed(drive.verdicts):
        return Ending(verdict_outcome(drive.verdicts), _verdict_root(drive), "", lines)
    return Ending("passed", None, "", lines)


def _limited_by(run: Run) -> str:
    """Where the limit of a run comes from."""
    if not run.apart:
        return " (--parity-timeout)"
    what = "on untouched ranks without a mutant" if run.mutant is None else "with the mutant"
    return (
        f" {what}; expected at most {LIMIT_TIMES:g} times what the cell took before, and "
        f"{LIMIT_LEAST:g} s"
    )


def _describe(drive: Drive, trace: RankTrace) -> str:
    """How a rank ended, and where it waits if it did not."""
    text = trace.describe()
    ledger = next((led for led in drive.ledgers if led.rank == trace.rank), None)
    if ledger is None or trace.over or trace.sealed is not None:
        return text
    doing = describe_rank(ledger)
    return f"{text}, {doing}" if doing else text


def _disagreement_or_raise(
    drive: Drive, trouble: list[RankTrace], end: Callable[[str, RankTrace, str], Ending]
) -> Ending:
    root = trouble[0]
    skipped = [trace for trace in drive.traces if trace.skipped_body is not None]
    if root.skipped_body is None:
        expected = root.failed_body is not None and "wasxfail" in root.failed_body
        if expected and any(trace.sealed is not None for trace in drive.traces):
            return end(
                "ranks disagree",
                root,
                f"rank {root.rank} failed as expected (xfail), another passed; they must agree",
            )
        return end("raised", root, f"rank {root.rank} raised first")
    if len(skipped) == len(drive.traces):
        return Ending("skipped", None, "", [])
    names = ", ".join(str(trace.rank) for trace in skipped)
    others = ", ".join(str(t.rank) for t in drive.traces if t.skipped_body is None)
    return end(
        "ranks disagree",
        root,
        f"rank {names} skipped, rank {others} went on; a skip must be the same on all ranks",
    )


def _trouble_at(trace: RankTrace) -> float | None:
    """When a rank first went its own way: raised, skipped or ended."""
    for phase in ("setup", "call"):
        report = trace.reports.get(phase)
        if report is not None and report["outcome"] != "passed" and not _is_verdict(trace):
            return trace.reported_at[phase]
    return trace.exited_at


def _is_verdict(trace: RankTrace) -> bool:
    return trace.judged is not None


def _lost_peer(trace: RankTrace) -> bool:
    """Whether this rank only tells that another one's process is gone."""
    report = trace.failed_body
    return (
        trace.exit_text is None
        and report is not None
        and bool(_LOST_PEER.search(str(report.get("longrepr"))))
    )


def _slowest(traces: list[RankTrace]) -> RankTrace:
    """The rank that the others wait for: one that is outside a collective, if there is one."""
    unfinished = [trace for trace in traces if not trace.over]
    busy = [
        trace
        for trace in unfinished
        if trace.sealed is None and not _IN_COLLECTIVE.search(trace.stack or "")
    ]
    # A rank that waits for the verdict has done its part: it is another one that is missing.
    inside = [trace for trace in unfinished if trace.sealed is None]
    return (busy or inside or unfinished or traces)[0]


def _verdict_root(drive: Drive) -> int | None:
    for verdict in drive.verdicts or []:
        details = verdict.get("details")
        if verdict["outcome"] != "passed" and isinstance(details, dict) and "rank" in details:
            return int(details["rank"])
    return None
