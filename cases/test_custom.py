"""Heads, probes and buffers of the caller's own: equal on all ranks, reduced by their own rule."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from cases.material import (
    AGAINST_ORACLE,
    TOPOLOGIES,
    factors,
    logprobs_of,
    normal,
    probe_weight,
    requests,
    spread,
    states_of,
)
from subjects.types import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable

    from cases.conftest import BuildTrainer
    from cases.material import Request
    from shardproof import Rank
    from subjects.protocol import Trainer

pytestmark = pytest.mark.parity(*TOPOLOGIES, **AGAINST_ORACLE)
_FEWER = pytest.mark.parity("dp2xcp2", "tp2xcp2", **AGAINST_ORACLE)

HIDDEN = 40


class Head(torch.nn.Module):
    """Two readings of the states with one matrix, which ``left`` and ``right`` share.

    ``scale`` is a buffer of floats and ``order`` one of integers; ``frozen`` is not trained.
    """

    scale: Tensor
    order: Tensor

    def __init__(self, values: Callable[..., Tensor]) -> None:
        super().__init__()
        self.left = torch.nn.Linear(HIDDEN, 3)
        self.right = torch.nn.Linear(HIDDEN, 3, bias=False)
        self.right.weight = self.left.weight
        self.read = torch.nn.Linear(3, 2)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        with torch.no_grad():
            for tensor in (*self.parameters(), self.scale):
                tensor.copy_(values(*tensor.shape))

    def forward(self, states: Tensor) -> Tensor:
        """States [n, 40] -> [n, 2]."""
        left = torch.tanh(self.left(states) * self.scale)
        mixed = left[:, self.order] * self.right(states.flip(1)) + self.frozen
        return self.read(mixed)  # type: ignore[no-any-return]


def _head(rank: Rank, name: str = "head") -> Head:
    """A head whose values are its own on every rank but the first, as from an unseeded start."""
    first = rank.is_reference or rank.index == 0
    generator = rank.generator(name if first else f"{name}/{rank.index}")
    return Head(lambda *shape: normal(rank, generator, *shape) / 6 + 0.3)


def _sparse(table: Tensor) -> torch.nn.Embedding:
    """An embedding whose gradients hold the rows that were read alone, each as often as it was."""
    return torch.nn.Embedding(len(table), table.shape[1], sparse=True, _weight=table.clone())


def _observe(rank: Rank, trainer: Trainer) -> None:
    """Gradients of all that is the caller's own, and of one weight that they reach through it.

    One device may leave those of a sparse embedding sparse.
    """
    own = {name for name, _, _ in trainer.named_parameters()}
    rank.observe_gradients(
        (name, None if gradient is None else gradient.to_dense(), placement)
        for name, gradient, placement in trainer.named_gradients()
        if name in own or name == "model.layers.0.input_layernorm.weight"
    )


def test_head_across_documents(rank: Rank, build: BuildTrainer) -> None:
    """A head's loss that no shard could compute: masked readings of all documents compete."""
    trainer = build(sharing="full")
    head = trainer.module("head", lambda: _head(rank))
    for request in rank.split(requests(rank, 3)):
        states = states_of(trainer.forward(request.ask(hidden_states=True)))
        read = head(states[1:][request.mask])
        scores = torch.stack([part.square().mean() for part in request.by_document(head(states))])
        loss = (read.logsumexp(0).square() * scores.softmax(0).max()).sum() + scores.logsumexp(0)
        rank.observe(f"{request.name}.read", read)
        rank.observe(f"{request.name}.loss", loss)
        loss.backward()
    _observe(rank, trainer)


def test_value_head(rank: Rank, build: BuildTrainer) -> None:
    """A clipped value loss beside a policy loss whose advantages are normalised over the batch."""
    trainer = build(sharing="full")
    value = trainer.module("value", lambda: _head(rank))
    offset = trainer.parameter("offset", lambda: torch.tensor(0.37))
    for request in rank.split(requests(rank)):
        output = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        asked = request.targets != IGNORED
        values = (value(states_of(output)).sum(1) + offset)[asked]
        returns, old = request.goals[asked, 0], request.goals[asked, 1] / 4
        advantages = returns - values.detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-3)
        clipped = old + (values - old).clamp(-0.5, 0.5)
        errors = torch.maximum((values - returns).square(), (clipped - returns).square())
        loss = 0.5 * errors.mean() - (logprobs_of(output)[asked] * advantages).mean()
        rank.observe(f"{request.name}.values", values)
        rank.observe(f"{request.name}.loss", loss)
        loss.backward()
    _observe(rank, trainer)


