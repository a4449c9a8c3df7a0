"""The reference side: from the files of its runs to a yardstick for every observation.

Files in the reference directory: ``reference``, ``repeat`` and ``noise-<seed>``, each an index
(``.json``) and the tensors that it points to (``.bin``), then ``finish`` likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .blocks import blocks
from .compare import Yardstick, masks
from .fingerprint import widen
from .floors import freedom, pooled, row_freedom
from .gates import FEW_RUNS, MANY_RUNS, SMALL, gate
from .records import Measured, plain
from .store import Reader, StoreError, Writer, read_index, write_index
from .vacuity import also_accepted, is_zero
from .values import dtype_of, real_dtype, unit_roundoff

FORMAT = 1
"""Version of the files: all runs of a reference are of one version."""

UNSURE = 2.0
"""Below this many degrees of freedom, as measured by three runs, eight are worth their time."""


@dataclass(frozen=True)
class Store:
    """The finished reference, as a candidate reads it."""

    measured: dict[str, Measured]
    values: Reader
    floors: Reader

    def tensor(self, entry: Measured) -> torch.Tensor:
        """The reference's numbers (complex ones as pairs); shared memory, not to be written to."""
        return self.values.tensor(entry.values_at, real_dtype(entry.dtype), stored_shape(entry))

    def yardstick(self, entry: Measured) -> Yardstick:
        """What errors of rows are measured in."""
        shape = stored_shape(entry)
        floors = (
            None
            if entry.row_floors_at < 0
            else self.floors.tensor(entry.row_floors_at, torch.float64, shape[:1])
        )
        return Yardstick(
            unit=entry.unit,
            row_gate=entry.row_gate,
            row_floor=entry.row_floor,
            least=entry.unit * max(entry.floor, entry.unit * entry.norm),
            row_floors=floors,
        )


def stored_shape(entry: Measured) -> tuple[int, ...]:
    """Shape of the stored numbers: a complex number is a pair."""
    pair = (2,) if entry.dtype and dtype_of(entry.dtype).is_complex else ()
    return (*entry.shape, *pair)


def open_store(directory: Path) -> Store:
    """Open a finished reference.

    Raises:
        StoreError: it was not finished.
    """
    index = _index(directory, "finish")
    measured = [Measured.of(content) for content in index["measured"]]
    return Store(
        {entry.name: entry for entry in measured},
        Reader(directory / "reference.bin"),
        Reader(directory / "finish.bin"),
    )


def read_reference(directory: Path) -> list[Measured]:
    """What the reference run observed.

    Raises:
        StoreError: it did not finish.
    """
    return [Measured.of(content) for content in _index(directory, "reference")["entries"]]


def reference_needs(reference_dir: Path) -> int:
    """How many noise runs the reference wants: 0, 3, or 8.

    Eight where anything of fewer than four floating numbers is observed. Called again after the
    first noise runs it also asks for eight where they move a tensor along (nearly) one line, since
    such an error scatters as a scalar's does.

    Raises:
        StoreError: the reference run did not finish.
    """
    entries = read_reference(reference_dir)
    noisy = [entry for entry in entries if _noisy(entry)]
    if not noisy:
        return 0
    if any(entry.numel < SMALL for entry in noisy):
        return MANY_RUNS
    runs = _noise_runs(reference_dir)
    if len(runs) >= 2:
        for entry in noisy:
            found = [run.sketch(entry.name) for run in runs if run.measured(entry)]
            if len(found) >= 2 and freedom(found) < UNSURE:
                return MANY_RUNS
    return FEW_RUNS


def _noisy(entry: Measured) -> bool:
    """Whether it is compared by a floor."""
    return entry.floating and not entry.exact and entry.numel > 0


