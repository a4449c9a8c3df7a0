"""The trainer under test and its oracle, behind one fixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shardproof import Rank
    from subjects.protocol import Trainer

BuildTrainer = Callable[..., "Trainer"]
Adapter = Callable[..., Path]

# So few that the head of the tiny model works in several chunks, the last one ragged.
_TINY = {"head_rows": 5}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A control (``controls.py``) runs where its fault shows, or where the user says."""
    if not config.getoption("--topology"):
        config.hook.pytest_deselected(items=[item for item in items if not _shows(item)])
        items[:] = [item for item in items if _shows(item)]


def _shows(item: pytest.Item) -> bool:
    faults = getattr(getattr(item, "function", None), "faults", None)
    params = getattr(getattr(item, "callspec", None), "params", {})
    return faults is None or params["rank"].label in faults[params["fault"]].topologies


@pytest.fixture(params=["none", "full"])
def sharing(request: pytest.FixtureRequest) -> str:
    """Whether prefixes that documents share are computed once."""
    return str(request.param)


@pytest.fixture
def checkpoint(rank: Rank) -> Callable[..., Path]:
    """Writes a checkpoint once for a case: the reference does, ranks find it there."""
    from oracles import checkpoints

    def write(kind: str = "tiny", **options: object) -> Path:
        directory = rank.case_dir / f"{kind}-checkpoint"
        if not (directory / "config.json").exists():
            getattr(checkpoints, f"{kind}_checkpoint")(directory, **options)
        return directory

    return write


@pytest.fixture
def adapter(rank: Rank, checkpoint: Callable[..., Path]) -> Adapter:
    """Writes an adapter of the tiny model once for a case, by PEFT; ranks find it there."""

    def write(name: str, **options: Any) -> Path:
        directory = rank.case_dir / f"adapter-{name}"
        if not (directory / "adapter_config.json").exists():
            from oracles.adapters import write_adapter

            write_adapter(directory, checkpoint("tiny"), **options)
        return directory

    return write


@pytest.fixture
def build(rank: Rank, checkpoint: Callable[..., Path]) -> BuildTrainer:
    """Builds the oracle on the reference and the trainer on ranks, from one checkpoint.

    ``of`` names the checkpoint, ``options`` go to its writer; ``only`` goes to the trainer, and
    makes no difference to the oracle.
    """

    def make(
        *,
        sharing: Any = "none",
        plan: Any = "uneven",
        of: str = "tiny",
        only: Mapping[str, Any] | None = None,
        **options: object,
    ) -> Trainer:
        directory = checkpoint(of, **options)
        if rank.is_reference:
            from oracles.transformers_oracle import TransformersTrainer

            return TransformersTrainer(directory, rank)
        from subjects.trainer import TrainerRank

        settings = {**(_TINY if of == "tiny" else {}), **(only or {})}
        return TrainerRank.build(directory, rank, sharing=sharing, plan=plan, **settings)

    return make


@pytest.fixture
def trainer(build: BuildTrainer, sharing: str) -> Trainer:
    """The tiny model, with and without shared prefixes."""
    return build(sharing=sharing)
