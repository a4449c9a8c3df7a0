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
        cell("test_a[full]", "cp2", reference=4.0, seed=1),
        cell("test_b", "cp2", reference=2.5),
        cell("test_c", "cp2", reference=None),
    ]
    assert table(cells)[-1] == "6.0 s on ranks, 9.0 s in references"
