"""Warm fleets by size, forked when first needed and replaced when one is lost."""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardproof.against.raised import RAISED
from shardproof.against.sides import Side
from shardproof.fleet import (
    DEFAULT_PRELOAD,
    Exited,
    Fleet,
    ForkServer,
    Message,
    PreloadError,
    PreloadThreadError,
    make_scratch,
)
from shardproof.fleet.stacks import shortened
from shardproof.options import Settings
from shardproof.rank.work import SessionSetup

ENTRY = "shardproof.rank.session:main"
PRELOAD = (*DEFAULT_PRELOAD, "torch.distributed.device_mesh", "shardproof.rank.session")
# Ranks import test modules as they start; on a busy host that takes a while.
_LEAST_START_LIMIT = 30.0
_CLOSE_LIMIT = 30.0


class StartError(RuntimeError):
    """Ranks that could not be started; the text says what they said.

    ``raised`` describes the exception that kept a rank from starting, where a control asks for it.
    """

    def __init__(self, text: str, raised: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.raised = raised


class FleetPool:
    """All processes of this controller, and the directories that its runs use.

    ``side`` is the side of a control against a revision that they are on.
    """

    def __init__(self, config: pytest.Config, settings: Settings, side: Side | None = None) -> None:
        self._config = config
        self._settings = settings
        self.side = side
        self._server: ForkServer | None = None
        self.scratch = Path()
        self._fleets: dict[str, Fleet] = {}
        self._made = 0
        self._directories = 0
        self._hopeless: dict[str, StartError] = {}
        self._run_id = uuid.uuid4().hex
        self.files: list[str] = []

    @property
    def server(self) -> ForkServer:
        """The fork server, started on first use.

        Raises:
            pytest.UsageError: a module of ``shardproof_preload`` can't be imported.
        """
        if self._server is None:
            self._server = self._start_server()
        return self._server

    @property
    def _elsewhere(self) -> Side | None:
        """The side of a control that imports the subject from elsewhere, if this is that one."""
        return self.side if self.side is not None and self.side.redirected else None

    def _start_server(self) -> ForkServer:
        preload = [*PRELOAD, *self._settings.preload]
        # Gloo must neither look up this host's name nor be reachable from elsewhere.
        env = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        if self._elsewhere is not None:
            preload = self._elsewhere.preload(preload)
            env |= self._elsewhere.environment
        while True:
            self.scratch = make_scratch()
            server = ForkServer(preload=preload, scratch=self.scratch, env=env)
            try:
                server.start()
            except PreloadThreadError as error:
                server.close()
                if error.module not in self._settings.preload:
                    raise pytest.UsageError(f"shardproof: {error}") from error
                # It works, only not in a process that is to be forked.
                preload.remove(error.module)
                warnings.warn(
                    pytest.PytestWarning(
                        f"shardproof_preload: {error.module} starts threads when it is imported, "
                        "so each rank imports it by itself, which takes longer"
                    ),
                    stacklevel=2,
                )
            except PreloadError as error:
                server.close()
                if self._elsewhere is not None and error.module in self._settings.preload:
                    # It uses the subject, and another revision does not suit it: a matter of
                    # the cases that need it, which import it by themselves.
                    preload.remove(error.module)
                    continue
                raise pytest.UsageError(f"shardproof_preload: {error}") from error
            else:
                return server

    def get(self, label: str, size: int) -> Fleet:
        """The warm fleet called ``label``, forked anew when there is none.

        Raises:
            StartError: a rank died or could not make its pytest session.
        """
        if label in self._hopeless:
            first = self._hopeless[label]
            raise StartError(f"not tried again: {first}", first.raised)
        fleet = self._fleets.get(label)
        if fleet is not None and not self._healthy(fleet):
            self.drop(fleet)
            fleet = None
        if fleet is None:
            fleet = self._fork(label, size)
            self._fleets[label] = fleet
        return fleet

    def drop(self, fleet: Fleet) -> None:
        """Forget a fleet and end what is left of it."""
        fleet.discard()
        self._fleets = {label: other for label, other in self._fleets.items() if other is not fleet}

    def retire(self, fleet: Fleet) -> list[str]:
        """End a fleet in good order; what its higher-scoped fixtures said, as texts."""
        errors: list[str] = []
        fleet.send(None, {"do": "close"})
        waiting = set(range(fleet.size))
        deadline = time.monotonic() + _CLOSE_LIMIT
        while waiting and time.monotonic() < deadline:
            for event in fleet.poll(max(0.0, deadline - time.monotonic())):
                match event:
                    case Message() if event.payload.get("type") == "closed":
                        waiting.discard(event.rank)
                        errors += [f"rank {event.rank}: {e}" for e in event.payload["errors"]]
                    case Exited():
                        waiting.discard(event.rank)
        errors += [f"rank {rank}: did not end within {_CLOSE_LIMIT:g} s" for rank in waiting]
        fleet.stop(1.0 if not waiting else 0.1)
        self.drop(fleet)
        return errors

    def end_references(self) -> None:
        """End the reference processes at once; the next case forks new ones."""
        for label, fleet in list(self._fleets.items()):
            if label.startswith("reference"):
                self.drop(fleet)

    def close(self, *, gently: bool) -> list[str]:
        """End everything; with ``gently`` higher-scoped fixtures of ranks are torn down first."""
        errors: list[str] = []
        try:
            if gently:
                for fleet in list(self._fleets.values()):
                    errors += self.retire(fleet)
        finally:
            self._fleets.clear()
            if self._server is not None:
                self._server.close()
                self._server = None
        return errors

    def directory(self, name: str) -> Path:
        """A new private directory in shared memory, gone with the server at the latest."""
        self.server.start()
        self._directories += 1
        safe = re.sub(r"[^A-Za-z0-9_]+", "_", name)[:40]
        path = self.scratch / f"{self._directories:06d}-{safe}"
        path.mkdir(mode=0o700)
        return path

    def tmp_path(self, item: pytest.Item, role: str = "") -> str:
        """A new directory for the ``tmp_path`` of one run, kept as pytest keeps its own.

        Empty where no fixture asks for one.
        """
        if "tmp_path" not in getattr(item, "fixturenames", ()):
            return ""
        name = f"{item.name}{role}"
        factory: pytest.TempPathFactory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return str(factory.mktemp(re.sub(r"[\W]", "_", name)[:30], numbered=True))

    def _healthy(self, fleet: Fleet) -> bool:
        return not any(isinstance(event, Exited) for event in fleet.poll(0))

    def _fork(self, label: str, size: int) -> Fleet:
        self._made += 1
        fleet = self.server.fork(
            size=size, entry=ENTRY, setup=self._setup(f"{label}-{self._made}"), label=label
        )
        waiting = set(range(size))
        limit = max(self._settings.timeout, _LEAST_START_LIMIT)
        deadline = time.monotonic() + limit
        try:
            while waiting:
                if time.monotonic() > deadline:
                    stacks = _texts(fleet.stacks())
                    self._hopeless[label] = StartError(
                        f"ranks {sorted(waiting)} of {label} were not ready within {limit:g} s, "
                        f"the limit of one case and at least {_LEAST_START_LIMIT:g} s; they import "
                        f"the test modules as they start\n{stacks}"
                    )
                    raise self._hopeless[label]
                for event in fleet.poll(max(0.0, deadline - time.monotonic())):
                    match event:
                        case Message() if event.payload.get("type") == "ready":
                            waiting.discard(event.rank)
                        case Message():
                            error = StartError(
                                f"rank {event.rank} of {label} could not make its pytest session\n"
                                f"{event.payload.get('text')}",
                                event.payload.get(RAISED),
                            )
                            if self._elsewhere is not None:
                                # The import of a conftest file ends the same way each time.
                                self._hopeless[label] = error
                            raise error
                        case Exited():
                            said = shortened(fleet.output(event.rank).stderr)
                            raise StartError(f"{label}: {event} at start\n{said}")
        except BaseException:
            fleet.discard()
            raise
        return fleet

    def _setup(self, label: str) -> dict[str, Any]:
        from dataclasses import asdict

        factory: pytest.TempPathFactory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        invocation = self._config.invocation_params
        setup = SessionSetup(
            args=[str(arg) for arg in invocation.args],
            directory=str(invocation.dir),
            path=[*(self.side.path if self.side is not None else ()), *sys.path],
            files=self.files,
            basetemp=str(factory.getbasetemp() / "ranks"),
            label=label,
            workerinput={
                "workerid": f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{label}",
                "workercount": 1,
                "testrunuid": self._run_id,
                "mainargv": list(sys.argv),
            },
            subject=self.side.data() if self.side is not None else None,
        )
        return asdict(setup)


def _texts(stacks: dict[int, str]) -> str:
    return "\n".join(f"rank {rank}:\n{shortened(text)}" for rank, text in stacks.items())
