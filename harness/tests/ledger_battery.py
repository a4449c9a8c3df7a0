"""What ranks can ask of process groups, run with and without a ledger: equal answers."""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import ledger_groups, ledger_libraries
from tests.ledger_probe import Probe, World, trial
from torch.distributed.device_mesh import init_device_mesh

PROBES: dict[str, Probe] = {**ledger_groups.probe, **ledger_libraries.probe}


def play(rank: int, size: int, folder: Path, ledger: bool, names: list[str]) -> dict[str, Any]:
    """The answers of one rank."""
    from shardproof.ledger import kernels

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if ledger:
        kernels.install()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=dt.timedelta(seconds=40),
    )
    world = World(rank, size, dist.group.WORLD, init_device_mesh("cpu", (size,)))
    if ledger:
        kernels.begin(folder, rank, lambda ranks: "-".join(map(str, ranks)))
    found: dict[str, Any] = {}
    for name in names:
        found[name] = trial(partial(PROBES[name], world))
        dist.barrier()
        found[f"{name}: sequence"] = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    if ledger:
        report, messages = kernels.end() or ({}, 0)
        found["ledger"] = {"messages": messages, **report}
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return found


def _child(pipe: Any, *args: Any) -> None:
    try:
        pipe.send_bytes(pickle.dumps(play(*args)))
    except BaseException:  # noqa: BLE001 - the parent tells
        pipe.send_bytes(pickle.dumps(traceback.format_exc()))


def run_battery(size: int, *, ledger: bool, names: list[str] | None = None) -> list[dict[str, Any]]:
    """The answers of all ranks, which are forked from this process."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            args = (theirs, rank, size, Path(folder), ledger, names or list(PROBES))
            child = context.Process(target=_child, args=args, daemon=False)
            child.start()
            theirs.close()
            running.append((child, ours))
        answers = []
        for child, ours in running:
            try:
                answers.append(pickle.loads(ours.recv_bytes()))
            except EOFError:
                answers.append(f"a rank died: {child.pid}")
        for child, _ in running:
            child.join()
    broken = [answer for answer in answers if isinstance(answer, str)]
    if broken:
        raise RuntimeError("\n".join(broken))
    return answers


def equal(one: Any, two: Any) -> bool:
    """Whether two answers are the same, tensors bit by bit."""
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
            return False
        return one.dtype == two.dtype and one.shape == two.shape and one.equal(two)
    if isinstance(one, dict):
        return (
            isinstance(two, dict)
            and one.keys() == two.keys()
            and all(equal(one[key], two[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)
