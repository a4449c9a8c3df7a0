"""The controller's side of the fork server."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from .birth import split_entry
from .channel import MAX_FDS, Channel
from .cleanup import make_scratch, record_token, remove_scratch
from .codec import encode
from .errors import (
    ChannelClosed,
    ChannelTimeout,
    FleetError,
    PreloadError,
    PreloadThreadError,
    ServerError,
    SurvivorError,
)
from .events import Exited, exited
from .fleet import Fleet, RankProcess
from .processes import TOKEN_VARIABLE, Family, Ident, identify

DEFAULT_PRELOAD: Final = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first functional collective imports it: 1 to 2 s in every rank
    "torch.distributed.tensor",
    "pytest",
)
"""What every rank needs. Without it each would import it by itself."""

ONE_THREAD: Final = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)
"""Set for the fork server and its ranks: a pool of threads does not survive a fork, and ranks
that each start one per core only get in each other's way."""

_START_TIMEOUT: Final = 60.0
_FORK_TIMEOUT: Final = 60.0
_CLOSE_TIMEOUT: Final = 5.0
_TRIM_INTERVAL: Final = 0.5
_STDERR_SHOWN: Final = 8000


class ForkServer:
    """Starts ranks by forking a process that has imported ``preload`` already.

    There is one per controller, which is the process that made it; it is started by `start` or by
    the first `fork`. ``scratch`` is this run's private directory, which `close` removes; without
    one, `make_scratch` makes it. ``env`` is set over the controller's environment for the server
    and its ranks. No preloaded module may take longer than ``import_timeout`` seconds. Not safe
    for use by several threads, though the controller may have them.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str],
        scratch: Path | None = None,
        env: Mapping[str, str] | None = None,
        import_timeout: float = 300.0,
    ) -> None:
        self._preload = list(dict.fromkeys(preload))
        self._scratch = make_scratch() if scratch is None else scratch
        self._env = {**ONE_THREAD, **(env or {})}
        self._import_timeout = import_timeout
        self._owner = os.getpid()
        self._token = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._replies: dict[int, dict[str, Any]] = {}
        self._fleets: dict[int, Fleet] = {}
        self._forks = 0
        self._starts = 0
        self._next_trim = 0.0
        self._closed = False

    @property
    def scratch(self) -> Path:
        """This run's private directory, there for callers too."""
        return self._scratch

    @property
    def alive(self) -> bool:
        """Whether the server runs, as far as is known."""
        return self._control is not None

    @property
    def pid(self) -> int | None:
        """The server's process number, None unless it runs."""
        return None if self._process is None else self._process.pid

    @property
    def token(self) -> str:
        """The text that marks all processes of the present server, in their environment."""
        return self._token

    # Starting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server and wait until it has imported everything; nothing if it runs.

        A server that has died is replaced; its fleets stay dead. Raises PreloadError for a module
        that cannot be preloaded and ServerError for any other failure, with the server's stderr.
        """
        if self._closed:
            raise ServerError("this fork server has been closed; make a new one")
        if self.alive:
            return
        if sys.platform != "linux" or not Path("/proc/self/stat").exists():
            raise ServerError("ranks can be forked on Linux only, with /proc mounted")
        atexit.unregister(self.close)
        atexit.register(self.close)
        self._starts += 1
        self._token = secrets.token_hex(16)
        record_token(self._scratch, self._token)
        try:
            self._launch()
        except BaseException:  # also Ctrl-C: a half-started server is of no use
            self._abandon()
            raise

    def _launch(self) -> None:
        control, theirs = Channel.pair(peer="the fork server")
        self._control = control
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.environ.get("PYTHONPATH")
        me = identify(os.getpid())
        if me is None:
            raise ServerError("/proc does not show the controller; is it mounted with hidepid?")
        env = {
            **os.environ,
            **self._env,
            TOKEN_VARIABLE: self._token,
            "PYTHONPATH": package_root + (os.pathsep + path if path else ""),
        }
        # -P: the working directory may hold modules that shadow those of the standard library.
        command = [sys.executable, *_interpreter_flags(), "-P", "-m", "shardproof.fleet"]
        about_us = [str(me.pid), str(me.started), str(self._scratch)]
        with (
            theirs,
            self._stream("out").open("wb") as stdout,
            self._stream("err").open("wb") as stderr,
        ):
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), *about_us],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C on the terminal is for the controller alone
            )
        importing = ""
        try:
            control.send(
                {
                    "op": "start",
                    "preload": self._preload,
                    "sys_path": [os.fsdecode(entry) for entry in sys.path],
                    "pythonpath": path,
                }
            )
            while True:
                limit = self._import_timeout if importing else _START_TIMEOUT
                event = control.receive(limit)
                if event["event"] == "importing":
                    importing = event["module"]
                elif event["event"] == "refused":
                    kind = PreloadThreadError if event["threads"] else PreloadError
                    raise kind(event["module"], event["details"])
                else:
                    return
        except ChannelClosed as error:
            how = self._death()
            if importing:
                raise PreloadError(importing, f"while importing it, {how}") from error
            raise ServerError(f"while starting, {how}") from error
        except ChannelTimeout as error:
            if importing:
                text = f"importing it took the fork server more than {self._import_timeout:g} s"
                raise PreloadError(importing, text) from error
            text = f"the fork server did not start within {_START_TIMEOUT:g} s"
            raise ServerError(text) from error

    # Forking ----------------------------------------------------------------------------------

    def fork(self, *, size: int, entry: str, setup: Mapping[str, object], label: str) -> Fleet:
        """Fork ``size`` ranks, each of which runs ``entry(channel, rank, size, setup)``.

        ``entry`` is ``module:function``; ``setup`` must be fit for a message. The rank exits with
        code 0 when the function returns, and with 1, its traceback on stderr, when it raises.
        ``label`` is for messages. Starts the server if need be. Raises MessageError or ValueError
        for bad arguments, before any process is started, and ServerError.
        """
        if not 1 <= size <= MAX_FDS:
            raise ValueError(f"a fleet has 1 to {MAX_FDS} ranks, not {size}")
        split_entry(entry)
        encode(setup)
        self.start()
        self.pump(0.0)  # a server that has died since is noticed here, and replaced
        self.start()
        number = self._forks
        self._forks += 1
        directory = self._scratch / f"fleet-{self._token[:8]}-{number}"
        directory.mkdir(mode=0o700)
        pairs = [Channel.pair(peer=f"rank {rank} of {label}") for rank in range(size)]
        try:
            reply = self._request(
                number, entry, directory, [theirs.fileno() for _, theirs in pairs]
            )
        except BaseException:
            for channel, _ in pairs:
                channel.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        ranks = [
            RankProcess(index=rank, ident=Ident(*ident), channel=channel, directory=directory)
            for rank, (ident, (channel, _)) in enumerate(zip(reply["pids"], pairs, strict=True))
        ]
        fleet = Fleet(
            number=number,
            label=label,
            token=self._token,
            directory=directory,
            ranks=ranks,
            server=self,
        )
        self._fleets[number] = fleet
        fleet.send(None, setup)
        return fleet

    def _request(
        self, number: int, entry: str, directory: Path, fds: Sequence[int]
    ) -> dict[str, Any]:
        control = self._control
        if control is None:
            raise ServerError("the fork server is not running")
        try:
            control.send(
                {
                    "op": "fork",
                    "fleet": number,
                    "size": len(fds),
                    "entry": entry,
                    "directory": str(directory),
                },
                fds=fds,
            )
        except ChannelClosed as error:
            raise ServerError(f"no ranks could be forked: {self._died()}") from error
        deadline = time.monotonic() + _FORK_TIMEOUT
        while number not in self._replies:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerError(f"the fork server has not answered within {_FORK_TIMEOUT:g} s")
            self.pump(left)
            if not self.alive and number not in self._replies:
                raise ServerError(f"no ranks could be forked: {self._last_death}")
        reply = self._replies.pop(number)
        if reply["event"] != "forked":
            raise ServerError(f"the fork server could not fork {len(fds)} ranks: {reply['error']}")
        return reply

    # Moving -----------------------------------------------------------------------------------

    def pump(self, timeout: float | None) -> None:
        """Wait until something happens to any fleet, at most ``timeout`` seconds; take it all."""
        poller = select.poll()
        control = self._control
        if control is not None:
            poller.register(control, select.POLLIN)
        owners: dict[int, tuple[Fleet, int]] = {}
        for fleet in self._fleets.values():
            for rank in fleet.ranks:
                if rank.alive and not rank.channel.eof:
                    owners[rank.channel.fileno()] = (fleet, rank.index)
                    wanted = select.POLLOUT if rank.channel.unsent else 0
                    poller.register(rank.channel, select.POLLIN | wanted)
        ready = dict(poller.poll(None if timeout is None else max(0.0, timeout) * 1000))
        ends: dict[int, list[Exited]] = {}
        died = False
        if control is not None and ready.pop(control.fileno(), 0):
            ends = self._read_control(control)
            died = control.eof
        readable: dict[int, list[int]] = {}
        for fd in ready:
            fleet, index = owners[fd]
            fleet.ranks[index].channel.flush()
            readable.setdefault(fleet.number, []).append(index)
        for number in readable.keys() | ends.keys():
            if number in self._fleets:
                self._fleets[number].take(readable.get(number, ()), ends.get(number, ()))
        if died:
            self._died()
        if (now := time.monotonic()) >= self._next_trim:
            self._next_trim = now + _TRIM_INTERVAL
            for fleet in self._fleets.values():
                fleet.trim()

    def _read_control(self, control: Channel) -> dict[int, list[Exited]]:
        ends: dict[int, list[Exited]] = {}
        for received in control.drain():
            event = received.payload
            if event["event"] == "exited":
                end = exited(event["rank"], event["status"], event["at"])
                ends.setdefault(event["fleet"], []).append(end)
            else:
                self._replies[event["fleet"]] = event
        return ends

    def forget(self, fleet: Fleet) -> None:
        """Take no further notice of a fleet that has ended."""
        self._fleets.pop(fleet.number, None)

    # Ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill every rank and the server, and remove the scratch directory.

        May be called again, is called at the controller's exit, and does nothing in a process
        that the controller forked. Ranks that should end in order are to be stopped before.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            if self._control is not None and self._process is not None:
                with contextlib.suppress(ChannelClosed, subprocess.TimeoutExpired):
                    self._control.send({"op": "close"})
                    self._process.wait(_CLOSE_TIMEOUT)
        finally:
            try:
                self._abandon()
            finally:
                self._end_fleets("the fork server was closed")
                remove_scratch(self._scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _abandon(self) -> None:
        """Kill whatever came from the present server, and the server, without its help."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        try:
            if self._token:
                fleets = self._fleets.values()
                roots = {rank.ident for fleet in fleets for rank in fleet.ranks if rank.alive}
                Family(self._token, roots=frozenset(roots)).kill()
        finally:
            if control is not None:
                control.close()
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.kill()
                    process.wait(_CLOSE_TIMEOUT)

    _last_death = ""

    def _died(self) -> str:
        """Note that the server has died by itself, and end its fleets; return how."""
        self._last_death = self._death()
        with contextlib.suppress(SurvivorError):
            self._abandon()
        self._end_fleets(self._last_death)
        return self._last_death

    def _end_fleets(self, why: str) -> None:
        now = time.monotonic()
        for fleet in list(self._fleets.values()):
            fleet.take((), [Exited(rank, None, 9, now, why) for rank in fleet.live])
            self.forget(fleet)

    def _death(self) -> str:
        """Say how the server died, with what it wrote to stderr."""
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_CLOSE_TIMEOUT)
        how = "closed its channel" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        stderr = ""
        with contextlib.suppress(OSError):
            stderr = self._stream("err").read_text("utf-8", "replace")[-_STDERR_SHOWN:].strip()
        return f"the fork server {how}" + (f"; its stderr:\n{stderr}" if stderr else "")

    def _stream(self, name: str) -> Path:
        return self._scratch / f"server{self._starts}.{name}"


def _interpreter_flags() -> list[str]:
    """Return the options (-W, -X, -O, ...) that this interpreter was started with."""
    flags: Any = getattr(subprocess, "_args_from_interpreter_flags", None)
    return [] if flags is None else [flag for flag in flags() if flag not in ("-P", "-I", "-E")]


__all__ = ["DEFAULT_PRELOAD", "FleetError", "ForkServer"]
