"""What torch calls an operation that moves data between ranks, by the module that it is taken from.

Written down by hand from torch's public API; a test compares it with the torch that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardproof.ledger.operations import OPERATIONS, recorded_methods

_EAGER: Final = frozenset(
    {
        "_all_gather_base",
        "_broadcast_coalesced",
        "_reduce_scatter_base",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "breakpoint",  # all ranks wait for the one that is looked into
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
    }
)
_FUNCTIONAL: Final = frozenset(
    {
        "all_gather_inplace",
        "all_gather_into_tensor_coalesced",
        "all_gather_single",
        "all_gather_single_autograd",
        "all_gather_single_coalesced",
        "all_gather_tensor",
        "all_gather_tensor_autograd",
        "all_gather_tensor_inplace",
        "all_reduce",
        "all_reduce_coalesced",
        "all_reduce_inplace",
        "all_to_all_inplace",
        "all_to_all_single",
        "all_to_all_single_autograd",
        "batch_p2p_ops_inplace",
        "broadcast",
        "irecv_inplace",
        "isend_inplace",
        "permute_tensor",
        "reduce_scatter_single",
        "reduce_scatter_single_autograd",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_autograd",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_inplace",
    }
)
_DIFFERENTIABLE: Final = frozenset(
    {
        "_all_gather_base",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    }
)
_TRACED: Final = frozenset(
    {
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out",
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_to_all_single",
        "batch_p2p_ops",
        "broadcast",
        "broadcast_",
        "irecv",
        "isend",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_out",
    }
)
FUNCTIONS: Final[Mapping[str, frozenset[str]]] = {
    "torch.distributed": _EAGER,
    "torch.distributed.distributed_c10d": _EAGER,
    "torch.distributed._functional_collectives": _FUNCTIONAL,
    "torch.distributed.nn": _DIFFERENTIABLE,
    "torch.distributed.nn.functional": _DIFFERENTIABLE,
    "torch.ops.c10d": frozenset(one.schema for one in OPERATIONS),
    "torch.ops._c10d_functional": _TRACED,
    "torch.ops._c10d_functional_autograd": _TRACED,
    "torch.ops.c10d_functional": _TRACED,
}
"""Functions that communicate, by module or namespace of operators."""

METHODS: Final = frozenset(recorded_methods())
"""Methods of a process group that communicate."""

PLAIN_METHODS: Final = METHODS - {
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "scatter",
    "send",
}
"""Those that tell by themselves: tensors, arrays, sockets and generators have none of that name."""

GROUP: Final = "torch.distributed.ProcessGroup()"
"""How a process group is written where names are resolved: an instance ends in parentheses."""

_WORLDS: Final = frozenset(
    f"torch.distributed.{module}{holder}.WORLD"
    for module in ("", "distributed_c10d.")
    for holder in ("group", "GroupMember")
)
_OVERLOADS: Final = (".default", ".out")


def operation_of(dotted: str) -> str | None:
    """The operation that a name stands for, None where it is no operation.

    ``dotted`` is the full name as a program would write it without an alias:
    ``torch.distributed.all_reduce``, ``torch.distributed.ProcessGroup().allreduce``.
    """
    if dotted.startswith("torch.ops."):
        for overload in _OVERLOADS:
            dotted = dotted.removesuffix(overload)
    place, _, name = dotted.rpartition(".")
    if name in FUNCTIONS.get(place, ()):
        return name
    module, _, kind = place.removesuffix("()").rpartition(".")
    of_group = module.startswith("torch.") and kind.startswith("ProcessGroup")
    return name if name in METHODS and (of_group or place in _WORLDS) else None
