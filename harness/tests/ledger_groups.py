"""Probes of plain process groups: their collectives, messages, handles, names and errors."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.ledger_probe import Probes, World, trial, trial_apart

probe = Probes()


@probe
def reductions(world: World) -> Any:
    found: list[Any] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        for name in ("SUM", "MAX", "MIN", "PRODUCT", "AVG"):
            x = world.values(3, 2, dtype=dtype)
            before = x.data_ptr()
            call = partial(dist.all_reduce, x, getattr(dist.ReduceOp, name))
            # The mean of integers is divided, and refused, inside the worker.
            apart = name == "AVG" and not dtype.is_floating_point
            answer = trial_apart(world, call) if apart else trial(call)
            found.append((str(dtype), name, answer, x, x.data_ptr() == before))
    x = world.values(5)
    found.append((dist.reduce(x, 1), x))
    found.append((trial(lambda: dist.all_reduce(x.bool(), dist.ReduceOp.BAND)), x))
    sparse = torch.eye(3).to_sparse() * (world.rank + 1)
    found.append((trial(lambda: dist.all_reduce(sparse)), sparse.to_dense()))
    premul = dist._make_nccl_premul_sum(2.0)
    return [*found, trial_apart(world, partial(dist.all_reduce, world.values(), premul))]


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
        trial_apart(world, partial(dist.all_to_all_single, x, x, [9], [9])),
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
