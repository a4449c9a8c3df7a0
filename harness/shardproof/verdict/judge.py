"""The owner's side: all ranks' records of one observation become one verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardproof.topology import Topology

from .candidate import comparable
from .evidence import of_numbers, of_replicas, of_shapes, part_of, places
from .pieces import CoverageError, Files, arrange, ensembles, free_axes, place_along
from .records import Measured, Outcome, Record, Verdict
from .reference import Store, describe, stored_shape
from .replicas import find_difference
from .results import Result, put_together


@dataclass
class Case:
    """One observation: its yardstick and what each rank says of it."""

    index: int
    name: str
    entry: Measured | None
    records: dict[int, list[Record]]
    held: dict[int, Record] = field(default_factory=dict)

    @property
    def first(self) -> Record:
        """The record that speaks for all, once the ranks are known to agree."""
        return next(iter(self.held.values()))


class Judge:
    """Gives verdicts from the sealed records of all ranks of a cell."""

    def __init__(
        self, store: Store, files: Files, topology: Topology, sealed: Sequence[Mapping[str, object]]
    ) -> None:
        self._store = store
        self._files = files
        self._topology = topology
        self._sealed = sealed

    def cases(self, *, owner: int) -> list[Case]:
        """The observations that ``owner`` judges: every n-th of n ranks.

        All are the reference's in its order, then those that it does not know.

        Raises:
            TypeError: ``sealed`` does not hold records.
        """
        found: dict[str, dict[int, list[Mapping[str, Any]]]] = {
            name: {} for name in self._store.measured
        }
        for rank, one in enumerate(self._sealed):
            records = one["records"]
            if not isinstance(records, list):
                raise TypeError(
                    f"expected the sealed records of rank {rank} to be a list, got {records!r}"
                )
            for content in records:
                found.setdefault(content["name"], {}).setdefault(rank, []).append(content)
        return [
            Case(
                index,
                name,
                self._store.measured.get(name),
                {rank: [Record.of(one) for one in listed] for rank, listed in contents.items()},
            )
            for index, (name, contents) in enumerate(found.items())
            if index % self._topology.world_size == owner
        ]

    def verdict(self, case: Case) -> Verdict:
        """The verdict on one observation."""
        verdict = Verdict(case.index, case.name, "passed")
        self._describe(verdict, case)
        for check in (
            self._invalid,
            self._known,
            self._agreement,
            self._presence,
            self._form,
            self._numbers,
            self._vacuous,
        ):
            if not check(verdict, case):
                break
        if "actual" in verdict.details:
            # Ranks may hold parts of different shapes: show that of the rank which is named.
            rank = verdict.details.get("rank")
            named = (case.held.get(rank) if isinstance(rank, int) else None) or case.first
            actual = describe(named.kind, named.dtype, named.shape)
            verdict.details = {**verdict.details, "actual": actual}
            part = part_of(named, verdict.shape)
            if part:
                verdict.details["part"] = part
        return verdict

    def _describe(self, verdict: Verdict, case: Case) -> None:
        entry = case.entry
        for records in case.records.values():
            verdict.source = verdict.source or records[0].source
            verdict.kind = verdict.kind or _kind(records[0])
        if entry is None:
            return
        verdict.source = verdict.source or entry.source
        stated = entry.exact or any(one[0].exact for one in case.records.values())
        exact = entry.kind in ("tensor", "scalar") and (stated or not entry.floating)
        verdict.value = "exact" if exact else entry.kind
        verdict.dtype, verdict.shape, verdict.numel = entry.dtype, entry.shape, entry.numel
        verdict.gate, verdict.row_gate = entry.gate, entry.row_gate
        verdict.floor, verdict.norm = entry.floor, entry.norm

    def _fail(self, verdict: Verdict, outcome: Outcome, message: str, *, rank: int = -1) -> bool:
        verdict.outcome, verdict.message = outcome, message
        if outcome not in ("vacuous", "replicas differ") and verdict.ratio == 0.0:
            # Nothing was measured: no ratio would be small enough.
            verdict.ratio = verdict.row_ratio = math.inf
        if rank >= 0:
            at = self._topology.coordinates(rank)
            sizes = self._topology.sizes
            verdict.details["rank"] = rank
            verdict.details["coordinates"] = {axis: at[axis] for axis in sizes if sizes[axis] > 1}
        return False

    def _at(self, ranks: Sequence[int]) -> str:
        return places(ranks, self._topology)

    # Each check fills in the verdict and says whether the next one has something to look at.

    def _invalid(self, verdict: Verdict, case: Case) -> bool:
        for rank, records in case.records.items():
            for record in records:
                if record.status == "invalid":
                    verdict.source = record.source
                    return self._fail(verdict, "invalid", record.problem, rank=rank)
        return True

    def _known(self, verdict: Verdict, case: Case) -> bool:
        case.held = {
            rank: records[0]
            for rank, records in sorted(case.records.items())
            if records[0].status != "elsewhere"
        }
        if case.entry is None:
            ranks = sorted(case.records)
            return self._fail(
                verdict,
                "extra",
                f"observed here (on {self._at(ranks)}) and not by the reference: expected the "
                "same names on every topology",
                rank=ranks[0],
            )
        if case.held:
            return True
        text = "observed by the reference and by no rank here"
        for records in case.records.values():
            text = f"observed only on ranks that on={records[0].on} leaves out"
        return self._fail(verdict, "missing", text)

    def _agreement(self, verdict: Verdict, case: Case) -> bool:
        def form(record: Record) -> dict[str, object]:
            held = record.status != "elsewhere"
            return {
                "on": record.on,
                **({"kind": record.kind, "dtype": record.dtype} if held else {}),
                **({"shard": record.shard, "partial": sorted(record.partial)} if held else {}),
                **({"rows": record.by_rows} if held else {}),
                "exact": record.exact,
                "zero": record.zero,
            }

        first_rank, first = next(iter(case.held.items()))
        for rank, records in case.records.items():
            mine, theirs = form(records[0]), form(first)
            for key in mine:
                if mine[key] != theirs[key]:
                    return self._fail(
                        verdict,
                        "ranks disagree",
                        f"{key} is {_word(theirs[key])} on {self._at([first_rank])} and "
                        f"{_word(mine[key])} on {self._at([rank])}: expected the same call on "
                        "every rank",
                        rank=rank,
                    )
        return True

    def _presence(self, verdict: Verdict, case: Case) -> bool:
        free = free_axes(case.first, self._topology)
        present = {place_along(rank, free, self._topology) for rank in case.held}
        lacking = [
            rank
            for rank in range(self._topology.world_size)
            if rank not in case.held
            and place_along(rank, free, self._topology) in present
            and all(
                self._topology.coordinates(rank)[axis] == at for axis, at in case.first.on.items()
            )
        ]
        if not lacking:
            return True
        return self._fail(
            verdict,
            "ranks disagree",
            f"observed on {self._at(list(case.held))} and not on {self._at(lacking)}: "
            "expected it on all ranks of every model axis; say on={axis: coordinate} where it "
            "exists on some alone",
            rank=lacking[0],
        )

    def _form(self, verdict: Verdict, case: Case) -> bool:
        entry = case.entry
        if entry is None:
            raise ValueError(f"{case.name} has no reference")
        expected = describe(entry.kind, entry.dtype, entry.shape)
        for rank, record in case.held.items():
            actual = describe(record.kind, record.dtype, record.shape)
            verdict.details = {"expected": expected, "actual": actual}
            if not comparable(record, entry):
                what = "dtype"
                if "none" in (record.kind, entry.kind) or "empty" in (record.kind, entry.kind):
                    what = "kind of value"
                note = ""
                if record.kind == "none" or entry.kind == "none":
                    note = "; None is not zero: a value is either computed or it is not"
                return self._fail(
                    verdict,
                    "diverged",
                    f"another {what}: expected {expected}, got {actual}{note}",
                    rank=rank,
                )
            if entry.kind in ("tensor", "scalar") and record.status == "bare":
                verdict.details["hints"] = of_shapes(case.held, entry.shape, self._topology)
                text = record.problem or (
                    f"another shape: expected {_expected_shape(record, expected)}, got {actual}"
                )
                return self._fail(verdict, "diverged", text, rank=rank)
        return True

    def _numbers(self, verdict: Verdict, case: Case) -> bool:
        entry = case.entry
        if entry is None or entry.kind in ("none", "empty"):
            return True
        full = stored_shape(entry)
        try:
            regions = arrange(case.held, full, self._topology)
            wholes = ensembles(regions, case.first, full, self._topology, self._files)
        except CoverageError as error:
            return self._fail(verdict, "coverage", str(error), rank=error.rank)
        results = [
            put_together(whole, case.held, entry, self._store, self._files) for whole in wholes
        ]
        worst = max(results, key=lambda result: result.severity)
        differences = (
            find_difference(region, case.held, self._files, rows=(full or (1,))[0])
            for region in regions
        )
        difference = next(filter(None, differences), None)
        if not self._judge(verdict, worst, entry):
            verdict.details |= of_numbers(worst, case.held, entry, self._topology, difference)
            return False
        if difference is None:
            return True
        verdict.details["hints"] = [of_replicas(difference, self._topology)]
        return self._fail(verdict, "replicas differ", difference.headline, rank=difference.other)

    def _judge(self, verdict: Verdict, result: Result, entry: Measured) -> bool:
        stats = result.stats
        exact = verdict.value == "exact"
        verdict.ratio, verdict.row_ratio = result.ratio, stats.row_ratio
        if exact:
            verdict.ratio = verdict.row_ratio = math.inf if stats.unequal else 0.0
        if stats.nan:
            verdict.ratio = verdict.row_ratio = math.inf
            message = f"{stats.nan} of {entry.numel} numbers are NaN"
        elif stats.infinite:
            message = (
                f"{stats.infinite} of {entry.numel} numbers are infinite where the reference is "
                "not, or the reverse"
            )
            verdict.ratio = math.inf
        elif exact and stats.unequal:
            message = f"{stats.unequal} of {entry.numel} differ, expected equality"
        elif not exact and result.ratio > entry.gate:
            message = f"ratio {result.ratio:.3g} is over the gate {entry.gate:.3g}"
        elif not exact and stats.row_ratio > entry.row_gate:
            message = (
                f"row {stats.worst_row}: ratio {stats.row_ratio:.3g} is over the gate "
                f"{entry.row_gate:.3g}"
            )
        else:
            return True
        return self._fail(verdict, "nan" if stats.nan else "diverged", message, rank=result.rank)

    def _vacuous(self, verdict: Verdict, case: Case) -> bool:
        if case.entry is None or not case.entry.vacuous:
            return True
        zero = case.entry.vacuous.startswith(("zeros", "anything"))
        return self._fail(
            verdict,
            "vacuous",
            f"the comparison would also accept {case.entry.vacuous}"
            + (
                "; make the case compute something, or say zero=True where this is what it means"
                if zero
                else f" (norm {case.entry.norm:.3g}, floor {case.entry.floor:.3g}); observe a "
                "better conditioned value, or in a higher precision"
            ),
        )


def _kind(record: Record) -> str:
    words = [
        word
        for word, given in (
            ("shard", record.shard),
            ("rows", record.by_rows),
            ("partial", record.partial),
            ("on", record.on),
        )
        if given
    ]
    return "+".join(words) or "replicated"


def _word(value: object) -> str:
    return "nothing" if value in ({}, [], "") else str(value)


def _expected_shape(record: Record, expected: str) -> str:
    if record.by_rows:
        return f"{record.positions} rows of {expected}"
    if record.shard:
        return f"a slice {dict(record.shard)} of {expected}"
    return expected
