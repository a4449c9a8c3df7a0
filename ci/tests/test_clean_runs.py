"""What `ci/clean_runs.py` concludes of the runs that it is given. (What it runs is no test.)"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import clean_runs


def seen(ratio: float | None, *, row: float | None = None, numel: int = 8, **more: Any) -> Any:
    found = {"name": "x", "numel": numel, "ratio": ratio, "gate": 10.0, "outcome": "passed"}
    return {**found, "row_ratio": row, "row_gate": 20.0, **more}


def cell(*observations: Any, outcome: str = "passed", seed: int = 0) -> dict[str, Any]:
    return {
        "seed": seed,
        "case": "test_a.py::test_a",
        "topology": "cp2",
        "outcome": outcome,
        "observations": list(observations),
    }


class Runs:
    """In place of subprocess: writes the cells of the seeds that are asked for."""

    def __init__(self, *cells: Any, status: int = 0, writes: bool = True) -> None:
        self.cells, self.status, self.writes = cells, status, writes
        self.seeds: list[str] = []
        self.commands: list[Sequence[str]] = []

    def run(self, command: Sequence[str], **_: object) -> SimpleNamespace:
        self.commands.append(command)
        self.seeds.append(command[command.index("--parity-seed") + 1])
        first, end = map(int, self.seeds[-1].split(":"))
        report = Path(command[command.index("--parity-report") + 1])
        if self.writes:
            lines = [{"schema": 1}, *(one for one in self.cells if first <= one["seed"] < end)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (report / "run.jsonl").write_text(text, encoding="utf-8")
        return SimpleNamespace(returncode=self.status, stdout="said", stderr="")


def conclude(
    monkeypatch: pytest.MonkeyPatch, folder: Path, runs: Runs, *arguments: str, least: int = 1
) -> int:
    monkeypatch.setattr("subprocess.run", runs.run)
    seeds = ["--seeds", "12", "--comparisons", str(least)]
    return clean_runs.main([str(folder), *seeds, *arguments])


@pytest.mark.parametrize(
    ("cells", "least", "status", "said"),
    [
        ([cell(seen(1.0), seen(4.9, row=9.9), seen(None))], 3, 0, "clean: all passed"),
        ([cell(seen(1.0))], 2, 1, "only 1 comparisons, asked for 2"),
        ([cell(seen(5.1))], 1, 1, "above half of its gate (0.51): x in test_a.py::test_a cp2 seed"),
        ([cell(seen(1.0, row=10.1))], 1, 1, "above half of its gate (0.51)"),
        ([cell(seen(0.0, gate=0.0))], 1, 0, "clean: all passed"),
        ([cell(seen(0.1, gate=0.0))], 1, 1, "above half of its gate (inf)"),
        ([cell(seen(float("nan")))], 1, 1, "above half of its gate (inf)"),
        ([cell(seen(50.0, outcome="diverged"), outcome="diverged")], 1, 1, "diverged: test_a.py"),
        ([], 1, 1, "only 0 comparisons"),
    ],
)
def test_what_runs_come_to(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cells: list[Any],
    least: int,
    status: int,
    said: str,
) -> None:
    assert conclude(monkeypatch, tmp_path, Runs(*cells), least=least) == status
    assert said in capsys.readouterr().out


def test_the_tail_counts_each_kind_by_part_of_the_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tensors = [seen(0.0), seen(0.3), seen(0.45), seen(4.1)]
    runs = Runs(cell(*tensors), cell(seen(1.2, numel=3), seed=11))
    assert conclude(monkeypatch, tmp_path, runs) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "5 comparisons, 2 seeds" in lines
    rows = [line.split()[:3] for line in lines]
    assert ["0.0001", "1", "7.50e-01"] in rows
    assert ["0.05", "2", "2.50e-01"] in rows
    assert ["0.5", "1", "0.00e+00"] in rows
    assert ["0.15", "1", "0.00e+00"] in rows
    assert (
        "scalars: 1, largest part of its gate 0.120 (x in test_a.py::test_a cp2 seed 11)" in lines
    )


def test_a_run_that_was_stopped_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = Runs(cell(seen(1.0)))
    assert conclude(monkeypatch, tmp_path, runs) == 0
    (tmp_path / "seeds-10" / "complete").unlink()
    assert conclude(monkeypatch, tmp_path, runs, "--topology", "tp2", "--", "cases/x.py") == 0
    assert runs.seeds == ["0:10", "10:12", "10:12"]
    assert runs.commands[0][0] == sys.executable
    assert runs.commands[0][-2:] == ["--topology", "dp2"]
    assert runs.commands[2][-3:] == ["cases/x.py", "--topology", "tp2"]


def test_fewer_seeds_than_are_asked_for_now_are_not_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = Runs(cell(seen(1.0)), cell(seen(1.0), seed=15))
    assert conclude(monkeypatch, tmp_path, runs) == 0
    assert conclude(monkeypatch, tmp_path, runs, "--seeds", "20", least=2) == 0
    assert runs.seeds == ["0:10", "10:12", "10:20"]


def test_a_run_that_did_not_end_by_its_cells_is_no_clean_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert conclude(monkeypatch, tmp_path, Runs(cell(seen(1.0)), status=3)) == 1
    assert "seeds-0: pytest ended with 3" in capsys.readouterr().out
    nothing = Runs(status=1, writes=False)
    assert conclude(monkeypatch, tmp_path / "b", nothing) == 1
    assert "seeds-0: pytest ended with 1\nsaid" in capsys.readouterr().out


def test_the_battery_is_there() -> None:
    for case in clean_runs.BATTERY:
        path, _, name = case.partition("::")
        assert f"def {name}(" in (clean_runs.ROOT / path).read_text("utf-8")
