"""The trainer under test and its oracle, behind one fixture."""

from __future__ import annotations

import json
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Native cases can run on a checkpoint that somebody trained."""
    group = parser.getgroup("cases")
    group.addoption(
        "--model",
        metavar="PATH",
        help="a Qwen3 checkpoint directory that the native cases run on (cases -m native)",
    )
    group.addoption(
        "--model-layers",
        type=int,
        default=1,
        metavar="N",
        help="how many of its first layers (default: 1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a ``--model`` that can't be run, before a rank starts."""
    path = config.getoption("--model", None)
    if path is not None:
        problem = _problem_of_model(Path(path), config.getoption("--model-layers"))
        if problem:
            raise pytest.UsageError(f"--model {path}: {problem}")


def _problem_of_model(directory: Path, layers: int) -> str | None:
    """Why the checkpoint can't be run, without importing what runs it."""
    file = directory / "config.json"
    if not file.is_file():
        return "no config.json there; expected a directory written by save_pretrained"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("model_type") != "qwen3":
        return f"model_type is {config.get('model_type')!r}; the trainer runs 'qwen3'"
    if not any(directory.glob("model*.safetensors")):
        return "no model.safetensors there, nor parts of one"
    there = config["num_hidden_layers"]
    if not 1 <= layers <= there:
        return f"--model-layers is {layers}; it has {there}"
    return None


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
def checkpoint(rank: Rank, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """Writes a checkpoint once for a case: the reference does, ranks find it there.

    A native one is that of ``--model`` where it is given.
    """
    from oracles import checkpoints

    model = request.config.getoption("--model", None)

    def write(kind: str = "tiny", **options: object) -> Path:
        if kind == "native" and model is not None:
            return Path(model)
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
def build(
    rank: Rank, checkpoint: Callable[..., Path], request: pytest.FixtureRequest
) -> BuildTrainer:
    """Builds the oracle on the reference and the trainer on ranks, from one checkpoint.

    ``of`` names the checkpoint, ``options`` go to its writer; ``only`` goes to the trainer, and
    makes no difference to the oracle; ``cut`` keeps so many layers of both.
    """

    def make(
        *,
        sharing: Any = "none",
        plan: Any = "uneven",
        of: str = "tiny",
        only: Mapping[str, Any] | None = None,
        cut: int | None = None,
        **options: object,
    ) -> Trainer:
        directory = checkpoint(of, **options)
        given = of == "native" and request.config.getoption("--model", None) is not None
        layers = request.config.getoption("--model-layers") if given else cut
        if rank.is_reference:
            from oracles.transformers_oracle import TransformersTrainer

            return TransformersTrainer(directory, rank, layers=layers)
        from subjects.trainer import TrainerRank

        settings = {**(_TINY if of == "tiny" else {}), **(only or {})}
        return TrainerRank.build(
            directory, rank, sharing=sharing, plan=plan, layers=layers, **settings
        )

    return make


@pytest.fixture
def trainer(build: BuildTrainer, sharing: str) -> Trainer:
    """The tiny model, with and without shared prefixes."""
    return build(sharing=sharing)
