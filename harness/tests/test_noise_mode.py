"""The mode over torch's operations: what moves, by how much, and what must not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardproof.noise import NoiseMode
from shardproof.noise.handlers import handler_of


def t(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, W, V, POS = t(12, 10), t(10, 8, seed=1), t(10, seed=2), t(12, 10).abs() + 0.1
B, C, Q, IMAGE, KERNEL = (
    t(4, 12, 10),
    t(4, 10, 6, seed=4),
    t(2, 4, 7, 8),
    t(2, 4, 9, 9),
    t(6, 4, 3, 3),
)
INDEX = torch.tensor([0, 3, 1, 1, 4, 0, 2, 3, 3, 3, 1, 0])
SPREAD = INDEX[:, None].expand(12, 10)
MASK = torch.ones(7, 7, dtype=torch.bool).tril()
aten = torch.ops.aten


def pair(values: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values])


ARITHMETIC: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: X @ W,
    "mm long": lambda: t(3, 5000) @ t(5000, 3, seed=1),
    "mm wide": lambda: t(4300, 8) @ t(8, 1000, seed=1),
    "mm transposed": lambda: X.t().contiguous().t() @ W.t().contiguous().t(),
    "mm.out": lambda: torch.mm(X, W, out=torch.empty(12, 8)),
    "mm.out grown": lambda: torch.mm(X, W, out=torch.empty(0)),
    "bmm": lambda: B @ C,
    "addmm": lambda: torch.addmm(t(8), X, W, beta=0.5, alpha=2),
    "addmm_": lambda: t(12, 8).addmm_(X, W, beta=0.3),
    "addmm activation": lambda: aten._addmm_activation(t(8), X, W, use_gelu=True),
    "baddbmm": lambda: torch.baddbmm(t(4, 12, 6), B, C, beta=0.3, alpha=0.7),
    "baddbmm_": lambda: t(4, 12, 6).baddbmm_(B, C, beta=0.4),
    "addbmm": lambda: torch.addbmm(t(12, 6), B, C, beta=0.3, alpha=0.7),
    "mv": lambda: X @ V,
    "addmv": lambda: torch.addmv(t(12), X, V, beta=0.3, alpha=0.7),
    "dot": lambda: torch.dot(t(300), t(300, seed=1)),
    "vdot": lambda: torch.vdot(t(300), t(300, seed=1)),
    "linear": lambda: functional.linear(B, t(5, 10), t(5)),
    "einsum": lambda: torch.einsum("bij,bjk->bik", B, C),
    "sum": lambda: X.sum(1),
    "sum all": lambda: t(3, 300).sum(),
    "sum large": lambda: t(1100, 1000).sum(0),
    "sum of many": lambda: t(3, 70_000).sum(0),
    "sum keepdim": lambda: B.sum((0, 2), keepdim=True),
    "sum out": lambda: torch.sum(X, 1, out=torch.empty(12)),
    "sum bfloat16": lambda: X.bfloat16().sum(1).float(),
    "mean": lambda: B.mean((0, 2)),
    "nansum": lambda: torch.where(X > 1, torch.nan, X).nansum(0),
    "var": lambda: X.var(1, correction=0),
    "std": lambda: B.std((0, 1), keepdim=True),
    "var_mean": lambda: pair(torch.var_mean(X, 1)),
    "std_mean": lambda: pair(torch.std_mean(X, 1)),
    "norm": lambda: X.norm(dim=0),
    "norm of order 1": lambda: X.norm(1, dim=1),
    "norm of order 3": lambda: torch.linalg.vector_norm(X, 3, dim=0),
    "foreach norm": lambda: pair(tuple(torch._foreach_norm(list(t(40, 50))))),
    "dist": lambda: torch.stack(
        [torch.dist(x, y) for x, y in zip(t(9, 50), t(9, 50, seed=1), strict=True)]
    ),
    "cumsum": lambda: X.cumsum(1),
    "cumsum_": lambda: X.clone().cumsum_(0),
    "softmax": lambda: B.softmax(0),
    "softmax bfloat16": lambda: X.bfloat16().softmax(1).float(),
    "log_softmax": lambda: B.log_softmax(1),
    "logsumexp": lambda: B.logsumexp((0, 2)),
    "logsumexp keepdim": lambda: X.logsumexp(1, keepdim=True),
    "softmax backward": lambda: aten._softmax_backward_data(X, POS.softmax(1), 1, torch.float32),
    "log_softmax backward": lambda: aten._log_softmax_backward_data(
        X, POS.log_softmax(1), 1, torch.float32
    ),
    "index_add": lambda: t(5, 10).index_add(0, INDEX, X, alpha=0.3),
    "index_add_": lambda: t(10, 5).index_add_(1, INDEX, X.t()),
    "scatter_add": lambda: t(5, 10).scatter_add(0, SPREAD, X),
    "scatter_reduce": lambda: t(5, 10).scatter_reduce(0, SPREAD, X, "sum"),
    "scatter mean": lambda: t(5, 10).scatter_reduce(0, SPREAD, X, "mean", include_self=False),
    "index_put": lambda: t(5, 10).index_put((INDEX,), X, accumulate=True),
    "index_put pairs": lambda: t(5, 5).index_put((INDEX, INDEX.flip(0)), X[:, 0], accumulate=True),
    "index_put negative": lambda: t(5, 10).index_put((INDEX - 5,), X, accumulate=True),
    "index_put columns": lambda: aten.index_put(t(10, 5), [None, INDEX], X.t(), True),
    "index_put mask": lambda: t(5, 10).index_put((t(5) > 0,), X[:1], accumulate=True),
    "unsafe index_put": lambda: aten._unsafe_index_put(t(5, 10), [INDEX], X, True),
    "embedding backward": lambda: aten.embedding_dense_backward(X, INDEX, 5, 2, False),
    "embedding backward scaled": lambda: aten.embedding_dense_backward(X, INDEX, 5, -1, True),
    "embedding backward of none": lambda: (
        aten.embedding_dense_backward(X[:2], INDEX[:1].expand(2), 5, 0, False) + X[:1] * 3
    ),
    "conv": lambda: functional.conv2d(IMAGE, KERNEL, t(6)),
    "depthwise conv": lambda: functional.conv1d(t(2, 4, 20), t(4, 1, 4), groups=4, padding=3),
    "fft": lambda: torch.view_as_real(torch.fft.rfft(X)),
    "inverse fft": lambda: torch.fft.irfft(torch.complex(X, POS)),
    "average pool": lambda: functional.avg_pool2d(IMAGE, 3),
    "trace": lambda: torch.stack([torch.trace(t(30, 30, seed=i)) for i in range(9)]),
    "layer_norm": lambda: functional.layer_norm(X, (10,), V, V),
    "rms_norm": lambda: functional.rms_norm(X, (10,), V),
    "group_norm": lambda: functional.group_norm(IMAGE, 2, t(4), t(4)),
    "batch_norm": lambda: functional.batch_norm(IMAGE, None, None, t(4), t(4), training=True),
    "nll": lambda: functional.nll_loss(X.log_softmax(1), INDEX) * X,
    "cross entropy": lambda: functional.cross_entropy(X, INDEX, label_smoothing=0.1) * X,
    "mse": lambda: functional.mse_loss(X, POS) * X,
    "huber": lambda: functional.huber_loss(X, POS) * X,
    "bce": lambda: functional.binary_cross_entropy_with_logits(X, POS.clamp(0, 1)) * X,
    "attention": lambda: functional.scaled_dot_product_attention(Q, Q, Q, is_causal=True),
    "attention long": lambda: functional.scaled_dot_product_attention(
        t(1, 2, 900, 8), t(1, 2, 900, 8), t(1, 2, 900, 8), is_causal=True
    ),
    "attention grouped": lambda: functional.scaled_dot_product_attention(
        Q, Q[:, :2], Q[:, :2], attn_mask=MASK, enable_gqa=True
    ),
    "attention biased": lambda: functional.scaled_dot_product_attention(
        Q, Q, Q, attn_mask=t(7, 7), scale=0.3
    ),
    "gelu": lambda: functional.gelu(X),
    "exp": lambda: torch.exp(X),
    "mul_": lambda: X.clone().mul_(POS),
    "mul_ strided": lambda: X.clone()[:, ::2].mul_(POS[:, ::2]),
    "mul transposed": lambda: X.t() * POS.t(),
    "addcmul_": lambda: X.clone().addcmul_(POS, POS),
    "lerp": lambda: X.lerp(POS, 0.3),
    "add out": lambda: torch.add(X, POS, out=torch.empty(12, 10)),
    "foreach": lambda: torch.stack(torch._foreach_add([X, POS], [POS, POS])),
    "to bfloat16": lambda: X.to(torch.bfloat16).float(),
    "copy_ to float16": lambda: torch.empty(12, 10, dtype=torch.float16).copy_(X).float(),
    "solve": lambda: torch.linalg.solve(t(6, 6), t(6, 2)),
    "cdist": lambda: torch.cdist(X, POS),
    "prod": lambda: X.prod(1),
}

COARSE = {
    "sum bfloat16": 2e-2,
    "softmax bfloat16": 2e-2,
    "to bfloat16": 2e-2,
    "copy_ to float16": 2e-3,
}

EXACT: dict[str, Callable[[], Tensor]] = {
    "views": lambda: X.view(10, 12).t()[1:].unsqueeze(0),
    "clone": lambda: torch.clone(X),
    "cat": lambda: torch.cat([X, POS]),
    "index": lambda: X[INDEX.clamp(max=9)],
    "gather": lambda: X.gather(0, SPREAD),
    "embedding": lambda: functional.embedding(INDEX, X),
    "where": lambda: torch.where(X > 0, X, POS),
    "masked_fill": lambda: X.masked_fill(X > 0, -1e30),
    "max": lambda: X.max(1).values,
    "maximum": lambda: torch.maximum(X, POS),
    "sort": lambda: X.sort(1).values,
    "topk": lambda: X.topk(3).values,
    "abs neg relu": lambda: -X.abs().relu(),
    "clamp": lambda: X.clamp(-1, 1),
    "pad roll flip": lambda: functional.pad(X.roll(2, 0).flip(1), (1, 2)),
    "tril": lambda: torch.tril(X),
    "widening": lambda: X.to(torch.float64),
    "widening copy": lambda: torch.empty(12, 10, dtype=torch.float64).copy_(X),
    "same dtype copy": lambda: torch.empty(12, 10).copy_(X),
    "index_put": lambda: t(5, 10).index_put((INDEX[:2],), X[:2]),
    "index_copy_": lambda: t(5, 10).index_copy_(0, INDEX[:2], X[:2]),
    "scatter": lambda: t(5, 10).scatter(0, SPREAD[:2], X),
    "largest entry": lambda: torch.linalg.vector_norm(X, float("inf"), dim=0),
    "scatter amax": lambda: t(5, 10).scatter_reduce(0, SPREAD, X, "amax"),
    "times a power of two": lambda: X * 0.125 / 4,
    "integers": lambda: (INDEX * 3 + 1).cumsum(0),
    "argmax": lambda: X.argmax(1),
}


def under(seed: int, run: Callable[[], Tensor]) -> Tensor:
    with NoiseMode(seed):
        return run()


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_moves_a_little_and_repeatably(name: str) -> None:
    run = ARITHMETIC[name]
    plain = run()
    moved = [under(seed, run) for seed in range(8)]
    assert all(value.shape == plain.shape and value.dtype == plain.dtype for value in moved)
    assert all(value.is_contiguous() == plain.is_contiguous() for value in moved)
    assert torch.equal(under(3, run), moved[3])
    assert any(not torch.equal(value, moved[0]) for value in moved)
    for value in moved:
        error = (value.double() - plain.double()).norm() / plain.double().norm()
        assert error < COARSE.get(name, 2e-6)


@pytest.mark.parametrize("name", EXACT)
def test_moving_and_selecting_does_not_round(name: str) -> None:
    run = EXACT[name]
    plain = run()
    assert all(torch.equal(under(seed, run), plain) for seed in range(3))


BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention grouped": lambda x: functional.scaled_dot_product_attention(
        x, x[:, :2], x[:, 2:], attn_mask=MASK, enable_gqa=True
    ),
    "attention biased": lambda x: functional.scaled_dot_product_attention(
        x, x * 2, x, attn_mask=t(7, 7), scale=0.3
    ),
    "layer_norm": lambda x: functional.layer_norm(x, (8,), t(8), t(8)),
    "rms_norm": lambda x: functional.rms_norm(x, (8,), t(8)),
    "group_norm": lambda x: functional.group_norm(x, 2, t(4), t(4)),
    "softmax": lambda x: x.softmax(1) * x.log_softmax(2),
    "conv": lambda x: functional.conv2d(x, KERNEL),
    "norms": lambda x: x.norm(dim=1) * x.var((0, 1)).sqrt(),
    "index": lambda x: x[:, INDEX.clamp(max=3)] * x[:, INDEX.clamp(max=2)],
    "product": lambda x: torch.einsum("bhsd,bhtd->bhst", x, x),
    "logsumexp": lambda x: x.logsumexp(1) * x.cumsum(2).sum(1),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_move_a_little_and_repeatably(name: str) -> None:
    def run() -> Tensor:
        value = t(2, 4, 7, 8).requires_grad_()
        output = BACKWARD[name](value)
        (output * t(*output.shape, seed=9)).sum().backward()
        assert value.grad is not None
        return value.grad

    plain = run()
    moved = [under(seed, run) for seed in range(4)]
    assert torch.equal(under(3, run), moved[3])
    assert not torch.equal(moved[0], moved[1])
    for value in moved:
        assert (value - plain).norm() / plain.norm() < 3e-6


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "attention", "logsumexp", "sum"])
def test_masks_stay_masks(name: str) -> None:
    """inf - inf is NaN, and the largest finite number must not round to infinity."""
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "attention": lambda x: functional.scaled_dot_product_attention(
            t(1, 1, 40, 8), t(1, 1, 40, 8), t(1, 1, 40, 8), attn_mask=x
        ),
        "logsumexp": lambda x: x.logsumexp(-1),
        "sum": lambda x: x.exp().sum(-1),
    }
    for hidden in (float("-inf"), torch.finfo(torch.float32).min):
        scores = (t(40, 40) * 3).masked_fill(~torch.ones(40, 40).tril().bool(), hidden)
        plain, moved = run[name](scores), under(1, lambda s=scores: run[name](s))  # type: ignore[misc]
        assert torch.equal(moved.isinf(), plain.isinf())
        assert not moved.isnan().any()
        assert torch.equal(moved == 0, plain == 0)
        # Elementwise too: the additive mask itself, added to scores.
        added = under(2, lambda s=scores: s + s.new_zeros(40, 40) + torch.where(s < -1e9, s, 0))  # type: ignore[misc]
        assert not added.isnan().any()


def test_rows_that_see_nothing_are_zero_in_fused_attention() -> None:
    mask = MASK.clone()
    mask[2] = False
    plain = functional.scaled_dot_product_attention(Q, Q, Q, attn_mask=mask)
    moved = under(1, lambda: functional.scaled_dot_product_attention(Q, Q, Q, attn_mask=mask))
    assert torch.equal(moved.isnan(), plain.isnan())
    assert torch.equal(moved[:, :, 2].nan_to_num(), plain[:, :, 2].nan_to_num())


def test_fused_attention_keeps_the_kernels_memory_layout() -> None:
    """Callers take views of the transposed result."""
    plain = functional.scaled_dot_product_attention(Q, Q, Q)
    assert under(1, lambda: functional.scaled_dot_product_attention(Q, Q, Q)).stride() == (
        plain.stride()
    )


@pytest.mark.parametrize("name", ["index_add_", "index_put_", "scatter_add_"])
def test_rows_that_no_index_names_keep_their_bits(name: str) -> None:
    """A sum into a few rows of a table must not shake the others each time."""
    add: Callable[[Tensor], Tensor] = {
        "index_add_": lambda table: table.index_add_(0, INDEX[:2], X[:2]),
        "index_put_": lambda table: table.index_put_((INDEX[:2],), X[:2], accumulate=True),
        "scatter_add_": lambda table: table.scatter_add_(0, SPREAD[:2], X),
    }[name]
    after = under(1, lambda: add(t(5, 10)))
    untouched = [row for row in range(5) if row not in INDEX[:2].tolist()]
    assert torch.equal(after[untouched], t(5, 10)[untouched])
    assert not torch.equal(after, add(t(5, 10)))


def test_perturbation_can_be_switched_while_active() -> None:
    plain = X.exp()
    with NoiseMode(1, perturb=False) as mode:
        assert torch.equal(X.exp(), plain)
        mode.perturb = True
        assert not torch.equal(X.exp(), plain)
        with mode.perturbing(False):
            assert torch.equal(X.exp(), plain)
        assert not torch.equal(X.exp(), plain)
        mode.perturb = False
        assert torch.equal(X.exp(), plain)


def test_the_models_own_random_numbers_are_those_of_the_plain_run() -> None:
    def draws() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        random.seed(5)
        kept = functional.dropout(X, 0.4) != 0
        return kept, torch.rand(3), torch.tensor(random.random())

    plain = draws()
    with NoiseMode(1):
        noisy = draws()
    assert all(torch.equal(a, b) for a, b in zip(plain, noisy, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_optimizers_move_weights_and_not_gradients_or_counters(  # type: ignore[no-untyped-def]
    optimizer, options: dict[str, object]
) -> None:
    gradient = t(500, seed=3)

    def run() -> tuple[Tensor, Tensor, list[float]]:
        weight = torch.nn.Parameter(t(500))
        made = optimizer([weight], **options)
        for _ in range(3):
            weight.grad = gradient.clone()
            made.step()
        state = made.state[weight]
        assert weight.grad is not None
        return weight.detach(), weight.grad, [float(state["step"])] if "step" in state else []

    plain = run()
    with NoiseMode(1):
        noisy = run()
    assert not torch.equal(noisy[0], plain[0])
    torch.testing.assert_close(noisy[0], plain[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(noisy[1], gradient)
    assert noisy[2] == plain[2]


def test_gradient_scaling_keeps_its_flags() -> None:
    found, gradients = torch.zeros(1), [t(500), t(300, seed=1)]
    with NoiseMode(1):
        before = gradients[0].clone()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.3))
        assert found.item() == 0.0
        gradients[0][0] = float("inf")
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.3))
    assert found.item() == 1.0
    assert not torch.equal(gradients[0], before * 0.3 * 0.3)


def test_custom_operations_are_perturbed_from_outside() -> None:
    """What rounds inside a kernel of someone else's cannot be seen, so its inputs move too."""

    @torch.library.custom_op("shardproof_noise_test::total", mutates_args=())
    def total(value: Tensor) -> Tensor:
        return value.sum(0)

    plain = total(t(300, 40))
    assert not torch.equal(under(1, lambda: total(t(300, 40))), plain)
    inputs = t(300, 40)
    under(1, lambda: total(inputs))
    assert torch.equal(inputs, t(300, 40))


def test_operations_without_a_rule_are_perturbed_all_the_same() -> None:
    """A new operation of torch is arithmetic until someone says otherwise."""
    op = torch.ops.aten.logcumsumexp.default
    assert handler_of(op, "logcumsumexp") is None
    assert not torch.equal(under(1, lambda: X.logcumsumexp(1)), X.logcumsumexp(1))
