"""Where a rank's value sits in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardproof.topology import Topology


class PlacementError(ValueError):
    """A placement that cannot hold; the text says what would."""


@dataclass(frozen=True, eq=False)
class Placement:
    """How the values of all ranks make up one.

    ``shard``: dimension by axis; axes that cut one dimension cut it in the order given, the first
    outermost. ``rows``: the source positions of this rank's rows (dimension 0). ``partial``: axes
    over which the sum is the value. ``on``: coordinates at which alone the value is given.
    """

    shard: Mapping[str, int] = field(default_factory=dict)
    rows: torch.Tensor | Sequence[int] | None = None
    partial: Sequence[str] = ()
    on: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolved:
    """A placement that was checked against a topology and a value.

    Dimensions count from the front; ``rows`` is an int64 tensor on the CPU.
    """

    shard: dict[str, int]
    rows: torch.Tensor | None
    partial: tuple[str, ...]
    on: dict[str, int]

    def here(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the value counts at ``coordinates``."""
        return all(coordinates[axis] == at for axis, at in self.on.items())


def placement_of(value: object) -> Placement:
    """The placement that a DTensor or a parameter of megatron-core carries, else replicated.

    Megatron's ``tensor_model_parallel`` and ``partition_dim`` mean ``shard={"tp": dim}``.

    Raises:
        PlacementError: the value is placed in a way that no observation can express.
    """
    found = _of_dtensor(value)
    if found is not None:
        return found
    if getattr(value, "tensor_model_parallel", False):
        dim, stride = getattr(value, "partition_dim", -1), getattr(value, "partition_stride", 1)
        if not isinstance(dim, int) or dim < 0:
            raise PlacementError(
                f"the tensor has tensor_model_parallel set and partition_dim {dim!r}: expected a "
                "dimension; pass shard={'tp': dim}"
            )
        if stride != 1:
            raise PlacementError(
                f"the tensor has partition_stride {stride}: its slices are interleaved. Observe "
                "each fused part on its own with shard={'tp': dim}"
            )
        return Placement(shard={"tp": dim})
    return Placement()


def _of_dtensor(value: object) -> Placement | None:
    # Looked up by name, so that DTensor is not imported for cases that use none.
    if not (isinstance(value, torch.Tensor) and hasattr(value, "placements")):
        return None
    mesh = getattr(value, "device_mesh")  # noqa: B009 - a DTensor, which is not imported here
    names = mesh.mesh_dim_names
    if names is None:
        raise PlacementError(
            "the DTensor's mesh has no mesh_dim_names: expected a mesh with named axes, such as "
            "rank.mesh, or observe value.to_local() with shard= and partial="
        )
    plain: dict[str, int] = {}
    strided: dict[str, int] = {}
    partial: list[str] = []
    for axis, placement in zip(names, value.placements, strict=True):
        if placement.is_partial():
            if placement.reduce_op != "sum":
                raise PlacementError(
                    f"the DTensor is partial over {axis!r} with {placement.reduce_op!r}: only sums "
                    "can be observed; redistribute it first"
                )
            partial.append(axis)
        elif hasattr(placement, "split_factor"):
            strided[axis] = placement.dim
        elif not placement.is_replicate():
            plain[axis] = placement.dim
    # A strided shard was cut after the later axes of the mesh: it is the inner one.
    return Placement(shard={**plain, **strided}, partial=tuple(partial))


def resolve(placement: Placement, *, topology: Topology, shape: Sequence[int]) -> Resolved:
    """Check a placement against the shape of this rank's value.

    Raises:
        PlacementError: an unknown axis, a dimension or coordinate out of range, one axis used
            twice, or rows that don't fit the value.
    """
    shard = dict(_mapping("shard", placement.shard))
    on = resolve_on(placement.on, topology=topology)
    partial = _axes(placement.partial)
    ndim, length = len(shape), shape[0] if shape else 0
    _known("shard", shard, topology)
    _known("partial", partial, topology)
    for axis in partial:
        if axis in shard:
            raise PlacementError(f"the axis {axis!r} is in shard and in partial: choose one")
    for axis in on:
        if axis in shard or axis in partial:
            raise PlacementError(f"the axis {axis!r} is in on and in shard or partial: choose one")
    rows = None if placement.rows is None else _positions(placement.rows)
    if rows is not None and (ndim == 0 or rows.numel() != length):
        raise PlacementError(
            f"rows gives {rows.numel()} positions for a value of "
            + (f"{length} rows" if ndim else "no dimension")
            + ": expected one source position for each row"
        )
    for axis, dim in shard.items():
        if not -ndim <= dim < ndim:
            raise PlacementError(
                f"shard={{{axis!r}: {dim}}} is out of range for a value of {ndim} dimensions"
            )
        shard[axis] = dim % ndim
        if rows is not None and shard[axis] == 0:
            raise PlacementError(
                f"rows places dimension 0 and shard={{{axis!r}: {dim}}} cuts it: choose one"
            )
    return Resolved(shard, rows, partial, on)


def resolve_on(on: object, *, topology: Topology) -> dict[str, int]:
    """Check ``on`` alone: elsewhere the value does not count and may be anything.

    One device stands for every coordinate, so there any coordinate will do.

    Raises:
        PlacementError: an unknown axis, or a coordinate that the topology does not have.
    """
    found = dict(_mapping("on", on))
    _known("on", found, topology)
    if topology.world_size == 1:
        return dict.fromkeys(found, 0)
    for axis, at in found.items():
        if not 0 <= at < topology.sizes[axis]:
            raise PlacementError(
                f"on={{{axis!r}: {at}}} is outside {topology.name}, where {axis} has size "
                f"{topology.sizes[axis]}"
            )
    return found


def _known(word: str, axes: Iterable[str], topology: Topology) -> None:
    for axis in axes:
        if axis not in topology.sizes:
            raise PlacementError(
                f"{word} names the axis {axis!r}, known are {', '.join(topology.sizes)}"
            )


def _mapping(word: str, given: object) -> Mapping[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PlacementError(
            f"expected {word} to be a mapping such as {{'tp': 0}}, got {type(given).__name__}"
        )
    for axis, number in given.items():
        if not isinstance(axis, str) or isinstance(number, bool) or not isinstance(number, int):
            raise PlacementError(
                f"expected {word} to map names of axes to integers, got {axis!r}: {number!r}"
            )
    return given


def _axes(given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Sequence) or not all(isinstance(axis, str) for axis in given):
        raise PlacementError(
            f"expected partial to be a sequence of axes such as ('cp',), got {given!r}"
        )
    if len(set(given)) < len(given):
        raise PlacementError(f"partial names an axis twice: {given!r}")
    return tuple(given)


def _positions(given: object) -> torch.Tensor:
    try:
        rows = torch.as_tensor(given).detach().to("cpu")
    except (TypeError, ValueError, RuntimeError):
        raise PlacementError(
            f"expected rows to be source positions (a tensor or a sequence of integers), got "
            f"{type(given).__name__}"
        ) from None
    if rows.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if rows.dim() != 1 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise PlacementError(
            "expected rows to be a vector of integers, got shape "
            f"{list(rows.shape)} of {str(rows.dtype).removeprefix('torch.')}"
            + ("; use mask.nonzero().flatten()" if rows.dtype == torch.bool else "")
        )
    if int(rows.min()) < 0:
        raise PlacementError(f"rows holds the negative position {int(rows.min())}")
    return rows.to(torch.int64).clone()
