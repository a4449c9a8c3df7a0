"""Documents, targets and goals of the cases: odd unequal lengths, shared prefixes, masks.

Everything depends on the seed of the run and on names alone, so every rank of every topology and
the reference have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof import Rank
from subjects.types import IGNORED, ForwardInput, ForwardOutput

TOPOLOGIES = ("cp2", "cp4", "dp2xcp2", "tp2xcp2")
VOCABULARY = 131
AGAINST_ORACLE = {
    "megatron": True,
    "full_precision": True,
    "requires": ["megatron-core>=0.16", "transformers>=5"],
    "divisor_of": {"tp": 2},
}
"""What cases of the tiny model have in common, for the parity marker."""


@dataclass(frozen=True)
class Request:
    """One batch: its name, its documents, and what a case reads from its outputs.

    ``targets`` are [T], -100 at some positions; ``mask`` [T - 1] chooses rows of
    ``hidden_states[1:]``; ``goals`` [T, 3] are what the probe is to read.
    """

    name: str
    documents: tuple[Tensor, ...]
    targets: Tensor
    mask: Tensor
    goals: Tensor

    @property
    def length(self) -> int:
        """Source positions T."""
        return sum(map(len, self.documents))

    @property
    def weights(self) -> Tensor:
        """Unequal weights [T] of the rows, so that no two can change places unseen."""
        return 0.5 + self.goals[:, 0].abs()

    def ask(self, *, target_tokens: Tensor | None = None, **wanted: object) -> ForwardInput:
        """The forward of these documents."""
        return ForwardInput(list(self.documents), target_tokens, **wanted)  # type: ignore[arg-type]

    def by_document(self, rows: Tensor) -> list[Tensor]:
        """Rows [T, ...] document by document."""
        return list(rows.split([len(document) for document in self.documents]))


def make_request(rank: Rank, name: str, lengths: Sequence[tuple[int, int]]) -> Request:
    """Documents of (shared, own) tokens: each begins with that much of one common prefix."""
    generator = rank.generator(f"request/{name}")
    prefix = _tokens(max(shared for shared, _ in lengths), generator)
    documents = tuple(
        torch.cat([prefix[:shared], _tokens(own, generator)]) for shared, own in lengths
    )
    return request_of(rank, name, documents, generator)


def request_of(
    rank: Rank,
    name: str,
    documents: tuple[Tensor, ...],
    generator: torch.Generator | None = None,
) -> Request:
    """The same of documents of one's own."""
    generator = generator or rank.generator(f"request/{name}")
    total = sum(map(len, documents))
    targets = _tokens(total, generator)
    targets[_uniform(generator, total) < 0.3] = IGNORED
    return Request(
        name,
        documents,
        targets,
        _uniform(generator, total - 1) < 0.4,
        normal(rank, generator, total, 3),
    )


def requests(rank: Rank, count: int = 2) -> list[Request]:
    """Batches of different sizes; with three, data-parallel ranks have unequally many as well.

    At least two documents straddle shards in every plan, and prefixes branch at two depths.
    """
    return [
        make_request(rank, "first", [(11, 6), (11, 14), (5, 8)]),
        make_request(rank, "second", [(7, 12), (0, 23)]),
        make_request(rank, "third", [(9, 2), (9, 11)]),
    ][:count]


def multi_targets(rank: Rank, request: Request) -> Tensor:
    """Three targets for each position [T, 3], some of them -100, also single ones of a row."""
    generator = rank.generator(f"multi/{request.name}")
    targets = _tokens(3 * request.length, generator).view(request.length, 3)
    targets[_uniform(generator, request.length, 3) < 0.3] = IGNORED
    return targets


def probe_weight(rank: Rank) -> Tensor:
    """A probe [hidden 40, 3]."""
    return normal(rank, rank.generator("probe"), 40, 3) / 6


def factors(rank: Rank, slot: str) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Values of a slot's factors, all of them other than zero."""

    def values(factor: str, shape: tuple[int, ...]) -> Tensor:
        return normal(rank, rank.generator(f"{slot}/{factor}"), *shape) / 5

    return values


def logprobs_of(output: ForwardOutput) -> Tensor:
    """Log-probabilities that were asked for."""
    assert output.target_logprobs is not None
    return output.target_logprobs


def states_of(output: ForwardOutput) -> Tensor:
    """Hidden states that were asked for."""
    assert output.hidden_states is not None
    return output.hidden_states


def spread(states: Tensor) -> Tensor:
    """[rows]: the mean square of each row's distance from one.

    The final norm holds a mean square alone near one: its gradient would be mostly rounding.
    """
    return (states - 1).square().mean(-1)


def weighted_loss(request: Request, output: ForwardOutput) -> Tensor:
    """The negated sum of log-probabilities with unequal weights, divided by no count."""
    return -(logprobs_of(output) * request.weights).sum()


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float32)


def normal(rank: Rank, generator: torch.Generator, *shape: int) -> Tensor:
    """Drawn in float32 whatever the run's dtype, so that runs of two dtypes have one truth."""
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(rank.dtype)


def _tokens(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=generator)
