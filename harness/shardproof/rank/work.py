"""The messages between the controller and a rank, typed at both ends.

The controller sends ``run``, ``judge``, ``verdicts``, ``abandon``, ``finish_reference`` and
``close``; a rank answers ``ready``, ``phase``, ``report``, ``sealed``, ``judged``, ``done``,
``finished`` and ``closed``, or ``broken`` when its session can't be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Role = Literal["reference", "repeat", "noise", "candidate"]


@dataclass(frozen=True)
class SessionSetup:
    """What a rank needs to make a pytest session like the controller's.

    ``subject`` is what a control against a revision watches, see :mod:`shardproof.against`.
    """

    args: list[str]
    directory: str
    path: list[str]
    files: list[str]
    basetemp: str
    label: str
    workerinput: dict[str, Any]
    subject: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """One run of one item on one rank.

    ``next_nodeid`` is the item that this rank really runs next, None when there is none.
    ``noise`` is the number of the noise run; ``ledger`` says whether collectives are recorded,
    ``callers`` that call sites are told apart by their callers, ``mutant`` which of them hand out
    something else (:mod:`shardproof.mutants`), ``rehearsed`` are mutants of which only what they
    would change is looked at, ``apart`` that the ranks must be as new afterwards.
    ``imports`` are modules that runs like it import, so that it need not. ``compared`` says whether
    a candidate is judged: otherwise it runs only to see what it calls, and needs the reference's
    first run alone.
    Paths are directories made by the controller; in ``rendezvous`` ranks of one fleet, or of one
    run apart, find each other.
    """

    nodeid: str
    next_nodeid: str | None
    topology: str
    role: Role
    noise: int
    reference_dir: str
    cell_dir: str
    case_dir: str
    tmp_path: str
    rendezvous: str
    dtype: str
    seed: int
    megatron: bool
    new_groups: bool
    ledger: bool
    callers: bool = False
    mutant: dict[str, Any] | None = None
    rehearsed: Sequence[dict[str, Any]] = ()
    apart: bool = False
    imports: tuple[str, ...] = ()
    compared: bool = True


def to_message(kind: str, value: Run) -> dict[str, Any]:
    """A JSON-able message that carries a run."""
    return {"do": kind, **asdict(value)}


def run_from(message: Mapping[str, Any]) -> Run:
    """The :class:`Run` in a message."""
    return Run(**{field.name: message[field.name] for field in fields(Run)})
