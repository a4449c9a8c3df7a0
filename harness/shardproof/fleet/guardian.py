"""A small process that outlives the fork server just long enough to clean up after it.

The server itself cleans up when the controller dies. It cannot while it is importing, stopped, or
killed; then this process does. It is forked before anything is preloaded, so it costs little.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Final

from .cleanup import recorded_ranks, remove_tree
from .errors import SurvivorError
from .processes import Family, Ident, alive, open_fds, set_process_name

_GRACE: Final = 1.0  # seconds that the server has to clean up itself after the controller's death
_INTERVAL: Final = 0.25


def start_guardian(*, token: str, scratch: Path, controller: Ident, server: Ident) -> int:
    """Fork the guardian and return its process number. To be called by the server, early."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.chdir("/")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        set_process_name(b"sp:guardian")
        for fd in open_fds() - {0, 1, 2}:  # above all the channel, whose end the peers wait for
            os.close(fd)
        _guard(token, scratch, controller, server)
        status = 0
    finally:
        os._exit(status)


def _guard(token: str, scratch: Path, controller: Ident, server: Ident) -> None:
    _wait_for_end((controller, server), timeout=None)
    if not alive(controller):
        _wait_for_end((server,), timeout=_GRACE)
    with contextlib.suppress(SurvivorError):
        # A rank's children that were given another environment are known by its group alone.
        Family(token, roots=recorded_ranks(scratch, token)).kill()
    # The directory is the controller's as long as that lives; it ends this process when it is
    # done with it.
    _wait_for_end((controller,), timeout=None)
    remove_tree(scratch)


def _wait_for_end(processes: tuple[Ident, ...], *, timeout: float | None) -> None:
    """Return when one of the processes has ended, or the time is over."""
    deadline = None if timeout is None else time.monotonic() + timeout
    poller = select.poll()
    handles = []
    for ident in processes:
        with contextlib.suppress(OSError):  # gone, or a kernel before 5.3: the loop below sees it
            handles.append(os.pidfd_open(ident.pid))
            poller.register(handles[-1], select.POLLIN)
    interval = _INTERVAL if len(handles) < len(processes) else None
    while all(alive(ident) for ident in processes):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        waits = [wait for wait in (interval, left) if wait is not None]
        poller.poll(min(waits) * 1000 if waits else None)
    for handle in handles:
        os.close(handle)
