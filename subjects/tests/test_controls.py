"""Each known fault, put into the trainer, fails the case that is about it, where it shows.

One run of ``cases/controls.py``, for all faults or those that CONTROLS in the environment chooses,
and of ``doctored_controls.py`` for what must not count as caught.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from cases.controls import CHOSEN
from subjects.tests.judge import judge, of_fault
from subjects.trainer.faults import FAULTS

ROOT = Path(__file__).parents[2]

COUNTED = "counted once for each rank of that axis"
# What the message of some must say: {cp} is the size of that axis.
CAUSES = {
    "rank-local rows returned": ["rank-local rows returned: the ranks along cp hold"],
    "two rows of a shard swapped": ["are swapped"],
    "one row zeroed": ["zero"],
    "document mask dropped for remote keys": [
        "A document mask dropped for remote keys",
        ".leak_of_document_",
    ],
    "positions restarted per shard": ["Positions restarted in each shard", ".twin_differs"],
    "labels shifted inside the shard": [
        "Labels shifted inside a shard",
        ".logprob_off_its_own_logits",
    ],
    "gather backward summed over cp": ["α = cp = {cp}", COUNTED],
    "gather backward divided by cp": ["α = 1/cp = 1/{cp}", "divided by that axis once too often"],
    "probe gradient summed over cp": ["grad/probe", "α = cp = {cp}", COUNTED],
    "dp_reduce including cp": ["tokens: diverged", "α = cp = {cp}", COUNTED],
    "q/k-norm gradient not summed over tp": ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],
}
# What alone may fail for some.
ALONE = {"q/k-norm gradient not summed over tp": ("q_norm.weight", "k_norm.weight")}
CP = {"cp2": 2, "cp4": 4, "dp2xcp2": 2, "tp2xcp2": 2, "tp2": 1}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    report = tmp_path_factory.mktemp("controls")
    files = ["cases/controls.py", "subjects/tests/doctored_controls.py"]
    options = ["-q", "--tb=no", "--parity-report", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-3000:] + done.stderr
    lines = (report / "run.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_is_caught_on_every_topology_where_it_shows(
    cells: list[dict[str, Any]], name: str
) -> None:
    found = of_fault(cells, name)
    assert set(found) == set(FAULTS[name].topologies)
    verdicts = {topology: judge(FAULTS[name], cell) for topology, cell in found.items()}
    assert verdicts == dict.fromkeys(found, "killed")
    for topology, cell in found.items():
        for words in CAUSES.get(name, ()):
            assert words.format(cp=CP.get(topology)) in cell["message"], cell["message"]
        if name in ALONE:
            failed = {seen["name"] for seen in cell["observations"] if seen["outcome"] != "passed"}
            assert failed
            assert all(one.endswith(ALONE[name]) for one in failed)


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ["survived", "misattributed", "misjudged", "weak"])
def test_what_proves_nothing_does_not_count_as_caught(
    cells: list[dict[str, Any]], verdict: str
) -> None:
    from subjects.tests.doctored_controls import DOCTORED

    (cell,) = of_fault(cells, verdict).values()
    assert judge(DOCTORED[verdict], cell).startswith(verdict), cell.get("message")


def test_words_are_of_faults() -> None:
    assert set(CAUSES) | set(ALONE) <= set(FAULTS)
