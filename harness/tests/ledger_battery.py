"""What ranks can ask of process groups, run with and without a ledger: the answers must be equal.

Every probe is a function of a rank's :class:`World`; what it returns or raises is its answer.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import pickle
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PROBES: dict[str, Callable[[World], Any]] = {}


@dataclass
class World:
    """One rank of the battery."""

    rank: int
    size: int
    group: Any
    mesh: DeviceMesh

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(17 + self.rank)
        return torch.randint(-9, 10, shape or (6,), generator=generator).to(dtype)


def probe(function: Callable[[World], Any]) -> Callable[[World], Any]:
    PROBES[function.__name__] = function
    return function


def trial(call: Callable[[], Any]) -> Any:
    """What a call returns, or the type and the text of what it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the error is the answer
        return type(error).__name__, plain(str(error))


def plain(text: str) -> str:
    """Without addresses, ports and lines of torch's own C++ frames."""
    text = text.partition("\nException raised from")[0]
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"\[?127\.0\.0\.1\]?:\d+", "host", text)
    return re.sub(r"\d+(\.\d+)? ?ms", "ms", text)


@probe
def reductions(world: World) -> Any:
    found: list[Any] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        for name in ("SUM", "MAX", "MIN", "PRODUCT", "AVG"):
            x = world.values(3, 2, dtype=dtype)
            before = x.data_ptr()
            answer = trial(partial(dist.all_reduce, x, getattr(dist.ReduceOp, name)))
            found.append((str(dtype), name, answer, x, x.data_ptr() == before))
    x = world.values(5)
    found.append((dist.reduce(x, 1), x))
    found.append((trial(lambda: dist.all_reduce(x.bool(), dist.ReduceOp.BAND)), x))
    sparse = torch.eye(3).to_sparse() * (world.rank + 1)
    found.append((trial(lambda: dist.all_reduce(sparse)), sparse.to_dense()))
    premul = dist._make_nccl_premul_sum(2.0)
    found.append(trial(lambda: dist.all_reduce(world.values(), premul)))
    return found


@probe
def gathers(world: World) -> Any:
    x = world.values(2, 3)
    lists = [torch.zeros(2, 3) for _ in range(world.size)]
    whole = torch.zeros(2 * world.size, 3)
    stacked = torch.zeros(world.size, 2, 3)
    found: list[Any] = [dist.all_gather(lists, x), lists]
    found += [dist.all_gather_into_tensor(whole, x), whole]
    found += [dist.all_gather_into_tensor(stacked, x), stacked]
    here = [torch.zeros(2, 3) for _ in range(world.size)] if world.rank == 0 else None
    found += [dist.gather(x, here, dst=0), here]
    there = [x + n for n in range(world.size)] if world.rank == 1 else None
    y = torch.zeros(2, 3)
    found += [dist.scatter(y, there, src=1), y]
    found += [dist.broadcast(x, 1), x]
    z = torch.zeros(2, 3)
    found += [trial(lambda: dist.reduce_scatter(z, [x + n for n in range(world.size)])), z]
    z = torch.zeros(2)
    wide = world.values(2 * world.size)
    found += [trial(lambda: dist.reduce_scatter_tensor(z, wide)), z]
    coalesced = [[torch.zeros(2, 3)] for _ in range(world.size)]
    found += [trial(lambda: dist.all_gather_coalesced(coalesced, [x])), coalesced]
    return found


@probe
def exchanges(world: World) -> Any:
    splits_in = [1 + (world.rank + n) % 2 for n in range(world.size)]
    splits_out = [1 + (world.rank + n) % 2 for n in range(world.size)]
    x = world.values(sum(splits_in), 2)
    y = torch.zeros(sum(splits_out), 2)
    found: list[Any] = [trial(lambda: dist.all_to_all_single(y, x, splits_out, splits_in)), y]
    equal = torch.zeros(world.size)
    found += [dist.all_to_all_single(equal, world.values(world.size)), equal]
    parts = [torch.zeros(2) for _ in range(world.size)]
    given = [world.values(2) + n for n in range(world.size)]
    return [*found, trial(lambda: dist.all_to_all(parts, given)), parts]


@probe
def messages(world: World) -> Any:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    found: list[Any] = []
    x, y = world.values(4), torch.zeros(4)
    work: Any = dist.isend(x, right, tag=3)
    received: Any = dist.irecv(y, left, tag=3)
    found.append((type(work).__name__, type(received).__name__))
    found.append((received.wait(), work.wait(), received._source_rank(), y.clone()))
    if world.rank == 0:
        sources = [dist.recv(y, tag=5) for _ in range(world.size - 1)]
        found.append(sorted(sources))
    else:
        found.append(dist.send(x, 0, tag=5))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    )
    found.append((len(works), [work.wait() for work in works], y.clone()))
    objects: list[Any] = [None, None]
    if world.rank == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    elif world.rank == 1:
        dist.recv_object_list(objects, 0)
    return [*found, objects, world.group.rank(), trial(lambda: dist.send(x, world.rank))]