def finish_reference(reference_dir: Path, *, noise_runs: int) -> dict[str, object]:
    """Check the reference, compute floors, gates and vacuity, and write them for the candidates.

    Returns a JSON-able summary: ``outcome`` ('passed' or 'reference failed'), ``failures`` (each
    ``name``, ``reason``, ``message``), ``observations``, ``scalars``, ``noise_runs``, ``wanted``
    (noise runs that would be worth their time), ``vacuous`` (names) and ``floors`` (for each
    observation ``name``, ``kind``, ``numel``, ``norm``, ``floor``, ``gate``, ``row_gate``,
    ``freedom``, ``vacuous``).

    Raises:
        StoreError: a run's files are missing, or there are fewer noise runs than ``noise_runs``.
        ValueError: fewer than three noise runs for floating values.
    """
    index = _index(reference_dir, "reference")
    entries = [Measured.of(content) for content in index["entries"]]
    failures = [_failure(item, "invalid", "the reference") for item in index["problems"]]
    if not entries and not failures:
        failures.append(
            {
                "name": "",
                "reason": "nothing observed",
                "message": "the case observes nothing on the reference, so it compares nothing: "
                "call rank.observe(name, value)",
            }
        )
    digests: Mapping[str, str] = index["digests"]
    failures += _repeat_failures(reference_dir, entries, digests)
    runs = _noise_runs(reference_dir)
    if len(runs) < noise_runs:
        raise StoreError(
            f"expected {noise_runs} noise runs in {reference_dir}, found {len(runs)}: "
            f"{', '.join(run.label for run in runs) or 'none'}"
        )
    if noise_runs < FEW_RUNS and any(map(_noisy, entries)):
        raise ValueError(
            f"expected at least {FEW_RUNS} noise runs, since floating values are observed, got "
            f"{noise_runs}: a floor of fewer gives no gate"
        )
    for run in runs:
        failures += run.failures(entries, digests)
    values = Reader(reference_dir / "reference.bin")
    with closing(Writer(reference_dir / "finish.bin")) as writer:
        for entry in entries:
            failures += _measure(entry, values, runs, writer)
    write_index(
        reference_dir / "finish.json",
        {"format": FORMAT, "measured": plain(entries)},
    )
    return {
        "outcome": "reference failed" if failures else "passed",
        "failures": failures,
        "observations": len(entries),
        "scalars": any(entry.floating and entry.numel == 1 for entry in entries),
        "noise_runs": len(runs),
        "wanted": reference_needs(reference_dir),
        "vacuous": [entry.name for entry in entries if entry.vacuous],
        "floors": [_floor_line(entry) for entry in entries],
    }


def _floor_line(entry: Measured) -> dict[str, object]:
    kept = ("name", "kind", "numel", "norm", "floor", "gate", "row_gate", "freedom", "vacuous")
    content = plain(entry)
    return {key: content[key] for key in kept}


class _NoiseFiles:
    """What one noise run left behind."""

    def __init__(self, directory: Path, label: str) -> None:
        index = _index(directory, label)
        self.label = label
        self.entries: dict[str, dict[str, Any]] = {item["name"]: item for item in index["entries"]}
        self._problems: list[dict[str, str]] = index["problems"]
        self._values = Reader(directory / f"{label}.bin")

    def sketch(self, name: str) -> torch.Tensor:
        """Sketch of the errors of ``name``."""
        entry = self.entries[name]
        shape = tuple(entry["sketch_shape"])
        return self._values.tensor(entry["sketch_at"], torch.float32, shape)

    def row_sq(self, name: str) -> torch.Tensor:
        """Squared errors of rows, or of groups of rows."""
        entry = self.entries[name]
        return self._values.tensor(entry["rows_at"], torch.float64, (entry["rows"],))

    def error(self, name: str) -> float:
        """L2 error of ``name``."""
        return math.sqrt(float(self.entries[name]["error_sq"]))

    def measured(self, entry: Measured) -> bool:
        """Whether this run has an error for ``entry``."""
        return int(self.entries.get(entry.name, {}).get("rows_at", -1)) >= 0

    def failures(
        self, entries: Iterable[Measured], digests: Mapping[str, str]
    ) -> list[dict[str, str]]:
        """What this run did otherwise than the reference, beyond rounding."""
        where = f"noise run {self.label.removeprefix('noise-')}"
        found = [_failure(item, "invalid", where) for item in self._problems]
        hint = (
            "; the body runs under noise too, and what it observes must not hang on rounding "
            "(a comparison of nearly equal numbers, a mask or a choice made from computed values)"
        )
        expected = {entry.name: entry for entry in entries}
        found += [
            _because(name, f"{where} observes it and the reference does not{hint}")
            for name in self.entries
            if name not in expected
        ]
        for name, entry in expected.items():
            found += [
                _because(name, f"{where} {text}{hint}")
                for text in self._differences(entry, digests)[:1]
            ]
        return found

    def _differences(self, entry: Measured, digests: Mapping[str, str]) -> list[str]:
        mine = self.entries.get(entry.name)
        if mine is None:
            return ["does not observe it and the reference does"]
        form = [mine["kind"], mine["dtype"], mine["shape"]]
        if form != [entry.kind, entry.dtype, entry.shape]:
            mine_form = describe(mine["kind"], mine["dtype"], mine["shape"])
            expected = describe(entry.kind, entry.dtype, entry.shape)
            return [f"gives {mine_form}, the reference {expected}"]
        if entry.kind in ("none", "empty") or entry.numel == 0:
            return []
        if entry.exact or not entry.floating:
            changed = mine["digest"] != digests[entry.name]
            return ["changes it, although it compares exactly"] if changed else []
        if mine["unlike"]:
            return [f"turns {mine['unlike']} of its numbers into NaN or infinity, or back"]
        return []


