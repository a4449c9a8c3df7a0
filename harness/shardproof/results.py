"""What a run leaves behind: run.jsonl, and the table at the end of the terminal's output."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from shardproof.cells import PAYLOAD, cell_of
from shardproof.options import Settings

if TYPE_CHECKING:
    from shardproof.against.control import Control

SCHEMA = 1
FILE_NAME = "run.jsonl"
SCALAR = 4
"""Values of fewer elements count as scalars, as they do where gates are set."""
_DISTRIBUTIONS = ("shardproof", "torch", "pytest", "megatron-core", "transformers")


class Results:
    """Collects the results of all cells, in the process that owns the terminal.

    The file is begun with the first cell and holds each cell as soon as it is known, so a run that
    is killed leaves what it had.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._file: IO[str] | None = None
        self._selected = 0
        self.cells: list[dict[str, Any]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the cells to come, so that a run that stops before the last says so.

        With xdist the workers know them, and nothing is said.
        """
        self._selected = sum(cell_of(item) is not None for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over the result that a report carries."""
        result = getattr(report, PAYLOAD, None)
        if isinstance(result, dict):
            self.cells.append(result)
            self._write(result)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A mutant that survives without a reason fails the run."""
        if not self.cells or self._settings.mutants is None:
            return
        if session.exitstatus != pytest.ExitCode.OK:
            return
        from shardproof.mutants.matrix import problems_of

        if problems_of(self.cells, self._settings.survivors, sampled=self._sampled):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table of cases and topologies."""
        if not self.cells:
            return
        control = self._control()
        terminalreporter.section("shardproof")
        for line in table(self.cells) if control is None else control_table(control, self.cells):
            terminalreporter.write_line(line)
        left = self._selected - len(self.cells)
        if left > 0:
            terminalreporter.write_line(
                f"{left} of {self._selected} cells did not run: the run was stopped before them"
            )
        if self._settings.mutants is not None:
            for line in ["", *self._mutants()]:
                terminalreporter.write_line(line)
        falls = lower_precision(self.cells)
        if falls:
            terminalreporter.write_line("")
            for line in falls:
                terminalreporter.write_line(line)
        path = self._settings.report / FILE_NAME
        root = self._config.invocation_params.dir
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        terminalreporter.write_line("")
        terminalreporter.write_line(f"results: {shown}")

    def _mutants(self) -> list[str]:
        from shardproof.mutants.matrix import lines_of, telling

        lines = lines_of(self.cells, self._settings.survivors, sampled=self._sampled)
        coverage = self._settings.coverage
        if coverage is not None:
            for site in (site for cell in self.cells for site in cell.get("call_sites", ())):
                coverage.see(site)
            for trial in telling(self.cells):
                if trial["result"] == "killed":
                    coverage.kill(trial["site"])
            lines += ["", *coverage.lines()]
        return lines

    @property
    def _sampled(self) -> bool:
        return self._settings.mutants is not None and self._settings.mutants.share < 1

    def pytest_unconfigure(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, result: dict[str, Any]) -> None:
        if self._file is None:
            path = self._settings.report / FILE_NAME
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                raise pytest.UsageError(
                    f"--parity-report {self._settings.report}: cannot write {FILE_NAME}: {error}"
                ) from error
            self._line(self._header())
        self._line(result)

    def _line(self, value: dict[str, Any]) -> None:
        if self._file is not None:
            json.dump(value, self._file, allow_nan=False)
            self._file.write("\n")
            self._file.flush()

    def _header(self) -> dict[str, Any]:
        control = self._control()
        return {
            "schema": SCHEMA,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(["pytest", *map(str, self._config.invocation_params.args)]),
            "versions": {"python": platform.python_version(), **_versions()},
            "commit": _commit(self._config.rootpath),
            "device": "cpu",
            "backend": "gloo",
            "dtype": self._settings.dtype,
            "seed": self._settings.seeds[0],
            "platform": f"{sys.platform} {platform.machine()}",
            "against": control.record() if control is not None else None,
        }

    def _control(self) -> Control | None:
        """The control of a run with ``--against``."""
        if self._settings.against is None:
            return None
        from shardproof.against.control import CONTROL

        return self._config.stash[CONTROL]


def table(cells: list[dict[str, Any]]) -> list[str]:
    """Rows of cases, columns of topologies; each cell shows its worst ratio and its seconds.

    A ratio is error over noise floor; the worst is the one closest to its gate.
    """
    topologies = list(dict.fromkeys(cell["topology"] for cell in cells))
    found = {(cell["case"], cell["topology"]): cell for cell in cells}
    cases = list(dict.fromkeys(cell["case"] for cell in cells))
    rows = [["case", *topologies]]
    for case in cases:
        row = [_short(case)]
        row += [_shown(found.get((case, topology))) for topology in topologies]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    passed = sum(cell["outcome"] == "passed" for cell in cells)
    observations = sum(len(cell["observations"]) for cell in cells)
    lines += ["", f"{passed} of {len(cells)} cells passed, {observations} comparisons"]
    seen = [seen for cell in cells if cell["outcome"] == "passed" for seen in cell["observations"]]
    tensors = [one for one in seen if one["numel"] >= SCALAR]
    scalars = [one for one in seen if one["numel"] < SCALAR]
    tops = {
        "tensors": _worst(tensors, "ratio"),
        "their rows": _worst(tensors, "row_ratio"),
        "scalars": _worst(scalars),
    }
    shown = [f"{title} {top:.2f}" for title, top in tops.items() if top is not None]
    if shown:
        lines[-1] += f"; worst ratios of what passed: {', '.join(shown)}"
    ranks = sum(cell["seconds"] for cell in cells)
    lines.append(f"{ranks:.1f} s on ranks, {_of_references(cells):.1f} s in references")
    return lines


def _of_references(cells: list[dict[str, Any]]) -> float:
    """Seconds of references and their noise runs: each once, whichever cells shared it."""
    found = {
        (cell["case"].partition("[")[0], cell["seed"], cell["reference_seconds"])
        for cell in cells
        if "reference_seconds" in cell
    }
    return math.fsum(seconds for _, _, seconds in found)


def control_table(control: Control, cells: list[dict[str, Any]]) -> list[str]:
    """What each case says of both sides of a control."""
    from shardproof.against.report import lines_of

    lines = lines_of(cells, label=control.label, shown=_shown, short=_short)
    return [*lines, *([control.problem] if control.problem else [])]


def lower_precision(cells: list[dict[str, Any]]) -> list[str]:
    """Where the float64 reference computed in a lower precision, one line for each place."""
    places: dict[str, None] = {}
    for cell in cells:
        for fall in cell.get("lower_precision", []):
            places[f"note: the reference fell to a lower precision: {describe_fall(fall)}"] = None
    return list(places)


def describe_fall(fall: dict[str, Any]) -> str:
    """One place where a value lost precision, in a line."""
    times = f" ({fall['count']} times)" if fall["count"] > 1 else ""
    return f"{fall['op']}: {fall['source']} -> {fall['target']} at {fall['site']}{times}"


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    seconds = f"{cell['seconds']:.2f}s"
    if cell["outcome"] == "skipped" and "mutants" in cell:
        return f"not compared {seconds}"
    if cell["outcome"] != "passed":
        if not cell["seconds"]:
            return str(cell["outcome"])
        # Of what failed alone: another shape has no ratio, and what is right says nothing of it.
        ratio = _worst([one for one in cell["observations"] if one["outcome"] != "passed"])
        score = f" {ratio:.1e}" if cell["outcome"] == "diverged" and ratio is not None else ""
        return f"{cell['outcome'].upper()}{score} {seconds}"
    ratio = _worst(cell["observations"])
    return f"{ratio:.2f} {seconds}" if ratio is not None else f"exact {seconds}"


def _worst(observations: list[dict[str, Any]], *keys: str) -> float | None:
    """The largest ratio of some observations, by both norms unless one is named."""
    found = [one[key] for one in observations for key in keys or ("ratio", "row_ratio")]
    known = [one for one in found if isinstance(one, int | float) and math.isfinite(one)]
    return max(known, default=None)


def _short(case: str) -> str:
    path, sep, name = case.partition("::")
    return f"{Path(path).name}{sep}{name}"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _commit(root: Path) -> str | None:
    """The commit of the checkout, with ``-dirty`` when files differ from it."""
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
