"""pytest hooks of a rank: fixture values, reports, and the verdict at the end of the call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _pytest._code.code import Traceback
from _pytest.outcomes import Failed, XFailed

from shardproof.against.loaded import loaded
from shardproof.against.raised import RAISED, describe
from shardproof.against.redirect import keep_first
from shardproof.against.subject import Subject
from shardproof.rank.context import Rank
from shardproof.rank.work import Run

if TYPE_CHECKING:
    from shardproof.noise import NoiseMode
    from shardproof.verdict import Recorder

RANK_PROCESS = pytest.StashKey[bool]()
CURRENT = pytest.StashKey["Active"]()


class ParityError(Failed):
    """The verdict on a case, raised on every rank at the end of the call phase."""

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)


@dataclass
class Active:
    """The run in progress on this rank."""

    run: Run
    rank: Rank
    recorder: Recorder
    noise: NoiseMode | None

    @contextlib.contextmanager
    def perturbing(self, *, on: bool) -> Iterator[None]:
        """Perturb (noise runs) or only track taint (every run of the reference)."""
        if self.noise is None:
            yield
            return
        before = self.noise.perturb
        self.noise.perturb = on and self.run.role == "noise"
        try:
            yield
        finally:
            self.noise.perturb = before


class RankHooks:
    """Registered in every rank's pytest session, before other plugins are configured."""

    def __init__(
        self, send: Callable[[dict[str, Any]], None], judge: Callable[[Active], str | None]
    ) -> None:
        self._send = send
        self._judge = judge
        self._config: pytest.Config | None = None
        self.active: Active | None = None
        self.items: dict[str, pytest.Item] = {}
        self.collect_errors: list[str] = []
        self.subject: Subject | None = None
        self._uncollected: dict[str, BaseException] = {}

    # A control against a revision -------------------------------------------------------------

    def loaded(self) -> dict[str, Any]:
        """What this rank imported of the subject, where a control watches one."""
        return {} if self.subject is None else {"loaded": loaded(self.subject).data()}

    def raised(self, error: BaseException) -> dict[str, Any]:
        """What an exception was, where a control watches a subject."""
        return {} if self.subject is None else {RAISED: describe(error, self.subject)}

    def uncollected(self, nodeid: str) -> dict[str, Any]:
        """What kept an item from being collected, where a control watches a subject."""
        error = self._uncollected.get(nodeid.partition("::")[0])
        return {} if error is None else self.raised(error)

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """Imports of the subject are answered before pytest's own import hook sees them."""
        keep_first()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Keep what could not be imported, as it was raised."""
        report = yield
        excinfo = getattr(getattr(report, "call", None), "excinfo", None)
        if report.failed and excinfo is not None and self.subject is not None:
            self._uncollected[collector.nodeid] = excinfo.value
        return report

    # ------------------------------------------------------------------------------------------

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One directory for all ranks of a cell, made by the controller."""
        if self.active is None:
            raise RuntimeError("tmp_path: no run is in progress on this rank")
        return Path(self.active.run.tmp_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Reports are serialised by this session's own hooks."""
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep every item by node id before another plugin deselects some."""
        self.items.update((item.nodeid, item) for item in items)
        if self._config is not None and not self._config.getoption("fulltrace"):
            for item in items:
                shorten_torch(item)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what could not be imported, for items that are missing later."""
        if report.failed:
            self.collect_errors.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send each phase's report at once: what follows may never end."""
        if self._config is None:
            raise RuntimeError("a report came before the session was configured")
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send({"type": "report", "report": json_safe(data)})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Say what is known of an error; an xfail mark is about topologies, never the reference."""
        if call.excinfo is not None and _MADE_TWICE in str(call.excinfo.value):
            call.excinfo.value.add_note(_MADE_ALREADY)
        report = yield
        if call.excinfo is not None:
            vars(report).update(self.raised(call.excinfo.value))
        active = self.active
        if active is None or (active.run.role == "candidate" and active.run.compared):
            return report
        if call.excinfo is None and report.when == "call":
            # A candidate that nobody compares may end well where the comparison is to fail.
            report.outcome = "passed"
            report.longrepr = None
            vars(report).pop("wasxfail", None)
        elif (
            active.run.role != "candidate"
            and call.excinfo is not None
            and not isinstance(call.excinfo.value, XFailed)
            and vars(report).pop("wasxfail", None) is not None
        ):
            report.outcome = "failed"
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """End fixtures of higher scope that this item does not share with the one before."""
        item.session._setupstate.teardown_exact(again(item))
        self._send({"type": "phase", "when": "setup"})
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        """Say where this rank is."""
        self._send({"type": "phase", "when": "teardown"})
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """Higher scopes outlive this run, so noise stays out of what they make."""
        if self.active is None:
            return (yield)
        with self.active.perturbing(on=fixturedef.scope == "function"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None]:
        """Run the body, under noise where asked, then judge what it observed."""
        active = self.active
        if active is None:
            return (yield)
        # Also here, for a body that never ends: fixtures have imported what they use.
        self._send({"type": "phase", "when": "call", **self.loaded()})
        with active.perturbing(on=True):
            result = yield
        text = self._judge(active)
        if text is not None:
            raise ParityError(text)
        return result


def shorten_torch(item: pytest.Item) -> None:
    """Have torch's frames take a line each in what pytest says of an error.

    In full, the function that raised can be a hundred lines of docstring below those of the case.
    """
    inside = f"{Path(torch.__file__).parent}{os.sep}"
    chosen = item._traceback_filter

    def shortened(excinfo: pytest.ExceptionInfo[BaseException]) -> Traceback:
        return Traceback(
            entry.with_repr_style("short") if str(entry.path).startswith(inside) else entry
            for entry in chosen(excinfo)
        )

    item._traceback_filter = shortened  # type: ignore[method-assign]


_MADE_TWICE = "trying to initialize the default process group twice"
_MADE_ALREADY = (
    "The ranks of a case have their process group before it begins, and so has the reference: "
    "leave init_process_group out where torch.distributed.is_initialized(), and take groups from "
    "rank.group(axis) or rank.mesh."
)


def again(item: pytest.Item) -> pytest.Item:
    """Stands for ``item`` as its own next item: function scope ends, every higher scope stays."""
    return _Again(item)  # type: ignore[return-value]


class _Again:
    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def listchain(self) -> list[Any]:
        return [*self._item.listchain()[:-1], self]


def json_safe(value: object) -> Any:
    """``value`` with everything that JSON can't carry replaced by its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): json_safe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(entry) for entry in value]
    return repr(value)
