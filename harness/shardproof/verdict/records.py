"""What ranks tell each other about an observation: plain data that survives JSON.

Numbers that JSON lacks (infinity, NaN) travel as text, which ``float`` reads back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

Status = Literal["compared", "deferred", "bare", "elsewhere", "invalid"]
"""compared: against the reference, on the rank. deferred: its numbers lie in the rank's file, for
the owner to put together. bare: described only (no reference, another shape or dtype, None).
elsewhere: ``on`` excludes this rank."""

Outcome = Literal[
    "passed",
    "diverged",
    "nan",
    "replicas differ",
    "missing",
    "extra",
    "coverage",
    "ranks disagree",
    "invalid",
    "vacuous",
]


def plain(value: object) -> Any:
    """``value`` with dataclasses as dicts and non-finite floats as text: ready for JSON."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return {key: plain(item) for key, item in vars(value).items()}


@dataclasses.dataclass
class Sample:
    """A stretch of one row, at the worst element.

    ``row`` and ``column`` count in the whole value (``column`` in the flattened rest of the row, of
    the rank's slice where it holds a slice); ``expected`` and ``actual`` start at ``column``.
    """

    row: int
    column: int
    expected: list[str]
    actual: list[str]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Sample:
        """From what ``plain`` made."""
        return cls(**content)


@dataclasses.dataclass
class Stats:
    """A comparison of one rank's numbers, or of a sum of several, with their part of the reference.

    Sums run over the numbers that are finite on both sides. ``row_ratio`` is the worst of the rows
    held here as a whole; where rows are cut (``rows_cut``) the owner adds them up. Of the failing
    rows a few are looked at: ``zero_rows`` are zero though the reference's are not, ``moved_rows``
    hold another row of the reference (position, position of what it holds).
    """

    error_sq: float = 0.0
    dot: float = 0.0
    candidate_sq: float = 0.0
    reference_sq: float = 0.0
    nan: int = 0
    infinite: int = 0
    unequal: int = 0
    row_ratio: float = 0.0
    worst_row: int = -1
    failing: int = 0
    failing_rows: list[int] = dataclasses.field(default_factory=list)
    zero_rows: list[int] = dataclasses.field(default_factory=list)
    moved_rows: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    sample: Sample | None = None
    rows_cut: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Stats:
        """From what ``plain`` made."""
        values = dict(content)
        for name in ("error_sq", "dot", "candidate_sq", "reference_sq", "row_ratio"):
            values[name] = float(values[name])
        if values["sample"] is not None:
            values["sample"] = Sample.of(values["sample"])
        values["moved_rows"] = [(row, held) for row, held in values["moved_rows"]]
        return cls(**values)


@dataclasses.dataclass
class Record:
    """One observation on one rank. Offsets point into the rank's file and are -1 where unused."""

    name: str
    source: str = ""
    status: Status = "bare"
    problem: str = ""
    kind: str = ""
    dtype: str = ""
    shape: list[int] = dataclasses.field(default_factory=list)
    floating: bool = False
    exact: bool = False
    zero: bool = False
    shard: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    partial: list[str] = dataclasses.field(default_factory=list)
    on: dict[str, int] = dataclasses.field(default_factory=dict)
    positions_at: int = -1
    positions: int = -1
    positions_digest: str = ""
    digest: str = ""
    values_at: int = -1
    row_errors_at: int = -1
    stats: Stats | None = None

    @property
    def by_rows(self) -> bool:
        """Whether the rank gave source positions of its rows."""
        return self.positions >= 0

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Record:
        """From what ``plain`` made."""
        values = dict(content)
        if values["stats"] is not None:
            values["stats"] = Stats.of(values["stats"])
        values["shard"] = [(axis, dim) for axis, dim in values["shard"]]
        return cls(**values)


@dataclasses.dataclass
class Measured:
    """What the reference side knows of one observation: the yardstick of its verdict.

    ``norm``: L2 of the finite numbers. ``floor``: largest L2 error of the noise runs. ``unit``:
    unit of rounding, 0 where the value compares exactly. ``gate`` and ``row_gate``: ratios not to
    be exceeded. ``pooled``: rows share ``row_floor``, else each has its own in the file at
    ``row_floors_at``. ``vacuous``: what this comparison would also accept, empty where nothing.
    ``freedom``: effective degrees of freedom of the error.
    """

    name: str
    kind: str = ""
    dtype: str = ""
    shape: list[int] = dataclasses.field(default_factory=list)
    floating: bool = False
    exact: bool = False
    zero: bool = False
    source: str = ""
    values_at: int = -1
    numel: int = 0
    norm: float = 0.0
    floor: float = 0.0
    unit: float = 0.0
    gate: float = 0.0
    row_gate: float = 0.0
    pooled: bool = True
    row_floor: float = 0.0
    row_floors_at: int = -1
    freedom: float = 0.0
    nan: int = 0
    infinite: int = 0
    vacuous: str = ""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Measured:
        """From what ``plain`` made."""
        values = dict(content)
        for name in ("norm", "floor", "unit", "gate", "row_gate", "row_floor", "freedom"):
            values[name] = float(values[name])
        return cls(**values)


@dataclasses.dataclass
class Verdict:
    """The verdict on one observation, on all ranks together.

    ``kind`` says how ranks held it (replicated, shard, rows, partial, on, joined by ``+``) and
    ``value`` what it is (tensor, scalar, none, empty, exact). ``details`` holds the evidence of a
    failure, where known: ``rank`` and its ``coordinates``; ``expected`` and ``actual`` (dtype and
    shape in words) and ``part`` (which part of the whole the rank holds, in words); ``row`` (source
    position), ``column``, ``expected_values``, ``actual_values``; ``failing_rows`` (how many),
    ``rows`` (the first of them); ``alpha``, ``explained`` and ``alpha_hint``; ``hints``.
    """

    index: int
    name: str
    outcome: Outcome
    message: str = ""
    kind: str = ""
    value: str = ""
    dtype: str = ""
    shape: list[int] = dataclasses.field(default_factory=list)
    numel: int = 0
    ratio: float = 0.0
    row_ratio: float = 0.0
    gate: float = 0.0
    row_gate: float = 0.0
    floor: float = 0.0
    norm: float = 0.0
    source: str = ""
    details: dict[str, object] = dataclasses.field(default_factory=dict)
