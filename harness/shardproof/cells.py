"""Cases and cells: what the marker declares, and how collected items become case x topology."""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import unittest
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from shardproof.options import DTYPES, SETTINGS, Settings
from shardproof.topology import Topology, TopologyError, parse_topology

MARKER = "parity"
RANK_FIXTURE = "rank"
PAYLOAD = "shardproof"
"""Attribute of a test report that carries the result of its cell."""
MARKER_HELP = (
    "parity(*topologies, timeout=None, requires=(), megatron=False, multiple_of={}, divisor_of={},"
    " full_precision=False, dtype=None, reference_ignores=(), fixes=None, fixes_raises=()):"
    " run the test as a parity case, once as the single-device reference and once on the ranks of"
    " each topology. timeout: seconds for one topology. requires: distributions that must be"
    " installed, such as 'transformers>=5'. megatron: set up megatron-core's parallel state."
    " multiple_of/divisor_of: what the size of an axis must be when it is above 1, such as"
    " multiple_of={'cp': 2}. full_precision: fail where a float64 reference computes in less."
    " dtype: in place of --parity-dtype, for a case that is about one dtype."
    " reference_ignores: parameters that make no difference to the reference, which is then run"
    " once for all of their values. fixes: what the change mends ('#911'); with --against the case"
    " must fail on the other revision. fixes_raises: exceptions that are such a failure."
)


ExceptionNames = str | type[BaseException] | Sequence[str | type[BaseException]]


class CaseError(ValueError):
    """A parity marker or a topology that does not fit its case."""


@dataclass(frozen=True)
class CaseOptions:
    """Keyword arguments of the parity marker, checked."""

    timeout: float | None = None
    requires: Sequence[str] = ()
    megatron: bool = False
    multiple_of: Mapping[str, int] | None = None
    divisor_of: Mapping[str, int] | None = None
    full_precision: bool = False
    dtype: str | None = None
    reference_ignores: Sequence[str] = ()
    fixes: str | None = None
    fixes_raises: ExceptionNames = ()

    @property
    def raises_there(self) -> tuple[str, ...]:
        """Names of the exceptions of ``fixes_raises``."""
        given = self.fixes_raises
        several = given if isinstance(given, tuple | list) else (given,)
        return tuple(one if isinstance(one, str) else one.__name__ for one in several)

    def missing(self) -> str | None:
        """What is not installed of what the case needs, or None."""
        wanted = [*self.requires, *(["megatron-core"] if self.megatron else [])]
        for text in wanted:
            requirement = Requirement(text)
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                return f"needs {text}, which is not installed"
            if not requirement.specifier.contains(version, prereleases=True):
                return f"needs {text}, but {requirement.name} {version} is installed"
        return None

    def misfit(self, topology: Topology) -> str | None:
        """Why ``topology`` does not fit the sizes that the case asks for, or None."""
        for axis, size in topology.sizes.items():
            factor = (self.multiple_of or {}).get(axis, 1)
            whole = (self.divisor_of or {}).get(axis, 0)
            if size > 1 and size % factor:
                return f"this case needs {axis} to be a multiple of {factor}, got {axis}{size}"
            if size > 1 and whole % size:
                return f"this case needs {axis} to divide {whole}, got {axis}{size}"
        return None


@dataclass(frozen=True)
class Cell:
    """One case on one topology with one seed, as collected.

    ``topology`` is None when its text could not be understood; ``problem`` says why. ``several``:
    whether the case runs with other seeds as well.
    """

    label: str
    topology: Topology | None
    problem: str | None = None
    seed: int = 0
    several: bool = False

    @property
    def id(self) -> str:
        """The part of the item's node id: ``cp2``, or ``cp2-seed7`` among several seeds."""
        return f"{self.label}-seed{self.seed}" if self.several else self.label


@dataclass(frozen=True)
class Case:
    """What an item runs.

    ``case`` is its node id without the topology, among several seeds with ``seed7`` as a parameter.
    """

    case: str
    cell: Cell
    options: CaseOptions


def cell_of(item: pytest.Item) -> Cell | None:
    """The cell that ``item`` is, or None for a test that is no parity case."""
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get(RANK_FIXTURE) if callspec is not None else None
    return cell if isinstance(cell, Cell) else None


def describe(item: pytest.Item, cell: Cell) -> Case:
    """Case name and options of an item.

    Raises:
        CaseError: the marker's arguments cannot be used.
    """
    return Case(case_id(item, cell), cell, read_options(item))


