"""The floor is what rounding does: neither less (false alarms) nor much more (hidden faults)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardproof.noise import NoiseMode, mode
from shardproof.noise.taint import REGISTRY

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
RUNS = 3
SMALLEST = 64
"""Elements from which on a tensor must be honest: fewer may be right by luck."""


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())


def floor_of(run: Callable[[], Mapping[str, Tensor]], runs: int = RUNS) -> dict[str, float]:
    """Root mean square over noise runs of how far each tensor moves."""
    reference = run()
    squares = dict.fromkeys(reference, 0.0)
    for seed in range(runs):
        with NoiseMode(seed):
            moved = run()
        for name, value in moved.items():
            squares[name] += distance(value, reference[name]) ** 2
    return {name: math.sqrt(total / runs) for name, total in squares.items()}


# A small transformer in the manner of Qwen3: grouped-query attention with normed queries and keys,
# rotary positions, SwiGLU, one table for input and output.


@dataclass(frozen=True)
class Size:
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    depth: int = 16
    mlp: int = 96
    vocabulary: int = 97
    tokens: int = 96


SMALL = Size()
WIDE = Size(hidden=96, layers=1, heads=6, kv_heads=3, depth=32, mlp=160, vocabulary=211, tokens=301)


def make_weights(size: Size, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        spread = 0.2 if len(shape) == 1 else 1 / math.sqrt(shape[-1])
        value = torch.randn(*shape, generator=generator) * spread
        return value + 1 if len(shape) == 1 else value

    weights = {"table": draw(size.vocabulary, size.hidden), "norm": draw(size.hidden)}
    for layer in range(size.layers):
        weights |= {
            f"{layer}.query": draw(size.heads * size.depth, size.hidden),
            f"{layer}.key": draw(size.kv_heads * size.depth, size.hidden),
            f"{layer}.value": draw(size.kv_heads * size.depth, size.hidden),
            f"{layer}.output": draw(size.hidden, size.heads * size.depth),
            f"{layer}.gate": draw(size.mlp, size.hidden),
            f"{layer}.up": draw(size.mlp, size.hidden),
            f"{layer}.down": draw(size.hidden, size.mlp),
            f"{layer}.norm1": draw(size.hidden),
            f"{layer}.norm2": draw(size.hidden),
            f"{layer}.query_norm": draw(size.depth),
            f"{layer}.key_norm": draw(size.depth),
        }
    return weights


def rms_norm(value: Tensor, weight: Tensor) -> Tensor:
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(value_HSD: Tensor, positions: Tensor) -> Tensor:
    depth, dtype = value_HSD.shape[-1], value_HSD.dtype
    inverse = 1.0 / (10000.0 ** (torch.arange(0, depth, 2).to(dtype) / depth))
    angles = torch.outer(positions.to(dtype), inverse)
    cos, sin = angles.cos(), angles.sin()
    one, two = value_HSD.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def eager(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    hidden = positions[:, None] < positions[None, :]
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    del positions
    return functional.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True
    )[0]


def chunked(parts: int, hidden_key: int | None = None) -> Attention:
    """Keys in parts whose results are merged by their log-sum-exp, as under context parallelism."""

    def attention(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        outputs, sums = [], []
        for keys, values, places in zip(
            key.chunk(parts, 1), value.chunk(parts, 1), positions.chunk(parts), strict=True
        ):
            scores = query @ keys.transpose(1, 2) / math.sqrt(query.shape[-1])
            masked = positions[:, None] < places[None, :]
            if hidden_key is not None:
                masked = masked | (places == positions[0] + hidden_key)[None, :]
            scores = scores.masked_fill(masked, -1e30)
            sums.append(torch.logsumexp(scores, -1))
            outputs.append(torch.exp(scores - sums[-1][..., None]) @ values)
        shares = torch.softmax(torch.stack(sums), 0)
        result = shares[0][..., None] * outputs[0]
        for share, output in zip(shares[1:], outputs[1:], strict=True):
            result = result + share[..., None] * output
        return result

    return attention


def run_model(
    size: Size,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    attention: Attention,
    *,
    start: int = 0,
) -> dict[str, Tensor]:
    """Hidden states, log-probabilities and all gradients."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, size.vocabulary, (size.tokens,), generator=generator)
    w = {name: value.to(dtype, copy=True).requires_grad_() for name, value in weights.items()}
    positions = torch.arange(start, start + size.tokens)
    found: dict[str, Tensor] = {}
    x_SH = functional.embedding(ids, w["table"])
    for layer in range(size.layers):

        def heads(value: Tensor, count: int) -> Tensor:
            return value.view(size.tokens, count, size.depth).transpose(0, 1)

        normed = rms_norm(x_SH, w[f"{layer}.norm1"])
        query = heads(normed @ w[f"{layer}.query"].T, size.heads)
        key = heads(normed @ w[f"{layer}.key"].T, size.kv_heads)
        value = heads(normed @ w[f"{layer}.value"].T, size.kv_heads)
        query = rotate(rms_norm(query, w[f"{layer}.query_norm"]), positions)
        key = rotate(rms_norm(key, w[f"{layer}.key_norm"]), positions)
        group = size.heads // size.kv_heads
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        mixed = attention(query, key, value, positions).transpose(0, 1).reshape(size.tokens, -1)
        x_SH = x_SH + mixed @ w[f"{layer}.output"].T
        normed = rms_norm(x_SH, w[f"{layer}.norm2"])
        gated = functional.silu(normed @ w[f"{layer}.gate"].T) * (normed @ w[f"{layer}.up"].T)
        x_SH = x_SH + gated @ w[f"{layer}.down"].T
        found[f"hidden {layer}"] = x_SH.detach()
    logits = rms_norm(x_SH, w["norm"]) @ w["table"].T
    chosen = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])
    (-chosen.mean()).backward()
    found |= {"logits": logits.detach(), "chosen": chosen.detach()}
    for name, weight in w.items():
        assert weight.grad is not None
        found[name] = weight.grad
    return {name: value for name, value in found.items() if value.numel() >= SMALLEST}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("attention", [eager, fused])
