"""What the table at the end of a run adds up."""

from __future__ import annotations

from typing import Any

from shardproof.results import table


def cell(case: str, topology: str, *, reference: float | None, seed: int = 0) -> dict[str, Any]:
    found = {"case": f"t.py::{case}", "topology": topology, "seed": seed, "seconds": 1.0}
    found |= {"outcome": "passed", "observations": []}
    return found if reference is None else {**found, "reference_seconds": reference}


def test_a_reference_counts_once_whichever_cells_share_it() -> None:
    cells = [
        cell("test_a[none]", "cp2", reference=2.5),
        cell("test_a[none]", "tp2", reference=2.5),
        cell("test_a[full]", "cp2", reference=2.5),
        cell("test_a[full]", "cp2", reference=2.5, seed=1),
        cell("test_b", "cp2", reference=2.5),
        cell("test_c", "cp2", reference=None),
    ]
    assert table(cells)[-1] == "6.0 s on ranks, 7.5 s in references"


def test_the_ratio_of_a_failure_is_that_of_what_failed() -> None:
    right = {"name": "a", "numel": 9, "ratio": 0.7, "row_ratio": 0.6, "outcome": "passed"}
    shape = {"name": "b", "numel": 9, "ratio": "inf", "row_ratio": "inf", "outcome": "diverged"}
    wrong = {**right, "name": "c", "ratio": 3e6, "outcome": "diverged"}
    failing = cell("test_a", "cp2", reference=None) | {"outcome": "diverged"}
    assert table([failing | {"observations": [right, shape]}])[1].split()[1:] == [
        "DIVERGED",
        "1.00s",
    ]
    assert table([failing | {"observations": [right, shape, wrong]}])[1].split()[1:] == [
        "DIVERGED",
        "3.0e+06",
        "1.00s",
    ]
