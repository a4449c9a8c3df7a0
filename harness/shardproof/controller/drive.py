"""One run of one item on one fleet: messages in, messages out, and an end that always comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardproof.controller.traces import RankTrace
from shardproof.controller.watch import INTERVAL, Watch, difference_at_end, read_all
from shardproof.fleet import Event, Exited, Fleet, Message, wait
from shardproof.ledger.compare import Difference
from shardproof.ledger.page import Ledger
from shardproof.rank.work import Run, to_message
from shardproof.verdict import merge

# How long the other ranks may go on once one has failed, before they are ended where they are.
# Peers of a rank that raised wait in a collective that never ends; those that raise as well need
# a moment under load.
GRACE = 1.5


class Drive:
    """A run in progress. ``finished`` turns true within the limit, whatever the ranks do."""

    def __init__(self, fleet: Fleet, run: Run, *, limit: float, reproduce: str) -> None:
        self.fleet = fleet
        self.run = run
        self.traces = [RankTrace(rank) for rank in range(fleet.size)]
        self.verdicts: list[dict[str, Any]] | None = None
        self.difference: Difference | None = None
        self.ledgers: list[Ledger] = []
        self.hung = False
        self.killed = False
        self.finished = False
        self.started = time.monotonic()
        self.seconds = 0.0
        self._limit = limit
        self._deadline = self.started + limit
        self._trouble_at: float | None = None
        self._reproduce = reproduce
        self._judging = False
        self._abandoned = False
        self._watch = Watch(Path(run.cell_dir), fleet.size) if run.ledger else None
        self._look_at = self.started + INTERVAL
        fleet.mark()
        fleet.send(None, to_message("run", run))

    @property
    def next_deadline(self) -> float:
        """Monotonic time at which :meth:`tick` has something to do."""
        ends = self._ends_at
        return min(ends, self._look_at) if self._watched else ends

    @property
    def _ends_at(self) -> float:
        """When the run is ended by force as things stand."""
        if self._trouble_at is None or not self._stranded():
            return self._deadline
        return min(self._deadline, self._trouble_at + GRACE)

    @property
    def _watched(self) -> bool:
        """Whether the ledgers can tell more than the ranks themselves."""
        return self._watch is not None and self._trouble_at is None and self.fleet.size > 1

    def _stranded(self) -> bool:
        """Whether a rank may be waiting for one that failed, and so for ever."""
        return any(
            trace.exit_text is not None or not (trace.body_over or trace.sealed is not None)
            for trace in self.traces
        )

    def handle(self, event: Event) -> None:
        """Take one message or exit."""
        trace = self.traces[event.rank]
        match event:
            case Message():
                self._take(trace, event.payload, event.at)
            case Exited():
                trace.exit_text = str(event).removeprefix(f"rank {event.rank} ")
                trace.exited_at = event.at
                self._trouble(event.at)
        self._advance()

    def tick(self) -> None:
        """End the run when its limit, or the grace after a first failure, is over.

        Also when the ledgers show that no rank can go on.
        """
        if self.finished:
            return
        now = time.monotonic()
        if now >= self._ends_at:
            self.hung = self._trouble_at is None or now >= self._deadline
            self._end_by_force()
        elif self._watch is not None and self._watched and now >= self._look_at:
            over = {trace.rank for trace in self.traces if self._part_over(trace)}
            self.difference = self._watch.look(over, lambda: self.fleet.stacks(1.0))
            self._look_at = time.monotonic() + INTERVAL
            if self.difference is not None:
                self._end_by_force()

    def _part_over(self, trace: RankTrace) -> bool:
        """Whether a rank has nothing more to say to the others, or waits for all of them."""
        waits_for_verdict = trace.sealed is not None and self.verdicts is None
        return trace.over or (waits_for_verdict and not self._abandoned)

    def _take(self, trace: RankTrace, payload: dict[str, Any], at: float) -> None:
        match payload["type"]:
            case "phase":
                trace.phase = payload["when"]
                trace.loaded = payload.get("loaded", trace.loaded)
            case "report":
                report = payload["report"]
                trace.reports[report["when"]] = report
                trace.reported_at[report["when"]] = at
                if report["when"] != "teardown" and report["outcome"] != "passed":
                    self._trouble(at)
            case "sealed":
                trace.sealed = payload["sealed"]
            case "judged":
                trace.judged = payload["part"]
            case "done":
                trace.done = payload
                trace.loaded = payload.get("loaded", trace.loaded)
                if "missing" in payload:
                    self._trouble(at)
            case other:
                raise RuntimeError(f"unknown message of type {other!r} from rank {trace.rank}")

    def _trouble(self, at: float) -> None:
        # After a failed verdict all ranks fail together and none waits for another.
        if self._trouble_at is None and self.verdicts is None:
            self._trouble_at = at

    def _advance(self) -> None:
        if all(trace.over for trace in self.traces):
            self._finish()
        elif self.run.role != "candidate" or self._abandoned or self.verdicts is not None:
            return
        elif not self.run.compared:
            if all(trace.sealed is not None or trace.body_over for trace in self.traces):
                self._abandon()
        elif all(trace.judged is not None for trace in self.traces):
            self.verdicts = merge([trace.judged or [] for trace in self.traces])
            self._tell({"do": "verdicts", "verdicts": self.verdicts, "reproduce": self._reproduce})
        elif all(trace.sealed is not None for trace in self.traces) and not self._judging:
            self._judging = True
            self._tell({"do": "judge", "sealed": [trace.sealed for trace in self.traces]})
        elif all(trace.sealed is not None or trace.body_over for trace in self.traces) and any(
            trace.body_over and trace.sealed is None for trace in self.traces
        ):
            # Some ranks failed or skipped.
            self._abandon()

    def _abandon(self) -> None:
        """Ranks whose body ended well end their case without a verdict."""
        self._abandoned = True
        self._tell({"do": "abandon"})

    def _tell(self, message: dict[str, Any]) -> None:
        for trace in self.traces:
            if trace.sealed is not None and not trace.over:
                self.fleet.send(trace.rank, message)

    def _end_by_force(self) -> None:
        stacks = self.fleet.stacks()
        for trace in self.traces:
            if not trace.over:
                trace.stack = stacks.get(trace.rank)
        self._finish(kill=True)

    def _finish(self, *, kill: bool = False) -> None:
        if kill:
            self.fleet.kill()
            self.killed = True
        if self.run.ledger:
            if any(trace.done is None for trace in self.traces):
                self.ledgers = read_all(Path(self.run.cell_dir), self.fleet.size)
            self.difference = self.difference or difference_at_end(self)
        for trace in self.traces:
            output = self.fleet.output(trace.rank)
            trace.stdout, trace.stderr = output.stdout, output.stderr
        self.seconds = time.monotonic() - self.started
        self.finished = True


def drive_all(
    starts: Sequence[Callable[[], Drive]], *, width: int, ended: Callable[[Drive], None]
) -> None:
    """Run several drives, at most ``width`` at a time, each on a fleet of its own.

    ``starts`` make a drive when called; they are called in order as places become free.
    ``ended`` is told of each drive as it ends.
    """
    waiting = list(starts)
    running: list[Drive] = []
    while waiting or running:
        while waiting and len(running) < width:
            running.append(waiting.pop(0)())
        pump(running)
        for drive in [drive for drive in running if drive.finished]:
            running.remove(drive)
            ended(drive)


def pump(running: Sequence[Drive]) -> None:
    """Wait for news of any of ``running``, or for the nearest deadline, and handle it."""
    nearest = min(drive.next_deadline for drive in running)
    by_fleet = {drive.fleet: drive for drive in running}
    for fleet, event in wait(list(by_fleet), max(0.0, nearest - time.monotonic())):
        by_fleet[fleet].handle(event)
    for drive in running:
        drive.tick()


def run_to_end(drive: Drive) -> Drive:
    """Drive one run alone until it is finished."""
    while not drive.finished:
        pump([drive])
    return drive
