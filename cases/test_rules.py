"""The rules of reduction, for gradients and values that differ from rank to rank by hand."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from cases.material import AGAINST_ORACLE

if TYPE_CHECKING:
    from cases.conftest import BuildTrainer
    from shardproof import Rank

TABLE = {
    "dp2": {"custom": 3.0, "metric": 3.0, "replicated": 3.0, "sharded": 3.0},
    "tp2": {"custom": 1.5, "metric": 1.0, "replicated": 3.0, "sharded": 1.0},
    "cp2": {"custom": 1.5, "metric": 1.0, "replicated": 3.0, "sharded": 3.0},
    "tp2xcp2": {"custom": 2.5, "metric": 1.0, "replicated": 10.0, "sharded": 4.0},
    "dp2xcp2": {"custom": 5.0, "metric": 4.0, "replicated": 10.0, "sharded": 10.0},
    "dp2xtp2xcp2": {"custom": 9.0, "metric": 6.0, "replicated": 36.0, "sharded": 16.0},
}
"""With rank + 1 on every rank, what rank 0 gets."""


def rules(rank: Rank) -> dict[str, float]:
    """The same for this rank of any topology, in words of what is summed over what."""
    tp, cp, dp = (rank.size(axis) for axis in ("tp", "cp", "dp"))
    number = {
        (at_tp, at_cp, at_dp): 1 + at_tp + tp * (at_cp + cp * at_dp)
        for at_tp, at_cp, at_dp in product(range(tp), range(cp), range(dp))
    }
    here = (rank.coordinates["tp"], rank.coordinates["cp"], rank.coordinates["dp"])
    assert number[here] == rank.index + 1
    batches = [number[here[0], here[1], at] for at in range(dp)]
    found = {
        "custom": sum(number.values()) / (tp * cp),
        "metric": sum(batches),
        "max": max(batches),
        "min": min(batches),
        "replicated": sum(number.values()),
        "sharded": sum(value for (at_tp, _, _), value in number.items() if at_tp == here[0]),
    }
    for rule, value in TABLE.get(rank.topology.name, {}).items():
        assert rank.index > 0 or found[rule] == value, (rule, found[rule])
    return found


def weight_of(rank: Rank, name: str) -> float:
    """A number for each factor, in sixty-fourths."""
    return int(torch.randint(1, 200, (), generator=rank.generator(name))) / 64


@pytest.mark.parity(
    "dp2", "tp2", "cp2", "tp2xcp2", "dp2xcp2", "dp2xtp2xcp2", **AGAINST_ORACLE, timeout=60
)
def test_rule_table(rank: Rank, build: BuildTrainer) -> None:
    """A sum for an average, an axis too many or too few: each rank gets what the rule says.

    Everything is divided by the rule's number, so that every rank of every topology observes what
    one device observes.
    """
    # Replicas never differ so but by hand, and are refused otherwise.
    trainer = build(only={"check_losses": False})
    rule, mine = rules(rank), rank.index + 1
    # In sixty-fourths, so that small multiples are exact and replicas agree bit for bit.
    drawn = torch.randint(1, 200, (7,), generator=rank.generator("pattern"))
    pattern = drawn.to(rank.dtype) / 64
    custom = trainer.parameter("custom", lambda: pattern)
    custom.grad = pattern * mine
    trainer.add_slot("low", rank=3, targets=("k_proj", "down_proj", "lm_head"))
    for name, factor, _ in trainer.named_parameters():
        if name.startswith("low/"):
            factor.grad = torch.full_like(factor, weight_of(rank, name)) * mine
    kinds = set()
    for name, gradient, placement in trainer.named_gradients():
        if name != "custom" and not name.startswith("low/"):
            continue
        assert gradient is not None
        kind = "sharded" if placement else "replicated"
        kind = "custom" if name == "custom" else kind
        kinds.add(kind)
        rank.observe_gradients([(name, gradient / rule[kind], placement)], prefix="reduced")
    assert rank.size("tp") == 1 or kinds == {"custom", "sharded", "replicated"}

    rank.observe("tensor", trainer.dp_reduce(pattern * mine) / rule["metric"])
    rank.observe("float", trainer.dp_reduce(0.375 * mine) / rule["metric"])
    count = trainer.dp_reduce(17 * mine)
    rank.observe("count", count - 17 * (int(rule["metric"]) - 1))
    rank.observe("count is an int", int(isinstance(count, int)))
    large = trainer.dp_reduce((1 << 56) + mine) - (1 << 56) * rank.size("dp")
    rank.observe("a count that no float holds", large - int(rule["metric"]) + 5)
    low = trainer.dp_reduce(2**32 - 1) - (2**32 - 1) * rank.size("dp")
    rank.observe("a count that carries", low + 5)
    rank.observe("max", trainer.dp_reduce(pattern.abs() * mine, "max") / rule["max"])
    rank.observe("min", trainer.dp_reduce(0.375 * mine, "min") / rule["min"])
    rank.observe("max of counts", trainer.dp_reduce(mine, "max") - int(rule["max"]) + 5)
    at, last = rank.coordinates["dp"], rank.size("dp") - 1
    for which, bad in (("first", at == 0), ("last", at == last)):
        value = math.nan if bad else 1.0
        lost = [op for op in ("max", "min") if not math.isnan(trainer.dp_reduce(value, op))]
        rank.observe(f"operations that pass on the NaN of the {which} rank", 2 - len(lost))
