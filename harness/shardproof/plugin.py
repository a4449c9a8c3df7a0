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
from shardproof.cells import MARKER, MARKER_HELP, ask_for_rank, check_selected, parametrize
from shardproof.options import SETTINGS, add_options, read_settings
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
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config, settings), "shardproof-results")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Bring the controller in when parity cases are selected, and torch with it, not before."""
    config = session.config
    if _is_rank(config) or not check_selected(session.items) or config.option.collectonly:
        return
    from shardproof.controller.protocol import Controller

    controller = Controller(config, config.stash[SETTINGS], session.items)
    config.pluginmanager.register(controller, "shardproof-controller")


def pytest_report_header(config: pytest.Config) -> str:
    """What parity cases run with."""
    settings = config.stash[SETTINGS]
    forced = ",".join(topology.name for topology in settings.forced)
    chosen = f", topology {forced}" if forced else ""
    return f"shardproof: {__version__}, {settings.dtype} on cpu, seed {settings.seed}{chosen}"


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