@probe
def objects(world: World) -> Any:
    everything: list[Any] = [None] * world.size
    dist.all_gather_object(everything, {"rank": world.rank, "x": [1] * world.rank})
    several = [{"from": world.rank}, None]
    dist.broadcast_object_list(several, 1)
    one: list[Any] = [None]
    dist.scatter_object_list(one, list(range(world.size)) if world.rank == 0 else None, 0)
    here: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(world.rank, here, 0)
    return everything, several, one, here


@probe
def handles(world: World) -> Any:
    x = world.values(4)
    work = dist.all_reduce(x, async_op=True)
    first = (type(work).__module__, type(work).__name__, work.wait(), x.clone())
    second = (work.wait(), work.is_completed(), work.is_success(), trial(work.exception))
    work = dist.all_gather_into_tensor(y := torch.zeros(4 * world.size), x, async_op=True)
    value = work.get_future().wait()
    third = (work.wait(dt.timedelta(seconds=20)), y, [t.shape for t in value], trial(work.result))
    loose = dist.all_reduce(world.values(3), async_op=True)
    while not loose.is_completed():
        pass
    del loose
    unwaited = [dist.all_reduce(world.values(2), async_op=True) for _ in range(5)]
    return first, second, third, [work.wait() for work in reversed(unwaited)]


@probe
def barriers(world: World) -> Any:
    work = dist.barrier(async_op=True)
    found = [dist.barrier(), type(work).__name__, work.wait()]
    found.append(dist.monitored_barrier())
    return [*found, dist.monitored_barrier(timeout=dt.timedelta(seconds=20), wait_all_ranks=True)]


