"""Negative controls: cases of this folder run with a fault in the trainer, and must fail.

Not collected with the cases; ``cases/tests/test_controls.py`` runs it and reads what it left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cases import test_gradients, test_metrics, test_outputs
from cases.material import TOPOLOGIES

if TYPE_CHECKING:
    from shardproof import Rank
    from subjects.protocol import Trainer

_NEEDS = {"megatron": True, "requires": ["megatron-core>=0.16", "transformers>=5"]}


@pytest.fixture(autouse=True)
def injected(rank: Rank, fault: str) -> Iterator[None]:
    """The fault is in on every rank, and never in the oracle."""
    if rank.is_reference:
        yield
        return
    from subjects.trainer import faults

    with faults.inject(fault):
        yield


@pytest.fixture
def sharing() -> str:
    """One packing is enough here."""
    return "none"


@pytest.mark.parity(*TOPOLOGIES, **_NEEDS)
@pytest.mark.parametrize(
    "fault",
    [
        "rank-local rows returned",
        "two rows of a shard swapped",
        "one row zeroed",
    ],
)
def test_hidden_states(rank: Rank, trainer: Trainer, fault: str) -> None:
    """What the states show."""
    del fault
    test_outputs.test_hidden_states(rank, trainer)


@pytest.mark.parity(*TOPOLOGIES, **_NEEDS)
@pytest.mark.parametrize("fault", ["document mask dropped for remote keys"])
def test_documents_do_not_see_each_other(rank: Rank, trainer: Trainer, fault: str) -> None:
    """A document mask dropped for remote keys: what leaks between documents shows."""
    del fault
    test_outputs.test_documents_do_not_see_each_other(rank, trainer)


@pytest.mark.parity(*TOPOLOGIES, **_NEEDS)
@pytest.mark.parametrize("fault", ["positions restarted per shard"])
def test_a_document_is_the_same_wherever_it_lies(rank: Rank, trainer: Trainer, fault: str) -> None:
    """Positions restarted in each shard: what twins show."""
    del fault
    test_outputs.test_a_document_is_the_same_wherever_it_lies(rank, trainer)


@pytest.mark.parity(*TOPOLOGIES, **_NEEDS)
@pytest.mark.parametrize("fault", ["labels shifted inside the shard"])
def test_targets_pick_from_their_own_logits(rank: Rank, trainer: Trainer, fault: str) -> None:
    """Labels shifted inside a shard: what log-probabilities beside logits show."""
    del fault
    test_outputs.test_targets_pick_from_their_own_logits(rank, trainer)


@pytest.mark.parity(*TOPOLOGIES, **_NEEDS)
@pytest.mark.parametrize(
    "fault", ["gather backward summed over cp", "gather backward divided by cp"]
)
def test_decoder_and_head_gradients(rank: Rank, trainer: Trainer, fault: str) -> None:
    """What the gradients of the model show."""
    del fault
    test_gradients.test_decoder_and_head_gradients(rank, trainer)


@pytest.mark.parity("tp2xcp2", "tp2", **_NEEDS)
@pytest.mark.parametrize("fault", ["q/k-norm gradient not summed over tp"])
def test_norm_gradients(rank: Rank, trainer: Trainer, fault: str) -> None:
    """What the gradients of weights that are replicated over TP show."""
    del fault
    test_gradients.test_decoder_and_head_gradients(rank, trainer)


@pytest.mark.parity(*TOPOLOGIES, **_NEEDS)
@pytest.mark.parametrize("fault", ["probe gradient summed over cp"])
def test_probe_gradient(rank: Rank, trainer: Trainer, fault: str) -> None:
    """What the gradient of a probe shows."""
    del fault
    test_gradients.test_probe_gradient(rank, trainer)


@pytest.mark.parity(*TOPOLOGIES, **_NEEDS)
@pytest.mark.parametrize("fault", ["dp_reduce including cp"])
def test_metrics_over_data_parallel_ranks(rank: Rank, trainer: Trainer, fault: str) -> None:
    """What the metrics show."""
    del fault
    test_metrics.test_metrics_over_data_parallel_ranks(rank, trainer)
