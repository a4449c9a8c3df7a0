"""The names of what communicates, against those of the torch that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from shardproof.ledger.operations import LOCAL
from shardproof.mutants.communication import (
    FUNCTIONS,
    METHODS,
    PLAIN_METHODS,
    operation_of,
)

# Functions of torch.distributed that move no tensor or object between ranks: they ask, set, or make
# and end groups, which meet in a store.
SILENT = {
    "destroy_process_group",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "record_comm",
    "register_rendezvous_handler",
    "rendezvous",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "split_group",
    "supports_complex",
}
# Of newer versions of torch than the oldest that is supported.
NEWER = {"all_gather_single", "reduce_scatter_single"}


def functions_of(module: ModuleType, *, own: bool = False) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and type(value) in (FunctionType, BuiltinFunctionType)
        and (not own or value.__module__ == module.__name__)
    }


def test_every_function_of_torch_distributed_is_known() -> None:
    names = FUNCTIONS["torch.distributed"]
    known = functions_of(dist)
    assert known - names == SILENT & known, "does a new function move data between ranks?"
    assert not names & SILENT
    assert {name for name in names - NEWER if not hasattr(dist, name)} == set()


def test_every_functional_collective_is_known() -> None:
    names = FUNCTIONS["torch.distributed._functional_collectives"]
    waiting = {"wait_tensor", "is_torchdynamo_compiling"}
    traced = ("_backward", "_setup_context", "_ctx", "_impl")
    known = {one for one in functions_of(functional, own=True) if not one.endswith(traced)}
    assert known - waiting <= names
    assert {"all_reduce", "all_gather_tensor", "reduce_scatter_tensor"} <= known & names
    names = FUNCTIONS["torch.distributed.nn.functional"]
    own = {one for one in vars(differentiable) if one in names}
    assert functions_of(differentiable, own=True) <= names == own


def test_every_operator_is_known() -> None:
    everything = torch._C._dispatch_get_all_op_names()
    silent = {"wait_tensor", "_wrap_tensor_autograd"} | LOCAL
    for place in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"):
        named = {one.partition(".")[0] for one in everything if one.startswith(f"{place}::")}
        own = {one.partition("::")[2] for one in named}
        assert own - silent <= FUNCTIONS[f"torch.ops.{place}"], place


def test_names_of_methods_tell_by_themselves() -> None:
    others = (torch.Tensor, torch, list, dict, Iterator, type(iter(())), Path)
    for name in PLAIN_METHODS:
        assert not [one for one in others if hasattr(one, name)], name
    assert {"gather", "scatter"} <= METHODS - PLAIN_METHODS


@pytest.mark.parametrize(
    ("dotted", "operation"),
    [
        ("torch.distributed.all_reduce", "all_reduce"),
        ("torch.distributed.ReduceOp", None),
        ("torch.distributed.ProcessGroup().reduce", "reduce"),
        ("torch.distributed.ProcessGroup().rank", None),
        ("torch.distributed.group.WORLD.barrier", "barrier"),
        ("torch.ops.c10d.allreduce_.default", "allreduce_"),
        ("torch.ops._c10d_functional.wait_tensor.default", None),
        ("numpy.broadcast", None),
        ("all_reduce", None),
    ],
)
def test_a_full_name_is_an_operation_or_none(dotted: str, operation: str | None) -> None:
    assert operation_of(dotted) == operation
