"""What `ci/kill_matrix.py` concludes of the reports that it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from ci import kill_matrix
from subjects.trainer.faults import Fault

LINK = "[a thread](https://example.org/1)"
PAGE = f"""
- no experts: every layer is dense.

| 1 | A loss | {LINK} | divided twice | `x` (`test_a.test_b`) |
| 2 | A loss | {LINK} | of experts | not here: no experts |
| 3 | B sums | {LINK} | added twice | `x` (`test_a.test_b`) |
| 4 | D experts | {LINK} | lost | not here: no experts |
| 5 | D experts | {LINK} | found | not here: no experts |
"""
Report = Callable[..., str]
Conclude = Callable[..., tuple[int, str]]


def fault(
    *catalogue: int, topology: str | Sequence[str] = "cp2", shows: str = "*.logprobs"
) -> Fault:
    return Fault(
        module=json,
        name="loads",
        function=len,
        axis="any",
        case="test_a.test_b",
        shows=shows,
        catalogue=catalogue,
        topology=topology,
    )


def control(name: str, topology: str = "cp2", *, result: str = "killed") -> dict[str, Any]:
    """A cell of which the judge says ``result``."""
    seen = {
        "name": "y.states" if result == "misattributed" else "y.logprobs",
        "ratio": 20.0 if result == "weak" else 1e9,
        "row_ratio": None,
        "outcome": "diverged",
    }
    outcome = {"survived": "passed", "misjudged": "hung"}.get(result, "diverged")
    case = f"cases/controls.py::test_a__test_b[{name}]"
    return {"case": case, "topology": topology, "outcome": outcome, "observations": [seen]}


def mutants(*results: str) -> dict[str, Any]:
    trials = [
        {
            "mutant": f"dropped: all_reduce over cp (forward) t.py in number{at}",
            "kind": "dropped",
            "operation": "all_reduce",
            "axis": "cp",
            "backward": False,
            "site": f"t.py:{at} in number{at}",
            "result": result,
            "ratio": None,
            "by": ["loss"],
        }
        for at, result in enumerate(results)
    ]
    return {"case": "t.py::test_c", "topology": "cp2", "outcome": "passed", "mutants": trials}


FAULTS = {"halved": fault(1, 3)}
KILLED = [control("halved")]
CAUGHT = [mutants("killed")]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    def write(name: str, cells: Sequence[Mapping[str, Any]], *, schema: int = 1) -> str:
        (tmp_path / name).mkdir()
        lines = [{"schema": schema}, *cells]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "run.jsonl").write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def conclude(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Conclude:
    """Exit status and what is printed, with made-up faults, catalogue and survivors."""

    def run(
        *arguments: str,
        faults: Mapping[str, Fault] = FAULTS,
        page: str = PAGE,
        survivors: str = "",
    ) -> tuple[int, str]:
        (tmp_path / "page.md").write_text(page, encoding="utf-8")
        (tmp_path / "survivors.txt").write_text(survivors, encoding="utf-8")
        monkeypatch.setattr("subjects.trainer.faults.FAULTS", faults)
        monkeypatch.setattr(kill_matrix, "DOCUMENT", tmp_path / "page.md")
        monkeypatch.setattr(kill_matrix, "SURVIVORS", tmp_path / "survivors.txt")
        try:
            status = kill_matrix.main(arguments)
        except SystemExit as ended:
            status = int(str(ended.code))
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def row(out: str, label: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if line.startswith(f"{label} ")]
    return line.removeprefix(label).split(maxsplit=6)


def test_all_that_is_killed_holds(conclude: Conclude, report: Report) -> None:
    folders = report("controls", KILLED), report("mutants", CAUGHT)
    status, out = conclude(*folders)
    assert (status, out.splitlines()[-1]) == (0, "holds")
    assert (
        "2 of 2 negative controls are killed (100.0 %): 1 of 1 faults, 1 of 1 mutants that" in out
    )


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("misattributed", "nothing like '*.logprobs' diverged, but y.states (diverged)"),
        ("survived", "the case passed with the fault in"),
        ("weak", "expected a ratio above 10000, got {'y.logprobs': (20.0, None)}"),
        ("misjudged", "the case ended as hung, expected diverged"),
        ("not run", "no result"),
    ],
)
def test_a_fault_that_is_not_killed_has_its_column_and_words(
    conclude: Conclude, report: Report, result: str, words: str
) -> None:
    cells = KILLED if result == "not run" else [*KILLED, control("other", result=result)]
    folder = report("controls", cells)
    status, out = conclude("--only", "controls", folder, faults={**FAULTS, "other": fault()})
    at = out.splitlines()[0].replace("not run", "notrun").split().index(result.replace(" ", ""))
    counts = row(out, "of the contract")
    assert counts[at - 1] == "1"
    assert counts.count("-") == 5
    assert f"\n{result}: other (test_a.test_b on cp2): {words}\n" in out
    assert "1 of 2 faults are not killed, expected none" in out
    assert (status, out.splitlines()[-1]) == (1, "FAILS")


def test_a_fault_counts_in_each_of_its_families_and_once_in_all(
    conclude: Conclude, report: Report
) -> None:
    faults = {**FAULTS, "added": fault(3), "own": fault()}
    folder = report("controls", [control(name) for name in faults])
    status, out = conclude("--only", "controls", folder, faults=faults)
    empty = ["-"] * 5
    assert status == 0
    assert row(out, "A loss") == ["1", *empty]
    assert row(out, "B sums") == ["2", *empty]
    assert row(out, "of the contract") == ["1", *empty]
    assert row(out, "all, each once") == ["3", *empty]


def test_a_family_without_a_fault_says_why(conclude: Conclude, report: Report) -> None:
    folder = report("controls", KILLED)
    status, out = conclude("--only", "controls", folder)
    assert status == 0
    assert row(out, "D experts")[6] == "no fault: no experts (every layer is dense)"
    assert row(out, "C")[6] == "no fault: no row in the catalogue"


def test_a_family_that_applies_needs_a_killed_fault(conclude: Conclude, report: Report) -> None:
    folder = report("controls", KILLED)
    status, out = conclude("--only", "controls", folder, faults={"halved": fault(1)})
    assert row(out, "B sums")[6] == "no fault: the catalogue gives no reason"
    assert "no fault of family B sums is killed, and the catalogue has it" in out
    assert "family A" not in out
    assert status == 1


@pytest.mark.parametrize(
    ("cells", "result"),
    [
        ([control("halved"), control("halved", "tp2")], "killed"),
        ([control("halved"), control("halved", "tp2", result="weak")], "weak"),
        ([control("halved", result="survived"), control("halved", "tp2", result="weak")], "surv"),
        ([control("halved")], "not run: halved (test_a.test_b on tp2)"),
        # One on which it isn't said to show counts, too.
        (
            [
                *(control("halved", topology) for topology in ("cp2", "tp2")),
                control("halved", "dp2", result="survived"),
            ],
            "survived: halved (test_a.test_b on dp2)",
        ),
    ],
)
def test_the_worst_of_its_topologies_counts_once(
    conclude: Conclude, report: Report, cells: list[Any], result: str
) -> None:
    faults = {"halved": fault(1, 3, topology=("cp2", "tp2"))}
    status, out = conclude("--only", "controls", report("controls", cells), faults=faults)
    assert sum(int(count) for count in row(out, "all, each once") if count != "-") == 1
    assert status == (result != "killed")
    assert status == 0 or f"\n{result}" in out


def test_cells_that_are_no_controls_are_left_out(conclude: Conclude, report: Report) -> None:
    other = {**control("weak"), "case": "subjects/tests/doctored_controls.py::test_a[weak]"}
    assert conclude("--only", "controls", report("controls", [*KILLED, other]))[0] == 0


@pytest.mark.parametrize(
    ("results", "survivors", "status"),
    [
        (["killed"] * 19 + ["not judged"], "", 0),
        (["killed"] * 18 + ["not judged"], "", 1),
        (["killed"] * 10 + ["refused"] * 9 + ["not judged"], "", 0),
        (["killed"] * 18 + ["not judged"] + ["survived"], "flag | *", 1),
        (["killed"] * 19 + ["not judged"] + ["survived"] * 9, "flag | *", 0),
        (["killed"] * 19 + ["not judged"] + ["survived"], "reported | *", 1),
        (["killed"] + ["equivalent"] * 9 + ["not reached"] * 9, "", 0),
        (["equivalent"], "", 1),
    ],
)
def test_the_share_of_mutants_that_must_be_killed(
    conclude: Conclude, report: Report, results: list[str], survivors: str, status: int
) -> None:
    folder = report("mutants", [mutants(*results)])
    found, out = conclude("--only", "mutants", folder, survivors=survivors)
    assert found == status
    assert ("make a difference are killed or refused, expected 95%" in out) == bool(status)


@pytest.mark.parametrize(("survivors", "status"), [("", 1), ("flag | dropped*in number20", 0)])
def test_a_survivor_without_a_reason_fails(
    conclude: Conclude, report: Report, survivors: str, status: int
) -> None:
    folder = report("mutants", [mutants(*["killed"] * 20, "survived")])
    found, out = conclude("--only", "mutants", folder, survivors=survivors)
    assert found == status
    assert ("1 survive without a reason in cases/survivors.txt" in out) == bool(status)


def test_mutants_by_kind_beside_faults(conclude: Conclude, report: Report) -> None:
    cell = mutants("killed", "refused", "survived", "not judged", "equivalent", "not reached")
    folders = report("controls", KILLED), report("mutants", [cell])
    status, out = conclude(*folders)
    assert status == 1
    assert row(out, "dropped") == ["1"] * 6
    assert "1 of 4 mutants that change a number are killed (25.0 %), 1 more refused" in out
    assert "2 of 5 negative controls are killed (40.0 %): 1 of 1 faults, 1 of 4 mutants" in out
    for result, at in (("refused", 1), ("survived", 2), ("not judged", 3)):
        assert f"\n{result}: dropped: all_reduce over cp in forward, t.py:{at} in number{at}" in out
    assert "\nnot reached:" not in out


@pytest.mark.parametrize(
    ("cells", "schema", "said"),
    [
        (KILLED, 2, "expected schema 1 in its first line, got 2"),
        ([], 1, "expected cells of cases/controls.py, got none"),
        (CAUGHT, 1, "expected cells of cases/controls.py, got none"),
        ([control("gone")], 1, "expected faults of subjects/trainer/faults, got 'gone'"),
        (KILLED * 2, 1, "'halved' ran more than once on cp2"),
    ],
)
def test_what_is_no_controls_run(
    conclude: Conclude, report: Report, cells: list[Any], schema: int, said: str
) -> None:
    folder = report("controls", cells, schema=schema)
    status, out = conclude("--only", "controls", folder)
    assert (status, f"kill_matrix: {folder}/run.jsonl: " in out) == (2, True)
    assert said in out
    assert "again" in out or "name that folder" in out


@pytest.mark.parametrize("cells", [[], KILLED, [mutants()]])
def test_what_is_no_run_with_mutants(conclude: Conclude, report: Report, cells: list[Any]) -> None:
    status, out = conclude("--only", "mutants", report("mutants", cells))
    assert status == 2
    assert f"expected cells with trials of mutants, got none in {len(cells)} cells" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "run.jsonl: expected the results of a run, got [Errno 2]"),
        (b"\xff", "run.jsonl: expected the results of a run, got 'utf-8'"),
        (b"", "run.jsonl: expected schema 1 in its first line, got 'an empty file'"),
        (b'{"schema": 1}\n{"case": "t', 'run.jsonl:2: expected a JSON object, got \'{"case": "t\''),
        (b"[1]\n", "run.jsonl:1: expected a JSON object, got '[1]'"),
    ],
)
@pytest.mark.parametrize("kind", ["controls", "mutants"])
def test_what_is_no_report(
    conclude: Conclude, tmp_path: Path, kind: str, text: bytes | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "run.jsonl").write_bytes(text)
    status, out = conclude("--only", kind, str(tmp_path))
    assert (status, said in out) == (2, True), out


def test_a_list_of_survivors_that_cannot_be_read(conclude: Conclude, report: Report) -> None:
    folder = report("mutants", CAUGHT)
    status, out = conclude("--only", "mutants", folder, survivors="because")
    assert (status, "survivors.txt:1: expected 'reason | name of a mutant'" in out) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], "expected 2 folders, of controls and mutants, got 1"),
        (["--only", "controls", "a", "b"], "expected 1 folder, of controls, got 2"),
    ],
)
def test_as_many_folders_as_runs(conclude: Conclude, arguments: list[str], said: str) -> None:
    status, out = conclude(*arguments)
    assert (status, said in out) == (2, True), out


def test_it_runs_from_anywhere(report: Report, tmp_path: Path) -> None:
    """A program that needs the checkout's packages finds them by its own place."""
    command = [sys.executable, kill_matrix.__file__, "--only", "mutants", report("m", CAUGHT)]
    env = {**os.environ, "PYTHONPATH": str(kill_matrix.ROOT / "harness")}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["holds"]), done.stderr
