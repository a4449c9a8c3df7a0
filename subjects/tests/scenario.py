"""One small training step that touches every output and every gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from subjects.protocol import Trainer
from subjects.types import ForwardInput

HIDDEN, VOCABULARY = 40, 131


def requests() -> list[ForwardInput]:
    """Two batches of odd, unequal documents; in the first three of four share prefixes."""
    generator = torch.Generator().manual_seed(3)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=generator)

    stem = ids(9)
    first = [torch.cat((stem, ids(8))), torch.cat((stem, ids(4))), stem[:5], ids(7)]
    second = [ids(23), ids(5)]
    targets, several = ids(sum(map(len, first))), ids(28, 2)
    targets[::3] = -100
    several[::4, 0] = -100
    return [
        ForwardInput(first, targets, top_k=5, hidden_states=True),
        ForwardInput(second, several, logits=True, hidden_states=True),
    ]


def step(trainer: Trainer, batches: Iterable[tuple[int, ForwardInput]]) -> dict[str, Tensor]:
    """Forward and backward of ``batches``, with a nonlinear loss; every output by name."""
    probe = trainer.parameter("probe", _probe)
    found: dict[str, Tensor] = {}
    for index, request in batches:
        output = trainer.forward(request)
        outputs = {
            "hidden": output.hidden_states,
            "logprobs": output.target_logprobs,
            "logits": output.logits,
            "top values": output.top_k and output.top_k.values,
        }
        if output.top_k is not None:
            found[f"{index} top tokens"] = output.top_k.tokens
        loss = torch.zeros((), dtype=torch.float64)
        for salt, (name, value) in enumerate(outputs.items()):
            if value is None:
                continue
            found[f"{index} {name}"] = value.detach()
            weight = _weights(value, seed=10 * index + salt)
            loss = loss + (value * weight).sum() + (0.1 * value * weight).tanh().square().sum()
        if output.hidden_states is not None:
            loss = loss + (output.hidden_states[1:] @ probe).tanh().square().sum()
        found[f"{index} loss"] = loss.detach()
        loss.backward()
    found["metric"] = trainer.dp_reduce(
        torch.tensor(float(sum(index + 1 for index, _ in batches)), dtype=torch.float64)
    )
    return found


def gradients(trainer: Trainer) -> dict[str, tuple[Tensor, int | None]]:
    """Reduced gradients, and the dimension along which TP cuts each."""
    return {
        name: (value, _dim(placement.get("shard")))
        for name, value, placement in trainer.named_gradients()
        if value is not None
    }


def _dim(shard: object) -> int | None:
    return shard["tp"] if isinstance(shard, dict) else None


def _probe() -> Tensor:
    return torch.randn(HIDDEN, 3, generator=torch.Generator().manual_seed(9))


def _weights(value: Tensor, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(value.shape, generator=generator, dtype=torch.float64)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 distance; infinite where shapes differ, the count of errors for integers."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return float((actual != expected).sum())
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))


def worst(
    outputs: dict[str, Tensor],
    grads: dict[str, tuple[Tensor, int | None]],
    expected: dict[str, Tensor],
    *,
    tp: tuple[int, int],
) -> dict[str, float]:
    """The distance of everything that was found from what was ``expected``."""
    result = {name: distance(value, expected[name]) for name, value in outputs.items()}
    for name, (value, dim) in grads.items():
        whole = expected[f"grad {name}"]
        part = whole if dim is None else whole.chunk(tp[1], dim=dim)[tp[0]]
        result[f"grad {name}"] = distance(value, part)
    return result
