"""In a float64 run the trainer computes nothing in a lower precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from oracles.checkpoints import tiny_checkpoint
from oracles.tests.watch import LowerPrecision
from subjects.tests import scenario
from subjects.trainer import TrainerRank, precision, rope
from subjects.trainer.head_gradients import Gradients
from subjects.trainer.head_rows import Chunk, HeadWeights


def lowered(alone: Any, directory: Path) -> set[str]:
    trainer = TrainerRank.build(tiny_checkpoint(directory), alone, sharing="full")
    # The scenario draws its probe in float32.
    scenario_probe = torch.randn(scenario.HIDDEN, 3, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch, LowerPrecision() as watch:
        patch.setattr(scenario, "_probe", lambda: scenario_probe)
        scenario.step(trainer, list(enumerate(scenario.requests())))
        scenario.gradients(trainer)
    sites: set[str] = watch.sites
    return sites


def test_nothing_falls_below_float64(alone: Any, tmp_path: Path) -> None:
    assert lowered(alone, tmp_path) == set()


def test_a_float32_table_would_be_seen(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "working_dtype", lambda _: torch.float32)
    assert {"angles"} <= {site.split()[0] for site in lowered(alone, tmp_path)}
    assert precision.working_dtype(torch.float64) == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_sum_over_chunks_in_float32(dtype: torch.dtype) -> None:
    """A sum in the dtype of the run stays where it is once a chunk adds less than its spacing."""
    assert precision.working_dtype(dtype) == torch.float32
    count = 4096
    rows, head = torch.ones(count, 1, dtype=dtype), HeadWeights(torch.ones(1, 1, dtype=dtype))
    sums = Gradients.empty(rows, head, [False, True, False, False])
    for at in range(count):
        chunk = Chunk(at, at + 1, *[torch.arange(1)] * 2)
        sums.add(chunk, rows[at : at + 1], head, torch.ones(1, 1, dtype=dtype))
    _, total, _, _ = sums.like(rows, head)
    assert total is not None
    assert total.dtype == dtype
    assert total.item() == count
