"""What a reference must be: deterministic, free of NaN, and the same under rounding."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verdict_support import Rank, World, numbers

from shardproof.topology import parse_topology
from shardproof.verdict import Recorder, StoreError, finish_reference, reference_needs


def failures(summary: dict[str, Any]) -> list[tuple[str, str]]:
    assert (summary["outcome"] == "reference failed") == bool(summary["failures"])
    return [(failure["name"], failure["reason"]) for failure in summary["failures"]]


def plain(rank: Rank) -> None:
    rank.observe("x", rank.noise(numbers(4, 9)))
    rank.observe("ids", torch.arange(3))
    rank.observe("none", None)


def test_a_sound_reference(tmp_path: Path) -> None:
    summary = World(tmp_path).reference(plain)
    assert failures(summary) == []
    assert (summary["observations"], summary["scalars"], summary["noise_runs"]) == (3, False, 3)
    assert [line["name"] for line in summary["floors"]] == ["x", "ids", "none"]


def test_one_bit_between_two_runs_is_not_deterministic(tmp_path: Path) -> None:
    def again(rank: Rank) -> None:
        value = numbers(4, 9)
        value[3, 1] = torch.nextafter(value[3, 1], value[0, 0])
        rank.observe("x", value)
        rank.observe("ids", torch.arange(3))
        rank.observe("none", None)

    summary = World(tmp_path).reference(plain, repeat=again)
    assert failures(summary) == [("x", "not deterministic")]
    assert "seed every generator" in summary["failures"][0]["message"]


def test_another_form_in_the_second_run(tmp_path: Path) -> None:
    def again(rank: Rank) -> None:
        rank.observe("x", numbers(4, 8))
        rank.observe("none", 1.0)
        rank.observe("new", 1)

    summary = World(tmp_path).reference(plain, repeat=again)
    assert failures(summary) == [
        ("x", "not deterministic"),
        ("ids", "not deterministic"),
        ("none", "not deterministic"),
        ("new", "not deterministic"),
    ]
    texts = [failure["message"] for failure in summary["failures"]]
    assert "float64[4, 9], the second float64[4, 8]" in texts[0]
    assert "gives None, the second float64[]" in texts[2]


def unstable(what: Any) -> Any:
    def body(rank: Rank) -> None:
        moved = rank.noise(torch.ones(1, dtype=torch.float64)) != 1.0
        what(rank, bool(moved))

    return body


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda rank, moved: rank.observe("x", int(moved)), "compares exactly"),
        (lambda rank, moved: rank.observe("x", 1.0 + moved, exact=True), "compares exactly"),
        (
            lambda rank, moved: rank.observe("x", torch.ones(4 + moved)),
            r"gives float32\[5\], the reference float32\[4\]",
        ),
        (
            lambda rank, moved: rank.observe(
                "x", torch.tensor([1.0, 2, 3, math.nan if moved else 4])
            ),
            "NaN or infinity",
        ),
        (lambda rank, moved: moved or rank.observe("x", torch.ones(4)), "does not observe it"),
        (
            lambda rank, moved: rank.observe("x", torch.ones(4) if moved else None),
            "the reference None",
        ),
    ],
)
def test_what_hangs_on_rounding_fails_and_names_the_noise_run(
    tmp_path: Path, what: Any, words: str
) -> None:
    summary = World(tmp_path).reference(unstable(what))
    assert failures(summary) == [("x", "unstable")]
    message = summary["failures"][0]["message"]
    assert "noise run 0" in message
    assert re.search(words, message)


def test_an_observation_made_under_noise_alone(tmp_path: Path) -> None:
    def body(rank: Rank, moved: bool) -> None:
        rank.observe("x", numbers(4, 9))
        if moved:
            rank.observe("y", 1)

    summary = World(tmp_path).reference(unstable(body))
    assert failures(summary) == [("y", "unstable")]


def test_nan_in_the_reference(tmp_path: Path) -> None:
    value = numbers(4, 9)
    value[2, 2] = math.nan
    summary = World(tmp_path).reference(lambda rank: rank.observe("x", value))
    assert failures(summary) == [("x", "nan")]


def test_a_case_that_observes_nothing(tmp_path: Path) -> None:
    summary = World(tmp_path).reference(lambda _rank: None)
    assert failures(summary) == [("", "nothing observed")]


def test_bad_input_carries_its_line(tmp_path: Path) -> None:
    def body(rank: Rank) -> None:
        rank.observe("x", "text")
        rank.observe("y", 1)
        rank.observe("y", 2)
        rank.observe("", 3)
        rank.observe(5, 3)  # type: ignore[arg-type]
        rank.observe("z", numbers(3), rows=[0, 1, 1])
        rank.observe("w", torch.tensor(True), partial=("cp",))
        rank.recorder.observe_gradients([("p", None)])  # type: ignore[list-item]
        rank.recorder.observe_gradients([])

    summary = World(tmp_path).reference(body, runs=0)
    found = {failure["name"]: failure["message"] for failure in summary["failures"]}
    assert set(found) == {"x", "y", "''", "5", "z", "w", "grad[0]", "grad"}
    assert all(f"{Path(__file__).name}:" in message for message in found.values())
    assert "expected a tensor" in found["x"]
    assert "observed twice, first at" in found["y"]
    assert "each of 0 to 2 once" in found["z"]
    assert "boolean" in found["w"]


@pytest.mark.parametrize(
    ("value", "runs"),
    [
        (torch.arange(5), 0),
        (None, 0),
        (numbers(4), 3),
        (numbers(3), 8),
        (1.5, 8),
        (torch.zeros(0), 0),
    ],
)
def test_how_many_noise_runs_are_wanted(tmp_path: Path, value: object, runs: int) -> None:
    world = World(tmp_path)
    world.run("reference", lambda rank: rank.observe("x", value))
    assert reference_needs(world.reference_dir) == runs


def test_floating_values_need_noise_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run("reference", plain)
    world.run("repeat", plain)
    with pytest.raises(ValueError, match="at least 3 noise runs"):
        finish_reference(world.reference_dir, noise_runs=0)
    with pytest.raises(StoreError, match=r"expected 3 noise runs .* found 0"):
        finish_reference(world.reference_dir, noise_runs=3)


def test_a_candidate_needs_a_finished_reference(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run("reference", plain)
    with pytest.raises(StoreError, match="did not finish"):
        world.cell("cp2", plain)


def test_a_candidate_that_is_not_compared_needs_no_reference(tmp_path: Path) -> None:
    recorder = Recorder(
        role="candidate",
        topology=parse_topology("single"),
        rank=0,
        reference_dir=tmp_path / "none",
        cell_dir=tmp_path / "c",
        dtype=torch.float64,
        compared=False,
    )
    recorder.observe("x", numbers(3))
    sealed = recorder.seal()
    with pytest.raises(RuntimeError, match="this is a candidate after it, not compared"):
        recorder.judge([sealed])


def test_rows_on_one_device_are_put_in_source_order(tmp_path: Path) -> None:
    value, order = numbers(6, 9), torch.tensor([3, 1, 0, 5, 4, 2])
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)[order], rows=order))
    assert world.same("cp2", value)["outcome"] == "passed"
    assert world.same("cp2", value[order])["outcome"] == "diverged"


def test_float32_values_of_a_float64_run_are_judged_in_float32(tmp_path: Path) -> None:
    value = numbers(4, 9)
    world = World(tmp_path)
    world.reference(lambda rank: rank.observe("x", rank.noise(value).float()))
    near = (value * (1 + 1e-8)).float()
    assert world.same("single", near)["outcome"] == "passed"
    far = (value * (1 + 1e-5)).float()
    assert world.same("single", far)["outcome"] == "diverged"


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_low_precision_runs(tmp_path: Path, dtype: torch.dtype, step: float) -> None:
    value = numbers(40, 16, dtype=dtype)
    world = World(tmp_path, dtype=dtype)
    world.reference(lambda rank: rank.observe("x", rank.noise(value)))
    for factor, outcome in ((step / 4, "passed"), (0.2, "diverged")):
        moved = (value.double() * (1 + factor)).to(dtype)
        verdict = world.same("cp2", moved)
        assert verdict["outcome"] == outcome


def test_observing_after_the_end_raises(tmp_path: Path) -> None:
    recorder = Recorder(
        role="reference",
        topology=parse_topology("single"),
        rank=0,
        reference_dir=tmp_path / "r",
        cell_dir=tmp_path / "c",
        dtype=torch.float64,
    )
    recorder.observe("x", 1)
    assert recorder.seal() is recorder.seal()
    with pytest.raises(RuntimeError, match="had ended"):
        recorder.observe("y", 1)
    with pytest.raises(RuntimeError, match="for a candidate that is compared, after seal"):
        recorder.judge([])


def test_no_mode_of_the_case_touches_the_comparison(tmp_path: Path) -> None:
    """Noise, default dtypes and devices, and autocast are the case's, not the verdict's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Spoil(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(f"{func} was seen")

    value, spoil = numbers(20, 16), Spoil()  # type: ignore[no-untyped-call]  # torch's own

    def body(rank: Rank) -> None:
        moved = rank.noise(value)
        torch.set_default_dtype(torch.float16)
        try:
            with spoil, torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
                rank.observe("x", moved)
        finally:
            torch.set_default_dtype(torch.float32)

    world = World(tmp_path)
    assert failures(world.reference(body)) == []
    assert world.one("cp2", body)["outcome"] == "passed"
