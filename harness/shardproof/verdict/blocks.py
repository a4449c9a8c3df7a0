"""Walking a tensor in blocks, so that no temporary grows with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

BLOCK = 1 << 19
"""Elements of a block: 4 MiB as float64, which stays in the cache of one core."""


def blocks(shape: Sequence[int], limit: int = BLOCK) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a tensor of ``shape`` into blocks of at most ``limit`` elements.

    A block is a range of rows, or a part of one row where a row is longer. Every index keeps all
    dimensions; a 0-dimensional tensor has the one index ``()`` and an empty one has none.
    """
    if not shape:
        yield ()
        return
    rows, inner = shape[0], math.prod(shape[1:])
    if rows * inner == 0:
        return
    if inner <= limit:
        step = max(1, limit // inner)
        for start in range(0, rows, step):
            yield (slice(start, min(rows, start + step)),)
        return
    for row in range(rows):
        for rest in blocks(shape[1:], limit):
            yield (slice(row, row + 1), *rest)