def case_id(item: pytest.Item, cell: Cell) -> str:
    """Node id without the topology: ``f.py::test[cp2-full]`` becomes ``f.py::test[full]``."""
    callspec: Any = getattr(item, "callspec", None)
    parts = str(callspec.id).split("-")
    label = cell.label.split("-")
    for start in range(len(parts)):
        if parts[start : start + len(label)] == label:
            del parts[start : start + len(label)]
            break
    stem = item.nodeid.removesuffix(f"[{callspec.id}]")
    return f"{stem}[{'-'.join(parts)}]" if parts else stem


def reference_key(item: pytest.Item) -> str:
    """What items with one reference have in common: test, parameters that matter, and seed.

    That of a case with a bad marker is its own.
    """
    try:
        options = read_options(item)
    except CaseError:
        return item.nodeid
    stem = item.nodeid.partition("[")[0]
    ignored = {RANK_FIXTURE, *options.reference_ignores}
    # pytest counts the values of a direct parameter anew for each cell; objects stay the same.
    chosen = [(name, id(value)) for name, value in _parameters(item).items() if name not in ignored]
    cell = cell_of(item)
    return f"{stem}{sorted(chosen)} {cell.seed if cell else ''}"


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    """The values of an item's parameters."""
    callspec = getattr(item, "callspec", None)
    found: Mapping[str, object] = callspec.params if callspec is not None else {}
    return found


