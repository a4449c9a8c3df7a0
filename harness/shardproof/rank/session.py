"""A rank process: a live pytest session that runs the items the controller asks for."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.config import _prepareconfig
from _pytest.outcomes import OutcomeException

from shardproof.against.redirect import keep_first
from shardproof.against.subject import from_data
from shardproof.fleet import STOP, Channel, ChannelClosed
from shardproof.fleet.processes import other_threads
from shardproof.ledger import kernels
from shardproof.ledger.axes import AxisNames
from shardproof.mutants.mutation import Mutation, Rehearsal
from shardproof.mutants.target import Mutant
from shardproof.noise import NoiseMode
from shardproof.rank.apart import run_apart
from shardproof.rank.context import Rank
from shardproof.rank.groups import RankGroups
from shardproof.rank.hooks import CURRENT, RANK_PROCESS, Active, RankHooks, again
from shardproof.rank.isolation import ProcessState, seed_everything
from shardproof.rank.work import Run, run_from
from shardproof.topology import Topology, declare_axes, parse_topology
from shardproof.verdict import Recorder, failed, finish_reference, render

# Options that choose, order or end a run belong to the controller; so do terminal and debugger.
_CONTROLLER_OPTIONS: dict[str, Any] = {
    "collectonly": False,
    "deselect": None,
    "dist": "no",
    "distload": False,
    "failedfirst": False,
    "keyword": "",
    "last_failed_no_failures": "all",
    "lf": False,
    "looponfail": False,
    "markexpr": "",
    "maxfail": 0,
    "maxprocesses": None,
    "newfirst": False,
    "numprocesses": None,
    "pyargs": False,
    "setuponly": False,
    "setupplan": False,
    "setupshow": False,
    "stepwise": False,
    "stepwise_skip": False,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}
_TRIM_ABOVE = 256 * 2**20


def main(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Entry of a rank process; returns when the controller says ``close`` and ends the channel."""
    RankSession(channel, rank, size, setup).serve()


