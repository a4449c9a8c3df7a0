"""Which context-parallel rank computes which packed rows, and in what order.

Shards may be uneven, reordered and empty. All ranks make the same plan from the same packed rows,
so no rank has to tell another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subjects.trainer.packing import PackedRows

Shards = Sequence[Sequence[int]]
PlanPolicy = str | Shards | Callable[[int, int], Shards]
"""A policy by name, the shards themselves, or a function of (rows, cp) that gives them."""


@dataclass(frozen=True)
class Plan:
    """The packed rows of each context-parallel rank, in the order in which it computes them."""

    shards: tuple[Tensor, ...]

    @property
    def sizes(self) -> list[int]:
        """Rows of each shard."""
        return [len(shard) for shard in self.shards]


def make_plan(policy: PlanPolicy, *, rows: int, cp: int) -> Plan:
    """The plan of ``policy`` for ``rows`` packed rows on ``cp`` ranks.

    ``"balanced"`` cuts the rows into equal runs. ``"uneven"`` cuts more, growing blocks and deals
    them out of order, so that shards differ in size and hold several runs in a shuffled order.
    ``"empty"`` is ``"uneven"`` with nothing for the last rank.

    Raises:
        ValueError: an unknown name, or shards that don't hold each row exactly once.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"plan is {policy!r}; expected one of {', '.join(POLICIES)}")
        shards = POLICIES[policy](rows, cp)
    elif callable(policy):
        shards = policy(rows, cp)
    else:
        shards = policy
    if len(shards) != cp:
        raise ValueError(f"the plan has {len(shards)} shards for {cp} context-parallel ranks")
    if sorted(row for shard in shards for row in shard) != list(range(rows)):
        raise ValueError(
            f"the plan's shards have {[len(shard) for shard in shards]} rows; expected each of "
            f"the {rows} packed rows 0..{rows - 1} exactly once over all shards"
        )
    return Plan(tuple(torch.tensor(list(shard), dtype=torch.int64) for shard in shards))


def balanced(rows: int, cp: int) -> Shards:
    """Contiguous runs, the first ones a row longer where the rows don't divide."""
    return [list(range(rows * at // cp, rows * (at + 1) // cp)) for at in range(cp)]


def uneven(rows: int, cp: int) -> Shards:
    """Blocks with sizes near 1:2:3:..., dealt in turn, the last block first."""
    count = 2 * cp + 1
    weight = count * (count + 1) // 2
    edges = [rows * (at * (at + 1) // 2) // weight for at in range(count + 1)]
    shards: list[list[int]] = [[] for _ in range(cp)]
    for block in reversed(range(count)):
        shards[block % cp].extend(range(edges[block], edges[block + 1]))
    return shards


def empty(rows: int, cp: int) -> Shards:
    """As uneven, but the last rank has nothing to do; one rank alone has everything."""
    return [*uneven(rows, cp - 1), []] if cp > 1 else uneven(rows, 1)


POLICIES: dict[str, Callable[[int, int], Shards]] = {
    "balanced": balanced,
    "uneven": uneven,
    "empty": empty,
}


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """One rank's share of a forward.

    ``rows`` [n] are its packed rows. ``sources`` [m] are the source positions that these rows
    answer, ascending, and ``source_rows`` [m] says by which of the n rows each is answered. With
    shared prefixes m may exceed n. ``padding`` rows are computed behind the n, so that tensor
    parallelism can split them evenly and an empty shard still runs every layer (Megatron's can't
    take no rows at all); nothing reads them.
    """

    packed: PackedRows
    plan: Plan
    rows: Tensor
    sources: Tensor
    source_rows: Tensor
    padding: int

    @property
    def total(self) -> int:
        """T, the number of source positions of all ranks."""
        return len(self.packed.source)


def local_rows(packed: PackedRows, plan: Plan, *, cp_rank: int, tp: int) -> LocalRows:
    """The share of context-parallel rank ``cp_rank``."""
    rows = plan.shards[cp_rank].to(packed.source.device)
    at = torch.full((packed.rows,), -1, device=rows.device)
    at[rows] = torch.arange(len(rows), device=rows.device)
    answered = at[packed.source]
    sources = torch.nonzero(answered >= 0).flatten()
    return LocalRows(
        packed=packed,
        plan=plan,
        rows=rows,
        sources=sources,
        source_rows=answered[sources],
        padding=-len(rows) % tp if len(rows) else tp,
    )


def tokens_for(local: LocalRows) -> Tensor:
    """The token ids of this rank's rows, [n]."""
    return local.packed.tokens[local.rows]


def positions_for(local: LocalRows) -> Tensor:
    """Each row's position in its own document, [n], whatever shard it lies in."""
    return local.packed.positions[local.rows]


def targets_for(targets: Tensor, local: LocalRows) -> Tensor:
    """The targets [m, ...] of the source positions that this rank answers, of all [T, ...]."""
    return targets[local.sources]


def padded(values: Tensor, local: LocalRows) -> Tensor:
    """``values`` [n] with zeros for the rows of padding."""
    return torch.nn.functional.pad(values, (0, local.padding))
