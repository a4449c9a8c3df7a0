"""What the tests of the fleet share: entries that ranks run, and ways to wait and to look."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shardproof.fleet import Channel, ChannelClosed, Exited, Fleet, Message
from shardproof.fleet.processes import Family, Stat
from shardproof.fleet.stacks import STACK_SIGNAL

T = TypeVar("T")

LIMIT = 20.0  # seconds after which a wait that should be short is a failure, on a busy machine


def eventually(look: Callable[[], T | None], *, within: float = LIMIT) -> T:
    """Return the first true value that ``look`` gives, failing after ``within`` seconds."""
    deadline = time.monotonic() + within
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {within} s: {look}"
        time.sleep(0.01)
    return value


def messages(fleet: Fleet, count: int) -> list[Message]:
    """Return the next ``count`` messages; a rank that ends instead is a failure."""
    found: list[Message] = []
    deadline = time.monotonic() + LIMIT
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        for event in fleet.poll(1.0):
            assert isinstance(event, Message), f"{event}\n{fleet.output(event.rank).stderr}"
            found.append(event)
    return found


def ends(fleet: Fleet) -> dict[int, Exited]:
    """Wait until all ranks have ended and return how."""
    deadline = time.monotonic() + LIMIT
    while fleet.live:
        assert time.monotonic() < deadline, f"ranks {fleet.live} go on"
        fleet.poll(1.0)
    return fleet.exits


def under(token: str) -> set[Stat]:
    """Return the processes that came from the fork server of that token."""
    return Family(token).members()


# Entries ----------------------------------------------------------------------------------------


def echo(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Say what one is, then send back whatever comes."""
    channel.send({"type": "ready", "rank": rank, "size": size, "setup": setup, "pid": os.getpid()})
    while (message := channel.receive())["type"] != "stop":
        channel.send(message)


def quick(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """End at once in the way that ``setup`` tells."""
    for number in range(setup.get("messages", 0)):
        channel.send({"number": number, "filling": "x" * setup.get("filling", 0)})
    match setup["how"]:
        case "return":
            return
        case "raise":
            raise RuntimeError(f"rank {rank} has had enough")
        case "exit":
            sys.exit(setup["value"])
        case "_exit":
            os._exit(setup["value"])
        case "signal":
            os.kill(os.getpid(), setup["value"])
        case "half a message":
            os.write(channel.fileno(), b"\0\0\1\0")
            os._exit(0)
        case "garbage":
            os.write(channel.fileno(), b"\xff" * 64)
            channel.receive()


def report(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Tell how this process is set up, and wait for the end."""
    sockets = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith(("socket:", "anon_inode:", "pipe:")):
                sockets.append(target)
    torch: Any = sys.modules.get("torch")
    status = Path("/proc/self/status").read_text()
    channel.send(
        {
            "pid": os.getpid(),
            "group": os.getpgrp(),
            "session": os.getsid(0),
            "sockets": sockets,
            "stdin": str(Path("/proc/self/fd/0").readlink()),
            "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "blocked": next(line for line in status.splitlines() if line.startswith("SigBlk")),
            "environ": dict(os.environ),
            "path": sys.path,
            "threads": None if torch is None else torch.get_num_threads(),
            "modules": [name for name in ("torch", "fleet_preloaded") if name in sys.modules],
        }
    )
    channel.receive()


def write(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Write to both streams what messages say, by Python and past it."""
    libc = ctypes.CDLL(None)
    channel.send({"type": "ready"})
    while (message := channel.receive())["type"] != "stop":
        text = message["text"] * message.get("times", 1)
        if message["how"] == "python":
            sys.stdout.write(text)
            sys.stderr.write(text.upper())
        elif message["how"] == "descriptor":
            os.write(1, text.encode())
        else:
            libc.puts(text.encode())
            libc.fflush(None)
        channel.send({"type": "written"})


def flood(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Write without end."""
    channel.send({"type": "ready"})
    line = b"y" * 2**16
    while True:
        os.write(1, line)


def deaf(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Ignore every request to end."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    channel.send({"type": "ready"})
    while True:
        signal.pause()


def unstackable(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Ignore the signal that asks for stacks."""
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    channel.send({"type": "ready"})
    channel.receive()


def hear_end(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Know nothing of the stop message, but notice that no more messages will come."""
    try:
        while True:
            channel.receive()
    except ChannelClosed:
        sys.exit(7)


def parent(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Start processes of several kinds, tell their numbers, then end as told or never."""
    sleep = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    pids: dict[str, int] = {}
    children = {
        "child": subprocess.Popen(sleep, stdout=subprocess.PIPE),
        "no environment": subprocess.Popen(sleep, stdout=subprocess.PIPE, env={}),
        "own session": subprocess.Popen(sleep, stdout=subprocess.PIPE, start_new_session=True),
    }
    for name, child in children.items():
        assert child.stdout is not None
        child.stdout.readline()
        pids[name] = child.pid
    pids["daemon, executed"] = _daemon(
        lambda: os.execv(sleep[0], [*sleep[:2], "import signal; signal.pause()"])
    )
    pids["daemon, forked"] = _daemon(signal.pause)
    if setup.get("unmarked"):
        pids["daemon, unmarked"] = _daemon(lambda: os.execve(sleep[0], sleep, {}))
    channel.send(pids)
    if setup["how"] == "return":
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def _daemon(body: Callable[[], object]) -> int:
    """Run ``body`` in an orphan with a session of its own and return its number."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        grandchild = os.fork()
        if grandchild == 0:
            body()
            os._exit(0)
        os.write(writing, str(grandchild).encode())
        os._exit(0)
    os.waitpid(child, 0)
    number = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    return number


def tidy(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Leave things to be done at the end."""
    folder = Path(setup["folder"])
    atexit.register((folder / "atexit").touch)
    pool = ThreadPoolExecutor(1)
    pool.submit(os.getpid).result()  # its idle thread must not keep the rank from ending
    rank_returned = threading.Event()

    def outlast() -> None:
        rank_returned.wait()
        (folder / "thread").touch()

    threading.Thread(target=outlast).start()
    rank_returned.set()


def collective(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Wait in an all-reduce for a rank that never comes (the last one), or sleep there."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(setup["store"], size), rank=rank, world_size=size
    )
    dist.all_reduce(torch.ones(1))
    channel.send({"type": "ready"})
    if rank == size - 1:
        channel.receive()
    dist.all_reduce(torch.ones(1))
    channel.send({"type": "done"})
    channel.receive()


def nested(channel: Channel, rank: int, size: int, setup: dict[str, Any]) -> None:
    """Be the controller of another fleet."""
    from shardproof.fleet import ForkServer, make_scratch

    server = ForkServer(preload=(), scratch=make_scratch(root=Path(setup["root"])))
    fleet = server.fork(size=1, entry="tests.fleet_support:echo", setup={}, label="inner")
    assert fleet.poll(LIMIT)
    channel.send({"token": server.token})
    channel.receive()
