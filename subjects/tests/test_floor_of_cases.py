"""The noise floor of what the cases observe is the true rounding error of their reference."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import test_gradients, test_metrics, test_outputs
from shardproof import Rank
from shardproof.noise import NoiseMode
from shardproof.rank.groups import RankGroups
from shardproof.rank.isolation import seed_everything
from shardproof.topology import parse_topology
from shardproof.verdict import Recorder, finish_reference
from shardproof.verdict.records import Measured
from shardproof.verdict.reference import Store, open_store
from shardproof.verdict.store import Reader, read_index

LOWEST, HIGHEST = 0.5, 5.0
ELEMENTS = 64
# Cases of which nothing that is observed has so many elements.
SHORT = {
    "test_metrics.test_metrics_over_data_parallel_ranks",
    "test_outputs.test_target_logprobs",
    "test_outputs.test_targets_pick_from_their_own_logits",
}
SINGLE = parse_topology("single")
CASES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": body
    for module in (test_outputs, test_gradients, test_metrics)
    for name, body in vars(module).items()
    if name.startswith("test_") and "plan" not in inspect.signature(body).parameters
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroups]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = RankGroups(0, 1)
    made.ensure(SINGLE, tmp_path_factory.mktemp("store"), megatron=False)
    yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    pytest.importorskip("transformers")
    from oracles.checkpoints import tiny_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")

    def write(*, tied: bool) -> Path:
        directory = root / f"tied-{tied}"
        return directory if directory.exists() else tiny_checkpoint(directory, tied=tied)

    return write


class ReferenceSide:
    """Runs one case's body as the reference, in one dtype."""

    def __init__(
        self,
        body: Callable[..., None],
        groups: RankGroups,
        checkpoint: Callable[..., Path],
        root: Path,
        dtype: torch.dtype,
    ) -> None:
        self._body = body
        self._groups = groups.topologies["single"]
        self._checkpoint = checkpoint
        self.directory = root / str(dtype)
        self._dtype = dtype

    def run(self, role: str, number: int = 0) -> None:
        recorder = Recorder(
            role=role,  # type: ignore[arg-type]
            topology=SINGLE,
            rank=0,
            reference_dir=self.directory,
            cell_dir=self.directory / "cell",
            dtype=self._dtype,
            seed=number,
        )
        rank = Rank(
            topology=SINGLE,
            index=0,
            mesh=self._groups.mesh,
            groups=self._groups.by_axis,
            dtype=self._dtype,
            is_reference=True,
            case_dir=self.directory,
            seed=0,
            recorder=recorder,
        )
        seed_everything(0)
        mode = NoiseMode(number, perturb=False)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with mode:
                arguments = self._arguments(rank)
                with mode.perturbing(role == "noise"):
                    self._body(**arguments)
        finally:
            torch.set_default_dtype(before)
        recorder.seal()

    def _arguments(self, rank: Rank) -> dict[str, Any]:
        from oracles.transformers_oracle import TransformersTrainer

        def build(*, tied: bool = False, **_: object) -> TransformersTrainer:
            return TransformersTrainer(self._checkpoint(tied=tied), rank)

        wanted = inspect.signature(self._body).parameters
        offered = {"rank": rank, "sharing": "none", "build": build}
        if "trainer" in wanted:
            offered["trainer"] = build()
        return {name: offered[name] for name in wanted}


def _errors(low: Store, high: Store) -> dict[str, float]:
    """L2 distance of each floating observation from its float64 truth."""
    found = {}
    for name, entry in low.measured.items():
        truth = high.measured[name]
        if entry.floating and entry.numel and entry.shape == truth.shape:
            difference = low.tensor(entry).double() - high.tensor(truth)
            found[name] = float(torch.linalg.vector_norm(difference))
    return found


def _values(directory: Path) -> Store:
    """What a reference observed, without floors."""
    entries = [Measured.of(one) for one in read_index(directory / "reference.json")["entries"]]  # type: ignore[attr-defined]
    values = Reader(directory / "reference.bin")
    return Store({entry.name: entry for entry in entries}, values, values)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_floor_is_the_rounding_error_of_the_reference(
    case: str,
    groups: RankGroups,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    low = ReferenceSide(CASES[case], groups, checkpoint, tmp_path, torch.float32)
    high = ReferenceSide(CASES[case], groups, checkpoint, tmp_path, torch.float64)
    high.run("reference")
    low.run("reference")
    low.run("repeat")
    for number in range(3):
        low.run("noise", number)
    summary = finish_reference(low.directory, noise_runs=3)
    assert summary["outcome"] == "passed", summary["failures"]
    store = open_store(low.directory)
    errors = _errors(store, _values(high.directory))
    ratios = {
        name: store.measured[name].floor / error
        for name, error in errors.items()
        if store.measured[name].numel >= ELEMENTS and store.measured[name].norm > 0
    }
    assert bool(ratios) == (case not in SHORT)
    outside = {name: value for name, value in ratios.items() if not LOWEST <= value <= HIGHEST}
    assert not outside
    assert all(map(math.isfinite, ratios.values()))
    record_property("least", min(ratios.values(), default=None))
    record_property("most", max(ratios.values(), default=None))
