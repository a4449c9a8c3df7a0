"""From a checkpoint and options to this rank's trainer, in steps that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from subjects.protocol import RankContext
from subjects.trainer import admission, agreement, checks, facts, heads, shims, weights
from subjects.trainer.agreement import Fact
from subjects.trainer.architecture import Architecture, read_architecture
from subjects.trainer.attention import AttentionOptions, Exchange
from subjects.trainer.layer_spec import build_model
from subjects.trainer.packing import Sharing
from subjects.trainer.plan import PlanPolicy, check_policy
from subjects.trainer.reductions import Groups
from subjects.trainer.slot_values import directory_of

if TYPE_CHECKING:
    from subjects.trainer.rank import TrainerRank


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``TrainerRank.build`` was told, of which nothing is checked yet."""

    sharing: Sharing
    plan: PlanPolicy
    attention: Exchange
    attention_block: int
    gather_limit: int
    head_rows: int
    check_losses: bool
    memory_limit: int | None
    layers: int | None


Make = Callable[[torch.nn.Module, Architecture, RankContext, Options], "TrainerRank"]


def build(
    make: Make, checkpoint_dir: str | Path, rank: RankContext, options: Options
) -> TrainerRank:
    """What ``make`` returns for the model, with this rank's slices loaded; a collective of all.

    Raises:
        Exception: as ``TrainerRank.build``, on every rank.
    """
    groups = Groups(rank.group("tp"), rank.group("cp"), rank.group("dp"))
    world = agreement.world(groups, rank.device)
    read: list[Architecture] = []

    def given() -> dict[str, Fact]:
        check(options)
        directory = directory_of(checkpoint_dir)
        architecture = read_architecture(directory, layers=options.layers)
        architecture.check_tp(groups.tp.size())
        shims.check_parallel_state(rank)
        read.append(architecture)
        return told(options, architecture, rank)

    agreement.agree("build", given, world)
    made: list[TrainerRank] = []

    def load() -> dict[str, Fact]:
        shims.place_buffers(rank.device)
        shims.quiet_rng()
        model = build_model(
            read[0],
            tp=groups.tp.size(),
            cp=groups.cp.size(),
            dtype=rank.dtype,
            device=rank.device,
        )
        trainer = make(model, read[0], rank, options)
        part = (groups.tp.rank(), groups.tp.size())
        weights.load(model, weights.Checkpoint(Path(checkpoint_dir)), trainer.layouts, part)
        trainer.slot_table.base_model = str(checkpoint_dir)
        made.append(trainer)
        return {}

    # A rank that can't read its slices must not leave the others in their first forward.
    agreement.agree("build, weights", load, world)
    return made[0]


def check(options: Options) -> None:
    """Refuse options that no topology could run with.

    Raises:
        ValueError, TypeError: with the option.
    """
    checks.one_of("sharing", options.sharing, get_args(Sharing))
    check_policy(options.plan)
    checks.truth("check_losses", options.check_losses)
    heads.check_rows(options.head_rows)
    admission.check_limit(options.memory_limit)
    attention_options(options)


def attention_options(options: Options) -> AttentionOptions:
    """Those of attention.

    Raises:
        ValueError, TypeError: as ``AttentionOptions``.
    """
    return AttentionOptions(options.attention, options.attention_block, options.gather_limit)


def told(options: Options, architecture: Architecture, rank: RankContext) -> dict[str, Fact]:
    """What all ranks must have been told alike."""
    return facts.option_facts(
        {
            **vars(architecture),
            "dtype": rank.dtype,
            "sharing": options.sharing,
            "plan": "a function" if callable(options.plan) else options.plan,
            "attention": options.attention,
            "attention_block": options.attention_block,
            "gather_limit": options.gather_limit,
            "head_rows": options.head_rows,
            "check_losses": options.check_losses,
            # The least limit counts, whatever it is; on a CPU none is no limit.
            "memory_limit is None": options.memory_limit is None and rank.device.type == "cpu",
        }
    )
