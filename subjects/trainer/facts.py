"""A request, what is trained and a plan, as facts that ranks can compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from subjects.token_ids import whole_number
from subjects.trainer.agreement import Fact
from subjects.trainer.plan import Plan
from subjects.types import ForwardInput


def request_facts(request: ForwardInput, *, prefix: str = "") -> dict[str, Fact]:
    """Every field of ``request`` by its name, whether gradients are on, and what autocast does.

    Tokens and targets count by what they mean, not by how they are nested.

    Raises:
        ValueError, TypeError: the request means nothing; see ``check_request``.
    """
    facts = {}
    for field in fields(request):
        if field.name == "input_tokens":
            fact = _tokens(request.documents())
        elif field.name == "target_tokens":
            fact = _targets(request.targets())
        else:
            given = getattr(request, field.name)
            # An integer of numpy is written otherwise than Python's own.
            number = whole_number(given)
            value = repr(given if number is None else number)
            fact = Fact(value.encode(), value)
        facts[prefix + field.name] = fact
    grad = str(torch.is_grad_enabled())
    facts[f"{prefix}torch.is_grad_enabled()"] = Fact(grad.encode(), grad)
    cast = autocast()
    facts[f"{prefix}torch.autocast"] = Fact(cast.encode(), cast)
    return facts


def autocast() -> str:
    """Which devices torch computes in another dtype on here, and in which."""
    active = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    told = [f"{torch.get_autocast_dtype(kind)} on {kind}" for kind in active]
    return ", ".join(told).replace("torch.", "") or "off"


def option_facts(options: Mapping[str, object]) -> dict[str, Fact]:
    """Every option by its name."""
    return {name: Fact(repr(one).encode(), repr(one)[:_LONGEST]) for name, one in options.items()}


def training_facts(trained: Mapping[str, bool]) -> dict[str, Fact]:
    """Which parameters are trained, by name; a reader is told those that are not."""
    frozen = [name for name, wanted in trained.items() if not wanted]
    shown = ", ".join(frozen[:_SHOWN]) or "nothing"
    more = f" and {len(frozen) - _SHOWN} more" if len(frozen) > _SHOWN else ""
    # Names hold no line feed, as they are those of attributes, files or callers.
    value = "\n".join(f"{int(wanted)}{name}" for name, wanted in trained.items())
    return {"what is frozen": Fact(value.encode(), shown + more)}


def plan_facts(plan: Plan) -> dict[str, Fact]:
    """Which rank computes which rows, in which order."""
    value = repr(plan.sizes).encode() + b"".join(_bytes(shard) for shard in plan.shards)
    return {"plan": Fact(value, f"shards of {plan.sizes} rows")}


_SHOWN, _LONGEST = 6, 80


def _tokens(documents: list[Tensor]) -> Fact:
    lengths = [len(document) for document in documents]
    value = repr(lengths).encode() + _bytes(torch.cat(documents))
    shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
    return Fact(value, f"{len(lengths)} documents of {shown} tokens")


def _targets(targets: Tensor | None) -> Fact:
    if targets is None:
        return Fact(b"", "None")
    shape = str(list(targets.shape))
    return Fact(shape.encode() + _bytes(targets), f"targets of shape {shape}")


def _bytes(values: Tensor) -> bytes:
    return values.cpu().contiguous().numpy().tobytes()
