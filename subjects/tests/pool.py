"""Ranks that stay warm: started once, they answer one command after another."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from shardproof.topology import parse_topology
from subjects.tests import worlds

Worker = Callable[[Any], Any]
Setup = Callable[[worlds.TestRank, Path], Worker]
"""Makes what answers commands on a rank; a function of a module, since it is sent there by name."""

PRELOADED = [
    "megatron.core.models.gpt.gpt_model",
    "transformers.models.qwen3.modeling_qwen3",
]


class RankError(AssertionError):
    """A rank raised, ended or did not answer; its peers were ended with it."""


class Pool:
    """All ranks of one topology, as processes behind pipes.

    They start with the first command. After a failure all of them are ended, since a peer may wait
    in a collective, and the next command starts new ones.
    """

    def __init__(
        self, topology: str, directory: Path, setup: Setup, *, timeout: float = 60.0
    ) -> None:
        self.topology, self.directory, self.setup, self.timeout = (
            topology,
            directory,
            setup,
            timeout,
        )
        self.starts = 0
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: Any) -> list[Any]:
        """Send ``command`` to all ranks and return their answers, by rank.

        Raises:
            RankError: with what each rank that failed has to say.
        """
        self.begin(command)
        return self.finish()

    def begin(self, command: Any) -> None:
        """Send ``command`` to all ranks; ``finish`` waits for the answers."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send(command)

    def finish(self) -> list[Any]:
        """The answers to the command that was sent last.

        Raises:
            RankError: as for ``ask``.
        """
        return self._answers(self.timeout)

    def close(self) -> None:
        """End the ranks, if there are any; only those of this pool."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []

    def _start(self) -> None:
        self.starts += 1
        multiprocessing.set_forkserver_preload(PRELOADED)
        context = multiprocessing.get_context("forkserver")
        store = self.directory / f"store-{self.topology}-{self.starts}"
        for index in range(parse_topology(self.topology).world_size):
            ours, theirs = context.Pipe()
            arguments = (index, self.topology, store, self.setup, self.directory, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._answers(max(self.timeout, 120.0))

    def _answers(self, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        problems: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = {pipe: index for index, (_, pipe) in enumerate(self._ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting), timeout=left)
            for pipe in [one for one in waiting if one in ready]:
                index = waiting.pop(pipe)
                kind, value = _received(pipe)
                (answers if kind == "done" else problems)[index] = value
                if kind != "done":
                    # The others have raised as well by then, or wait for this one.
                    deadline = min(deadline, time.monotonic() + 2.0)
        problems |= dict.fromkeys(waiting.values(), f"no answer in {timeout:.0f} s")
        if problems:
            self.close()
            told = "\n".join(f"rank {index}: {problems[index]}" for index in problems)
            raise RankError(f"{self.topology}: {len(problems)} of the ranks failed\n{told}")
        return [answers[index] for index in sorted(answers)]


def _received(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        return "ended", "ended without an answer"
    return kind, value


def _serve(
    index: int, topology: str, store: Path, setup: Setup, directory: Path, pipe: Connection
) -> None:
    """What a rank does: answer until the other end of ``pipe`` is gone."""
    worker: Worker | None = None

    def answer() -> Any:
        nonlocal worker
        if worker is not None:
            return worker(pipe.recv())
        worlds.join(index, store, ranks=parse_topology(topology).world_size)
        worker = setup(worlds.make_rank(topology), directory)
        return None

    while True:
        try:
            pipe.send(("done", answer()))
        except (EOFError, BrokenPipeError):
            os._exit(0)
        except BaseException:  # noqa: BLE001 -- whatever it is, the parent is to hear of it
            pipe.send(("raised", traceback.format_exc()))