@probe
def coalescing(world: World) -> Any:
    x, y = world.values(3), world.values(2)
    with dist._coalescing_manager(group=world.group, async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    z = [world.values(2), world.values(3)]
    return x, y, dist.all_reduce_coalesced(z), z


@probe
def identity(world: World) -> Any:
    group: Any = world.group
    cpu = torch.device("cpu")
    return {
        "type": type(group).__name__,
        "exact": type(group) is dist.ProcessGroup,
        "backend": (dist.get_backend(), dist.get_backend(group), group._get_backend_name()),
        "config": str(dist.get_backend_config()),
        "inner": type(group._get_backend(cpu)).__name__,
        "options": type(group._get_backend(cpu).options).__name__,
        "coalescing": group._get_backend(cpu).supports_coalescing,
        "ranks": dist.get_process_group_ranks(group),
        "name": (group.group_name, group.group_desc, group.name(), group.size(), group.rank()),
        "devices": sorted(map(str, group._device_types)),
        "store": type(group.get_group_store()).__name__,
        "hooks": group._has_hooks(),
        "unboxed": dist.ProcessGroup.unbox(group.boxed()) is group,
        "documents": [getattr(dist.ProcessGroup, n).__doc__ for n in dir(dist.ProcessGroup)
                      if callable(getattr(dist.ProcessGroup, n)) and not n.startswith("__")
                      and "object at 0x" not in str(getattr(dist.ProcessGroup, n).__doc__)],
        "sequence": group._get_sequence_number_for_group(),
        "resolved": dist.distributed_c10d._resolve_process_group(group.group_name) is group,
    }  # fmt: skip


@probe
def groups(world: World) -> Any:
    found: list[Any] = []
    pair = dist.new_group([0, 1])
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    for group in (pair, alone):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            found.append("no member")
            continue
        x = world.values(3)
        dist.all_reduce(x, group=group)
        found.append(
            (x, dist.get_process_group_ranks(group), dist.get_group_rank(group, world.rank))
        )
        found.append(group._get_sequence_number_for_group())
    sub, every = dist.new_subgroups(2)
    x = world.values(2)
    dist.all_reduce(x, group=sub)
    found += [x, len(every), trial(lambda: dist.split_group(world.group, [[0, 1]]))]
    if pair != dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(pair)
    return found


@probe
def errors(world: World) -> Any:
    group: Any = world.group
    x = world.values(4)
    return [
        trial(lambda: group.allreduce(3)),
        trial(lambda: group.nothing),
        trial(lambda: dist.all_reduce([x])),
        trial(lambda: dist.all_gather_into_tensor(torch.zeros(3), x)),
        trial(lambda: dist.all_gather([torch.zeros(4)], x)),
        trial(lambda: dist.scatter(x, [x], src=world.rank)),
        trial(lambda: dist.all_to_all_single(x, x, [9], [9])),
        trial(lambda: dist.all_reduce(x.to(torch.complex64), dist.ReduceOp.MAX)),
        trial(lambda: dist.all_reduce(x, group=dist.new_group([0], use_local_synchronization=True))
              if world.rank == 0 else None),
        trial(lambda: group.broadcast([x, x]).wait()),
        trial(lambda: group.barrier(dt.timedelta(seconds=10)).wait()),
    ]  # fmt: skip


@probe
def plain_methods(world: World) -> Any:
    """Overloads that only Python callers of the group itself use."""
    group: Any = world.group
    x = world.values(2)
    outs = [torch.zeros(2) for _ in range(world.size)]
    found = [
        group.allreduce(x).wait(),
        x.clone(),
        group.allreduce([x], dist.ReduceOp.MAX).wait(),
        x,
    ]
    found += [group.broadcast(x, 1).wait(), x, group.allgather(outs, x).wait(), outs]
    found += [group.reduce(x, 0).wait(), x]
    out = torch.zeros(2 * world.size)
    return [*found, group._allgather_base(out, x).wait(), out]


@probe
def functional_collectives(world: World) -> Any:
    call, name = torch.ops._c10d_functional, world.group.group_name
    x = world.values(4)
    wide = world.values(4 * world.size)
    found: list[Any] = [
        functional.all_reduce(x, "sum", world.group) + 1,
        functional.all_gather_tensor(x, 0, world.group) + 1,
        functional.reduce_scatter_tensor(wide, "sum", 0, world.group) + 1,
        functional.broadcast(x, 1, world.group) + 1,
        functional.all_to_all_single(wide, None, None, world.group) + 1,
        *[t + 1 for t in functional.all_reduce_coalesced([x, x * 2], "max", world.group)],
        call.wait_tensor(call.all_reduce_(x.clone(), "avg", name)),
    ]
    out = torch.zeros(4 * world.size)
    found.append(call.wait_tensor(call.all_gather_into_tensor_out(x, world.size, name, out=out)))
    lazy = functional.all_reduce(x, "sum", world.group)
    return [*found, type(lazy).__name__, (lazy * 2)]


@probe
def autograd(world: World) -> Any:
    import torch.distributed.nn.functional as differentiable

    x = world.values(4).requires_grad_()
    y = functional.all_gather_tensor_autograd(x, 0, world.group)
    z = functional.reduce_scatter_tensor_autograd(y * 2, "sum", 0, world.group)
    (z * torch.arange(4.0)).sum().backward()
    first = x.grad
    x.grad = None
    w = differentiable.all_reduce(x * (world.rank + 1))
    (w * w).sum().backward()
    return first, x.grad, type(y.grad_fn).__name__, z.detach(), w.detach()


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def _train(model: nn.Module, world: World) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step * 7 + world.rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@probe
def ddp(world: World) -> Any:
    model = _model()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    losses = _train(wrapped, world)
    with wrapped.no_sync():
        wrapped(torch.ones(2, 8)).sum().backward()
    return losses, [p.detach() for p in model.parameters()]


@probe
def fsdp(world: World) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    losses = _train(model, world)
    return losses, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


@probe
def dtensor(world: World) -> Any:
    from torch.distributed.tensor import (
        Partial,
        Replicate,
        Shard,
        distribute_module,
        distribute_tensor,
    )
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(5)
    whole = torch.randn(8, 4 * world.size)
    x = distribute_tensor(whole, world.mesh, [Shard(0)])
    y = x.redistribute(world.mesh, [Shard(1)])
    z: Any = (x @ distribute_tensor(whole.T.contiguous(), world.mesh, [Replicate()])).sum()
    model = _model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()}
    parallel = parallelize_module(model, world.mesh, plan)
    out = parallel(torch.ones(3, 8))
    out.sum().backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    grads = [gradient.full_tensor() for gradient in gradients]
    copied = distribute_module(nn.Linear(4, 4), world.mesh)(torch.ones(2, 4))
    return (
        x.full_tensor(),
        y.to_local(),
        z.full_tensor(),
        out,
        grads,
        type(copied).__name__,
        str(Partial()),
    )


@probe
def mesh(world: World) -> Any:
    shape = (world.size // 2, 2)
    two = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    x, y = world.values(3), world.values(3)
    dist.all_reduce(x, group=two["tp"].get_group())
    dist.all_reduce(y, group=two.get_group("dp"))
    flat = two._flatten("all")
    z = functional.all_reduce(world.values(2), "sum", flat) + 0
    return x, y, z, two.get_coordinate(), dist.get_process_group_ranks(two.get_group("tp"))


@probe
def modes(world: World) -> Any:
    """Modes that watch torch's functions and operations see the same ones."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = world.values(4)
    with Functions():
        dist.all_reduce(x)
    with Operations():  # type: ignore[no-untyped-call]
        dist.all_reduce(x)
        y = functional.all_reduce(x, "sum", world.group) + 1
    with torch.inference_mode():
        dist.all_reduce(x)
    return seen, x, y


@probe
def compiled(world: World) -> Any:
    group = world.group

    def body(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", group)
        return functional.all_gather_tensor(y + dist.get_rank(group), 0, group)

    run = torch.compile(body, fullgraph=True, backend="aot_eager")
    return run(world.values(4)), run(world.values(4) + 1)


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
