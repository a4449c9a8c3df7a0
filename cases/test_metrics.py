"""Numbers that a training loop logs, reduced over data parallelism alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cases.material import AGAINST_ORACLE, TOPOLOGIES, requests
from subjects.types import IGNORED

if TYPE_CHECKING:
    from shardproof import Rank
    from subjects.protocol import Trainer

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE, reference_ignores=["sharing"])


def test_metrics_over_data_parallel_ranks(rank: Rank, trainer: Trainer) -> None:
    """A sum of losses over a sum of counts; a reduction that took CP in would count twice."""
    total = torch.zeros((), dtype=rank.dtype)
    rows = torch.zeros(40, dtype=rank.dtype)
    count, longest = 0, 0
    for request in rank.split(requests(rank, 3)):
        output = trainer.forward(
            request.ask(target_tokens=request.targets, hidden_states=True, no_grad=True)
        )
        assert output.target_logprobs is not None
        assert output.hidden_states is not None
        total = total - output.target_logprobs.sum()
        rows = rows + output.hidden_states.sum(0)
        count += int((request.targets != IGNORED).sum())
        longest = max(longest, request.length)
    rank.observe("loss", trainer.dp_reduce(total) / trainer.dp_reduce(count))
    rank.observe("tokens", trainer.dp_reduce(count))
    rank.observe("longest", trainer.dp_reduce(longest, "max"))
    mine = rows.clone()
    rank.observe("states", trainer.dp_reduce(rows))
    rank.observe("own states are left alone", rows.equal(mine))
