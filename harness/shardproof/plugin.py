"""The pytest plugin: options, marker, fixture, and which part runs in which process.

A process is one of four: the pytest process that the user started (controller, and owner of the
results), an xdist worker (controller), the xdist main process (owner of the results alone), or a
rank (neither: see :mod:`shardproof.rank.session`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from shardproof import __version__
from shardproof.cells import (
    MARKER,
    MARKER_HELP,
    ask_for_rank,
    cell_of,
    check_selected,
    in_order_of_references,
    parametrize,
)
from shardproof.options import SETTINGS, Settings, add_options, read_settings
from shardproof.results import Results

if TYPE_CHECKING:
    from shardproof.rank.context import Rank


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options and ini settings."""
    add_options(parser)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check every setting; collect results unless another process does."""
    config.addinivalue_line("markers", MARKER_HELP)
    settings = read_settings(config)
    config.stash[SETTINGS] = settings
    if _is_rank(config):
        return
    if settings.against is not None and not config.option.collectonly:
        from shardproof.against.control import CONTROL, prepare

        config.stash[CONTROL] = prepare(config, settings.against)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config, settings), "shardproof-results")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cells of one reference come together; a control is about parity cases alone."""
    if _is_rank(config):
        return
    items[:] = in_order_of_references(items)
    if config.stash[SETTINGS].against is None:
        return
    others = [
        item for item in items if cell_of(item) is None and not item.get_closest_marker(MARKER)
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Bring the controller in when parity cases are selected, and torch with it, not before."""
    config = session.config
    if _is_rank(config) or config.option.collectonly:
        return
    settings = config.stash[SETTINGS]
    selected = check_selected(session.items)
    if settings.against is not None:
        _begin_control(session, settings, selected=selected)
    elif selected:
        from shardproof.controller.protocol import Controller

        controller = Controller(config, settings, session.items)
        config.pluginmanager.register(controller, "shardproof-controller")


def _begin_control(session: pytest.Session, settings: Settings, *, selected: bool) -> None:
    if session.testsfailed:
        return  # modules that can't be imported: pytest says so, and runs nothing
    if not selected:
        raise pytest.UsageError(
            f"--against {settings.against}: no parity case is selected, so there is nothing to run "
            f"on it; cases are tests with @pytest.mark.{MARKER}(...)"
        )
    from shardproof.against.control import CONTROL
    from shardproof.against.protocol import AgainstController

    config = session.config
    controller = AgainstController(config, settings, session.items, config.stash[CONTROL])
    config.pluginmanager.register(controller, "shardproof-controller")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What parity cases run with, and against what."""
    settings = config.stash[SETTINGS]
    forced = ",".join(topology.name for topology in settings.forced)
    chosen = f", topology {forced}" if forced else ""
    first, last = settings.seeds[0], settings.seeds[-1]
    seeds = f"seed {first}" if first == last else f"seeds {first} to {last}"
    lines = [f"shardproof: {__version__}, {settings.dtype} on cpu, {seeds}{chosen}"]
    if settings.against is not None and not config.option.collectonly:
        from shardproof.against.control import CONTROL

        lines += config.stash[CONTROL].header()
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """A parity test has the rank fixture whether or not its signature says so."""
    ask_for_rank(collector, name, obj)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """First of all parametrizations, so that ids begin with the topology."""
    parametrize(metafunc)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Rank:
    """This process's rank of a parity case: its mesh, groups and dtype, and ``observe``.

    Only tests with the ``parity`` marker have one.
    """
    hooks = sys.modules.get("shardproof.rank.hooks")
    current = request.config.stash.get(hooks.CURRENT, None) if hooks is not None else None
    if current is None:
        pytest.fail(
            f"the fixture 'rank' is for parity cases, but {request.node.nodeid} has no parity "
            f"marker; add @pytest.mark.{MARKER}('cp2') or another topology",
            pytrace=False,
        )
    value: Rank = current.rank
    return value


def _is_rank(config: pytest.Config) -> bool:
    hooks = sys.modules.get("shardproof.rank.hooks")
    return hooks is not None and config.stash.get(hooks.RANK_PROCESS, False)
