"""Which context-parallel rank computes which packed rows, and in what order.

Shards may be uneven, reordered and empty. All ranks make the same plan from the same packed rows,
so no rank has to tell another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from subjects.token_ids import is_list, shown, whole_number
from subjects.trainer import checks
from subjects.trainer.architecture import Architecture
from subjects.trainer.packing import PackedRows

Shards = Sequence[Sequence[int]]
PlanPolicy = str | Shards | Callable[[Tensor, int], Shards]
"""A policy by name, the shards themselves, or a function of (work [R], cp) that gives them."""

BLOCKS = 8
"""Runs of rows for each rank that ``balanced`` deals: more even out better, and see more edges."""


@dataclass(frozen=True)
class Plan:
    """The packed rows of each context-parallel rank, in the order in which it computes them.

    ``loads`` is the work of each shard, in the cost of attending to one key (see ``row_work``).
    """

    shards: tuple[Tensor, ...]
    loads: tuple[float, ...]

    @property
    def sizes(self) -> list[int]:
        """Rows of each shard."""
        return [len(shard) for shard in self.shards]

    @property
    def imbalance(self) -> float:
        """The work of the busiest rank over that of the mean; 1 is even, cp is one rank alone."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


def row_work(packed: PackedRows, *, linear: float) -> Tensor:
    """What each row costs, float64 [R], on the CPU: the keys that it attends to, and ``linear``.

    A row sees its own path through the prefix tree, which is its position + 1. ``linear`` is what
    every row costs alike, in keys; ``linear_work`` gives it for a model.
    """
    return packed.positions.to(device="cpu", dtype=torch.float64) + 1 + linear


def linear_work(architecture: Architecture) -> float:
    """What the linear layers cost a row, in the cost of attending to one key.

    Multiplications of a layer: A heads of D read a key and a value in 2 A D; the projections take
    H (2 A + 2 G) D and the MLP 3 H F. The head is left out, since not every forward runs it.
    """
    width = architecture.heads * architecture.head_size
    kv_width = architecture.kv_heads * architecture.head_size
    per_row = architecture.hidden * (2 * width + 2 * kv_width + 3 * architecture.mlp)
    return per_row / (2 * width)


def make_plan(policy: PlanPolicy, *, work: Tensor, cp: int) -> Plan:
    """The plan of ``policy`` for R packed rows of ``work`` [R] each on ``cp`` ranks.

    ``"balanced"`` gives every rank about as much work: runs of rows, the heaviest first, each to
    the rank with the least so far. ``"runs"`` cuts the rows into equal runs; of one long document
    the last run is the heaviest. ``"uneven"`` cuts more, growing blocks and deals them out of
    order, so that shards differ in size and hold several runs in a shuffled order. ``"empty"`` is
    ``"uneven"`` with nothing for the last rank.

    Raises:
        ValueError: an unknown name, or shards that don't hold each row exactly once.
        TypeError: no policy, or shards that are no lists of rows.
    """
    check_policy(policy)
    rows = len(work)
    if isinstance(policy, str):
        shards = POLICIES[policy](work, cp)
    elif callable(policy):
        shards = policy(work, cp)
        check_shards("what the function given as plan returned", shards)
    else:
        shards = policy
    if len(shards) != cp:
        raise ValueError(f"the plan has {len(shards)} shards for {cp} context-parallel ranks")
    if sorted(row for shard in shards for row in shard) != list(range(rows)):
        raise ValueError(
            f"the plan's shards have {[len(shard) for shard in shards]} rows; expected each of "
            f"the {rows} packed rows 0..{rows - 1} exactly once over all shards"
        )
    tensors = tuple(torch.tensor(list(shard), dtype=torch.int64) for shard in shards)
    return Plan(tensors, tuple(float(work[shard].sum()) for shard in tensors))


def check_policy(policy: object) -> None:
    """Refuse what is no policy: no name, no function, no shards.

    Raises:
        ValueError: an unknown name.
        TypeError: something else, or shards that are no lists of rows.
    """
    if isinstance(policy, str):
        checks.one_of("plan", policy, POLICIES)
    elif not callable(policy):
        check_shards("plan", policy)


def check_shards(what: str, shards: object) -> None:
    """Refuse what is no list of lists of rows.

    Raises:
        TypeError: with what came.
    """
    if not is_list(shards):
        raise TypeError(
            f"{what} is {shown(shards)}; expected a list of rows for each context-parallel rank, a "
            f"function (work, cp) that returns one, or one of {', '.join(POLICIES)}"
        )
    for at, shard in enumerate(shards):
        rows = shard.tolist() if isinstance(shard, Tensor) else shard
        wrong = [one for one in rows if whole_number(one) is None] if is_list(rows) else [shard]
        if wrong:
            raise TypeError(
                f"{what} has {shown(wrong[0])} in its shard {at}; expected a list of rows, each an "
                "integer"
            )


def balanced(work: Tensor, cp: int) -> Shards:
    """Runs of equal length, the heaviest first, each to the rank with the least work so far.

    That is Graham's longest-processing-time rule: the busiest rank has at most 4/3 - 1/(3 cp) of
    what the best deal of the same runs gives it. A shard's runs lie in the order of the rows.
    """
    rows = len(work)
    count = min(rows, BLOCKS * cp)
    edges = [rows * at // count for at in range(count + 1)]
    weights = [float(work[start:stop].sum()) for start, stop in pairwise(edges)]
    loads = [0.0] * cp
    mine: list[list[int]] = [[] for _ in range(cp)]
    for block in sorted(range(count), key=lambda at: -weights[at]):
        least = min(range(cp), key=loads.__getitem__)
        loads[least] += weights[block]
        mine[least].append(block)
    return [
        [row for block in sorted(blocks) for row in range(edges[block], edges[block + 1])]
        for blocks in mine
    ]


def runs(work: Tensor, cp: int) -> Shards:
    """Contiguous runs of equal length, some of them a row longer where the rows don't divide."""
    rows = len(work)
    return [list(range(rows * at // cp, rows * (at + 1) // cp)) for at in range(cp)]


def uneven(work: Tensor, cp: int) -> Shards:
    """Blocks with sizes near 1:2:3:..., dealt in turn, the last block first."""
    rows, count = len(work), 2 * cp + 1
    weight = count * (count + 1) // 2
    edges = [rows * (at * (at + 1) // 2) // weight for at in range(count + 1)]
    shards: list[list[int]] = [[] for _ in range(cp)]
    for block in reversed(range(count)):
        shards[block % cp].extend(range(edges[block], edges[block + 1]))
    return shards


def empty(work: Tensor, cp: int) -> Shards:
    """As uneven, but the last rank has nothing to do; one rank alone has everything."""
    return [*uneven(work, cp - 1), []] if cp > 1 else uneven(work, 1)


POLICIES: dict[str, Callable[[Tensor, int], Shards]] = {
    "balanced": balanced,
    "runs": runs,
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
