"""Each known fault, put into the trainer, fails the case that is about it, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

COUNTED = "counted once for each rank of that axis"
# What the message must say: {cp} is the size of that axis.
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
EVERYWHERE = {"cp2", "cp4", "dp2xcp2", "tp2xcp2"}
CP = {"cp2": 2, "cp4": 4, "dp2xcp2": 2, "tp2xcp2": 2, "tp2": 1}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    report = tmp_path_factory.mktemp("controls")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "cases/controls.py", "-q", "--parity-report", report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-3000:] + done.stderr
    lines = (report / "run.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines[1:]]


def _fault(cell: dict[str, Any]) -> str:
    return str(cell["case"]).partition("[")[2].removesuffix("]")


@pytest.mark.slow
@pytest.mark.parametrize("fault", CAUSES)
def test_a_fault_is_caught_on_every_topology_where_it_can_show(
    cells: list[dict[str, Any]], fault: str
) -> None:
    found = {cell["topology"]: cell for cell in cells if _fault(cell) == fault}
    assert set(found) == ({"tp2", "tp2xcp2"} if "over tp" in fault else EVERYWHERE)
    for topology, cell in found.items():
        assert cell["outcome"] == "diverged", (topology, cell["message"])
        for words in CAUSES[fault]:
            assert words.format(cp=CP[topology]) in cell["message"], (topology, cell["message"])


@pytest.mark.slow
def test_faulty_ratios_are_far_from_clean_ones(cells: list[dict[str, Any]]) -> None:
    """In float64 a fault scores orders of magnitude above the gate, so the gate is not tuned."""
    for cell in cells:
        ratios = [
            seen["ratio"]
            for seen in cell["observations"]
            if seen["outcome"] != "passed" and isinstance(seen["ratio"], float)
        ]
        exact = [seen for seen in cell["observations"] if seen["gate"] == 0]
        assert not ratios or max(ratios) > 1e9, cell["case"]
        assert ratios or exact or cell["case"].endswith("rows returned]")


@pytest.mark.slow
def test_norms_alone_fail_for_a_fault_of_norms(cells: list[dict[str, Any]]) -> None:
    for cell in cells:
        if "over tp" in _fault(cell):
            failed = {seen["name"] for seen in cell["observations"] if seen["outcome"] != "passed"}
            assert failed
            assert all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in failed)


def test_every_fault_has_its_words() -> None:
    pytest.importorskip("megatron.core")
    from subjects.trainer.faults import FAULTS

    assert set(CAUSES) == set(FAULTS)