def test_head_used_twice(rank: Rank, build: BuildTrainer) -> None:
    """Two uses in one forward and one in the next add up once each, before one reduction.

    So do the rows of a sparse embedding that are read several times.
    """
    trainer = build(sharing="full")
    head = trainer.module("head", lambda: _head(rank))
    table = normal(rank, rank.generator("bins"), 8, 2)
    bins = trainer.module("bins", lambda: _sparse(table))
    for request in rank.split(requests(rank)):
        states = states_of(trainer.forward(request.ask(hidden_states=True)))
        again = head(states.flip(0) * head(states).mean())
        (head(states)[1:][request.mask].square().sum() + again.tanh().sum()).backward()
        second = trainer.forward(request.ask(target_tokens=request.targets, hidden_states=True))
        read = (head(states_of(second)) * bins(request.targets % 8)).sum(1)
        (read * logprobs_of(second)).sum().backward()
    _observe(rank, trainer)


def test_head_of_some_batches(rank: Rank, build: BuildTrainer) -> None:
    """A head that some data-parallel ranks use: the others have zeros to add, not nothing.

    A head that nobody uses has no gradient on any rank.
    """
    trainer = build(sharing="full")
    heads = {name: trainer.module(name, partial(_head, rank, name)) for name in ("a", "b")}
    trainer.parameter("unused", lambda: probe_weight(rank))
    for request in rank.split(requests(rank, 3)):
        states = states_of(trainer.forward(request.ask(hidden_states=True)))
        loss = spread(states).mean()
        if request.name != "third":
            head = heads["a" if request.name == "first" else "b"]
            loss = loss + head(states)[1:][request.mask].tanh().square().sum()
        loss.backward()
    _observe(rank, trainer)


def test_shared_parameter_has_one_gradient(rank: Rank, build: BuildTrainer) -> None:
    """A matrix under two names: the sum of both uses, once; untied copies have a part each."""
    trainer = build(sharing="full")
    head = trainer.module("head", lambda: _head(rank))
    for request in rank.split(requests(rank)):
        head(states_of(trainer.forward(request.ask(hidden_states=True)))).square().sum().backward()
    named = {name: gradient for name, gradient, _ in trainer.named_gradients()}
    names = [name for name in named if name.startswith("head.")]
    rank.observe("gradients", len(names))
    rank.observe("parameters", sum(1 for _ in trainer.named_parameters()))
    rank.observe("tied", head.right.weight is head.left.weight)
    rank.observe("grad", {name: named[name] for name in names})


@_FEWER
def test_values_of_the_first_rank(rank: Rank, build: BuildTrainer) -> None:
    """Parameters and buffers are the first rank's, in the dtype of the run."""
    trainer = build(sharing="full")
    first = rank.is_reference or rank.index == 0
    generator = rank.generator("values" if first else f"values/{rank.index}")

    def values() -> Tensor:
        # In float32 whatever the run is in: the trainer casts.
        return torch.randn(5, 3, generator=generator, dtype=torch.float32)

    def counts() -> Tensor:
        return torch.randint(1, 100, (5,), generator=generator)

    rank.observe("parameter", trainer.parameter("parameter", values).detach())
    rank.observe("buffer", trainer.buffer("buffer", values).detach())
    rank.observe("counts", trainer.buffer("counts", counts))
    rank.observe("module", dict(trainer.module("head", lambda: _head(rank)).state_dict()))


@_FEWER
def test_buffers_are_not_trained(rank: Rank, build: BuildTrainer) -> None:
    """A loss through buffers and an untrained parameter leaves these without a gradient."""
    trainer = build(sharing="full")
    head = trainer.module("head", lambda: _head(rank))
    shift = trainer.buffer("shift", lambda: probe_weight(rank)[:, 0])
    for request in rank.split(requests(rank)):
        states = states_of(trainer.forward(request.ask(hidden_states=True)))
        head(states + shift)[1:][request.mask].tanh().sum().backward()
    rank.observe("buffers", {"shift": shift.grad, "scale": head.scale.grad})
    _observe(rank, trainer)


def _read(
    rank: Rank, trainer: Trainer, request: Request, head: torch.nn.Module, slot: str | None
) -> None:
    states = states_of(trainer.forward(request.ask(hidden_states=True, slot=slot)))
    read = head(states)[1:][request.mask]
    rank.observe(f"{request.name}.{slot}.read", read)
    read.tanh().square().sum().backward()


def test_heads_of_slots(rank: Rank, build: BuildTrainer) -> None:
    """Each slot has a head of the same name: values and gradients keep apart."""
    trainer = build(sharing="full")
    heads: dict[str | None, torch.nn.Module] = {None: trainer.module("head", lambda: _head(rank))}
    for name in ("one", "two"):
        trainer.add_slot(name, rank=2, targets=("q_proj", "down_proj"), factory=factors(rank, name))
        heads[name] = trainer.module("head", partial(_head, rank, name), slot=name)
    for request in rank.split(requests(rank)):
        for slot in ("one", "two") if request.name == "first" else ("two", None):
            _read(rank, trainer, request, heads[slot], slot)
    _observe(rank, trainer)


