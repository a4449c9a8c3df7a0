"""One forward of a trainer: from a request that its batch agrees on to the outputs of all rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subjects.trainer import (
    admission,
    attention,
    batches,
    facts,
    gradients,
    heads,
    losses,
    packing,
    plan,
    rope,
)
from subjects.trainer.agreement import Fact
from subjects.trainer.head_rows import HeadWeights, Place
from subjects.trainer.plan import LocalRows
from subjects.types import ForwardInput, ForwardOutput, check_request

if TYPE_CHECKING:
    from subjects.trainer.rank import TrainerRank


def run(trainer: TrainerRank, request: ForwardInput) -> ForwardOutput:
    """Answer ``request``; see ``TrainerRank.forward``."""
    found: list[LocalRows] = []

    def more(known: ForwardInput) -> dict[str, Fact]:
        # A plan of the caller's may fail, or differ: found before any row is sent by it.
        found.append(local_rows(trainer, known))
        return {
            **facts.training_facts(gradients.trained(trainer)),
            **facts.plan_facts(found[0].plan),
        }

    request = batches.agree_on_request(request, partial(check, trainer), trainer.batch, more)
    local = found[0]
    with torch.set_grad_enabled(with_grad(request)):
        head, place = head_of(trainer, request, local)
        admission.admit(request, head, place, limit=trainer.memory_limit)
        with trainer.slot_table.use(request.slot):
            hidden = decode(trainer, local)
        output = heads.outputs(request, hidden, head, place)
    trainer.forwards += 1
    return losses.watch(
        output,
        number=trainer.forwards,
        circle=trainer.batch,
        compare=trainer.check_losses,
        changed=trainer.slot_table.changes(request.slot),
    )


def check(trainer: TrainerRank, request: ForwardInput) -> None:
    """Refuse what this rank can't run, before any collective.

    Raises:
        ValueError, TypeError: as ``TrainerRank.forward``.
    """
    check_request(request, vocabulary=trainer.architecture.vocabulary)
    if request.slot is not None:
        trainer.slot_table.get(request.slot)
    if with_grad(request) and trainer.reduced is not None:
        raise ValueError(
            "the gradients have been reduced over the ranks, and what a further backward adds "
            "would not be; call zero_gradients() before the next forward, or pass no_grad"
        )


def with_grad(request: ForwardInput) -> bool:
    """Whether a graph is kept."""
    return torch.is_grad_enabled() and not request.no_grad


def local_rows(trainer: TrainerRank, request: ForwardInput) -> LocalRows:
    """The documents as packed rows, and those of them that are this rank's by the plan."""
    groups = trainer.groups
    packed = packing.pack(request.documents(), sharing=trainer.sharing).to(trainer.device)
    work = plan.row_work(packed, linear=plan.linear_work(trainer.architecture))
    made = plan.make_plan(trainer.policy, work=work, cp=groups.cp.size())
    return plan.local_rows(packed, made, cp_rank=groups.cp.rank(), tp=groups.tp.size())


def decode(trainer: TrainerRank, local: LocalRows) -> Tensor:
    """This rank's rows -> hidden states [p / tp, 1, H] after the last norm."""
    tokens = plan.padded(plan.tokens_for(local), local)[None, :]
    positions = plan.padded(plan.positions_for(local), local)
    embedded = trainer.model.embedding(input_ids=tokens, position_ids=None)
    hidden: Tensor = trainer.model.decoder(
        hidden_states=embedded,
        attention_mask=None,
        rotary_pos_emb=rope.angles(
            positions,
            head_size=trainer.architecture.head_size,
            base=trainer.architecture.rope_base,
            dtype=trainer.dtype,
        ),
        packed_seq_params=attention.attention_rows(
            local,
            trainer.attention_options,
            cp_rank=trainer.groups.cp.rank(),
            group=trainer.groups.cp,
        ),
    )
    return hidden


def head_of(
    trainer: TrainerRank, request: ForwardInput, local: LocalRows
) -> tuple[HeadWeights, Place]:
    """The weights of the head for the request's slot, and the rows and columns it is asked for."""
    model = trainer.model
    owner = model.embedding.word_embeddings if trainer.architecture.tied else model.output_layer
    factors = trainer.slot_table.head_factors(request.slot) or ()
    return HeadWeights(owner.weight, *factors), Place(
        local=local, part=trainer.part, groups=trainer.groups, head_rows=trainer.head_rows
    )
