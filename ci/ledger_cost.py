"""What the ledger costs: cases of this project with and without it, in turns, side by side.

Prints three figures by the least of several rounds, each with its ratio:

- the whole suite: wall time of the run, start, references and noise runs included, which is what
  somebody waits for; the limit of 5 percent is about this one;
- processor time of the run and all that it started, which other work on the machine lengthens less;
- the cells alone: wall time of the ranks, references aside, summed over the cells that passed in
  every round.

Exits with 1 when the whole suite takes more than the limit, and when no cell passed or nothing was
recorded.

    python ci/ledger_cost.py [--rounds 3] [--topology cp2] [-- more arguments for pytest]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LIMIT: Final = 1.05


@dataclass
class Cost:
    """Seconds of one run, and how many collectives its ranks called.

    ``cells`` are seconds of each cell that passed.
    """

    wall: float
    processor: float
    cells: dict[str, float]
    calls: int = 0

    def least(self, other: Cost) -> Cost:
        """The least of both, number by number; cells that passed in both."""
        return Cost(
            min(self.wall, other.wall),
            min(self.processor, other.processor),
            {
                case: min(self.cells[case], other.cells[case])
                for case in self.cells.keys() & other.cells.keys()
            },
            max(self.calls, other.calls),
        )


def measure(ledger: str, topology: str, more: Sequence[str]) -> Cost:
    """Run the cases once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "cases", "-q", "-m", "not native"]
        command += ["--topology", topology, "--parity-ledger", ledger, "--parity-report", folder]
        used, begin = _processor(), time.perf_counter()
        subprocess.run([*command, *more], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        wall, processor = time.perf_counter() - begin, _processor() - used
        lines = (Path(folder) / "run.jsonl").read_text("utf-8").splitlines()[1:]
    cells = [json.loads(line) for line in lines]
    passed = {
        f"{cell['case']} {cell['topology']}": float(cell["seconds"])
        for cell in cells
        if cell["outcome"] == "passed"
    }
    calls = sum(entry["calls"] for cell in cells for entry in cell.get("collectives", []))
    return Cost(wall, processor, passed, calls)


def _processor() -> float:
    """Processor seconds of all that this process started and that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, print, and say by the exit status whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--topology", default="cp2")
    parser.add_argument("more", nargs="*", help="arguments for pytest")
    options = parser.parse_args(arguments)
    best: dict[str, Cost] = {}
    for number in range(options.rounds):
        # The first of a round finds the machine as the one before it left it: take turns.
        for ledger in ("off", "on") if number % 2 == 0 else ("on", "off"):
            cost = measure(ledger, options.topology, options.more)
            print(
                f"round {number + 1}, ledger {ledger}: wall {cost.wall:.1f} s, "
                f"processor {cost.processor:.1f} s, {len(cost.cells)} cells passed",
                flush=True,
            )
            best[ledger] = best[ledger].least(cost) if ledger in best else cost
    return judge(best["off"], best["on"])


def judge(off: Cost, on: Cost) -> int:
    """Print the figures; 0 when the limit is kept."""
    both = sorted(off.cells.keys() & on.cells.keys())
    print(f"{len(both)} cells, {on.calls} collectives")
    if not both or not on.calls:
        print("no cell passed both ways, or nothing was recorded: this says nothing")
        return 1
    cells = [sum(cost.cells[case] for case in both) for cost in (off, on)]
    figures = [
        ("whole suite, wall", off.wall, on.wall),
        ("whole suite, processor", off.processor, on.processor),
        ("cells alone, wall", cells[0], cells[1]),
    ]
    for name, without, with_it in figures:
        ratio = with_it / without
        print(f"{name}: without {without:.2f} s, with {with_it:.2f} s, ratio {ratio:.3f}")
    kept = on.wall <= LIMIT * off.wall
    print(f"limit for the whole suite {LIMIT}: {'kept' if kept else 'EXCEEDED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
