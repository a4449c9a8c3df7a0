"""What a case talks to: observations on one process, in any role."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardproof.topology import Topology

from .candidate import Candidate
from .judge import Judge
from .pieces import Files, rank_file
from .placement import Placement, PlacementError, placement_of, resolve, resolve_on
from .records import Record, plain
from .reference import open_store
from .runs import NoiseRun, ReferenceRun, RepeatRun, Run
from .store import Writer
from .values import BadValueError, capture, flatten

Role = Literal["reference", "repeat", "noise", "candidate"]

LONGEST_NAME = 500
"""Characters of an observation's name."""


class Recorder:
    """Takes the observations of one process, and gives verdicts on those that it owns.

    Nothing that a case does wrong raises here, since that would strand its peers in their next
    collective: a value of the wrong type, a second observation of one name or a placement that
    cannot hold is noted with its line and comes out as a verdict of its own ('invalid').

    ``role``: ``reference`` writes values, ``repeat`` checks that they come out the same again,
    ``noise`` (with ``seed``, a small integer that names the run) measures how far rounding moves
    them, ``candidate`` compares. ``reference_dir``: files of the reference, made where missing.
    ``cell_dir``: shared by the ranks of this cell, on this host. ``dtype``: of the run; rounding is
    taken from it or from a value's own dtype, whichever is coarser. With ``compared`` false a
    candidate only says what it observes: it needs no reference, and can't be judged.

    Raises:
        StoreError: a noise run or a candidate finds no finished reference.
        OSError: the directories cannot be written.
    """

    def __init__(
        self,
        *,
        role: Role,
        topology: Topology,
        rank: int,
        reference_dir: Path,
        cell_dir: Path,
        dtype: torch.dtype,
        seed: int = 0,
        compared: bool = True,
    ) -> None:
        self._role = role
        self._topology = topology
        self._rank = rank
        self._coordinates = topology.coordinates(rank)
        self._reference_dir = reference_dir
        self._cell_dir = cell_dir
        self._names: dict[str, str] = {}
        self._records: list[Record] = []
        self._problems: list[Record] = []
        self._sealed: dict[str, object] | None = None
        self._run: Run | None = None
        self._candidate: Candidate | None = None
        with _quiet():
            if role == "reference":
                self._run = ReferenceRun(reference_dir, dtype)
            elif role == "repeat":
                self._run = RepeatRun(reference_dir)
            elif role == "noise":
                self._run = NoiseRun(reference_dir, seed)
            elif compared:
                self._store = open_store(reference_dir)
                self._writer = Writer(rank_file(cell_dir, rank))
                self._candidate = Candidate(self._store, self._writer, topology, rank)

    def observe(
        self,
        name: str,
        value: object,
        *,
        shard: Mapping[str, int] | None = None,
        rows: torch.Tensor | Sequence[int] | None = None,
        partial: Sequence[str] = (),
        on: Mapping[str, int] | None = None,
        exact: bool = False,
        zero: bool = False,
    ) -> None:
        """Compare ``value``, as it is now, with what the reference observes under ``name``.

        ``value``: a tensor, a numpy array, a number, None, or a mapping, sequence or dataclass of
        these (each item is an observation, ``name.key``). By default all ranks of every model axis
        must hold it, equal in bits. ``shard={"tp": 0}``: this rank holds a slice of dimension 0.
        ``rows=positions``: this rank holds these rows (dimension 0) of the whole.
        ``partial=("cp",)``: the sum over the axis is the value. ``on={"cp": 0}``: it counts there
        only. ``exact``: floating numbers must be equal; integers and booleans always must.
        ``zero``: the value is zero, or empty, and that is what the case means to show.

        Raises:
            RuntimeError: the case's call phase is over.
        """
        self._check_open()
        source = caller()
        placement = None
        if shard is not None or rows is not None or partial or on:
            placement = Placement(shard or {}, rows, partial, on or {})
        with _quiet():
            self._observe(name, value, placement, source, exact=exact, zero=zero)

    def observe_gradients(
        self,
        named: Iterable[tuple[str, torch.Tensor | None, Placement | Mapping[str, Any] | None]],
        *,
        prefix: str = "grad",
        zero: Collection[str] = (),
    ) -> None:
        """Observe gradients as ``prefix.name``, each with its placement.

        ``named``: name, gradient (None where there is none) and placement: a ``Placement``, a
        mapping of its fields or of axes to dimensions, or None for what the tensor itself says
        (DTensor, Megatron's attributes; else replicated). ``zero``: names whose gradient is zero.

        Raises:
            RuntimeError: the case's call phase is over.
        """
        self._check_open()
        source = caller()
        count = 0
        for count, item in enumerate(named, 1):
            with _quiet():
                if not (isinstance(item, tuple) and len(item) == 3):
                    self._note(
                        f"{prefix}[{count - 1}]",
                        f"expected (name, gradient, placement), got {type(item).__name__}",
                        source,
                    )
                    continue
                name, gradient, placed = item
                self._observe(
                    f"{prefix}.{name}",
                    gradient,
                    _as_placement(placed),
                    source,
                    exact=False,
                    zero=name in zero,
                )
        if count == 0 and self._role == "reference":
            self._note(prefix, "observe_gradients was given no gradients", source)

    def seal(self) -> dict[str, object]:
        """End the call phase: write the run's index, and say what was observed (JSON-able).

        A second call returns the same.

        Raises:
            OSError: the files cannot be written.
        """
        if self._sealed is None:
            with _quiet():
                if self._run is not None:
                    self._run.finish(self._problems)
                elif self._candidate is not None:
                    self._writer.close()
            self._sealed = {
                "rank": self._rank,
                "topology": self._topology.name,
                "role": self._role,
                "records": plain([*self._records, *self._problems]),
            }
        return self._sealed

    def judge(self, sealed: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
        """Verdicts on the observations that this rank owns, from what all ranks sealed.

        Raises:
            RuntimeError: not a candidate, or not sealed yet.
            ValueError: ``sealed`` is not one from each rank.
        """
        if self._candidate is None or self._sealed is None:
            raise RuntimeError(
                f"judge() is for a candidate that is compared, after seal(): this is a "
                f"{self._role} {'after' if self._sealed else 'before'} it"
                f"{', not compared' if self._role == 'candidate' and not self._candidate else ''}"
            )
        ordered = sorted(sealed, key=lambda one: int(one["rank"]))
        ranks = [int(one["rank"]) for one in ordered]
        if ranks != list(range(self._topology.world_size)):
            raise ValueError(
                f"expected what each of {self._topology.world_size} ranks sealed, got ranks {ranks}"
            )
        with _quiet():
            judge = Judge(self._store, Files(self._cell_dir), self._topology, ordered)
            return [plain(judge.verdict(case)) for case in judge.cases(owner=self._rank)]

    @property
    def judging(self) -> bool:
        """Whether this process is under test, and not on the side of the reference."""
        return self._role == "candidate"

    def _check_open(self) -> None:
        if self._sealed is not None:
            raise RuntimeError(
                "observed after the case's call phase had ended (in a fixture's teardown, or from "
                "a thread): observe in the body of the case"
            )

    def _observe(
        self,
        name: object,
        value: object,
        placement: Placement | None,
        source: str,
        *,
        exact: bool,
        zero: bool,
    ) -> None:
        if not isinstance(name, str) or not name or len(name) > LONGEST_NAME:
            self._note(
                repr(name)[:LONGEST_NAME],
                f"expected a name of 1 to {LONGEST_NAME} characters, got {repr(name)[:80]}",
                source,
            )
            return
        try:
            leaves = list(flatten(name, value))
        except Exception as error:  # noqa: BLE001 - a container is the case's own code
            self._note(name, _reason(error), source)
            return
        for leaf_name, item in leaves:
            self._leaf(leaf_name, item, placement, source, exact=exact, zero=zero)

    def _leaf(
        self,
        name: str,
        value: object,
        placement: Placement | None,
        source: str,
        *,
        exact: bool,
        zero: bool,
    ) -> None:
        if name in self._names:
            self._note(
                name,
                f"observed twice, first at {self._names[name]}: each observation needs a name of "
                "its own",
                source,
            )
            return
        self._names[name] = source
        record = Record(name, source, exact=exact, zero=zero)
        try:
            self._take(record, value, placement)
        except Exception as error:  # noqa: BLE001 - it comes out as a verdict, with its line
            self._note(name, _reason(error), source)
        else:
            self._records.append(record)

    def _take(self, record: Record, value: object, placement: Placement | None) -> None:
        """Fill in ``record`` from the value as it is now.

        Raises:
            BadValueError, PlacementError: the value or its placement cannot be observed.
        """
        own = placement_of(value)
        if placement is None:
            placement = own
        elif own.shard or own.partial:
            placement = _joined(placement, own, local=not _is_dtensor(value))
        record.on = resolve_on(placement.on, topology=self._topology)
        if not all(self._coordinates[axis] == at for axis, at in record.on.items()):
            record.status = "elsewhere"
            return
        leaf = capture(value.to_local() if _is_dtensor(value) else value)  # type: ignore[attr-defined]
        record.kind, record.dtype, record.shape = leaf.kind, leaf.dtype, list(leaf.shape)
        record.floating = leaf.floating
        if leaf.tensor is None:
            # A gradient that is None has no slices, wherever its parameter's would lie.
            placement = Placement(on=placement.on)
        placed = resolve(placement, topology=self._topology, shape=leaf.shape)
        record.shard = list(placed.shard.items())
        record.partial = list(placed.partial)
        if record.dtype == "bool" and placed.partial:
            raise PlacementError(
                "partial sums a boolean value: observe value.int() where it counts"
            )
        if self._run is not None:
            self._run.take(record, leaf, placed)
        elif self._candidate is not None:
            self._candidate.compare(record, leaf, placed)

    def _note(self, name: str, problem: str, source: str) -> None:
        self._problems.append(Record(name, source, "invalid", problem))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Arithmetic that no mode of the case sees: noise, autocast, default devices, autograd."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_initialized() else _nothing(),
    ):
        yield


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _is_dtensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")