def _noise_runs(directory: Path) -> list[_NoiseFiles]:
    seeds = sorted(int(path.stem.removeprefix("noise-")) for path in directory.glob("noise-*.json"))
    return [_NoiseFiles(directory, f"noise-{seed}") for seed in seeds]


def _index(directory: Path, label: str) -> dict[str, Any]:
    content = read_index(directory / f"{label}.json")
    if content.get("format") != FORMAT:
        raise StoreError(
            f"{directory / label}.json is of format {content.get('format')!r}, expected {FORMAT}: "
            "it was written by another version"
        )
    return content


def _because(name: str, message: str, reason: str = "unstable") -> dict[str, str]:
    return {"name": name, "reason": reason, "message": f"{name}: {message}"}


def _failure(item: Mapping[str, str], reason: str, where: str) -> dict[str, str]:
    text = f"{item['problem']} (on {where}, at {item['source']})"
    return _because(item["name"], text, reason)


def describe(kind: str, dtype: str, shape: Iterable[int]) -> str:
    """A value's form in words: ``float64[3, 4]``, ``None``, ``an empty container``."""
    if kind == "none":
        return "None"
    if kind == "empty":
        return "an empty container"
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _repeat_failures(
    directory: Path, entries: Iterable[Measured], digests: Mapping[str, str]
) -> list[dict[str, str]]:
    index = _index(directory, "repeat")
    found = [_failure(item, "invalid", "the repeated reference") for item in index["problems"]]
    again = {item["name"]: item for item in index["entries"]}
    known = set()
    advice = (
        "; the reference must be deterministic: seed every generator (rank.generator), and use no "
        "clock, set order, or state that an earlier run left behind"
    )
    for entry in entries:
        known.add(entry.name)
        mine = again.get(entry.name)
        text = ""
        if mine is None:
            text = "observed in the first run of the reference and not in the second"
        elif [mine["kind"], mine["dtype"], mine["shape"]] != [entry.kind, entry.dtype, entry.shape]:
            text = (
                f"the first run of the reference gives "
                f"{describe(entry.kind, entry.dtype, entry.shape)}, the second "
                f"{describe(mine['kind'], mine['dtype'], mine['shape'])}"
            )
        elif mine["digest"] != digests.get(entry.name, ""):
            text = "two runs of the reference differ in bits"
        if text:
            found.append(_because(entry.name, text + advice, "not deterministic"))
    found += [
        _because(
            name,
            "observed in the second run of the reference and not in the first" + advice,
            "not deterministic",
        )
        for name in again
        if name not in known
    ]
    return found


def _measure(
    entry: Measured, values: Reader, runs: list[_NoiseFiles], writer: Writer
) -> list[dict[str, str]]:
    """Fill in ``entry``; returns what is wrong with the reference's value itself."""
    if entry.kind == "none":
        return []
    if entry.numel == 0:
        entry.vacuous = "" if entry.zero else "anything: it has no elements"
        return []
    reference = values.tensor(entry.values_at, real_dtype(entry.dtype), stored_shape(entry))
    row_norms = _row_norms(entry, reference)
    if entry.nan:
        return [
            _because(entry.name, f"the reference holds {entry.nan} NaN: nothing equals NaN", "nan")
        ]
    if not entry.floating:
        return []
    if not entry.exact:
        _measure_floor(entry, [run for run in runs if run.measured(entry)], row_norms, writer)
    return _judge_reference(entry, reference, writer.path)


