"""A context-parallel trainer on megatron-core; README.md beside this file says its contract."""

from __future__ import annotations

from subjects.trainer.agreement import DisagreementError
from subjects.trainer.rank import TrainerRank
from subjects.types import ForwardInput, ForwardOutput, MicroBatch, TopK

__all__ = [
    "DisagreementError",
    "ForwardInput",
    "ForwardOutput",
    "MicroBatch",
    "TopK",
    "TrainerRank",
]
