"""The fork server: a process that has imported what ranks need, and forks them.

It stays free of threads, since a fork copies only the thread that forks. It is told what to do by
the controller over a channel, and dies with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Never

from .birth import Birth, be_rank
from .channel import Channel
from .cleanup import record_ranks, remove_tree
from .errors import ChannelClosed, SurvivorError
from .guardian import start_guardian
from .processes import (
    TOKEN_VARIABLE,
    Family,
    Ident,
    alive,
    identify,
    libc,
    open_fds,
    other_threads,
    set_process_name,
)
from .stacks import STACK_SIGNAL

_PR_SET_CHILD_SUBREAPER: Final = 36
_CONTROLLER_GRACE: Final = 1.0
_THREAD_GRACE: Final = 0.5  # seconds that a thread started by an import has to end again


@dataclass(frozen=True, slots=True)
class _Rank:
    fleet: int
    rank: int
    ident: Ident


class Server:
    """State and loop of the fork server."""

    def __init__(self, control: Channel, *, controller: Ident, scratch: Path, token: str) -> None:
        self._control = control
        self._controller = controller
        self._scratch = scratch
        self._token = token
        self._ranks: dict[int, _Rank] = {}  # by process number
        self._inherited: frozenset[int] = frozenset()
        self._wake_read, self._wake_write = socket.socketpair()
        self._controller_fd = -1

    def run(self) -> Never:
        """Serve until told to end or the controller is gone, then clean up and leave."""
        status, orphaned = 0, False
        try:
            self._prepare()
            self._serve()
        except ChannelClosed:
            orphaned = True
        except _TerminatedError:
            pass
        except BaseException:  # noqa: BLE001  it must clean up whatever happened
            traceback.print_exc()
            status = 1
        self._leave(status, orphaned=orphaned)

    # Preparing --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        me = identify(os.getpid())
        if me is None:
            raise RuntimeError("/proc does not show this process: is /proc mounted?")
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        start_guardian(
            token=self._token, scratch=self._scratch, controller=self._controller, server=me
        )
        start = self._control.receive()
        sys.path[:] = start["sys_path"]
        if start["pythonpath"] is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = start["pythonpath"]
        self._refuse_threads("sitecustomize", "the start of the interpreter (a .pth file, perhaps)")
        own = open_fds()
        # Imports make much and leave little garbage: to look for it at the end is enough.
        gc.disable()
        for module in start["preload"]:
            self._control.send({"event": "importing", "module": module})
            self._import(module)
        # Garbage of the imports would be copied into every rank at its first collection.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._inherited = frozenset(open_fds() - own)
        self._install_signals()
        with contextlib.suppress(OSError):  # gone, or no pidfds: the channel's end tells as well
            self._controller_fd = os.pidfd_open(self._controller.pid)
        self._control.send({"event": "ready"})

    def _import(self, module: str) -> None:
        try:
            importlib.import_module(module)
        except BaseException:  # noqa: BLE001  a SystemExit in a module must not end the server silently
            self._refuse(module, traceback.format_exc())
        self._refuse_threads(module, "importing it")

    def _refuse_threads(self, module: str, what: str) -> None:
        deadline = time.monotonic() + _THREAD_GRACE
        while threads := other_threads():
            if time.monotonic() > deadline:
                known = ", ".join(
                    repr(thread.name)
                    for thread in threading.enumerate()
                    if thread is not threading.main_thread()
                )
                self._refuse(
                    module,
                    f"{what} started {len(threads)} thread(s) (names in the system: "
                    f"{', '.join(threads)}; in Python: {known or 'none'}). A process with "
                    "threads cannot be forked safely: import this module inside the ranks, or "
                    "let it start its threads when they are first needed.",
                    threads=True,
                )
            time.sleep(0.01)

    def _refuse(self, module: str, details: str, *, threads: bool = False) -> Never:
        self._control.send(
            {"event": "refused", "module": module, "details": details, "threads": threads}
        )
        self._leave(0, orphaned=False)

    def _install_signals(self) -> None:
        # Preloaded modules may have done otherwise.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _ignore_terminal()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, _terminate)
        # A dump asked of a rank that has no handler yet must not kill it.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    # Serving ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        if self._controller_fd >= 0:
            poller.register(self._controller_fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._controller_fd in ready:
                raise ChannelClosed("the controller is dead")
            if self._wake_read.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
            self._reap()
            for message in self._control.drain():
                if message.payload["op"] == "close":
                    return
                self._fork(message.payload, self._control.take_fds())
            if self._control.eof:
                raise ChannelClosed("the controller closed its end")

    def _fork(self, request: dict[str, Any], channels: list[int]) -> None:
        try:
            if threads := other_threads():
                raise RuntimeError(f"the fork server has threads: {', '.join(threads)}")
            if len(channels) != request["size"]:
                raise RuntimeError(
                    f"{len(channels)} of {request['size']} channels arrived: is the limit on open "
                    "files (ulimit -n) too low?"
                )
            pids = []
            for rank, fd in enumerate(channels):
                birth = Birth(
                    fleet=request["fleet"],
                    rank=rank,
                    size=len(channels),
                    entry=request["entry"],
                    directory=Path(request["directory"]),
                    token=self._token,
                    channel_fd=fd,
                    server_pid=os.getpid(),
                )
                ident = self._fork_one(birth)
                pids.append([ident.pid, ident.started])
        except Exception as error:  # noqa: BLE001  told to the controller
            for known in list(self._ranks.values()):
                if known.fleet == request["fleet"]:
                    self._end(known)
            reply: dict[str, object] = {"event": "not forked", "error": f"{error!r}"}
        else:
            reply = {"event": "forked", "pids": pids}
            self._record()
        for fd in channels:
            os.close(fd)
        self._control.send({**reply, "fleet": request["fleet"]})

    def _fork_one(self, birth: Birth) -> Ident:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            # Objects first: one that is collected later would close a descriptor that is by then
            # someone else's.
            signal.set_wakeup_fd(-1)
            self._control.close()
            self._wake_read.close()
            self._wake_write.close()
            be_rank(birth, inherited=self._inherited)
        ident = identify(pid)  # it has not been waited for, so it is there, if as a zombie
        if ident is None:
            raise RuntimeError(f"/proc does not show process {pid}, which was just forked")
        self._ranks[pid] = _Rank(birth.fleet, birth.rank, ident)
        return ident

    # Ending -----------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Report every rank that has ended, after everything that it started is ended too."""
        while True:
            try:
                # Looked at without reaping: the number stays taken until its group is gone.
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None:
                return
            rank = self._ranks.get(result.si_pid)
            if rank is None:  # the guardian, or an orphan of a rank
                os.waitpid(result.si_pid, 0)
            else:
                at = time.monotonic()
                status = self._end(rank)
                self._control.send(
                    {
                        "event": "exited",
                        "fleet": rank.fleet,
                        "rank": rank.rank,
                        "status": status,
                        "at": at,
                    }
                )

    def _end(self, rank: _Rank) -> int:
        """Kill a rank, dead or alive, with all that it started; return its wait status."""
        with contextlib.suppress(SurvivorError):
            self._family([rank]).kill()
        _, status = os.waitpid(rank.ident.pid, 0)
        del self._ranks[rank.ident.pid]
        self._record()
        return status

    def _record(self) -> None:
        record_ranks(self._scratch, self._token, (rank.ident for rank in self._ranks.values()))

    def _family(self, ranks: list[_Rank]) -> Family:
        return Family(
            self._token,
            roots=frozenset(rank.ident for rank in ranks),
            ranks=frozenset(f"{rank.fleet}.{rank.rank}" for rank in ranks),
        )

    def _leave(self, status: int, *, orphaned: bool) -> Never:
        """End everything that came from this server, and exit.

        ``orphaned`` says that the controller seems to be dead; when it is, its scratch directory
        is removed.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(SurvivorError):
            roots = frozenset(rank.ident for rank in self._ranks.values())
            # Orphans of ranks are this process's children, with or without marks.
            Family(self._token, roots=roots, below=frozenset({os.getpid()})).kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # else they'd wait for an init that reaps
                pass
        if orphaned and self._controller_ends():
            remove_tree(self._scratch)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _controller_ends(self) -> bool:
        """Whether the controller is dead. Its descriptors are closed a moment before it is."""
        deadline = time.monotonic() + _CONTROLLER_GRACE
        while alive(self._controller):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


class _TerminatedError(BaseException):
    """SIGTERM came: end, whatever is being done."""


def _terminate(_number: int, _frame: object) -> Never:
    raise _TerminatedError


def _ignore_terminal() -> None:
    """Leave Ctrl-C and the end of the terminal to the controller, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def main(fd: int, *, controller: Ident, scratch: Path) -> Never:
    """Run the fork server on the control socket ``fd``.

    ``scratch`` is the controller's private directory, to be removed if the controller dies.
    """
    _ignore_terminal()
    set_process_name(b"sp:server")
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    Server(
        Channel(sock, peer="the controller"),
        controller=controller,
        scratch=scratch,
        token=os.environ[TOKEN_VARIABLE],
    ).run()
