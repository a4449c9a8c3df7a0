"""Whether the replicas of one batch take the same loss.

All outputs of a forward pass through one node of the graph, which comes first in backward and runs
once, whichever outputs the loss uses. There the TP and CP ranks compare the gradients that reached
them before the model's own backward begins. Replicas that differ would give gradients that are
wrong without a sign: each rank takes its own rows of what it believes to be the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from subjects.trainer import agreement
from subjects.trainer.agreement import Circle, DisagreementError
from subjects.trainer.precision import working_dtype
from subjects.types import ForwardOutput

PROJECTIONS = 4
STATISTICS = ("presence", "sum", "norm", *(f"projection {at}" for at in range(PROJECTIONS)))
LOCAL = frozenset({"local_logits.values"})
"""Outputs that differ from rank to rank: of their gradients, presence alone is compared."""

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Watch:
    """The outputs of one forward: its ``number`` on this trainer, their ``names``.

    ``changed`` says what has happened since to the weights that it ran with; "" for nothing.
    """

    number: int
    names: tuple[str, ...]
    circle: Circle
    compare: bool
    changed: Callable[[], str]


def nothing_changed() -> str:
    """Of weights that are never replaced."""
    return ""


def watch(
    output: ForwardOutput,
    *,
    number: int,
    circle: Circle,
    compare: bool,
    changed: Callable[[], str] = nothing_changed,
) -> ForwardOutput:
    """``output`` with what is differentiable in it led through one node of the graph.

    ``compare`` False leaves out the comparison and its two collectives. ``changed`` is asked in
    backward what has happened to the weights since.
    """
    tensors = differentiable(output)
    if not tensors:
        return output
    watched: tuple[Tensor, ...] = Outputs.apply(  # type: ignore[no-untyped-call]
        Watch(number, tuple(tensors), circle, compare, changed), *tensors.values()
    )
    return put_back(output, dict(zip(tensors, watched, strict=True)))


class Outputs(torch.autograd.Function):
    """The identity, and in backward the comparison."""

    @staticmethod
    def forward(ctx: Any, watched: Watch, *outputs: Tensor) -> tuple[Tensor, ...]:
        """[...] each -> the same."""
        # An output that the loss ignores keeps None, so that what is behind it has no gradient.
        ctx.set_materialize_grads(False)
        ctx.watched = watched
        # Torch frees what is saved with the graph, so this shows whether the graph is there.
        ctx.save_for_backward(torch.empty(0, dtype=torch.int64))
        # Not views: the caller may change an output in place.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients as they came.

        Raises:
            RuntimeError: the graph is gone, or the weights are no longer those of the forward.
            DisagreementError: the replicas' losses differ.
        """
        check_graph(ctx)
        watched: Watch = ctx.watched
        if watched.compare:
            compare(gradients, watched)
        check_weights(watched)
        return None, *passed_on(gradients)


