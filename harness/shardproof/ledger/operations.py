"""The operations of a process group, as torch's dispatcher knows them, and how each is recorded.

Every method of a process group that communicates, whoever calls it (Python, DDP's reducer,
functional collectives, compiled code), goes through one of the ``c10d::`` operations, with
arguments by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

Matched = Literal["inputs", "outputs", "dtype", "nothing"]


@dataclass(frozen=True)
class Operation:
    """One operation of the dispatcher.

    ``outputs``, ``inputs``, ``group``, ``reduce_op``, ``root``, ``peer``, ``tag`` and
    ``asynchronous`` are positions of arguments, None where it has none. ``matched`` says what must
    be equal on all ranks beside the name, the reduce operation and the root: shapes and dtypes of
    the inputs or of the outputs, the dtype alone, or nothing.
    """

    schema: str
    name: str
    group: int
    outputs: int | None
    inputs: int | None
    matched: Matched
    reduce_op: int | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    asynchronous: int | None = None
    methods: tuple[str, ...] = ()

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks rather than all of the group."""
        return self.tag is not None

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Positions of the root, the peer and the tag, as far as it has these."""
        return tuple(at for at in (self.root, self.peer, self.tag) if at is not None)


# Ranks of one group may legally hand in tensors of different sizes where the lists of sizes that
# each of them has are the same (all_gather and reduce_scatter of lists) or where the split sizes
# say so (all_to_all).
OPERATIONS: Final[Sequence[Operation]] = (
    Operation(
        "allreduce_", "all_reduce", 1, 0, 0, "inputs", reduce_op=2, asynchronous=4,
        methods=("allreduce",),
    ),
    Operation(
        "allreduce_coalesced_", "all_reduce_coalesced", 1, 0, 0, "inputs", reduce_op=2,
        asynchronous=3, methods=("allreduce_coalesced",),
    ),
    Operation(
        "broadcast_", "broadcast", 1, 0, 0, "inputs", root=2, asynchronous=4,
        methods=("broadcast",),
    ),
    Operation(
        "reduce_", "reduce", 1, 0, 0, "inputs", reduce_op=2, root=3, asynchronous=5,
        methods=("reduce",),
    ),
    Operation(
        "allgather_", "all_gather", 2, 0, 1, "outputs", asynchronous=3, methods=("allgather",)
    ),
    Operation(
        "allgather_coalesced_", "all_gather_coalesced", 2, 0, 1, "outputs", asynchronous=3,
        methods=("allgather_coalesced",),
    ),
    Operation(
        "_allgather_base_", "all_gather_into_tensor", 2, 0, 1, "inputs", asynchronous=3,
        methods=("_allgather_base", "all_gather_single"),
    ),
    Operation(
        "allgather_into_tensor_coalesced_", "all_gather_into_tensor_coalesced", 2, 0, 1, "inputs",
        asynchronous=3,
        methods=("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
    Operation(
        "reduce_scatter_", "reduce_scatter", 2, 0, 1, "inputs", reduce_op=3, asynchronous=4,
        methods=("reduce_scatter",),
    ),
    Operation(
        "_reduce_scatter_base_", "reduce_scatter_tensor", 2, 0, 1, "inputs", reduce_op=3,
        asynchronous=4, methods=("_reduce_scatter_base", "reduce_scatter_single"),
    ),
    Operation(
        "reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor_coalesced", 2, 0, 1, "inputs",
        reduce_op=3, asynchronous=4,
        methods=("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
    Operation(
        "alltoall_base_", "all_to_all_single", 2, 0, 1, "dtype", asynchronous=5,
        methods=("alltoall_base", "all_to_all_single"),
    ),
    Operation("alltoall_", "all_to_all", 2, 0, 1, "dtype", asynchronous=3, methods=("alltoall",)),
    Operation(
        "gather_", "gather", 2, 0, 1, "inputs", root=3, asynchronous=4, methods=("gather",)
    ),
    Operation(
        "scatter_", "scatter", 2, 0, 1, "outputs", root=3, asynchronous=4, methods=("scatter",)
    ),
    Operation("barrier", "barrier", 1, None, None, "nothing", asynchronous=3, methods=("barrier",)),
    Operation(
        "monitored_barrier_", "monitored_barrier", 1, None, None, "nothing",
        methods=("monitored_barrier",),
    ),
    Operation("send", "send", 1, None, 0, "inputs", peer=2, tag=3, methods=("send",)),
    Operation("recv_", "recv", 1, 0, None, "outputs", peer=2, tag=3, methods=("recv",)),
    Operation(
        "recv_any_source_", "recv from any", 1, 0, None, "outputs", tag=2,
        methods=("recv_anysource",),
    ),
)  # fmt: skip

# They look at one rank's tensors alone.
LOCAL: Final = frozenset({"check_for_nan"})

# Methods of ProcessGroup that say or set something of this rank, or make and end groups: groups
# that they make are recorded like any other.
SILENT_METHODS: Final = frozenset(
    {
        "BackendType",
        "CUSTOM",
        "GLOO",
        "MPI",
        "NCCL",
        "UCC",
        "UNDEFINED",
        "XCCL",
        "_backend_id",
        "_device_types",
        "_enable_collectives_timing",
        "_end_coalescing",
        "_get_backend",
        "_get_backend_name",
        "_get_sequence_number_for_group",
        "_has_hooks",
        "_id",
        "_pybind11_conduit_v1_",
        "_register_backend",
        "_register_on_completion_hook",
        "_set_default_backend",
        "_set_group_desc",
        "_set_group_name",
        "_set_sequence_number_for_group",
        "_start_coalescing",
        "_wait_for_pending_works",
        "abort",
        "bound_device_id",
        "boxed",
        "get_group_store",
        "group_desc",
        "group_name",
        "merge_remote_group",
        "name",
        "rank",
        "set_timeout",
        "shutdown",
        "size",
        "split_group",
        "unbox",
        "use_pg_for_symm_mem_rendezvous",
    }
)


def recorded_methods() -> dict[str, Operation]:
    """Method of ``ProcessGroup`` to the operation that it ends in."""
    return {method: operation for operation in OPERATIONS for method in operation.methods}


def argument(args: Sequence[Any], position: int | None, default: Any = None) -> Any:
    """One argument of an operation; those at the end that have their default are left out."""
    if position is None or position >= len(args):
        return default
    return args[position]


def tensors(args: Sequence[Any], position: int | None) -> list[Any]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if position is None or position >= len(args):
        return []
    value = args[position]
    if type(value) is not list:
        return [] if value is None else [value]
    if value and type(value[0]) is list:
        return [tensor for entry in value for tensor in entry]
    return value
