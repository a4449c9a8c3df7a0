"""The noise floor of what the cases observe is the true rounding error of their reference."""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.parameters import marks_of, names_of, values_of
from shardproof import Rank
from shardproof.noise import NoiseMode
from shardproof.rank.groups import RankGroups
from shardproof.rank.isolation import seed_everything
from shardproof.topology import parse_topology
from shardproof.verdict import Recorder, finish_reference
from shardproof.verdict.records import Measured
from shardproof.verdict.reference import Store, open_store
from shardproof.verdict.store import Reader, read_index
from subjects.trainer.faults.sample import seed_of, shuffled

Checkpoints = Callable[..., Path]

LOWEST, HIGHEST = 0.5, 8.0
ELEMENTS = 64
# Cases of which nothing that is observed has so many elements.
SHORT = {
    "test_heads.test_what_does_not_fit_is_refused",
    "test_heads.test_the_least_memory_is_told_to_all",
    "test_micro_batches.test_waves_run_when_they_are_asked_for",
    "test_metrics.test_metrics_over_data_parallel_ranks",
    "test_outputs.test_target_logprobs",
    "test_outputs.test_targets_pick_from_their_own_logits",
}
# Cases, by pattern, whose floors are not measured here, and why. All others are.
LEFT_OUT = {
    "test_native.*": "true widths: gigabytes and minutes",
    "test_contract.*": "refusals; what is observed besides is observed by others",
    "test_rules.*": "nothing is computed on one device",
    "test_outputs.test_plans": "a plan is nothing to the reference: that of test_hidden_states",
    "test_attention.test_exchanges": "an exchange is nothing to the reference",
    "test_attention.test_empty_shard_in_a_ring": "a shard is nothing to the reference",
    "test_attention.test_one_row_a_shard": "a shard is nothing to the reference",
    "test_slots.test_load_change_and_restore": "factors are copies, compared bit for bit",
}
SINGLE = parse_topology("single")
KNOWN = {"rank", "sharing", "build", "trainer", "checkpoint", "adapter"}
"""Fixtures that the reference side offers here."""


@dataclass(frozen=True)
class Case:
    """A case as a function, with the first value of each of its parameters."""

    body: Callable[..., None]
    values: Mapping[str, object]

    @property
    def unknown(self) -> set[str]:
        """Fixtures that are not offered here."""
        return set(inspect.signature(self.body).parameters) - KNOWN - set(self.values)


def _all_cases() -> dict[str, Case]:
    found = {}
    for path in sorted((Path(__file__).parents[2] / "cases").glob("test_*.py")):
        source = importlib.import_module(f"cases.{path.stem}")
        for name, body in vars(source).items():
            if name.startswith("test_") and inspect.isfunction(body):
                marks = [m for m in marks_of(body, source) if m.name == "parametrize"]
                values: dict[str, object] = {}
                for mark in marks:
                    values |= dict(zip(names_of(mark), values_of(mark, {}), strict=True))
                found[f"{path.stem}.{name}"] = Case(body, values)
    return found


def _left_out(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in LEFT_OUT)


def _chosen(names: list[str], words: str) -> list[str]:
    """All names, or for ``sample:SEED`` a third of them."""
    seed = seed_of(words, "FLOORS")
    some = names if seed is None else shuffled(names, seed)[: math.ceil(len(names) / 3)]
    return [name for name in names if name in some]


CASES = _all_cases()
MEASURED = [name for name in CASES if not _left_out(name)]
CHOSEN = _chosen(MEASURED, os.environ.get("FLOORS", "all"))


def test_every_case_is_measured_or_left_out_for_a_reason() -> None:
    unknown = {name: CASES[name].unknown for name in MEASURED if CASES[name].unknown}
    assert not unknown, f"give them here, or name the cases in LEFT_OUT with a reason: {unknown}"
    for pattern in LEFT_OUT:
        assert any(fnmatchcase(name, pattern) for name in CASES), f"{pattern} leaves out nothing"


def test_a_sample_is_a_third_and_every_case_comes_up() -> None:
    assert _chosen(MEASURED, "all") == MEASURED
    drawn = [_chosen(MEASURED, f"sample:{seed}") for seed in range(30)]
    assert {len(some) for some in drawn} == {math.ceil(len(MEASURED) / 3)}
    assert set().union(*drawn) == set(MEASURED)
    with pytest.raises(ValueError, match=r"FLOORS=all or FLOORS=sample:SEED"):
        _chosen(MEASURED, "some")


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroups]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = RankGroups(0, 1)
    made.ensure(SINGLE, tmp_path_factory.mktemp("store"), megatron=False, ledger=False)
    yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    pytest.importorskip("transformers")
    from oracles import checkpoints

    root = tmp_path_factory.mktemp("checkpoints")

    def write(kind: str = "tiny", **options: object) -> Path:
        directory = root / f"{kind}-{sorted(options.items())}"
        if not directory.exists():
            getattr(checkpoints, f"{kind}_checkpoint")(directory, **options)
        return directory

    return write


class ReferenceSide:
    """Runs one case's body as the reference, in one dtype."""

    def __init__(
        self,
        case: Case,
        groups: RankGroups,
        checkpoint: Checkpoints,
        root: Path,
        dtype: torch.dtype,
    ) -> None:
        self._case = case
        self._groups = groups.topologies["single"]
        self._checkpoint = checkpoint
        self._adapters = root / "adapters"  # the same files in both dtypes
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
                    self._case.body(**arguments)
        finally:
            torch.set_default_dtype(before)
        recorder.seal()

    def _arguments(self, rank: Rank) -> dict[str, Any]:
        from oracles.transformers_oracle import TransformersTrainer

        def build(
            *,
            of: str = "tiny",
            sharing: object = None,
            plan: object = None,
            only: object = None,
            cut: int | None = None,
            **options: object,
        ) -> TransformersTrainer:
            del sharing, plan, only
            return TransformersTrainer(self._checkpoint(of, **options), rank, layers=cut)

        def adapter(name: str, **options: Any) -> Path:
            directory = self._adapters / name
            if not directory.exists():
                from oracles.adapters import write_adapter

                write_adapter(directory, self._checkpoint("tiny"), **options)
            return directory

        wanted = inspect.signature(self._case.body).parameters
        offered = {
            "rank": rank,
            "sharing": "none",
            "build": build,
            "checkpoint": self._checkpoint,
            "adapter": adapter,
            **self._case.values,
        }
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
@pytest.mark.parametrize("case", CHOSEN)
def test_floor_is_the_rounding_error_of_the_reference(
    case: str,
    groups: RankGroups,
    checkpoint: Checkpoints,
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
