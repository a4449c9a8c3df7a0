"""Gradients: what is trained, reduced once, by their names in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subjects.protocol import Placement
from subjects.trainer import agreement, facts, losses, reductions, slots
from subjects.trainer.agreement import Fact
from subjects.trainer.lora import Factor

if TYPE_CHECKING:
    from subjects.trainer.rank import TrainerRank

Stamps = dict[str, tuple[int, int]]


def reduce_once(trainer: TrainerRank, reduced: Stamps | None) -> Stamps:
    """Reduce every gradient over the ranks, in place, unless that was done; a collective.

    ``reduced`` are the stamps of an earlier reduction, None where there was none since gradients
    were zeroed. Returns those of this one. All ranks agree first on whether they were reduced, on
    what is trained, and that modules hold what was registered.

    Raises:
        ValueError: on every rank: a backward has added to gradients that were reduced, on any; or a
            module of the caller's holds other parameters than those registered.
        DisagreementError: ranks that train other parameters, or have reduced where others have
            not; or a caller's parameter whose gradients differ between the ranks of a batch.
    """
    rules = reducers(trainer)
    every = {name: parameter for name, (parameter, _) in rules.items()}

    def known() -> dict[str, Fact]:
        # What belonged to a slot that is gone has no stamp any more.
        if reduced is not None and not stamps(every).items() <= reduced.items():
            raise ValueError(
                "a backward has added to gradients that were reduced over the ranks already; "
                "call zero_gradients() between reading gradients and the next backward"
            )
        trainer.custom.check_modules()
        state = "not reduced yet" if reduced is None else "reduced"
        return {
            **facts.training_facts(trained(trainer)),
            "the state of gradients": Fact(state.encode(), state),
        }

    agreement.agree("reading or reducing gradients", known, trainer.world)
    if reduced is not None:
        return reduced
    if trainer.check_losses:
        losses.compare_own(
            {name: one.grad for name, one in trainer.custom.named_parameters()}, trainer.world
        )
    present = reductions.agree_on_presence(
        [parameter.grad for parameter in every.values()], trainer.groups, device=trainer.device
    )
    for (parameter, reduce), there in zip(rules.values(), present, strict=True):
        if not there:
            continue
        local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = reduce(dense(local).contiguous())
    return stamps(every)


def dense(gradient: Tensor) -> Tensor:
    """A gradient as it is reduced: a sparse embedding's has a row for each time one was read."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def trained(trainer: TrainerRank) -> dict[str, bool]:
    """Whether each parameter is trained, by the names of its gradients.

    Asked anew each time, since a caller may set ``requires_grad`` by hand.
    """
    return {
        **{name: one.requires_grad for name, one in trainer.weights.items()},
        **{name: one.requires_grad for name, one, _ in trainer.named_parameters()},
    }


def freeze(trainer: TrainerRank, part: str) -> None:
    """Take no gradients of a part of the model; see ``TrainerRank.freeze``."""

    def given() -> dict[str, Fact]:
        if part not in ("decoder", "head", "base"):
            raise ValueError(f"freeze: got {part!r}; expected 'decoder', 'head' or 'base'")
        return {"part": Fact(part.encode(), repr(part))}

    agreement.agree("freeze", given, trainer.world)
    for name, parameter in trainer.model.named_parameters():
        if part == "base" or name.startswith("output_layer.") == (part == "head"):
            parameter.requires_grad_(False)


def reducers(
    trainer: TrainerRank,
) -> dict[str, tuple[torch.nn.Parameter, Callable[[Tensor], Tensor]]]:
    """Each parameter by name, with the rule by which its gradient is reduced."""
    groups = trainer.groups

    def of_weight(name: str, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        over_tp = reductions.sum_over_tp(name, parameter)
        return lambda gradient: reductions.reduce_weight(gradient, groups, over_tp=over_tp)

    def of_factor(factor: Factor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: slots.reduce_factor(gradient, factor, groups)

    def of_custom(gradient: Tensor) -> Tensor:
        return reductions.reduce_custom(gradient, groups)

    return {
        **{name: (one, of_weight(name, one)) for name, one in trainer.model.named_parameters()},
        **{name: (one, of_factor(of)) for name, one, of in trainer.slot_table.named_factors()},
        **{name: (one, of_custom) for name, one in trainer.custom.named_parameters()},
    }


def by_name(trainer: TrainerRank) -> Iterator[tuple[str, Tensor | None, Placement]]:
    """Name, gradient and placement of the checkpoint's tensors, of slots and of custom parameters.

    Fused weights come apart into the checkpoint's tensors.
    """
    for name, parameter in trainer.model.named_parameters():
        layout = trainer.layouts[name]
        placement: Placement = {} if layout.dim is None else {"shard": {"tp": layout.dim}}
        pieces = (
            [None] * len(layout.names) if parameter.grad is None else layout.split(parameter.grad)
        )
        for tensor, piece in zip(layout.names, pieces, strict=True):
            yield tensor, piece, placement
    for name, parameter, placement in trainer.named_parameters():
        yield name, parameter.grad, placement


def stamps(parameters: Mapping[str, torch.nn.Parameter]) -> Stamps:
    """Identity and version of each gradient, which change when a backward adds to it."""
    return {
        name: (id(parameter.grad), parameter.grad._version)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
