"""Probes of what torch builds on process groups: parallel libraries, meshes, modes, compilation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.ledger_probe import Probes, World
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

probe = Probes()


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
