"""The mode beside torch's other machinery: autograd, checkpoints, compilers, subclasses, groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardproof.noise import NoiseMode
from shardproof.noise.taint import REGISTRY


def t(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Counting(NoiseMode):
    """Notes which operations were perturbed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.computed: list[str] = []

    def _compute(self, func: OpOverload, *rest: object) -> object:
        self.computed.append(str(func))
        return super()._compute(func, *rest)  # type: ignore[arg-type]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()


def close(moved: Tensor, plain: Tensor) -> None:
    """Different by rounding, and only by rounding."""
    assert not torch.equal(moved, plain)
    assert (moved - plain).norm() / plain.norm() < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_under_noise(reentrant: bool) -> None:
    def run() -> Tensor:
        weight, value = nn.Parameter(t(8, 8)), t(40, 8, seed=1).requires_grad_()
        inside = checkpoint(lambda x: (x @ weight).tanh() @ weight, value, use_reentrant=reentrant)
        inside.square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    plain = run()
    with NoiseMode(1):
        close(run(), plain)


def test_second_derivatives() -> None:
    def run() -> Tensor:
        value = t(40, 8).requires_grad_()
        (slope,) = torch.autograd.grad(
            torch.tanh(value @ t(8, 8)).square().sum(), value, create_graph=True
        )
        slope.square().sum().backward()
        assert value.grad is not None
        return value.grad

    plain = run()
    with NoiseMode(1):
        close(run(), plain)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_autograd_operations_are_seen_all_the_same(guard: type) -> None:
    """Under inference mode torch hands whole compositions to a mode: linear, matmul."""
    value, weight = t(3, 50, 8), t(8, 8)
    with guard():
        plain = functional.linear(value, weight)
        with Counting(1) as mode:
            close(functional.linear(value, weight), plain)
            table = torch.arange(8).float() / 3
            assert not REGISTRY.tainted(functional.linear(table, torch.ones(8, 8)))
    assert "aten.mm.default" in mode.computed


def test_function_transforms() -> None:
    weight, value = t(8, 8), t(3, 5, 8)

    def loss(one: Tensor) -> Tensor:
        return (one @ weight).tanh().square().sum()

    batched, gradient = torch.vmap(loss)(value), torch.func.grad(loss)(value[0])
    with NoiseMode(1):
        torch.testing.assert_close(torch.vmap(loss)(value), batched)
        close(torch.func.grad(loss)(value[0]), gradient)
        assert torch.func.jacrev(lambda x: x @ weight)(value[0]).shape == (5, 8, 5, 8)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_regions_run_eagerly(fullgraph: bool) -> None:
    compiled = torch.compile(lambda x: (x @ x).tanh(), backend="eager", fullgraph=fullgraph)
    value = t(9, 9)
    plain = value.matmul(value).tanh()
    with Counting(1) as mode:
        close(compiled(value), plain)
    assert "aten.mm.default" in mode.computed
    torch.testing.assert_close(compiled(value), plain)


def test_operators_on_functions_are_opened() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    query = t(1, 2, 16, 8)
    plain = functional.scaled_dot_product_attention(query, query, query)
    with Counting(1) as mode:
        moved = flex_attention(query, query, query)
    assert isinstance(moved, Tensor)
    close(moved, plain)
    assert len(mode.computed) > 2


def test_shapes_alone_pass() -> None:
    with NoiseMode(1), FakeTensorMode():
        assert (torch.randn(3, 4) @ torch.randn(4, 5)).shape == (3, 5)
    with NoiseMode(1):
        assert (torch.randn(3, 4, device="meta") @ torch.randn(4, 5, device="meta")).shape == (3, 5)


def test_distributed_tensors_are_perturbed_by_their_shards(group: dist.ProcessGroup) -> None:
    assert group.size() == 1
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    local = t(8, 8)
    plain = local @ local
    with Counting(1) as mode:
        value = distribute_tensor(local, mesh, [Shard(0)]).requires_grad_()
        product = value @ value
        product.sum().backward()
    assert isinstance(value.grad, DTensor)
    assert isinstance(product, DTensor)
    close(product.full_tensor().detach(), plain)
    assert mode.computed.count("aten.mm.default") == 3


def test_collectives_move_and_taint_but_do_not_round(group: dist.ProcessGroup) -> None:
    value = t(8, 8)
    with NoiseMode(1):
        summed = functional_collectives.all_reduce(value, "sum", group) + torch.zeros(8, 8)
        gathered, kept = [torch.zeros(8, 8)], torch.zeros(8, 8)
        dist.all_gather(gathered, value)
        dist.all_reduce(kept)
        assert REGISTRY.tainted(summed)
        assert REGISTRY.tainted(gathered[0])
        assert not REGISTRY.tainted(kept)
    assert torch.equal(gathered[0], value)


def test_data_parallel_wrappers(group: dist.ProcessGroup) -> None:
    def run(wrap: bool) -> Tensor:
        torch.manual_seed(0)
        linear: nn.Module = nn.Linear(8, 8)
        weight = next(linear.parameters())
        wrapped = nn.parallel.DistributedDataParallel(linear) if wrap else linear
        wrapped(t(40, 8)).square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert group.size() == 1
    plain = run(wrap=False)
    with NoiseMode(1):
        close(run(wrap=True), plain)
        linear = nn.Linear(8, 8)
        fully_shard(linear, mesh=init_device_mesh("cpu", (1,)))
        linear(t(40, 8)).square().sum().backward()
        torch.optim.AdamW(linear.parameters()).step()


def test_modes_nest_and_leave_nothing_behind() -> None:
    value = t(50)
    plain = value.exp()
    with NoiseMode(1, perturb=False):
        with NoiseMode(2):
            close(value.exp(), plain)
        assert torch.equal(value.exp(), plain)
    with pytest.raises(ValueError, match="from the case"), NoiseMode(3):
        raise ValueError("from the case")
    assert torch.equal(value.exp(), plain)