def passed_on(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What the outputs' own graphs are given: each gradient as it came, None where it is None."""
    return gradients


def check_graph(ctx: Any) -> None:
    """Refuse a second backward through a graph that the first one has freed.

    Raises:
        RuntimeError: on every rank alike, before any collective.
    """
    try:
        _ = ctx.saved_tensors
    except RuntimeError as error:
        raise RuntimeError(
            "backward ran a second time through the outputs of one forward, whose graph is gone "
            "since the first; pass retain_graph=True to all but the last backward, or add the "
            "losses and call backward once"
        ) from error


def check_weights(watched: Watch) -> None:
    """Refuse the backward of a forward whose slot was replaced, removed or changed since.

    Raises:
        RuntimeError: on every rank, since all of them change their slots together.
    """
    changed = watched.changed()
    if changed:
        raise RuntimeError(
            f"the backward of forward {watched.number} came after {changed}: the gradients would "
            "be lost, or not be those of the values that the forward ran with. Finish the backward "
            "before a slot is replaced, restored, removed or stepped; call zero_gradients(), and "
            "run the forward again"
        )


def compare(gradients: Sequence[Tensor | None], watched: Watch) -> None:
    """Compare the gradients of one forward's outputs over the TP and CP ranks; a collective.

    Raises:
        DisagreementError: with the outputs, ranks and values, the same text on every rank.
    """
    circle = watched.circle
    if len(circle.ranks) == 1:
        return
    mine = torch.stack(
        [
            statistics(gradient, local=name in LOCAL).to(circle.device)
            for name, gradient in zip(watched.names, gradients, strict=True)
        ]
    )
    # A rank that is about to refuse says so here, for the others to hear of it.
    changed = watched.changed()
    call = f"the backward of forward {watched.number}" + (f" after {changed}" if changed else "")
    everyone = agreement.exchange(call, mine.view(torch.int64).flatten(), circle)
    seen = everyone[:, : mine.numel()].contiguous().view(torch.float64)
    seen = seen.view(len(everyone), len(gradients), len(STATISTICS))
    found = []
    for at, (name, gradient) in enumerate(zip(watched.names, gradients, strict=True)):
        differing = differences(seen[:, at], tolerance(gradient))
        if differing:
            found.append(_described(name, seen[:, at], differing, circle))
    if found:
        raise DisagreementError(
            f"the losses differ between the ranks of {circle.name}: {'; '.join(found)}. Compute "
            "the loss in the same way on all TP and CP ranks, from the outputs alone; call "
            "zero_gradients() before going on (build(..., check_losses=False) leaves this check "
            "out)"
        )


def compare_own(gradients: Mapping[str, Tensor | None], everyone: Circle) -> None:
    """Compare the gradients of the caller's own parameters over the TP and CP ranks of each batch.

    A collective of all ranks: one gather for all parameters. A loss may depend on them beside the
    outputs, or on outputs without their graph, and ``compare`` sees nothing of that.

    Raises:
        DisagreementError: with the parameters, ranks and values, the same text on every rank.
    """
    batch = everyone.within
    if batch is None or len(batch.ranks) == 1 or not gradients:
        return
    mine = torch.cat(
        [statistics(_rows(gradient)).to(everyone.device) for gradient in gradients.values()]
    )
    rows = agreement.gather(mine, everyone).cpu()
    seen = rows.view(-1, len(batch.ranks), len(gradients), len(STATISTICS))
    found = []
    for at, (name, gradient) in enumerate(gradients.items()):
        for index, one in enumerate(seen[:, :, at]):
            differing = differences(one, tolerance(gradient))
            if differing:
                places = everyone.ranks[index * len(batch.ranks) :][: len(batch.ranks)]
                found.append(f"that of {name} has {_by_place(one, differing, places)}")
    if found:
        raise DisagreementError(
            "the gradients of the caller's own parameters differ between the ranks of a batch: "
            f"{'; '.join(found)}. Each TP and CP rank must compute the whole gradient, from the "
            "same outputs in the same way; call zero_gradients() before going on "
            "(build(..., check_losses=False) leaves this check out)"
        )


def _rows(gradient: Tensor | None) -> Tensor | None:
    """The same with a first dimension, and dense: an embedding of the caller's may be sparse."""
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense if dense.dim() else dense.reshape(1)


def statistics(gradient: Tensor | None, *, local: bool = False) -> Tensor:
    """``STATISTICS`` of one gradient, float64 [7]; zeros where there is none.

    The projections are r^T G R with fixed random numbers: they show what leaves sum and norm alone,
    such as rows in another order. Of a ``local`` gradient, presence alone.
    """
    if gradient is None or local:
        nothing = torch.zeros(len(STATISTICS), dtype=torch.float64)
        nothing[0] = gradient is not None
        return nothing
    flat = gradient.reshape(len(gradient), math.prod(gradient.shape[1:]))
    dtype, device = working_dtype(flat.dtype), flat.device
    columns = _random(flat.shape[1], 1, dtype, device)
    rows = _random(flat.shape[0], 2, dtype, device)
    total = torch.zeros(2 + PROJECTIONS, dtype=torch.float64, device=device)
    step = max(1, _CHUNK // max(1, flat.shape[1]))
    for start in range(0, len(flat), step):
        part = flat[start : start + step].to(dtype)
        total[0] += part.sum(dtype=torch.float64)
        total[1] += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        projected = (part @ columns) * rows[start : start + step]
        total[2:] += projected.sum(0, dtype=torch.float64)
    total[1] = total[1].sqrt()
    return torch.cat((total.new_ones(1), total))


def tolerance(gradient: Tensor | None) -> float:
    """How far replicas may differ, relative to the norm.

    Some ulp for each element that may be off by itself; never as much as 1e-4 in float32 or 1e-6 in
    float64, which no rounding of one computation explains.
    """
    if gradient is None:
        return 0.0
    ulp = torch.finfo(gradient.dtype).eps
    most = {torch.float64: 3e-7, torch.float32: 3e-5}.get(gradient.dtype, 0.05)
    return min(8 * ulp * math.sqrt(max(1, gradient.numel())), most)


def differences(seen: Tensor, tolerance: float) -> list[int]:
    """Which statistics [ranks, 7] differ over the ranks; NaN is equal to NaN alone."""
    if not same_presence(seen):
        return [0]
    norm, values = seen[:, 2:3], seen[:, 1:]
    first = values[:1]
    # A sum of equal signs is larger than the norm, and so is its rounding.
    scale = torch.maximum(norm.abs(), values.abs()).amax(dim=0)
    equal = (values == first) | (values.isnan() & first.isnan())
    apart = (values - first).abs()
    # An infinity is apart from every number, whatever tolerance it allows itself.
    near = (apart <= tolerance * scale) & apart.isfinite()
    return (1 + torch.nonzero(~(equal | near).all(dim=0)).flatten()).tolist()


def same_presence(seen: Tensor) -> bool:
    """Whether all ranks have a gradient, or none."""
    return bool((seen[:, 0] == seen[0, 0]).all())


def differentiable(output: ForwardOutput) -> dict[str, Tensor]:
    """The tensors in ``output`` that carry a graph, by name: "logits", "top_k.values"."""
    found = {}
    for field in fields(output):
        value = getattr(output, field.name)
        name, tensor = field.name, value
        if hasattr(value, "_fields"):
            name, tensor = f"{name}.values", value.values
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            found[name] = tensor
    return found


def put_back(output: ForwardOutput, tensors: dict[str, Tensor]) -> ForwardOutput:
    """``output`` with ``tensors`` in place of those that ``differentiable`` names."""
    changed: dict[str, Any] = {}
    for name, tensor in tensors.items():
        field, _, inner = name.partition(".")
        changed[field] = getattr(output, field)._replace(**{inner: tensor}) if inner else tensor
    return replace(output, **changed)


def _described(name: str, seen: Tensor, differing: list[int], circle: Circle) -> str:
    return f"the gradient that reached {name} has {_by_place(seen, differing, circle.ranks)}"


def _by_place(seen: Tensor, differing: list[int], places: Sequence[str]) -> str:
    ranks = []
    for place, row in zip(places, seen, strict=True):
        if not row[0]:
            ranks.append(f"none on {place}")
            continue
        # Sum and norm always, so that a reader can tell a scale from a shuffle.
        shown = dict.fromkeys([1, 2, *(at for at in differing if at > 2)][:3])
        words = ", ".join(f"{STATISTICS[at]} {row[at].item():.12g}" for at in shown)
        ranks.append(f"{words} on {place}")
    return "; ".join(ranks)


@lru_cache(maxsize=16)
def _random(count: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers [count, PROJECTIONS], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, PROJECTIONS, generator=generator, dtype=torch.float32)
    return numbers.to(device=device, dtype=dtype)