def _as_placement(given: object) -> Placement | None:
    if given is None or isinstance(given, Placement):
        return given
    if isinstance(given, Mapping) and given and given.keys() <= {"shard", "rows", "partial", "on"}:
        return Placement(**given)
    return Placement(shard=given)  # type: ignore[arg-type]  # resolve() says what is wrong with it


def _joined(given: Placement, own: Placement, *, local: bool) -> Placement:
    """What the caller says, with what the tensor itself says where the caller is silent.

    Raises:
        PlacementError: a DTensor's placement is contradicted. (Megatron's attributes describe the
        parameter, which a value derived from it may not follow: the caller overrides them.)
    """
    if local:
        return given if given.shard else Placement(own.shard, given.rows, given.partial, given.on)
    for word, mine, theirs in (
        ("shard", given.shard, own.shard),
        ("partial", tuple(given.partial or ()), tuple(own.partial)),
    ):
        if mine and mine != theirs:
            raise PlacementError(
                f"{word}={mine!r} was given for a DTensor whose own placement says {theirs!r}: "
                "leave it out"
            )
    return Placement(own.shard, given.rows, own.partial, given.on)


def _reason(error: Exception) -> str:
    if isinstance(error, BadValueError | PlacementError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return (
            "no room in shared memory for this value: give /dev/shm more, observe less, or run "
            "fewer topologies at a time"
        )
    return f"{type(error).__name__} while the value was read: {error}"


def caller() -> str:
    """File and line of the nearest caller outside shardproof, relative to where we run."""
    here = f"{Path(__file__).parents[1]}{os.sep}"
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    with contextlib.suppress(ValueError, OSError):  # a case may delete its working directory
        path = path.relative_to(Path.cwd())
    return f"{path}:{frame.f_lineno}"
