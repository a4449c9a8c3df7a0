"""The first and the last things that a rank's process does."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .capture import Capture
from .channel import Channel
from .processes import die_with, leave, marks, open_fds, process_name, set_process_name
from .stacks import enable_stacks, stack_file


@dataclass(frozen=True, slots=True)
class Birth:
    """All that a rank's process needs to know to start."""

    fleet: int
    rank: int
    size: int
    entry: str
    directory: Path
    token: str
    channel_fd: int
    server_pid: int


def split_entry(entry: str) -> tuple[str, str]:
    """Return module and function of ``module:function``; raises ValueError for anything else."""
    module, colon, function = entry.partition(":")
    if not colon or not all(
        part.isidentifier() for name in (module, function) for part in name.split(".")
    ):
        raise ValueError(f"a rank's entry must look like 'package.module:function', not {entry!r}")
    return module, function


def be_rank(birth: Birth, *, inherited: Collection[int]) -> None:
    """Become a rank: run its entry and leave the process. Never returns.

    ``inherited`` are the descriptors that preloaded modules opened and may still need.
    """
    status = 1
    try:
        _isolate(birth, inherited)
        status = _run(birth)
    except BaseException:  # noqa: BLE001  the caller's stack is the fork server's: nothing may get there
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        leave(status)


def _isolate(birth: Birth, inherited: Collection[int]) -> None:
    os.setsid()
    die_with(birth.server_pid)
    rank = f"{birth.fleet}.{birth.rank}"
    set_process_name(process_name(rank))
    os.environ.update(marks(birth.token, rank))
    _forget_exit_handlers()
    del sys.argv[1:]
    _reset_signals()
    _redirect(birth)
    keep = {0, 1, 2, birth.channel_fd, *inherited}
    for fd in open_fds() - keep:
        with contextlib.suppress(OSError):
            os.close(fd)
    enable_stacks(stack_file(birth.directory, birth.rank))
    faulthandler.enable(file=2)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _run(birth: Birth) -> int:
    with contextlib.closing(
        Channel(socket.socket(fileno=birth.channel_fd), peer="the controller")
    ) as channel:
        status = 0
        try:
            setup = channel.receive()
            module, function = split_entry(birth.entry)
            target: Any = importlib.import_module(module)
            for name in function.split("."):
                target = getattr(target, name)
            run: Callable[..., object] = target
            run(channel, birth.rank, birth.size, setup)
        except SystemExit as wish:
            status = _exit_status(wish.code)
        except BaseException:  # noqa: BLE001  whatever it is, the rank ends with its traceback
            traceback.print_exc()
            status = 1
        _finish()
    return status


def _finish() -> None:
    """Do what the interpreter does for a program that ends, short of destroying it."""
    shutdown: Callable[[], object] = vars(threading)["_shutdown"]
    shutdown()  # joins threads, idle ones of thread pools included
    atexit._run_exitfuncs()


def _forget_exit_handlers() -> None:
    """Leave what preloaded modules want done at exit to the server.

    One that removes a directory would remove it from under all other ranks. What serves a rank's
    own objects stays.
    """
    atexit._clear()
    finalizers: Any = weakref.finalize
    for finalizer in list(finalizers._registry):
        finalizer.atexit = False
    atexit.register(finalizers._exitfunc)
    atexit.register(logging.shutdown)
    multiprocessing: Any = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:
        atexit.register(multiprocessing._exit_function)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    # SIGINT stays ignored, as in the server: Ctrl-C is for the controller, which ends its ranks.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _redirect(birth: Birth) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    capture = Capture(birth.directory, birth.rank)
    for number, path in ((1, capture.stdout.path), (2, capture.stderr.path)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, number)
    streams: Any = sys
    streams.stdin, streams.stdout, streams.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for stream in (streams.stdout, streams.stderr):
        # Line by line, so that what a rank printed before it was killed is there to read.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
