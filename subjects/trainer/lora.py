"""The factors of a LoRA adapter, where tensor parallelism places them, and their forward.

Placed as megatron-core would. Of a column-parallel layer (q, k, v, gate, up, lm_head) every rank
holds all of A and its output rows of B; of a row-parallel one (o, down) its input columns of A and
all of B. Under sequence parallelism a factor that every rank holds has seen this rank's rows of the
sequence alone, so its gradient is a partial sum; that of a slice is whole.

Shapes: p rows of the sequence (padding included), p / tp of them on this rank, r the rank of the
adapter, H hidden size, v rows of B on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from subjects.protocol import Placement
from subjects.trainer import collectives
from subjects.trainer.adapters import AdapterConfig
from subjects.trainer.architecture import Architecture
from subjects.trainer.weights import bounds


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One factor: its name, the shape of the whole, and the dimension that TP splits, if any."""

    name: str
    shape: tuple[int, int]
    dim: int | None

    @property
    def placement(self) -> Placement:
        """How this rank's part lies in the whole."""
        return {} if self.dim is None else {"shard": {"tp": self.dim}}


def factors(config: AdapterConfig, architecture: Architecture) -> Iterator[Factor]:
    """All factors of an adapter, in the order of the layers; names as in the checkpoint."""
    found = sizes(architecture)
    for index in range(architecture.layers):
        for target in config.targets:
            if target != "lm_head":
                block = "self_attn" if target in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                module = f"model.layers.{index}.{block}.{target}"
                yield from _pair(module, config.rank, *found[target], column=column(target))
    if "lm_head" in config.targets:
        yield from _pair("lm_head", config.rank, *found["lm_head"], column=column("lm_head"))


def column(target: str) -> bool:
    """Whether tensor parallelism splits the outputs of the target's layer, or else its inputs."""
    return target not in ("o_proj", "down_proj")


def _pair(module: str, rank: int, inputs: int, outputs: int, *, column: bool) -> Iterator[Factor]:
    yield Factor(name=f"{module}.lora_A", shape=(rank, inputs), dim=None if column else 1)
    yield Factor(name=f"{module}.lora_B", shape=(outputs, rank), dim=0 if column else None)


def sizes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each target."""
    hidden, mlp = architecture.hidden, architecture.mlp
    queries = architecture.heads * architecture.head_size
    keys = architecture.kv_heads * architecture.head_size
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, mlp),
        "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
        "lm_head": (hidden, architecture.vocabulary),
    }


def partial_over_tp(factor: Factor) -> bool:
    """Whether the factor's gradient is a partial sum on each tensor-parallel rank."""
    return factor.dim is None


def slice_of(value: Tensor, factor: Factor, part: tuple[int, int]) -> Tensor:
    """Slice ``part[0]`` of ``part[1]`` of a whole factor."""
    if factor.dim is None:
        return value
    start, stop = bounds(factor.shape[factor.dim], part)
    return value.narrow(factor.dim, start, stop - start)


def whole_of(value: Tensor, factor: Factor, group: ProcessGroup) -> Tensor:
    """The whole factor of the slices of all ranks of ``group``; a collective of them."""
    if factor.dim is None:
        return value
    pieces = group.size()
    edges = [bounds(factor.shape[factor.dim], (at, pieces)) for at in range(pieces)]
    # Rows lead in a gather.
    rows = value.movedim(factor.dim, 0).contiguous()
    gathered = collectives.all_gather_rows(rows, [stop - start for start, stop in edges], group)
    return gathered.movedim(0, factor.dim).contiguous()


def project_down(hidden: Tensor, a: Tensor) -> Tensor:
    """x A^T; [..., in] -> [..., r]."""
    return torch.nn.functional.linear(hidden, a)


def project_up(low: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * y B^T; [..., r] -> [..., out]."""
    return torch.nn.functional.linear(low, b) * scale


def gather_low(low: Tensor, group: ProcessGroup) -> Tensor:
    """Rows of this rank [p / tp, 1, r] -> all rows [p, 1, r].

    Each rank goes on with its own rows of B, so backward sums over the ranks and scatters.
    """
    if group.size() == 1:
        return low
    gathered: Tensor = gather_from_sequence_parallel_region(low, group=group)
    return gathered


def scatter_low(low: Tensor, group: ProcessGroup) -> Tensor:
    """Partial sums of all rows [p, 1, r] -> whole sums of this rank's rows [p / tp, 1, r]."""
    if group.size() == 1:
        return low
    scattered: Tensor = reduce_scatter_to_sequence_parallel_region(low, group=group)
    return scattered


def column_deltas(
    hidden: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], *, scale: float, group: ProcessGroup
) -> list[Tensor]:
    """What each (A [r, H], B [v, r]) of a column-parallel layer adds: [p / tp, 1, H] -> [p, 1, v].

    The r numbers of a row travel, not its H; those of all pairs together.
    """
    low = torch.cat([project_down(hidden, a) for a, _ in pairs], dim=-1)
    parts = gather_low(low, group).split([len(a) for a, _ in pairs], dim=-1)
    return [project_up(part, b, scale) for part, (_, b) in zip(parts, pairs, strict=True)]


def row_delta(
    hidden: Tensor, pair: tuple[Tensor, Tensor], *, scale: float, group: ProcessGroup
) -> Tensor:
    """What (A [r, in / tp], B [H, r]) of a row-parallel layer adds.

    [p, 1, in / tp] -> [p / tp, 1, H].
    """
    a, b = pair
    return project_up(scatter_low(project_down(hidden, a), group), b, scale)


def interleave_qkv(q: Tensor, k: Tensor, v: Tensor, *, head_size: int) -> Tensor:
    """Outputs of q [..., G * g * D], k and v [..., G * D] in the order of Megatron's fused layer.

    For each of the G key-value heads its g query heads, its key, its value.
    """
    groups = k.shape[-1] // head_size
    heads = [part.unflatten(-1, (groups, -1, head_size)) for part in (q, k, v)]
    return torch.cat(heads, dim=-2).flatten(-3)


def gate_then_up(gate: Tensor, up: Tensor) -> Tensor:
    """Outputs [..., F] each, in the order of Megatron's fused layer -> [..., 2 F]."""
    return torch.cat((gate, up), dim=-1)
