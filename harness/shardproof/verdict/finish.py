"""Finishing a reference: from its runs to a floor, a gate and a vacuity test for every value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch

from .blocks import blocks
from .compare import Yardstick, masks
from .fingerprint import widen
from .floors import freedom, pooled, row_freedom
from .gates import FEW_RUNS, MANY_RUNS, SMALL, WIDE_GATE, gate
from .records import Measured, plain
from .reference import FORMAT, load_index, read_reference, stored_shape
from .steadiness import NoiseFiles, failure, noise_runs_of, noted, repeat_failures
from .store import Reader, StoreError, Writer, write_index
from .vacuity import ZEROS, also_accepted
from .values import dtype_of, real_dtype, unit_roundoff


def reference_needs(reference_dir: Path) -> int:
    """How many noise runs the reference wants at first: 0, 3, or 8.

    Eight where anything of fewer than four floating numbers is observed. ``finish_reference`` then
    tells whether three were enough.

    Raises:
        StoreError: the reference run did not finish.
    """
    noisy = [entry for entry in read_reference(reference_dir) if _noisy(entry)]
    if not noisy:
        return 0
    return MANY_RUNS if any(entry.numel < SMALL for entry in noisy) else FEW_RUNS


def _enough(entries: list[Measured], runs: int) -> bool:
    """Whether so many noise runs give no value a wide gate.

    Errors that move along (nearly) one line, of a whole or of one row in it, scatter as a scalar's
    do: three draws may all be small by chance, and only a wide gate allows for that.
    """
    return runs >= MANY_RUNS or all(
        max(entry.gate, entry.row_gate) <= WIDE_GATE for entry in entries if _noisy(entry)
    )


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
    index = load_index(reference_dir, "reference")
    entries = [Measured.of(content) for content in index["entries"]]
    failures = [noted(item, "invalid", "the reference") for item in index["problems"]]
    if not entries and not failures:
        text = "the case observes nothing, so it compares nothing: call rank.observe(name, value)"
        failures.append({"name": "", "reason": "nothing observed", "message": text})
    digests: Mapping[str, str] = index["digests"]
    failures += repeat_failures(reference_dir, entries, digests)
    runs = noise_runs_of(reference_dir)
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
    # One word for each observation: what is wrong in the first run is wrong in all of them.
    failures = list({item["name"]: item for item in reversed(failures)}.values())[::-1]
    return {
        "outcome": "reference failed" if failures else "passed",
        "failures": failures,
        "observations": len(entries),
        "scalars": any(entry.floating and entry.numel == 1 for entry in entries),
        "noise_runs": len(runs),
        "wanted": len(runs) if _enough(entries, len(runs)) else MANY_RUNS,
        "vacuous": [entry.name for entry in entries if entry.vacuous],
        "floors": [_floor_line(entry) for entry in entries],
    }


def _floor_line(entry: Measured) -> dict[str, object]:
    kept = ("name", "kind", "numel", "norm", "floor", "gate", "row_gate", "freedom", "vacuous")
    content = plain(entry)
    return {key: content[key] for key in kept}


def _measure(
    entry: Measured, values: Reader, runs: list[NoiseFiles], writer: Writer
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
            failure(entry.name, f"the reference holds {entry.nan} NaN: nothing equals NaN", "nan")
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
    entry: Measured, runs: list[NoiseFiles], row_norms: torch.Tensor, writer: Writer
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
    # One false alarm for all rows together, as if each were as free as the least free of them.
    entry.row_gate = gate(
        freedom=min(float(inner), row_freedom(sketches)), runs=draws, comparisons=rows
    )
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
    accepted = also_accepted(reference, yardstick, floor=denominator, gate=entry.gate)
    # Where some numbers are infinite (a mask), zeros would be told apart by them.
    zero = (entry.norm == 0.0 and not entry.infinite) or ZEROS in accepted
    if entry.zero and not zero:
        return [
            failure(
                entry.name,
                f"zero=True says that it is zero, but the reference has norm {entry.norm:.3g} over "
                f"a floor of {denominator:.3g}: drop zero=True",
                "not zero",
            )
        ]
    if zero:
        entry.vacuous = "" if entry.zero else "zeros: the reference is zero"
    else:
        entry.vacuous = ", ".join(accepted)
    return []
