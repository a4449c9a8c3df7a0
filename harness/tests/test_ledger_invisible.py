"""Process groups are the same with the ledger below them as without it, and nothing escapes it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ledger_battery import PROBES, equal, run_battery
from tests.ledger_probe import World, trial, trial_apart

from shardproof.ledger import kernels
from shardproof.ledger.operations import LOCAL, OPERATIONS, SILENT_METHODS, recorded_methods


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_answer_is_the_same_with_and_without(size: int) -> None:
    """Results bit by bit, errors with their text, types, handles, sequence numbers."""
    without = run_battery(size, ledger=False)
    with_it = run_battery(size, ledger=True)
    for rank, (one, two) in enumerate(zip(without, with_it, strict=True)):
        ledger = two.pop("ledger")
        unlike = {name: (one[name], two[name]) for name in one if not equal(one[name], two[name])}
        assert not unlike, f"rank {rank}"
        assert one.keys() == two.keys() >= PROBES.keys()
        called = {operation for _, operation, *_ in ledger["totals"]}
        wanted = {operation.name for operation in OPERATIONS} - _NOT_IN_GLOO - _not_called(rank)
        assert called >= wanted
        assert ledger["messages"] > 0


# Gloo refuses them (all versions, and those before 2.13), which torch's Python side knows.
_NOT_IN_GLOO = {"all_gather_coalesced", "reduce_scatter"}


def _not_called(rank: int) -> set[str]:
    return {"recv from any"} if rank else {"send"}


def test_answers_that_differ_are_told_apart() -> None:
    """The comparison of the battery can fail."""
    assert equal([torch.ones(2), {"a": (1,)}], [torch.ones(2), {"a": (1,)}])
    assert not equal(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not equal(torch.ones(2), torch.tensor([1.0, 1.0 + 2**-23]))
    assert not equal((1,), [1])
    assert not equal({"a": 1}, {"a": 1, "b": 2})


def test_a_failure_inside_a_worker_is_kept_from_the_barriers_of_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A barrier raises what a work failed with that is still in its group's list: now and then."""

    def call(world: World) -> Any:
        return partial(dist.all_reduce, world.values(), dist._make_nccl_premul_sum(2.0))

    monkeypatch.setitem(PROBES, "apart", lambda world: trial_apart(world, call(world)))
    monkeypatch.setitem(PROBES, "among all", lambda world: trial(call(world)))
    monkeypatch.setitem(PROBES, "handle", lambda world: call(world)(async_op=True).wait())
    monkeypatch.setitem(PROBES, "bare", lambda world: call(world)())
    for answers in run_battery(2, ledger=False, names=["apart"]):
        answer, _ = answers["apart"]
        assert answer == ("RuntimeError", "Cannot use ReduceOp.PREMUL_SUM with Gloo")
    for name in ("among all", "handle", "bare"):
        with pytest.raises(RuntimeError, match=r"PREMUL_SUM.* failed inside a worker"):
            run_battery(2, ledger=False, names=[name])


def test_every_operation_and_method_is_recorded_or_silent() -> None:
    """All that this torch has is known, by name."""
    kernels.check_known(kernels.operation_names(), dir(dist.ProcessGroup))
    methods = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    assert methods <= recorded_methods().keys() | SILENT_METHODS
    assert not recorded_methods().keys() & SILENT_METHODS
    known = {operation.schema for operation in OPERATIONS}
    assert known <= set(kernels.operation_names()) <= known | LOCAL


@pytest.mark.parametrize(
    ("operations", "methods", "named"),
    [(["telepathy_"], [], "c10d::telepathy_"), ([], ["whisper"], "ProcessGroup.whisper")],
)
def test_what_is_not_known_is_refused_by_name(
    operations: list[str], methods: list[str], named: str
) -> None:
    with pytest.raises(kernels.LedgerError, match=named) as caught:
        kernels.check_known(operations, methods)
    assert "--parity-ledger off" in str(caught.value)


def test_positions_of_arguments_follow_the_schemas() -> None:
    """The table of operations says where torch's own schemas have group, reduce op and async."""
    for operation in OPERATIONS:
        schema = torch._C._get_schema(f"c10d::{operation.schema}", "")
        names = [argument.name for argument in schema.arguments]
        types = [str(argument.type) for argument in schema.arguments]
        assert "ProcessGroup" in types[operation.group], operation
        for position, name in (
            (operation.reduce_op, "reduce_op"),
            (operation.root, "root_rank"),
            (operation.tag, "tag"),
            (operation.asynchronous, "async_op"),
        ):
            assert (names.index(name) if name in names else None) == position, (operation, name)
            # Those at the end that have their default are left out of a call.
            may_lack = position is not None and schema.arguments[position].has_default_value()
            assert may_lack == (name == "async_op" and position is not None), (operation, name)


def test_reading_ledgers_imports_no_torch() -> None:
    """The controller's plain runs stay light."""
    code = (
        "import sys, shardproof.ledger.words, shardproof.ledger.axes\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
