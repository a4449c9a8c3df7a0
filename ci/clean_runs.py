"""How far correct code lands from its gates: a battery of cases under many seeds.

Each seed has other inputs and other noise, so that no two comparisons share their rounding. Prints
how many comparisons came to which part of their gate, apart for tensors and scalars (of fewer than
four elements): the larger of error over gate of the whole and of the worst row.

FOLDER keeps the results of every ten seeds; those that are there and complete are not run again,
so that a run that was stopped goes on. Cases and topologies have to stay the same in one folder.

Exits with 1 when a cell did not pass, a comparison came above half of its gate, or there were fewer
than were asked for.

    python ci/clean_runs.py FOLDER [--seeds 100] [--comparisons 200000] [--jobs 1]
        [--topology NAME ...] [-- cases and more arguments for pytest]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardproof.results import SCALAR

ROOT: Final = Path(__file__).resolve().parent.parent
HALF: Final = 0.5
TOGETHER: Final = 10
"""Seeds of one run of pytest: starting one costs as much as two seeds or so."""
EDGES: Final = (1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
BAR: Final = 40
# Outputs, gradients, slots and metrics, chosen for many comparisons a second, and two ranks for the
# same: about 2,000 comparisons a seed.
BATTERY: Final = (
    "cases/test_outputs.py::test_no_grad",
    "cases/test_gradients.py::test_frozen_decoder",
    "cases/test_gradients.py::test_logits_gradients",
    "cases/test_gradients.py::test_masked_readout_gradients",
    "cases/test_slots.py::test_gradients_stay_in_their_slot",
    "cases/test_slots.py::test_slots_trained_alone",
    "cases/test_slots.py::test_ranks_with_slots_of_their_own",
    "cases/test_slots.py::test_bare_model_beside_slots",
    "cases/test_rules.py::test_rule_table",
)
TOPOLOGIES: Final = ("cp2", "tp2", "dp2")


@dataclass
class Tail:
    """Parts of their gates that comparisons came to, and what is wrong.

    ``parts`` counts by ``tensors`` and ``scalars`` and by the index of the first of ``EDGES`` that
    is not exceeded.
    """

    seeds: set[int] = field(default_factory=set)
    comparisons: int = 0
    parts: dict[str, Counter[int]] = field(
        default_factory=lambda: {"tensors": Counter(), "scalars": Counter()}
    )
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, cells: Sequence[dict[str, Any]]) -> None:
        """Take over the cells of some seeds."""
        for cell in cells:
            self.seeds.add(cell["seed"])
            where = f"{cell['case']} {cell['topology']} seed {cell['seed']}"
            if cell["outcome"] != "passed":
                self.problems.append(f"{cell['outcome']}: {where}")
            for seen in cell["observations"]:
                self._compare(seen, where)

    def _compare(self, seen: dict[str, Any], where: str) -> None:
        self.comparisons += 1
        kind = "tensors" if seen["numel"] >= SCALAR else "scalars"
        part = part_of(seen)
        name = f"{seen['name']} in {where}"
        self.parts[kind][sum(part > edge for edge in EDGES)] += 1
        self.worst[kind] = max(self.worst.get(kind, (0.0, "")), (part, name))
        if part > HALF and seen["outcome"] == "passed":
            self.problems.append(f"above half of its gate ({part:.2f}): {name}")

    def lines(self) -> list[str]:
        """The tail: each row a part of the gate, bars by the logarithm of the count."""
        found = [f"{self.comparisons} comparisons, {len(self.seeds)} seeds"]
        for kind, counts in self.parts.items():
            total = sum(counts.values())
            if not total:
                continue
            part, name = self.worst[kind]
            found += ["", f"{kind}: {total}, largest part of its gate {part:.3f} ({name})"]
            found.append(f"{'at most':>8}  {'count':>8}  {'above':>9}")
            above, most = total, math.log10(1 + max(counts.values()))
            for index in range(max(counts) + 1):
                count = counts[index]
                above -= count
                edge = f"{EDGES[index]:g}" if index < len(EDGES) else "more"
                bar = "#" * math.ceil(BAR * math.log10(1 + count) / most)
                found.append(f"{edge:>8}  {count:>8}  {above / total:>9.2e}  {bar}".rstrip())
        return found


def part_of(seen: dict[str, Any]) -> float:
    """The part of its gate that a comparison came to; 0 for what is equal, as some must be."""
    parts = [0.0]
    for ratio, gate in (("ratio", "gate"), ("row_ratio", "row_gate")):
        value = seen.get(ratio)
        # Not a number, or any distance where none is allowed, is beyond every gate.
        if value is not None and value != 0:
            part = float(value) / float(seen[gate]) if seen[gate] else math.inf
            parts.append(math.inf if math.isnan(part) else part)
    return max(parts)


def read(report: Path, seeds: range) -> list[dict[str, Any]] | None:
    """The cells of these seeds, None where they are not complete."""
    complete = report / "complete"
    if not complete.exists() or complete.read_text("utf-8") != str(seeds):
        return None
    lines = (report / "run.jsonl").read_text("utf-8").splitlines()[1:]
    return [json.loads(line) for line in lines]


def run(report: Path, seeds: range, arguments: Sequence[str]) -> str:
    """Run the battery with these seeds; what pytest said when not the cells made it fail."""
    report.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--parity-seed", f"{seeds.start}:{seeds.stop}", "--parity-report", str(report)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    # 1: cells failed, and the results say which.
    if done.returncode not in (0, 1) or not (report / "run.jsonl").exists():
        said = done.stdout[-2000:] + done.stderr
        return f"{report.name}: pytest ended with {done.returncode}\n{said}"
    (report / "complete").write_text(str(seeds), encoding="utf-8")
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, print the tail, and say by the exit status whether it is clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--comparisons", type=int, default=200_000)
    parser.add_argument("--jobs", type=int, default=1, help="runs of ten seeds at a time")
    parser.add_argument("--topology", action="append", default=[])
    parser.add_argument("more", nargs="*", help="cases and more arguments for pytest")
    options = parser.parse_intermixed_args(arguments)
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs: expected at least 1")
    folder: Path = options.folder.resolve()
    more = [*(options.more or BATTERY)]
    for topology in options.topology or TOPOLOGIES:
        more += ["--topology", topology]
    begin = time.perf_counter()
    parts = {
        folder / f"seeds-{first}": range(first, min(first + TOGETHER, options.seeds))
        for first in range(0, options.seeds, TOGETHER)
    }
    missing = [report for report, seeds in parts.items() if read(report, seeds) is None]
    pool = ThreadPoolExecutor(options.jobs)
    try:
        told = list(pool.map(lambda report: run(report, parts[report], more), missing))
    finally:
        # Ctrl-C ends what runs; what has not begun must not begin then.
        pool.shutdown(cancel_futures=True)
    tail = Tail()
    for report, part in parts.items():
        tail.add(read(report, part) or [])
    tail.problems += [one for one in told if one]
    seeds = sum(len(parts[report]) for report in missing)
    print(f"ran {seeds} seeds in {time.perf_counter() - begin:.0f} s")
    return judge(tail, options.comparisons)


def judge(tail: Tail, comparisons: int) -> int:
    """Print the tail and what is wrong; 0 when nothing is."""
    print("\n".join(tail.lines()))
    for problem in tail.problems:
        print(problem)
    if tail.comparisons < comparisons:
        print(f"only {tail.comparisons} comparisons, asked for {comparisons}: more seeds or cases")
    bad = bool(tail.problems) or tail.comparisons < comparisons
    print("NOT CLEAN" if bad else "clean: all passed, none above half of its gate")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
