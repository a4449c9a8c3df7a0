"""A run in a process of its own: forked from a rank that has run nothing, and gone with the run.

What a run leaves in modules, caches and fixtures is gone with it. A fork costs a hundredth of a new
session, and needs a process without threads: they would be missing in the child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Never

from shardproof.fleet.processes import die_with, leave
from shardproof.fleet.stacks import stacks_of


def run_apart(run: Callable[[], object]) -> None:
    """Fork, have the child ``run``, and wait for its end. What kills it ends this process too."""
    parent = os.getpid()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(run, parent, writing)
    os.close(writing)
    with stacks_of(child):
        _, status = os.waitpid(child, 0)
    finished = b""
    os.set_blocking(reading, False)
    with contextlib.suppress(BlockingIOError):  # what the run started may hold the other end
        finished = os.read(reading, 1)
    os.close(reading)
    if status or not finished:
        _end_like(status)


def _be_child(run: Callable[[], object], parent: int, writing: int) -> Never:
    status = 1
    try:
        die_with(parent)
        run()
        os.write(writing, b"1")  # a run that leaves with code 0 has not finished
        status = 0
    except BaseException:  # noqa: BLE001 - the caller's stack is the parent's: nothing may get there
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        leave(status)


def _end_like(status: int) -> Never:
    """End as a child with this wait status did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        faulthandler.disable()  # the child's own dump is on the stream already
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))
