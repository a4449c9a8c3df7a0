from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from subjects.tests.allocations import Allocations
from subjects.tests.test_heads import ROWS, VOCABULARY, place_of, request_of, states
from subjects.trainer import admission, heads
from subjects.trainer.admission import AdmissionError
from subjects.trainer.head_rows import HeadWeights, Place
from subjects.types import ForwardInput, ForwardOutput

TARGETS = torch.arange(ROWS * 2).view(ROWS, 2) * 7 % VOCABULARY
REQUESTS: dict[str, dict[str, Any]] = {
    "targets": {"target_tokens": TARGETS},
    "top_k": {"top_k": 9},
    "entropy": {"entropy": True},
    "logits": {"logits": True},
    "local": {"logits": "local"},
    "states": {"hidden_states": True},
    "all": {
        "target_tokens": TARGETS,
        "top_k": 9,
        "entropy": True,
        "logits": True,
        "hidden_states": True,
    },
    "most": {"target_tokens": TARGETS, "top_k": 3, "logits": "local"},
}


def parts(output: ForwardOutput) -> list[Tensor]:
    """The differentiable tensors of an output."""
    found = [output.target_logprobs, output.entropy, output.logits, output.hidden_states]
    found.append(None if output.top_k is None else output.top_k.values)
    found.append(None if output.local_logits is None else output.local_logits.values)
    return [value for value in found if value is not None]


def step(request: ForwardInput, hidden: Tensor, head: HeadWeights, place: Place) -> None:
    """Forward and, with gradients, a backward from a gradient of each output."""
    output = heads.outputs(request, hidden, head, place)
    if torch.is_grad_enabled():
        values = parts(output)
        torch.autograd.backward(values, [torch.ones_like(value) for value in values])


@pytest.mark.parametrize(
    ("sharing", "head_rows", "dtype", "grad"),
    [
        ("none", 4, torch.float32, True),
        ("full", 1024, torch.float32, True),
        ("full", 4, torch.bfloat16, True),
        ("none", 1024, torch.bfloat16, True),
        ("full", 4, torch.float64, True),
        ("none", 1024, torch.float64, False),
        ("full", 4, torch.float32, False),
        ("none", 1024, torch.bfloat16, False),
    ],
)
def test_prediction_against_what_is_allocated(
    alone: Any, sharing: str, head_rows: int, dtype: torch.dtype, grad: bool
) -> None:
    """Never below what is allocated by more than a tenth, never above twice as much."""
    for name, wanted in REQUESTS.items():
        request = request_of(**wanted)
        place = place_of(alone, request.documents(), head_rows=head_rows, sharing=sharing)
        hidden, weight, *_ = states(len(place.local.rows), dtype)
        head = HeadWeights(weight)
        predicted = admission.predict(
            request, admission.sizes(place, head), grad=grad, head_grad=True
        )
        gc.collect()
        with torch.set_grad_enabled(grad), Allocations() as allocations:
            step(request, hidden, head, place)
        ratio = sum(predicted.values()) / allocations.peak
        assert 0.9 <= ratio <= 2, (name, ratio, predicted, allocations.peak)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("grad", [True, False])
def test_prediction_against_the_peak_of_a_gpu(alone: Any, grad: bool) -> None:
    """At sizes where a kernel's own workspace counts little."""
    device = torch.device("cuda")
    measured = 0
    for name, wanted in REQUESTS.items():
        request = request_of(**wanted)
        place = place_of(alone, request.documents(), head_rows=16, sharing="none")
        local = place.local
        place = replace(
            place,
            local=replace(
                local,
                packed=local.packed.to(device),
                rows=local.rows.to(device),
                sources=local.sources.to(device),
                source_rows=local.source_rows.to(device),
            ),
            part=replace(place.part, columns=1 << 20, size=1 << 20),
        )
        weight = torch.randn(1 << 20, 3, device=device, requires_grad=True)
        hidden = torch.randn(ROWS, 1, 3, device=device, requires_grad=True)
        head = HeadWeights(weight)
        predicted = admission.predict(
            request, admission.sizes(place, head), grad=grad, head_grad=True
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(grad):
            step(request, hidden, head, place)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        # Small requests are ruled by the allocator's granularity.
        if peak > 8 << 20:
            measured += 1
            ratio = sum(predicted.values()) / peak
            assert 0.8 <= ratio <= 1.5, (name, ratio, predicted, peak)
    assert measured


def admitted(alone: Any, limit: int | None, **wanted: Any) -> None:
    request = request_of(**wanted)
    place = place_of(alone, request.documents(), head_rows=4, sharing="full")
    _, weight, *_ = states(1, torch.float32)
    admission.admit(request, HeadWeights(weight), place, limit=limit)


def test_a_refusal_tells_what_takes_how_much_and_a_way_out(alone: Any) -> None:
    logits = ROWS * VOCABULARY * 4
    with pytest.raises(AdmissionError) as caught:
        admitted(alone, logits, logits=True, entropy=True)
    words = str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert (caught.value.allowed, caught.value.parts["logits"]) == (logits, logits)
    assert str(pickle.loads(pickle.dumps(caught.value))) == words
    assert f"{logits:,} may be used" in words
    assert f"logits {logits:,}" in words
    assert "gradients of outputs" in words
    assert "logits='local'" in words
    assert "fewer head_rows than 4" in words
    with torch.no_grad(), pytest.raises(AdmissionError) as caught:
        admitted(alone, logits, logits=True)
    assert "gradients of outputs" not in str(caught.value)


def test_what_fits_is_admitted(alone: Any) -> None:
    admitted(alone, None, logits=True)
    admitted(alone, ROWS * VOCABULARY * 4, entropy=True)
    request = request_of(logits=True)
    place = place_of(alone, request.documents(), head_rows=4, sharing="full")
    _, weight, *_ = states(1, torch.float32)
    parts = admission.predict(
        request, admission.sizes(place, HeadWeights(weight)), grad=True, head_grad=True
    )
    admitted(alone, sum(parts.values()), logits=True)
    with pytest.raises(AdmissionError):
        admitted(alone, sum(parts.values()) - 1, logits=True)


def test_the_largest_shard_counts(alone: Any) -> None:
    """Another rank's shard is larger than this rank's own, in rows and in what they answer."""
    request = request_of(logits="local")
    place = place_of(alone, request.documents(), head_rows=4, sharing="full")
    few = replace(place.local.plan, shards=(torch.arange(20, 27), torch.arange(20)))
    local = replace(place.local, plan=few)
    assert admission.most_answered(local) == 38 + 1
    found = admission.sizes(replace(place, local=local), HeadWeights(torch.zeros(1000, 3)))
    assert (found.rows, found.answered) == (20, 39)


@pytest.mark.parametrize(
    ("wrong", "error"), [(-1, ValueError), (2.5, TypeError), ("1G", TypeError)]
)
def test_a_limit_is_a_number_of_bytes(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="expected a number of bytes"):
        admission.check_limit(wrong)
