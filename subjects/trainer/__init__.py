"""A context-parallel trainer on megatron-core; README.md beside this file says its contract."""

from __future__ import annotations

from subjects.trainer.rank import TrainerRank
from subjects.types import ForwardInput, ForwardOutput, TopK

__all__ = ["ForwardInput", "ForwardOutput", "TopK", "TrainerRank"]