def in_order_of_references(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Cells of a test function that share a reference side by side, so that it need not be kept.

    All else stays where it is.
    """
    found: list[pytest.Item] = []
    for _, of_function in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        keyed = [
            (reference_key(item) if cell_of(item) else item.nodeid, item) for item in of_function
        ]
        first: dict[str, int] = {}
        for key, _ in keyed:
            first.setdefault(key, len(first))
        found += [item for _, item in sorted(keyed, key=lambda pair: first[pair[0]])]
    return found


def read_options(item: pytest.Item) -> CaseOptions:
    """Keyword arguments of the closest parity marker.

    One that has nothing but ``fixes`` (on a parameter's value, say) adds to the others.

    Raises:
        CaseError: an unknown keyword, or a value of the wrong kind.
    """
    given = _keywords(item)
    try:
        options = CaseOptions(**given)
    except TypeError as error:
        known = ", ".join(CaseOptions.__dataclass_fields__)
        raise CaseError(
            f"parity marker: expected keywords among {known}, got {sorted(given)}"
        ) from error
    for keyword in ("requires", "reference_ignores"):
        if isinstance(getattr(options, keyword), str):
            raise CaseError(f"parity marker: {keyword} must be a list of names, got one string")
    parameters = {name for name in _parameters(item) if name != RANK_FIXTURE}
    unknown = [name for name in options.reference_ignores if name not in parameters]
    if unknown:
        raise CaseError(
            f"parity marker: reference_ignores names {unknown}, but the parameters of this case "
            f"are {sorted(parameters) or 'none'}"
        )
    for text in options.requires:
        try:
            Requirement(text)
        except (InvalidRequirement, TypeError) as error:
            raise CaseError(f"parity marker: requires: {text!r} is no requirement") from error
    seconds: Any = options.timeout
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise CaseError(f"parity marker: timeout must be seconds above 0, got {seconds!r}")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise CaseError(
            f"parity marker: dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}"
        )
    _check_fixes(options)
    _check_sizes(item.config.stash[SETTINGS], "multiple_of", options.multiple_of)
    _check_sizes(item.config.stash[SETTINGS], "divisor_of", options.divisor_of)
    return options


def _keywords(item: pytest.Item) -> dict[str, Any]:
    """Keywords of the closest marker, and of one that adds ``fixes`` to it."""
    main, added = _split(item.iter_markers(MARKER))
    return {**(main.kwargs if main else {}), **(added.kwargs if added else {})}


def _split(markers: Iterable[pytest.Mark]) -> tuple[pytest.Mark | None, pytest.Mark | None]:
    """The closest marker, and the closest of those with nothing but ``fixes``."""
    main: pytest.Mark | None = None
    added: pytest.Mark | None = None
    for mark in markers:
        if mark.args or not mark.kwargs or not mark.kwargs.keys() <= {"fixes", "fixes_raises"}:
            main = main or mark
        else:
            added = added or mark
    return main, added


def _check_fixes(options: CaseOptions) -> None:
    if options.fixes is not None and not (isinstance(options.fixes, str) and options.fixes):
        raise CaseError(
            f"parity marker: fixes must name what the change mends, '#911', got {options.fixes!r}"
        )
    given = options.fixes_raises
    several = given if isinstance(given, tuple | list) else (given,)
    for one in several:
        named = isinstance(one, str) and one.isidentifier()
        if not named and not (isinstance(one, type) and issubclass(one, BaseException)):
            raise CaseError(
                f"parity marker: fixes_raises must be exceptions or their names, got {one!r}"
            )
    if several and options.fixes is None:
        raise CaseError("parity marker: fixes_raises says how fixes shows, but there is no fixes")


def _check_sizes(settings: Settings, keyword: str, sizes: object) -> None:
    known = {axis.name for axis in settings.axes}
    right = sizes is None or (
        isinstance(sizes, Mapping)
        and all(
            axis in known and isinstance(n, int) and not isinstance(n, bool) and n > 0
            for axis, n in sizes.items()
        )
    )
    if not right:
        raise CaseError(
            f"parity marker: {keyword} must map axes ({', '.join(sorted(known))}) to whole "
            f"numbers above 0, got {sizes!r}"
        )


def ask_for_rank(collector: pytest.Collector, name: str, obj: object) -> None:
    """Make a parity test use the ``rank`` fixture even when it asks for it through none.

    A mark of a module or class reaches its tests alone: not the fixtures and helpers in it.
    """
    if not inspect.isroutine(obj) or not any(_markers(collector, obj)):
        return
    if isinstance(collector, pytest.Module | pytest.Class) and not collector.istestfunction(
        obj, name
    ):
        return
    cls = getattr(collector, "cls", None) or getattr(getattr(collector, "parent", None), "cls", 0)
    if isinstance(cls, type) and issubclass(cls, unittest.TestCase):
        return  # refused with a clear text in check_selected
    function = getattr(obj, "__func__", obj)
    already = getattr(function, "pytestmark", [])
    if not any(mark.name == "usefixtures" and RANK_FIXTURE in mark.args for mark in already):
        pytest.mark.usefixtures(RANK_FIXTURE)(function)


def _markers(collector: pytest.Collector, obj: object) -> Iterator[pytest.Mark]:
    yield from collector.iter_markers(MARKER)
    for mark in getattr(obj, "pytestmark", []):
        if getattr(mark, "name", None) == MARKER:
            yield mark


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a parity test one item for each topology and seed; those of a seed come together."""
    main, added = _split(metafunc.definition.iter_markers(MARKER))
    marker = main or added
    if marker is None or RANK_FIXTURE not in metafunc.fixturenames:
        return
    settings = metafunc.config.stash[SETTINGS]
    several = len(settings.seeds) > 1
    cells = [
        replace(cell, seed=seed, several=several)
        for seed in settings.seeds
        for cell in _cells(settings, marker)
    ]
    metafunc.parametrize(RANK_FIXTURE, cells, indirect=True, ids=[cell.id for cell in cells])


def _cells(settings: Settings, marker: pytest.Mark) -> Iterator[Cell]:
    if settings.forced:
        yield from (Cell(topology.name, topology) for topology in settings.forced)
        return
    seen: set[str] = set()
    for text in marker.args or settings.defaults:
        cell = _declared(settings, text)
        if cell.label not in seen:
            seen.add(cell.label)
            yield cell


def _declared(settings: Settings, text: object) -> Cell:
    if not isinstance(text, str):
        label = f"invalid_{type(text).__name__}"
        return Cell(label, None, f"parity marker: a topology is a name like 'cp2', got {text!r}")
    try:
        topology = parse_topology(text, settings.axes)
    except TopologyError as error:
        return Cell(text or "empty", None, f"parity marker: {error}")
    return Cell(topology.name, topology)


def check_selected(items: list[pytest.Item]) -> bool:
    """Whether any selected item is a parity case.

    Raises:
        pytest.UsageError: a parity marker on a test that can't be parametrized (unittest).
    """
    for item in items:
        if item.get_closest_marker(MARKER) and cell_of(item) is None:
            raise pytest.UsageError(
                f"{item.nodeid}: the parity marker works on functions and on methods of plain "
                "classes, not on unittest.TestCase methods or custom items; make it a function"
            )
    return any(cell_of(item) for item in items)
