"""What a group is called in a ledger: the axis whose ranks it has."""

from __future__ import annotations

from itertools import combinations

from shardproof.topology import Topology


class AxisNames:
    """Names of groups on one topology, seen from one rank.

    ``cp`` for the ranks along one axis, ``world`` for all ranks, ``dp+cp`` for those along several
    axes, ``self`` for a rank alone, and ``ranks 0, 3`` for all others.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self._names: dict[tuple[int, ...], str] = {}
        here = topology.coordinates(rank)
        longer = [axis.name for axis in topology.axes if topology.sizes[axis.name] > 1]
        for count in range(len(longer), 0, -1):
            for axes in combinations(longer, count):
                ranks = tuple(
                    other
                    for other in range(topology.world_size)
                    if all(
                        at == here[axis] or axis in axes
                        for axis, at in topology.coordinates(other).items()
                    )
                )
                name = "world" if count > 1 and count == len(longer) else "+".join(axes)
                self._names[ranks] = name

    def __call__(self, ranks: tuple[int, ...]) -> str:
        """The name of a group of these global ranks."""
        if len(ranks) == 1:
            return "self"
        known = self._names.get(tuple(sorted(ranks)))
        return known or f"ranks {', '.join(map(str, ranks))}"