class RankSession:
    """The session, its process groups, and the loop over messages."""

    def __init__(self, channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
        self._channel = channel
        self._rank = rank
        self._size = size
        self._setup = setup
        self._groups = RankGroups(rank, size)
        self._hooks = RankHooks(channel.send, self._verdict)
        self._noise: NoiseMode | None = None
        self._mutation: Mutation | Rehearsal | None = None
        self._resident = 0
        self._splitting = False
        subject = setup.get("subject")
        if subject is not None:
            self._hooks.subject = from_data(subject)

    def serve(self) -> None:
        """Make the session, then answer messages until the channel ends."""
        try:
            self._start()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it was goes to the controller
            text = traceback.format_exc()
            self._channel.send({"type": "broken", "text": text, **self._hooks.raised(error)})
            return
        os.register_at_fork(after_in_child=self._forked)
        self._channel.send({"type": "ready"})
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed:
                return
            if message == STOP:
                return
            self._answer(message)

    def _forked(self) -> None:
        """A child that a case forks must not speak for the rank."""
        if not self._splitting:
            self._channel.close()
        self._splitting = False

    def _answer(self, message: dict[str, Any]) -> None:
        kind = message.get("do")
        if kind == "run":
            self._run_where(run_from(message))
        elif kind == "finish_reference":
            self._channel.send({"type": "finished", **self._finish(message)})
        elif kind == "close":
            self._channel.send({"type": "closed", "errors": self._close()})
        elif kind not in ("abandon", "verdicts"):  # late answers to a case that ended already
            raise RuntimeError(f"rank {self._rank}: unknown message {message!r}")

    # The pytest session -----------------------------------------------------------------------

    def _start(self) -> None:
        setup = self._setup
        os.chdir(setup["directory"])
        sys.path[:] = setup["path"]
        os.environ.update(
            RANK=str(self._rank), LOCAL_RANK=str(self._rank), WORLD_SIZE=str(self._size)
        )
        args = list(setup["args"])
        # pytest's own capture starts as the options are read; descriptors 1 and 2 are captured
        # from birth already, in a way that outlives a crash.
        args.insert(args.index("--") if "--" in args else len(args), "--capture=no")
        config = _prepareconfig(args, [self._hooks])
        for name, value in _CONTROLLER_OPTIONS.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.option.basetemp = f"{setup['basetemp']}-{setup['label']}-{self._rank}"
        config.stash[RANK_PROCESS] = True
        config.workerinput = setup["workerinput"]  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        config.pluginmanager.set_blocked("terminalreporter")
        config._do_configure()
        self._config = config
        self._session = pytest.Session.from_config(config)
        config.hook.pytest_sessionstart(session=self._session)
        keep_first()
        config.args = list(setup["files"])
        config.hook.pytest_collection(session=self._session)
        self._axes = declare_axes(config.getini("shardproof_axes"))

    def _item(self, nodeid: str | None) -> pytest.Item | None:
        return self._hooks.items.get(nodeid) if nodeid is not None else None

    def _close(self) -> list[str]:
        """End fixtures of higher scopes and the session; what failed, as texts."""
        errors = []
        for step in (
            lambda: self._session._setupstate.teardown_exact(None),
            lambda: self._config.hook.pytest_sessionfinish(session=self._session, exitstatus=0),
            self._config._ensure_unconfigure,
            self._groups.close,
        ):
            try:
                step()
            except (Exception, OutcomeException):  # noqa: BLE001 - reported with the rest
                errors.append(traceback.format_exc())
        return errors

    # One run ----------------------------------------------------------------------------------

    def _run_where(self, run: Run) -> None:
        """Run here or, where no threads forbid it, in a child that is gone afterwards."""
        for name in run.imports:
            with contextlib.suppress(Exception):  # the run tells of it when it imports it again
                importlib.import_module(name)
        apart = run.apart and not other_threads()
        known = set(sys.modules)

        def answer() -> None:
            ended = self._run(run)
            if run.apart:
                new = [name for name in sys.modules if name not in known]
                ended.update(used=not apart, imported=new)
            self._channel.send({"type": "done", **ended})

        if apart:
            self._splitting = True
            run_apart(answer)
            self._splitting = False
        else:
            answer()

    def _run(self, run: Run) -> dict[str, Any]:
        item = self._item(run.nodeid)
        if item is None:
            collected = "\n".join(self._hooks.collect_errors)
            return {
                "missing": f"rank {self._rank} did not collect {run.nodeid}; ids must be the same "
                f"in every process, so parametrize over ordered, reproducible values"
                + (f"\n{collected}" if collected else ""),
                **self._hooks.uncollected(run.nodeid),
            }
        state = ProcessState()
        try:
            active = self._activate(run)
        except Exception:  # noqa: BLE001 - goes to the controller
            return {"missing": f"rank {self._rank}: set-up failed\n{traceback.format_exc()}"}
        nextitem = again(item) if run.next_nodeid == run.nodeid else self._item(run.next_nodeid)
        self._hooks.active = active
        self._config.stash[CURRENT] = active
        try:
            if self._noise is None:
                self._protocol(item, nextitem)
            else:
                with self._noise:
                    self._protocol(item, nextitem)
        finally:
            self._hooks.active = None
            del self._config.stash[CURRENT]
            ledger, messages = kernels.end() or (None, 0)
            ended: dict[str, Any] = {
                "groups": self._groups.end_case(megatron=run.megatron, messages=messages)
            }
            if ledger is not None:
                ended["ledger"] = ledger
            if self._mutation is not None:
                ended["rehearsal" if run.rehearsed else "mutant"] = self._mutation.report()
                self._mutation = None
            ended.update(self._hooks.loaded())
            state.restore()
        if run.role == "noise" and self._noise is not None:
            falls = [*self._noise.fallen, *self._noise.lower]
            ended["fallen"] = [asdict(fall) for fall in falls]
        self._noise = None
        self._trim()
        return ended

    def _protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self._config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)

    def _activate(self, run: Run) -> Active:
        if run.new_groups:
            self._groups.close()
        dtype = getattr(torch, run.dtype)
        topology: Topology = parse_topology(run.topology, self._axes)
        groups = self._groups.ensure(
            topology, Path(run.rendezvous), megatron=run.megatron, ledger=run.ledger
        )
        if run.ledger:
            self._mutation = None if run.mutant is None else Mutation(Mutant.of(run.mutant))
            if run.rehearsed:
                self._mutation = Rehearsal([Mutant.of(one) for one in run.rehearsed])
            names = AxisNames(topology, self._rank)
            kernels.begin(
                Path(run.cell_dir),
                self._rank,
                names,
                self._mutation,
                callers=run.callers,
                # Names of mutants are the same wherever pytest was started.
                root=self._config.rootpath if run.callers else None,
            )
        if dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
        seed_everything(run.seed)
        if run.role != "candidate":
            self._noise = NoiseMode(
                seed=run.seed * 1_000_003 + run.noise, perturb=False, expected=dtype
            )
        recorder = Recorder(
            role=run.role,
            topology=topology,
            rank=self._rank,
            reference_dir=Path(run.reference_dir),
            cell_dir=Path(run.cell_dir),
            dtype=dtype,
            seed=run.noise,
            compared=run.compared,
        )
        rank = Rank(
            topology=topology,
            index=self._rank,
            mesh=groups.mesh,
            groups=groups.by_axis,
            dtype=dtype,
            is_reference=run.role != "candidate",
            case_dir=Path(run.case_dir),
            seed=run.seed,
            recorder=recorder,
        )
        return Active(run, rank, recorder, self._noise)

    def _verdict(self, active: Active) -> str | None:
        """The text of a failed verdict, None when all is well; every rank comes to the same."""
        self._channel.send({"type": "sealed", "sealed": active.recorder.seal()})
        if active.run.role != "candidate":
            return None
        message = self._channel.receive()
        if message["do"] == "abandon":
            return None
        self._channel.send({"type": "judged", "part": active.recorder.judge(message["sealed"])})
        message = self._channel.receive()
        if message["do"] == "abandon" or not failed(message["verdicts"]):
            return None
        text: str = render(
            message["verdicts"], reproduce=message["reproduce"], topology=active.rank.topology
        )
        return text

    def _finish(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            path = Path(message["dir"])
            return {"summary": finish_reference(path, noise_runs=message["noise_runs"])}
        except Exception:  # noqa: BLE001 - goes to the controller
            return {"error": traceback.format_exc()}

    def _trim(self) -> None:
        """Give memory of a large case back to the system; cycles can hold whole models."""
        resident = _resident_bytes()
        if resident - self._resident > _TRIM_ABOVE:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self._resident = _resident_bytes()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
