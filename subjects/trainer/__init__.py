"""A context-parallel trainer on megatron-core; README.md beside this file says its contract."""

from __future__ import annotations

from subjects.trainer.admission import AdmissionError
from subjects.trainer.agreement import DisagreementError
from subjects.trainer.rank import TrainerRank
from subjects.types import ForwardInput, ForwardOutput, LocalLogits, MicroBatch, TopK

__all__ = [
    "AdmissionError",
    "DisagreementError",
    "ForwardInput",
    "ForwardOutput",
    "LocalLogits",
    "MicroBatch",
    "TopK",
    "TrainerRank",
]
