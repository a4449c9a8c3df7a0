"""Random plans, packings, masks and lengths: what ranks return is what one device returns.

``make properties EXAMPLES=5000`` runs more of them, other ones each time.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, find, given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from subjects.protocol import Trainer
from subjects.tests import examples, worlds
from subjects.tests.examples import TOPOLOGIES, Example, as_case, documents, measure, shards
from subjects.tests.pool import Pool, RankError
from subjects.trainer.masks import visible_blocks
from subjects.trainer.packing import Sharing, pack
from subjects.trainer.plan import POLICIES, local_rows, make_plan, row_work

ROOT = Path(__file__).parents[2]
EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
BOUND = 1e-9
"""Relative distance from one device in float64: rounding is below 1e-12, faults above 1e-3."""

on_ranks = settings(
    max_examples=math.ceil((EXAMPLES or 200) / len(TOPOLOGIES)),
    # The gate must not change from one run to the next; by hand, new examples are wanted.
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class World:
    """A pool for each topology, started when it is first needed, and the oracle."""

    def __init__(self, directory: Path) -> None:
        from oracles.checkpoints import tiny_checkpoint
        from oracles.transformers_oracle import TransformersTrainer

        tiny_checkpoint(directory / "checkpoint")
        alone = worlds.TestRank(coordinates={}, groups={})
        self.oracle: Trainer = TransformersTrainer(directory / "checkpoint", alone)
        examples.add_slots(self.oracle)
        self.pools = {name: Pool(name, directory, examples.setup) for name in TOPOLOGIES}

    def measure(self, example: Example, *, fault: str | None = None) -> dict[str, float]:
        """How far ranks are from the oracle."""
        return measure(self.pools[example.topology], self.oracle, example, fault=fault)

    def zeros(self, example: Example) -> tuple[str, ...]:
        """Gradients that are zero on one device, which a parity case can't judge."""
        expected = examples.expected_of(self.oracle, example)
        scales = examples.scales(expected)
        return tuple(
            name.removeprefix("grad.")
            for name, value in expected.items()
            if name.startswith("grad.") and float(value.norm()) <= examples.TINY * scales[name]
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    for pool in made.pools.values():
        pool.close()
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.properties
@pytest.mark.parametrize("topology", TOPOLOGIES)
@on_ranks
@given(data=st.data())
def test_ranks_return_what_one_device_returns(
    world: World, topology: str, data: st.DataObject
) -> None:
    """A failure ends with a parity case of the smallest example that was found."""
    example = data.draw(examples.examples(topology=topology))
    try:
        found = world.measure(example)
    except RankError as error:
        raise AssertionError(f"{error}\n\n{as_case(example)}") from error
    worst = max(found, key=found.__getitem__)
    event(f"attention {example.attention}, sharing {example.sharing}, slot {example.slot}")
    event(f"{examples.branches(example.documents)} branches on one path")
    event(f"distance below 1e{_exponent(found[worst])}")
    assert found[worst] < BOUND, (
        f"{worst} is {found[worst]:.3g} from what one device has; as a parity case:\n\n"
        f"{as_case(example, rightly_zero=world.zeros(example))}"
    )


def _exponent(distance: float) -> int:
    return next((power for power in range(-15, 3) if distance < 10.0**power), 99)


@pytest.mark.slow
def test_a_fault_is_found_and_written_down_as_a_case(world: World, tmp_path: Path) -> None:
    """Found, shrunk, and printed: the case fails with the fault and passes without it."""
    fault = "a shared row answers one document alone"

    def shows(example: Example) -> bool:
        return max(world.measure(example, fault=fault).values()) > 1e-3

    smallest = find(
        examples.examples(topology="cp2"),
        shows,
        settings=settings(
            on_ranks,
            max_examples=200,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    assert smallest.sharing == "full"
    # Nothing smaller shares a row: two documents that begin alike.
    assert smallest.documents == ((0,), (0,))
    source = as_case(smallest, rightly_zero=world.zeros(smallest))
    done = _run_case(tmp_path, source, fault)
    said = done.stdout[-3000:] + done.stderr
    assert re.search("^1 failed, 1 passed", done.stdout, re.MULTILINE), said
    assert re.search(r"^PASSED .*\[cp2-without\]", done.stdout, re.MULTILINE), said
    assert re.search(r"hidden_states: diverged|logprobs: diverged", done.stdout), said


def _run_case(directory: Path, source: str, fault: str) -> subprocess.CompletedProcess[str]:
    """Run the source of a case as if it stood in cases/, with and without a fault."""
    (directory / "test_found.py").write_text(source, encoding="utf-8")
    (directory / "conftest.py").write_text(_CONFTEST.format(fault=fault), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "--parity-report", str(directory / "report")]
    command += ["--parity-timeout", "120", str(directory / "test_found.py")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


_CONFTEST = """
from contextlib import nullcontext

import pytest

from cases.conftest import *  # noqa: F403


@pytest.fixture(autouse=True, params=[{fault!r}, ""], ids=["with", "without"])
def injected(rank, request):
    from subjects.trainer.faults import inject

    fault = request.param
    with inject(fault) if fault and not rank.is_reference else nullcontext():
        yield
"""


@pytest.mark.slow
def test_a_rank_that_raises_or_hangs_is_a_failure_and_the_next_example_runs(
    tmp_path: Path,
) -> None:
    with Pool("cp2", tmp_path, _strange, timeout=3.0) as pool:
        assert pool.ask(("say", 4)) == [4, 4]
        for command, told in (
            (("raise", 1), "ValueError: as asked"),
            (("end", 0), "rank 0: ended without an answer"),
            (("hang", 1), "rank 1: no answer in 3 s"),
        ):
            started = time.monotonic()
            with pytest.raises(RankError, match=told):
                pool.ask(command)
            assert time.monotonic() - started < 60
            assert pool.ask(("say", 5)) == [5, 5]
        assert pool.starts == 4


def _strange(rank: worlds.TestRank, directory: Path) -> Any:
    """Ranks that do as they are told; the one that is not, waits in a collective."""
    del directory

    def obey(command: tuple[str, int]) -> int:
        kind, value = command
        if kind == "say":
            return value
        if rank.coordinates["cp"] == value:
            if kind == "raise":
                raise ValueError("as asked")
            if kind == "end":
                os._exit(3)
            time.sleep(1000)
        torch.distributed.barrier()
        return value

    return obey


@given(data=st.data(), cp=st.integers(1, 5), rows=st.integers(1, 70))
def test_every_plan_holds_each_row_once(data: st.DataObject, cp: int, rows: int) -> None:
    policy = data.draw(st.sampled_from(sorted(POLICIES)) | shards(rows, cp))
    work = torch.arange(1, rows + 1, dtype=torch.float64)
    plan = make_plan(policy, work=work, cp=cp)
    assert sorted(torch.cat(plan.shards).tolist()) == list(range(rows))
    assert sum(plan.sizes) == rows
    assert 1 - 1e-12 <= plan.imbalance <= cp + 1e-12


@given(data=st.data(), asked=documents(), sharing=st.sampled_from(["none", "full"]))
def test_what_was_packed_and_dealt_comes_back(
    data: st.DataObject, asked: tuple[tuple[int, ...], ...], sharing: Sharing
) -> None:
    """Each source position is answered by one rank, from a row of its token and position."""
    cp = data.draw(st.integers(1, 4))
    packed = pack([torch.tensor(one) for one in asked], sharing=sharing)
    policy = data.draw(st.sampled_from(sorted(POLICIES)) | shards(packed.rows, cp))
    plan = make_plan(policy, work=row_work(packed, linear=3.5), cp=cp)
    tokens = [token for one in asked for token in one]
    positions = [at for one in asked for at in range(len(one))]
    answers: list[tuple[int, int] | None] = [None] * len(tokens)
    for rank in range(cp):
        local = local_rows(packed, plan, cp_rank=rank, tp=2)
        for source, row in zip(local.sources.tolist(), local.source_rows.tolist(), strict=True):
            assert answers[source] is None
            at = local.rows[row]
            answers[source] = (int(packed.tokens[at]), int(packed.positions[at]))
    assert answers == list(zip(tokens, positions, strict=True))


@given(asked=documents(most=8), size=st.integers(1, 9))
def test_a_row_sees_its_prefix_whatever_the_tree(
    asked: tuple[tuple[int, ...], ...], size: int
) -> None:
    """Intervals against a comparison of paths, one by one, in blocks of any size."""
    packed = pack([torch.tensor(one) for one in asked], sharing="full")
    path: dict[int, tuple[int, ...]] = {}
    sources = iter(packed.source.tolist())
    for one in asked:
        for depth in range(len(one)):
            path[next(sources)] = one[: depth + 1]
    everyone = packed.take(torch.arange(packed.rows))
    seen = visible_blocks(everyone, everyone, remote=True, size=size)
    mask = torch.zeros(packed.rows, packed.rows, dtype=torch.bool)
    for block in seen.blocks:
        mask[block] = seen.mask(block)
    for query in range(packed.rows):
        for key in range(packed.rows):
            is_prefix = path[query][: len(path[key])] == path[key]
            assert bool(mask[query, key]) == is_prefix
