"""Command line options, ini settings and their checks, all made before anything starts."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardproof.mutants.choice import EXAMPLES, Choice, ChoiceError, read_choice
from shardproof.mutants.coverage import Coverage
from shardproof.mutants.reading import ReadingError
from shardproof.mutants.survivors import Listed, SurvivorsError, read_survivors
from shardproof.topology import Axis, Topology, TopologyError, declare_axes, parse_topology

DTYPES = ("float64", "float32", "bfloat16")
DEFAULT_TOPOLOGIES = ("cp2", "cp4", "dp2xcp2", "tp2xcp2")
DEFAULT_TIMEOUT = 120.0
DEFAULT_MAX_RANKS = 16
DEFAULT_REPORT = "reports/latest"
_MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Settings:
    """What this run was asked for, checked.

    ``seeds`` are those of ``--parity-seed``. ``timeout`` is in seconds per case and topology.
    ``forced`` are the topologies of ``--topology``, empty when each case's own are used.
    ``against`` is the revision or release of ``--against``, ``subject`` the paths that it supplies,
    relative to the rootdir; ``coverage`` are the call sites there, in a run with ``--mutants``.
    """

    axes: tuple[Axis, ...]
    forced: tuple[Topology, ...]
    defaults: tuple[str, ...]
    dtype: str
    seeds: tuple[int, ...]
    timeout: float
    fresh: bool
    keep_groups: bool
    max_ranks: int
    preload: tuple[str, ...]
    report: Path
    ledger: bool
    against: str | None = None
    mutants: Choice | None = None
    survivors: tuple[Listed, ...] = ()
    subject: tuple[str, ...] = ()
    coverage: Coverage | None = None


SETTINGS = pytest.StashKey[Settings]()


def add_options(parser: pytest.Parser) -> None:
    """Register every option and ini setting of the plugin."""
    group = parser.getgroup("shardproof", "parity under sharding")
    group.addoption(
        "--topology",
        action="append",
        default=[],
        metavar="NAME",
        help="run parity cases on exactly this topology (cp2, dp2xcp2, ...), declared or not; "
        "repeatable",
    )
    group.addoption(
        "--parity-dtype",
        choices=DTYPES,
        default="float64",
        help="floating dtype of reference and ranks (default: float64)",
    )
    group.addoption(
        "--parity-seed",
        default="0",
        metavar="N",
        help="seed of every generator and noise run (default: 0); each case runs once for each "
        "seed of 'FIRST:END', the end left out",
    )
    group.addoption(
        "--parity-timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="limit for one case on one topology (default: 120)",
    )
    group.addoption(
        "--parity-fresh",
        action="store_true",
        help="fork new ranks for every case instead of reusing warm ones",
    )
    group.addoption(
        "--parity-report",
        default=DEFAULT_REPORT,
        metavar="DIR",
        help=f"where run.jsonl is written, relative to the rootdir (default: {DEFAULT_REPORT})",
    )
    group.addoption(
        "--parity-ledger",
        choices=("on", "off"),
        default="on",
        help="record the collectives of every rank, to name those that differ between ranks and "
        "those in which a rank hangs (default: on)",
    )
    group.addoption(
        "--mutants",
        metavar="WHICH",
        help="break one collective at a time after each cell that passed, and say which mutants "
        f"no case notices: {EXAMPLES}",
    )
    group.addoption(
        "--against",
        metavar="REV",
        help="control: run each case on the subject of this revision too (or of a release, "
        "'package==1.2.3'), and say which cases catch the difference",
    )
    parser.addini(
        "shardproof_subject",
        "paths under test, relative to the rootdir: what --against takes from a revision",
        type="args",
        default=[],
    )
    parser.addini(
        "shardproof_survivors",
        "file of mutants that may survive --mutants, as lines 'reason | name'; others fail the run",
        default="",
    )
    parser.addini(
        "shardproof_preload",
        "modules that the fork server imports once for all ranks (never test modules)",
        type="args",
        default=[],
    )
    parser.addini(
        "shardproof_axes",
        "axes beyond tp, cp, dp and pp, as NAME:data or NAME:model",
        type="args",
        default=[],
    )
    parser.addini(
        "shardproof_topologies",
        "topologies of a parity marker that names none",
        type="args",
        default=list(DEFAULT_TOPOLOGIES),
    )
    parser.addini(
        "shardproof_max_ranks",
        "most ranks that one topology may use",
        default=str(DEFAULT_MAX_RANKS),
    )
    parser.addini(
        "shardproof_groups",
        "process groups of warm ranks: 'keep' them while provably clean, or 'new' for every case",
        default="keep",
    )


def read_settings(config: pytest.Config) -> Settings:
    """Settings from the command line and the ini.

    Raises:
        pytest.UsageError: a value that can't be used; the text names the option, what was
            expected and what came.
    """
    try:
        axes = declare_axes(config.getini("shardproof_axes"))
    except TopologyError as error:
        raise pytest.UsageError(f"shardproof_axes: {error}") from error
    max_ranks = _positive_int("shardproof_max_ranks", config.getini("shardproof_max_ranks"))
    mutants = _mutants(config)
    groups = config.getini("shardproof_groups")
    if groups not in ("keep", "new"):
        raise pytest.UsageError(f"shardproof_groups: expected 'keep' or 'new', got {groups!r}")
    timeout: float = config.getoption("--parity-timeout")
    if not (math.isfinite(timeout) and timeout > 0):
        raise pytest.UsageError(f"--parity-timeout: expected seconds above 0, got {timeout}")
    preload = tuple(config.getini("shardproof_preload"))
    for module in preload:
        _check_preload(module)
    forced = tuple(
        _forced(text, axes, max_ranks) for text in dict.fromkeys(config.getoption("--topology"))
    )
    return Settings(
        axes=axes,
        forced=tuple(dict.fromkeys(forced)),
        defaults=tuple(config.getini("shardproof_topologies")),
        dtype=config.getoption("--parity-dtype"),
        seeds=_seeds(config.getoption("--parity-seed")),
        timeout=timeout,
        fresh=config.getoption("--parity-fresh"),
        keep_groups=groups == "keep",
        max_ranks=max_ranks,
        preload=preload,
        report=config.rootpath / config.getoption("--parity-report"),
        ledger=config.getoption("--parity-ledger") == "on",
        against=config.getoption("--against"),
        mutants=mutants,
        survivors=_survivors(config),
        subject=tuple(config.getini("shardproof_subject")),
        coverage=_coverage(config),
    )


def _mutants(config: pytest.Config) -> Choice | None:
    text = config.getoption("--mutants")
    if text is None:
        return None
    for option, wanted in (
        ("--parity-ledger off", config.getoption("--parity-ledger") == "off"),
        ("--against", config.getoption("--against") is not None),
    ):
        if wanted:
            raise pytest.UsageError(
                f"--mutants can't be used with {option}: the ledger is what breaks a collective, "
                "and one run answers one question; leave one of them out"
            )
    try:
        return read_choice(text)
    except ChoiceError as error:
        raise pytest.UsageError(f"--mutants: {error}") from error


def _coverage(config: pytest.Config) -> Coverage | None:
    subject = config.getini("shardproof_subject")
    if not subject or config.getoption("--mutants") is None:
        return None
    try:
        return Coverage(subject, root=config.rootpath)
    except ReadingError as error:
        raise pytest.UsageError(f"shardproof_subject: {error}") from error


def _survivors(config: pytest.Config) -> tuple[Listed, ...]:
    path = config.getini("shardproof_survivors")
    if not path or config.getoption("--mutants") is None:
        return ()
    try:
        return tuple(read_survivors(config.rootpath / path))
    except SurvivorsError as error:
        raise pytest.UsageError(f"shardproof_survivors: {error}") from error


def _seeds(text: str) -> tuple[int, ...]:
    first, colon, end = text.partition(":")
    try:
        found = range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        found = range(0)
    if not 0 < len(found) <= _MOST_SEEDS:
        raise pytest.UsageError(
            "--parity-seed: expected a whole number, or FIRST:END with FIRST below END and at most "
            f"{_MOST_SEEDS} seeds, got {text!r}"
        )
    return tuple(found)


def _forced(text: str, axes: tuple[Axis, ...], max_ranks: int) -> Topology:
    try:
        topology = parse_topology(text, axes)
    except TopologyError as error:
        raise pytest.UsageError(f"--topology: {error}") from error
    if topology.world_size > max_ranks:
        raise pytest.UsageError(
            f"--topology {topology.name}: needs {topology.world_size} ranks, at most {max_ranks} "
            "are allowed; raise shardproof_max_ranks in the ini if this machine can hold them"
        )
    return topology


def _positive_int(name: str, text: Any) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise pytest.UsageError(f"{name}: expected a whole number of at least 1, got {text!r}")
    return value


def _check_preload(module: str) -> None:
    """Refuse what is certainly no module; the rest is found by the fork server.

    Only the first part of a dotted name is looked for: finding the others would import it here.
    """
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(f"shardproof_preload: cannot find {module!r}: {error}") from error
    if found is None:
        raise pytest.UsageError(
            f"shardproof_preload: cannot find module {module!r}; expected importable module names"
        )