@_FEWER
def test_head_of_a_replaced_slot_is_stale(rank: Rank, build: BuildTrainer) -> None:
    """A head that outlives its slot's weights is refused; the new one's is trained alone.

    So is a backward that comes after them. What another slot owns stays.
    """
    trainer = build(sharing="full")
    for name in ("one", "other"):
        trainer.add_slot(name, rank=2, targets=("q_proj",), factory=factors(rank, "old"))
    kept = trainer.parameter("kept", lambda: probe_weight(rank), slot="other")
    request = requests(rank)[0]
    loaded: list[Tensor] = []
    if not rank.is_reference:
        directory = rank.case_dir / f"saved-{rank.topology.name}"
        trainer.save_slot("one", directory)
        for _ in range(2):
            # The name is free again once the slot is loaded anew.
            loaded.append(trainer.buffer("loaded", lambda: torch.ones(HIDDEN, 1), slot="one"))
            trainer.load_slot("one", directory)
    old = trainer.module("head", lambda: _head(rank, "old"), slot="one")
    probe = trainer.parameter("probe", lambda: probe_weight(rank), slot="one")
    late: list[Tensor] = []
    if not rank.is_reference:
        states = states_of(trainer.forward(request.ask(hidden_states=True, slot="one")))
        late = [states, states.detach() @ probe]
    trainer.remove_slot("one")
    trainer.add_slot("one", rank=3, targets=("o_proj",), factory=factors(rank, "new"))
    head = trainer.module("head", lambda: _head(rank, "new"), slot="one")
    if not rank.is_reference:
        states = states_of(trainer.forward(request.ask(hidden_states=True, no_grad=True)))
        uses: list[Callable[[Tensor], Tensor]] = [
            old,
            old.left,
            lambda rows: rows @ probe,
            lambda rows: rows @ loaded[0],
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match="was used after"):
                use(states)
        for output in late:
            with pytest.raises(RuntimeError, match="after slot 'one' was removed"):
                output.sum().backward()
        trainer.zero_gradients()
    for one in rank.split(requests(rank)):
        _read(rank, trainer, one, head, "one")
        # Once for each batch: over dp it sums.
        (kept.square().sum() * 0.3).backward()
    _observe(rank, trainer)


WAYS: dict[str, Callable[[int], torch.nn.Module]] = {
    "shape": lambda at: torch.nn.Linear(4, 3 + at),
    "dtype": lambda at: torch.nn.Linear(4, 3, dtype=(torch.float32, torch.float64)[at]),
    "order": lambda at: torch.nn.ParameterDict(
        [(name, torch.ones(2)) for name in ("ab", "ba")[at]]
    ),
    "aliasing": lambda at: _tied(at == 1),
    "trainability": lambda at: torch.nn.Linear(4, 3).requires_grad_(at == 0),
    "kind": lambda at: (torch.nn.Tanh, torch.nn.ReLU)[at](),
    "failure": lambda at: torch.nn.Linear((4, -1)[at], 3),
}


def _tied(really: bool) -> torch.nn.Module:
    pair = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    if really:
        pair[1].weight = pair[0].weight
    return pair


@_FEWER
def test_ranks_that_make_different_heads_are_refused(rank: Rank, build: BuildTrainer) -> None:
    """On every rank, before anything is sent: nobody waits, and the name stays free.

    So is a head of which a rank has exchanged a parameter since, by the reduction and by a step
    that finds gradients reduced. A name that is taken is refused too.
    """
    trainer = build(sharing="full")
    if not rank.is_reference:
        last = int(rank.index == rank.world_size - 1)
        for way, make in WAYS.items():
            with pytest.raises(ValueError, match=r"different things|refused by some") as refused:
                trainer.module("head", partial(make, last))
            assert "head" in str(refused.value), way
    head = trainer.module("head", lambda: _head(rank))
    if not rank.is_reference:
        with pytest.raises(ValueError, match="the name 'head' is taken"):
            trainer.buffer("head", lambda: torch.ones(1))
        registered = head.read.weight
        for use in (lambda: list(trainer.named_gradients()), trainer.optimizer("sgd", lr=0.1).step):
            if last:
                head.read.weight = torch.nn.Parameter(torch.ones_like(registered))
            with pytest.raises(ValueError, match=r"'head\.read\.weight' is another.*Nothing was"):
                use()
            head.read.weight = registered
            list(trainer.named_gradients())
    rank.observe("values", dict(head.state_dict()))
