"""What the tests of verdicts share: ranks as recorders of one process, with JSON between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardproof.topology import parse_topology
from shardproof.verdict import Recorder, failed, finish_reference, merge, outcome, render
from shardproof.verdict.recorder import Role

Body = Callable[["Rank"], None]
"""What a case does, on the reference and on a rank."""


class Rank:
    """A recorder and where it stands, as a case sees it; ``noise`` perturbs as a noise run does."""

    def __init__(self, recorder: Recorder, coordinates: Mapping[str, int], noise: int | None):
        self.recorder = recorder
        self.observe = recorder.observe
        self.coordinates = coordinates
        self._generator = None if noise is None else torch.Generator().manual_seed(noise)

    def noise(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` under noise of two units of rounding, in a noise run; else unchanged."""
        if self._generator is None:
            return value
        drawn = torch.rand(value.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        unit = torch.finfo(value.dtype).eps
        return (value.double() * (1 + drawn * unit)).to(value.dtype)


class World:
    """A case: its reference with noise runs, then any number of topologies."""

    def __init__(self, directory: Path, *, dtype: torch.dtype = torch.float64) -> None:
        self.directory = directory
        self.reference_dir = directory / "reference"
        self.dtype = dtype
        self.text = ""
        self._cells = 0

    def run(self, role: Role, body: Body, *, topology: str = "single", seed: int = 0) -> None:
        """One run of the reference side."""
        recorder = Recorder(
            role=role,
            topology=parse_topology(topology),
            rank=0,
            reference_dir=self.reference_dir,
            cell_dir=self.directory / role,
            dtype=self.dtype,
            seed=seed,
        )
        coordinates = parse_topology("single").coordinates(0)
        body(Rank(recorder, coordinates, seed if role == "noise" else None))
        json.dumps(recorder.seal(), allow_nan=False)

    def reference(self, body: Body, *, runs: int = 3, repeat: Body | None = None) -> dict[str, Any]:
        """The reference, its repetition and noise runs; returns the summary."""
        self.run("reference", body)
        self.run("repeat", repeat or body)
        for seed in range(runs):
            self.run("noise", body, seed=seed)
        summary = finish_reference(self.reference_dir, noise_runs=runs)
        loaded: dict[str, Any] = json.loads(json.dumps(summary, allow_nan=False))
        return loaded

    def cell(self, name: str, body: Body) -> list[dict[str, Any]]:
        """The verdicts on one topology; ``text`` is the failure message."""
        topology = parse_topology(name)
        self._cells += 1
        recorders = []
        for rank in range(topology.world_size):
            recorder = Recorder(
                role="candidate",
                topology=topology,
                rank=rank,
                reference_dir=self.reference_dir,
                cell_dir=self.directory / f"cell{self._cells}",
                dtype=self.dtype,
            )
            body(Rank(recorder, topology.coordinates(rank), None))
            recorders.append(recorder)
        sealed = [_over_the_wire(recorder.seal()) for recorder in recorders]
        parts = [_over_the_wire(recorder.judge(sealed)) for recorder in recorders]
        verdicts = merge(parts)
        assert failed(verdicts) == (outcome(verdicts) != "passed")
        self.text = render(verdicts, reproduce="pytest -k this", topology=topology)
        return verdicts

    def one(self, name: str, body: Body) -> dict[str, Any]:
        """The only verdict on a topology."""
        (verdict,) = self.cell(name, body)
        return verdict

    def same(self, name: str, value: object, **options: Any) -> dict[str, Any]:
        """The only verdict where every rank observes ``value`` as ``x``."""
        return self.one(name, lambda rank: rank.observe("x", value, **options))


def _over_the_wire(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


VALUE = numbers(12, 16)
"""What ranks observe in tests of where a value lies."""


def world_of(directory: Path, value: torch.Tensor) -> World:
    """The world of a case whose reference observes ``value`` as ``x``."""
    world = World(directory, dtype=value.dtype)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)))
    return world
