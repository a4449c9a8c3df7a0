"""Whether the reference holds still: the same bits when repeated, the same form under noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .records import Measured
from .reference import describe, load_index
from .store import Reader


def failure(name: str, message: str, reason: str = "unstable") -> dict[str, str]:
    """One thing that is wrong with the reference."""
    return {"name": name, "reason": reason, "message": f"{name}: {message}"}


def noted(item: Mapping[str, str], reason: str, where: str) -> dict[str, str]:
    """A bad observation that a run noted, with its line."""
    text = f"{item['problem']} (on {where}, at {item['source']})"
    return failure(item["name"], text, reason)


class NoiseFiles:
    """What one noise run left behind."""

    def __init__(self, directory: Path, label: str) -> None:
        index = load_index(directory, label)
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
        found = [noted(item, "invalid", where) for item in self._problems]
        hint = (
            "; the body runs under noise too, and what it observes must not hang on rounding "
            "(a comparison of nearly equal numbers, a mask or a choice made from computed values)"
        )
        expected = {entry.name: entry for entry in entries}
        found += [
            failure(name, f"{where} observes it and the reference does not{hint}")
            for name in self.entries
            if name not in expected
        ]
        for name, entry in expected.items():
            found += [
                failure(name, f"{where} {text}{hint}")
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


def noise_runs_of(directory: Path) -> list[NoiseFiles]:
    """All noise runs that finished, by seed."""
    seeds = sorted(int(path.stem.removeprefix("noise-")) for path in directory.glob("noise-*.json"))
    return [NoiseFiles(directory, f"noise-{seed}") for seed in seeds]


def repeat_failures(
    directory: Path, entries: Iterable[Measured], digests: Mapping[str, str]
) -> list[dict[str, str]]:
    """What the second run of the reference gave otherwise than the first.

    Raises:
        StoreError: the second run did not finish.
    """
    index = load_index(directory, "repeat")
    found = [noted(item, "invalid", "the repeated reference") for item in index["problems"]]
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
            found.append(failure(entry.name, text + advice, "not deterministic"))
    found += [
        failure(
            name,
            "observed in the second run of the reference and not in the first" + advice,
            "not deterministic",
        )
        for name in again
        if name not in known
    ]
    return found