@pytest.mark.parametrize("size", [SMALL, WIDE], ids=["small", "wide"])
def test_the_floor_is_the_rounding_error_of_a_transformer(
    size: Size, attention: Attention, seed: int
) -> None:
    """In float32, where float64 knows the truth; each tensor and gradient by itself."""
    weights = make_weights(size, seed)
    reference = run_model(size, weights, torch.float32, attention)
    truth = run_model(size, weights, torch.float64, attention)
    floor = floor_of(lambda: run_model(size, weights, torch.float32, attention))
    honest = {name: floor[name] / distance(reference[name], truth[name]) for name in reference}
    assert len(honest) > 12
    assert min(honest.values()) >= 0.5, honest
    assert max(honest.values()) <= 5, honest


@pytest.mark.parametrize("seed", [0, 1])
def test_the_floor_is_the_rounding_error_of_transformers_qwen3(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that is not ours; its norm falls to float32 inside, which would spoil the truth."""
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = pytest.importorskip("transformers").Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=131,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=112,
        tie_word_embeddings=bool(seed),
        attn_implementation="sdpa",
    )
    monkeypatch.setattr(
        qwen3.Qwen3RMSNorm,
        "forward",
        lambda self, value: rms_norm(value, self.weight),
    )
    torch.manual_seed(seed)
    with NoiseMode(0, perturb=False):  # as the rank session does for fixtures
        model = qwen3.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * weight.shape[-1] ** -0.5)
            if weight.dim() == 1:
                weight.add_(1)
    ids = torch.randint(0, 131, (1, 140))

    def run() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        chosen = torch.log_softmax(output.logits[0, :-1], -1).gather(1, ids[0, 1:, None])
        (-chosen.mean()).backward()
        found = {f"hidden {i}": v.detach().clone() for i, v in enumerate(output.hidden_states)}
        found |= {"logits": output.logits.detach().clone(), "chosen": chosen.detach().clone()}
        found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        del found["hidden 0"]  # rows of the table: exact
        return {name: value for name, value in found.items() if value.numel() >= SMALLEST}

    reference, floor = run(), floor_of(run)
    model.double()
    truth = run()
    honest = {name: floor[name] / distance(reference[name], truth[name]) for name in reference}
    assert len(honest) > 18
    assert min(honest.values()) >= 0.5, honest
    assert max(honest.values()) <= 5, honest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_correct_parallel_attention_stays_low_and_one_hidden_key_does_not(
    dtype: torch.dtype,
) -> None:
    weights = make_weights(SMALL, 3)
    reference = run_model(SMALL, weights, dtype, eager)
    floor = floor_of(lambda: run_model(SMALL, weights, dtype, eager))

    def scores(attention: Attention) -> dict[str, float]:
        value = run_model(SMALL, weights, dtype, attention)
        return {name: distance(value[name], reference[name]) / floor[name] for name in value}

    for parts in (2, 4, 8):
        right = scores(chunked(parts))
        assert max(right.values()) <= 3, right
    wrong = scores(chunked(2, hidden_key=5))
    assert min(wrong.values()) > (1e3 if dtype is torch.float32 else 1e9), wrong


def test_perturbed_tables_would_hide_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles near position 20,000: a unit of rounding there turns by a thousandth."""
    weights = make_weights(SMALL, 4)

    def run() -> dict[str, Tensor]:
        return run_model(SMALL, weights, torch.float32, eager, start=20_000)

    kept = floor_of(run)
    with monkeypatch.context() as patch:
        patch.setattr(REGISTRY, "mark_clean", lambda _: None)
        lifted = floor_of(run)
    assert lifted["hidden 1"] > 100 * kept["hidden 1"]
    truth = run_model(SMALL, weights, torch.float64, eager)
    near = run_model(SMALL, weights, torch.float32, eager)
    # With tables kept, the floor at 20,000 is that of the same model at position 0.
    assert kept["hidden 1"] < 5 * distance(near["hidden 1"], truth["hidden 1"])


# Sums whose length is what goes wrong.


Split = Callable[[Sequence[Tensor]], Tensor]


def parts_of(value: Tensor, parts: int, order: Tensor | None, dim: int = 0) -> Sequence[Tensor]:
    return (value if order is None else value.index_select(dim, order)).chunk(parts, dim)


def added(parts: Sequence[Tensor]) -> Tensor:
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result


def terms(kind: str, count: int, dtype: torch.dtype) -> Tensor:
    """[count, columns]: several sums at once, since one number may be right by luck."""
    generator = torch.Generator().manual_seed(count)
    columns = 6 if count == 1_000_000 else 16
    if kind in ("positive", "cancelling"):
        value = torch.rand(count, columns, generator=generator, dtype=torch.float64)
    else:
        value = torch.randn(count, columns, generator=generator, dtype=torch.float64)
    if kind == "sorted":
        value = value.sort(0).values
    elif kind == "cancelling":
        half = value[: count // 2]
        value = torch.cat([half, -half * (1 + 1e-3 * value[count // 2 :])])
    return value.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["positive", "signed", "sorted", "cancelling"])
@pytest.mark.parametrize("count", [100, 1_000, 10_000, 100_000, 1_000_000])
def test_a_split_sum_stays_low(count: int, kind: str, dtype: torch.dtype) -> None:
    value = terms(kind, count, dtype)
    reference = value.sum(0)
    floor = floor_of(lambda: {"sum": value.sum(0)})["sum"]
    floor = max(floor, UNIT[dtype] * float(reference.norm()))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    for parts in (2, 4, 8):
        for arranged in (None, order):
            split = added([part.sum(0) for part in parts_of(value, parts, arranged)])
            assert distance(split, reference) <= 3 * floor, (parts, arranged is not None)
    if dtype is torch.float32:
        assert 0.5 <= floor / distance(reference, value.double().sum(0)) <= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (1, 64), (32, 32)])
@pytest.mark.parametrize("kind", ["positive", "signed", "cancelling"])
def test_a_split_product_of_131072_terms_stays_low(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    count = 131_072
    generator = torch.Generator().manual_seed(2)
    left = torch.rand(shape[0], count, generator=generator, dtype=torch.float64)
    right = torch.rand(count, shape[1], generator=generator, dtype=torch.float64)
    if kind != "positive":
        left = left * 2 - 1
    if kind == "cancelling":
        left[:, count // 2 :] = -left[:, : count // 2]
        right[count // 2 :] = right[: count // 2] * (1 + 1e-3 * right[count // 2 :])
    left, right = left.to(dtype), right.to(dtype)
    reference = left @ right
    floor = floor_of(lambda: {"product": left @ right})["product"]
    order = torch.randperm(count, generator=generator)
    for parts in (2, 4, 8):
        for arranged in (None, order):
            pairs = zip(
                parts_of(left, parts, arranged, 1), parts_of(right, parts, arranged), strict=True
            )
            split = added([a @ b for a, b in pairs])
            assert distance(split, reference) <= 3 * floor, (parts, arranged is not None)
    if dtype is torch.float32:
        assert 0.5 <= floor / distance(reference, left.double() @ right.double()) <= 5


def embedding_case(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A gradient of 20,436 tokens of one id, beside a few of others: [N, 32] and ids [N]."""
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn if kind == "signed" else torch.rand
    gradient = draw(20_500, 32, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.full((20_500,), 7)
    ids[torch.randperm(20_500, generator=generator)[:64]] = torch.arange(64)
    return gradient, ids


def scatter(gradient: Tensor, ids: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(gradient, ids, 80, -1, False)  # type: ignore[no-any-return]


ACCUMULATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": scatter,
    "index_add": lambda g, ids: g.new_zeros(80, 32).index_add_(0, ids, g),
    "index_put": lambda g, ids: g.new_zeros(80, 32).index_put_((ids,), g, accumulate=True),
    "scatter_add": lambda g, ids: g.new_zeros(80, 32).scatter_add_(
        0, ids[:, None].expand(g.shape), g
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["signed", "positive"])
@pytest.mark.parametrize("way", ACCUMULATE)
def test_a_split_gradient_of_one_id_stays_low(way: str, kind: str, dtype: torch.dtype) -> None:
    gradient, ids = embedding_case(kind, dtype)
    accumulate = ACCUMULATE[way]
    reference = accumulate(gradient, ids)
    floor = floor_of(lambda: {"gradient": accumulate(gradient, ids)})["gradient"]
    for parts in (2, 4, 8):
        pairs = zip(gradient.chunk(parts), ids.chunk(parts), strict=True)
        split = added([accumulate(g, i) for g, i in pairs])
        assert distance(split, reference) <= 3 * floor
    if dtype is torch.float32:
        truth = accumulate(gradient.double(), ids)
        assert 0.5 <= floor / distance(reference, truth) <= 5


def test_perturbation_alone_would_raise_false_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reassociation is for: without it a correct split of a long sum looks like a fault."""
    gradient, ids = embedding_case("positive", torch.float64)
    monkeypatch.setattr(mode, "handler_of", lambda *_: None)
    floor = floor_of(lambda: {"gradient": scatter(gradient, ids)})["gradient"]
    split = added([scatter(g, i) for g, i in zip(gradient.chunk(4), ids.chunk(4), strict=True)])
    assert distance(split, scatter(gradient, ids)) > 10 * floor


@pytest.mark.parametrize("way", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_the_floor_is_the_rounding_error_of_an_optimizer(way: dict[str, bool]) -> None:
    """Weights and both moments after five steps of AdamW, with weight decay."""
    start, slopes = torch.randn(3000), [torch.randn(3000) + 0.5 for _ in range(5)]

    def run(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        weight = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1, **way)  # type: ignore[arg-type]
        for slope in slopes:
            weight.grad = slope.to(dtype, copy=True)
            optimizer.step()
        state = optimizer.state[weight]
        assert float(state["step"]) == 5
        return {
            "weight": weight.detach(),
            "first": state["exp_avg"],
            "second": state["exp_avg_sq"],
        }

    floor, reference, truth = floor_of(run), run(), run(torch.float64)
    for name, value in reference.items():
        assert 0.5 <= floor[name] / distance(value, truth[name]) <= 5, name