def _row_norms(entry: Measured, reference: torch.Tensor) -> torch.Tensor:
    """Norms of rows that have floors of their own (empty otherwise); fills in the entry's norm."""
    shape = reference.shape
    own = entry.floating and not pooled(shape)
    squares = torch.zeros(shape[0] if own else 0, dtype=torch.float64)
    total = 0.0
    for index in blocks(shape):
        block = widen(reference[index]).to(torch.float64)
        wild = masks(block)
        if bool(wild.any()):
            entry.nan += int(block.isnan().sum())
            entry.infinite += int(wild.sum()) - int(block.isnan().sum())
            block = block.masked_fill(wild, 0.0)
        block = block.square()
        total += float(block.sum())
        if own:
            squares[index[0]] += block.reshape(index[0].stop - index[0].start, -1).sum(1)
    entry.norm = math.sqrt(total)
    return squares.sqrt()


def _measure_floor(
    entry: Measured, runs: list[_NoiseFiles], row_norms: torch.Tensor, writer: Writer
) -> None:
    shape = stored_shape(entry)
    rows, inner = (shape[0] if shape else 1), math.prod(shape[1:])
    entry.unit = max(entry.unit, unit_roundoff(dtype_of(entry.dtype)))
    entry.pooled = pooled(shape)
    draws = max(1, len(runs))
    sketches = [run.sketch(entry.name) for run in runs]
    entry.floor = max((run.error(entry.name) for run in runs), default=0.0)
    entry.freedom = min(float(math.prod(shape)), freedom(sketches))
    entry.gate = gate(freedom=entry.freedom, runs=draws)
    row_sq = torch.stack([run.row_sq(entry.name) for run in runs]).amax(0) if runs else None
    if entry.pooled:
        # The largest of all rows and runs is one draw out of many; how many of the rows are
        # independent, the freedom of the whole tells.
        independent = max(1.0, entry.freedom / inner)
        within = min(float(inner), entry.freedom)
        entry.row_floor = float(row_sq.max()) ** 0.5 if row_sq is not None else 0.0
        entry.row_gate = gate(
            freedom=within, runs=math.floor(draws * independent), comparisons=rows
        )
        return
    entry.row_gate = gate(freedom=min(float(inner), row_freedom(sketches)), runs=draws)
    floors = torch.zeros_like(row_norms) if row_sq is None else row_sq.sqrt()
    relative = floors[row_norms > 0] / row_norms[row_norms > 0]
    typical = float(relative.median()) if relative.numel() else 0.0
    # No row is trusted to be more exact, for its size, than the median row was measured to be: a
    # row may be right by luck in all runs, and there are many rows.
    entry.row_floor = 0.0
    entry.row_floors_at = writer.append(torch.maximum(floors, typical * row_norms))


def _judge_reference(
    entry: Measured, reference: torch.Tensor, floors: Path
) -> list[dict[str, str]]:
    denominator = max(entry.floor, entry.unit * entry.norm)
    yardstick = Yardstick(
        unit=entry.unit,
        row_gate=entry.row_gate,
        row_floor=entry.row_floor,
        least=entry.unit * denominator,
        row_floors=None
        if entry.row_floors_at < 0
        else Reader(floors).tensor(entry.row_floors_at, torch.float64, tuple(reference.shape[:1])),
    )
    floor, limit = denominator, entry.gate
    # Where some numbers are infinite (a mask), zeros would be told apart by them.
    zero = (entry.norm == 0.0 and not entry.infinite) or is_zero(
        reference, yardstick, floor=floor, gate=limit
    )
    if entry.zero and not zero:
        return [
            _because(
                entry.name,
                f"zero=True says that it is zero, but the reference has norm {entry.norm:.3g} over "
                f"a floor of {denominator:.3g}: drop zero=True",
                "not zero",
            )
        ]
    if zero:
        entry.vacuous = "" if entry.zero else "zeros: the reference is zero"
    elif not entry.exact:
        entry.vacuous = also_accepted(reference, yardstick, floor=floor, gate=limit)
    return []
