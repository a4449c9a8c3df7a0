"""What the ledger costs: the cases of this project on cp2 with and without it, side by side.

Prints the seconds of all cells (ranks alone, references aside) of each run and their ratio, by the
least of several rounds, and exits with 1 when the ledger takes more than 5 percent.

    python ci/ledger_cost.py [--rounds 3] [--topology cp2] [-- more arguments for pytest]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LIMIT: Final = 1.05


def seconds_of(ledger: str, topology: str, more: Sequence[str]) -> tuple[dict[str, float], int]:
    """Seconds of each passed cell, and how many collectives all of them called."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "cases", "-q", "-m", "not native"]
        command += ["--topology", topology, "--parity-ledger", ledger, "--parity-report", folder]
        subprocess.run([*command, *more], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        lines = (Path(folder) / "run.jsonl").read_text("utf-8").splitlines()[1:]
    cells = [json.loads(line) for line in lines]
    calls = sum(entry["calls"] for cell in cells for entry in cell.get("collectives", []))
    return {c["case"]: c["seconds"] for c in cells if c["outcome"] == "passed"}, calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, print, and say by the exit status whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--topology", default="cp2")
    parser.add_argument("more", nargs="*", help="arguments for pytest")
    options = parser.parse_args(arguments)
    best: dict[str, dict[str, float]] = {"off": {}, "on": {}}
    calls = 0
    for _ in range(options.rounds):
        for ledger, least in best.items():
            found, called = seconds_of(ledger, options.topology, options.more)
            calls = max(calls, called)
            for case, seconds in found.items():
                least[case] = min(seconds, least.get(case, seconds))
    both = best["off"].keys() & best["on"].keys()
    without, with_it = (sum(best[name][case] for case in both) for name in ("off", "on"))
    if not without:
        print("no cell passed both with and without the ledger")
        return 1
    ratio = with_it / without
    print(f"{len(both)} cells, {calls} collectives")
    print(f"without {without:.2f} s, with {with_it:.2f} s, ratio {ratio:.3f} (limit {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
