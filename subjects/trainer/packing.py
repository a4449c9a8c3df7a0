"""From documents to packed rows: what is computed once, and who sees whom.

A packed row is one token at one position of one path. Without sharing every source position has a
row of its own. With full sharing the documents of a forward form a prefix tree: a prefix that
several documents have in common is computed once and its rows are expanded to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Sharing = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The R rows of one forward and how the T source positions map to them; all int64.

    ``tokens``, ``positions`` (in the document, from 0), ``enter`` and ``leave`` have shape [R];
    ``source`` has shape [T] and names the row of each source position.

    Row k lies on the path from the root to row q (or is q) exactly where
    ``enter[k] <= enter[q] < leave[k]``: the intervals of a depth-first walk.
    """

    tokens: Tensor
    positions: Tensor
    enter: Tensor
    leave: Tensor
    source: Tensor

    @property
    def rows(self) -> int:
        """How many rows are computed."""
        return len(self.tokens)

    def to(self, device: torch.device) -> PackedRows:
        """The same on ``device``."""
        return PackedRows(
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            enter=self.enter.to(device),
            leave=self.leave.to(device),
            source=self.source.to(device),
        )

    def take(self, rows: Tensor) -> RowIds:
        """What a mask needs to know of ``rows``."""
        return RowIds(
            positions=self.positions[rows], enter=self.enter[rows], leave=self.leave[rows]
        )


@dataclass(frozen=True, kw_only=True)
class RowIds:
    """Positions and tree intervals of some packed rows, each of shape [n]."""

    positions: Tensor
    enter: Tensor
    leave: Tensor

    def __len__(self) -> int:
        """How many rows."""
        return len(self.positions)

    def cut(self, rows: slice) -> RowIds:
        """Some of them."""
        return RowIds(
            positions=self.positions[rows], enter=self.enter[rows], leave=self.leave[rows]
        )


def pack(documents: Sequence[Tensor], *, sharing: Sharing) -> PackedRows:
    """Pack 1-D int64 documents.

    Raises:
        ValueError: an unknown way of sharing.
    """
    if sharing not in get_args(Sharing):
        raise ValueError(f"sharing is {sharing!r}; expected one of {', '.join(get_args(Sharing))}")
    tree = _Tree(share=sharing == "full")
    nodes = [node for document in documents for node in tree.insert(document.tolist())]
    enter, leave = tree.intervals()
    # Rows in the order of the walk, so that a path is contiguous up to where it branches.
    order = sorted(range(len(enter)), key=enter.__getitem__)
    row_of = {node: row for row, node in enumerate(order)}
    return PackedRows(
        tokens=torch.tensor([tree.tokens[node] for node in order]),
        positions=torch.tensor([tree.depths[node] for node in order]),
        enter=torch.tensor([enter[node] for node in order]),
        leave=torch.tensor([leave[node] for node in order]),
        source=torch.tensor([row_of[node] for node in nodes]),
    )


class _Tree:
    """A forest of tokens; without sharing each document is a chain of its own."""

    def __init__(self, *, share: bool) -> None:
        self.share = share
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.children: list[dict[int, int]] = []
        self.roots: list[int] = []
        self._by_first: dict[int, int] = {}

    def insert(self, document: list[int]) -> list[int]:
        """Add a document and return the node of each of its tokens."""
        path: list[int] = []
        for depth, token in enumerate(document):
            known = self.children[path[-1]] if path else self._by_first
            node = known.get(token) if self.share else None
            if node is None:
                node = len(self.tokens)
                self.tokens.append(token)
                self.depths.append(depth)
                self.children.append({})
                # Without sharing a chain never branches, so the token is a key as good as any.
                known[token] = node
                if not path:
                    self.roots.append(node)
            path.append(node)
        return path

    def intervals(self) -> tuple[list[int], list[int]]:
        """The times at which a depth-first walk enters and leaves each node."""
        enter, leave = [0] * len(self.tokens), [0] * len(self.tokens)
        clock = 0
        # A stack, since a document may be far longer than Python's recursion limit.
        stack = [(root, False) for root in reversed(self.roots)]
        while stack:
            node, done = stack.pop()
            if done:
                leave[node] = clock
                continue
            enter[node] = clock
            clock += 1
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(self.children[node].values()))
        return enter, leave
