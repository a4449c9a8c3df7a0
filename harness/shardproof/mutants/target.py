"""Where a collective is called, and which mutants there are of it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

REDUCING: Final = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)
GATHERING: Final = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "gather",
    }
)
EXCHANGING: Final = frozenset({"all_to_all", "all_to_all_single"})
HANDING_OUT: Final = frozenset({"broadcast", "scatter"})
MUTABLE: Final = REDUCING | GATHERING | EXCHANGING | HANDING_OUT

DROPPED: Final = "dropped"
MULTIPLIED: Final = "multiplied by the size of its group"
DIVIDED: Final = "divided by the size of its group"
OTHER_REDUCTION: Final = "maximum and sum exchanged"
WORLD: Final = "over the whole world"
ROTATED: Final = "chunks rotated"
REPEATED: Final = "own chunk repeated"
STALE: Final = "one call old"
ROUNDED: Final = "rounded through bfloat16"
ELEMENT: Final = "one element wrong on one rank"

KINDS: Final[Mapping[str, frozenset[str]]] = {
    DROPPED: MUTABLE,
    MULTIPLIED: REDUCING,
    DIVIDED: REDUCING,
    OTHER_REDUCTION: frozenset({"all_reduce"}),
    WORLD: frozenset({"all_reduce"}),
    ROTATED: GATHERING | EXCHANGING,
    REPEATED: GATHERING,
    STALE: MUTABLE,
    ROUNDED: MUTABLE,
    ELEMENT: MUTABLE,
}
"""What may be wrong with a result, and the operations of which."""

_LINE: Final = re.compile(r":\d+(?= in )")
_INSTALLED: Final = re.compile(r"(?:^|(?<= < ))[^<]*?/(?:site|dist)-packages/")
_REDUCTIONS: Final = ("SUM", "MAX")


REHEARSED: Final = frozenset(KINDS) - {OTHER_REDUCTION, WORLD}
"""Kinds that say nothing to other ranks, so that a run can tell what they would change."""


@dataclass(frozen=True, order=True)
class Target:
    """A call site: ``operation`` on the groups of an axis, called from one line of user code.

    ``size`` is that of the group, ``whole`` says that it holds all ranks, ``repeated`` that it is
    called more than once. The two passes of a site that is called in both are two targets.
    """

    site: str
    operation: str
    axis: str
    reduce_op: str
    backward: bool
    size: int
    whole: bool
    repeated: bool

    @property
    def key(self) -> tuple[str, str, str, str, bool]:
        """What tells the calls of this target in a rank."""
        return self.axis, self.operation, self.reduce_op, self.site, self.backward

    def __str__(self) -> str:
        operation = f"{self.operation}({self.reduce_op})" if self.reduce_op else self.operation
        phase = "backward" if self.backward else "forward"
        return f"{operation} over {self.axis} in {phase}, {self.site}"


@dataclass(frozen=True, order=True)
class Mutant:
    """One way in which the calls of a target are wrong."""

    target: Target
    kind: str

    @property
    def name(self) -> str:
        """The same on every topology where the axis has that name, whatever line it is on.

        Nor does it matter where libraries are installed.
        """
        where = _INSTALLED.sub("", _LINE.sub("", self.target.site))
        phase = "backward" if self.target.backward else "forward"
        return f"{self.kind}: {self.target.operation} over {self.target.axis} ({phase}) {where}"

    def message(self) -> dict[str, Any]:
        """A JSON-able form of it."""
        return {"target": list(astuple(self.target)), "kind": self.kind}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Mutant:
        """The mutant in a message."""
        return cls(Target(*message["target"]), message["kind"])


def targets_of(places: Iterable[Sequence[Any]], world_size: int) -> list[Target]:
    """The targets that ranks reached, by the ``places`` of their ledgers.

    Groups of one rank are left out, and so are operations that hand out nothing.
    """
    found: dict[tuple[Any, ...], Target] = {}
    for (axis, operation, reduce_op, site, backward), size, calls in places:
        if size > 1 and operation in MUTABLE:
            where = (site, operation, axis, reduce_op, bool(backward), size, size == world_size)
            known = found.get(where)
            repeated = calls > 1 or (known is not None and known.repeated)
            found[where] = Target(*where, repeated)
    return sorted(found.values())


def is_the_cases_own(site: str, subject: Sequence[Path], root: Path) -> bool:
    """Whether a call site belongs to the project that tests, and not to the system under test.

    Args:
        site: as of a target; its paths are absolute or relative to ``root``.
        subject: absolute paths of the system under test; when empty, everything may belong to it.
        root: the project's directory. What lies elsewhere or is installed is a library, which the
            system under test calls.
    """
    text = _LINE.split(site)[0]
    path = root / text
    # Without a line it is a thread without user code: the subject's, for all that is known.
    if not subject or text == site or not path.is_relative_to(root):
        return False
    if _INSTALLED.match(str(path)):
        return False
    return not any(path.is_relative_to(part) for part in subject)


def mutants_of(target: Target) -> list[Mutant]:
    """All mutants of a target that could change what it hands out."""
    kinds = [kind for kind, operations in KINDS.items() if target.operation in operations]
    if not target.repeated:
        kinds = [kind for kind in kinds if kind != STALE]
    if target.whole:
        kinds = [kind for kind in kinds if kind != WORLD]
    if target.reduce_op not in _REDUCTIONS:
        kinds = [kind for kind in kinds if kind != OTHER_REDUCTION]
    if target.reduce_op in ("MAX", "MIN", "BAND", "BOR", "BXOR"):
        # A factor is not what such a reduction gets wrong, and would only scale.
        kinds = [kind for kind in kinds if kind not in (MULTIPLIED, DIVIDED)]
    return [Mutant(target, kind) for kind in kinds]


def share_of(name: str, seed: str) -> float:
    """A number in [0, 1) that a seed draws for a mutant, the same one always."""
    return zlib.crc32(f"{seed}/{name}".encode()) / 2**32
