"""LoRA slots: outputs, gradients and files of adapters as PEFT has them on one device."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from cases.material import AGAINST_ORACLE, TOPOLOGIES, make_request, requests, spread
from subjects.types import TARGETS, ForwardOutput

if TYPE_CHECKING:
    from pathlib import Path

    from cases.conftest import Adapter, BuildTrainer
    from cases.material import Request
    from shardproof import Rank
    from subjects.protocol import Placement, Trainer

_OPTIONS: dict[str, Any] = {
    **AGAINST_ORACLE,
    "requires": [*AGAINST_ORACLE["requires"], "peft>=0.18"],  # type: ignore[misc]
}
pytestmark = pytest.mark.parity(*TOPOLOGIES, **_OPTIONS)
_FEWER = pytest.mark.parity("dp2xcp2", "tp2xcp2", **_OPTIONS)
_EITHER_SHARING = pytest.mark.parity(*TOPOLOGIES, **_OPTIONS, reference_ignores=["sharing"])

# Odd ranks, of which none divides another; scales that no mistake makes equal.
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"rank": 5, "alpha": 7, "targets": TARGETS, "seed": 1},
    "narrow": {
        "rank": 3,
        "alpha": 10.5,
        "targets": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
        "rslora": True,
        "seed": 2,
    },
    "twin": {"rank": 5, "alpha": 3, "targets": TARGETS, "seed": 3},
    "head": {"rank": 3, "alpha": 2, "targets": ("lm_head",), "seed": 4},
}


def _load(trainer: Trainer, adapter: Adapter, *names: str) -> None:
    for name in names:
        trainer.load_slot(name, adapter(name, **ADAPTERS[name]))


def _loss(output: ForwardOutput, request: Request) -> Tensor:
    """Of log-probabilities and states, with unequal weights of rows."""
    weights = request.weights
    loss = torch.zeros((), dtype=weights.dtype)
    if output.target_logprobs is not None:
        loss = loss - (output.target_logprobs * weights).sum()
    if output.hidden_states is not None:
        loss = loss + (spread(output.hidden_states) * weights).sum()
    return loss


def _scored(trainer: Trainer, request: Request, slot: str | None) -> ForwardOutput:
    return trainer.forward(
        request.ask(target_tokens=request.targets, hidden_states=True, slot=slot)
    )


def _of_slots(trainer: Trainer, *slots: str) -> Iterator[tuple[str, Tensor | None, Placement]]:
    """Gradients of the factors of ``slots``, or of all slots."""
    for name, gradient, placement in trainer.named_gradients():
        owner, slash, _ = name.partition("/")
        if slash and (not slots or owner in slots):
            yield name, gradient, placement


@_EITHER_SHARING
def test_outputs_of_slots(rank: Rank, trainer: Trainer, adapter: Adapter) -> None:
    """A forward is that of its own slot: a delta left out, or another slot's, shows here.

    Two slots differ in rank, alpha, scale and targets, and the bare model runs beside them.
    """
    _load(trainer, adapter, "wide", "narrow")
    for request in rank.split(requests(rank)):
        for slot in ("wide", None, "narrow"):
            output = trainer.forward(
                request.ask(
                    target_tokens=request.targets,
                    top_k=3,
                    logits=True,
                    hidden_states=True,
                    slot=slot,
                )
            )
            name = f"{request.name}.{slot or 'bare'}"
            assert output.top_k is not None
            rank.observe(f"{name}.hidden_states", output.hidden_states)
            rank.observe(f"{name}.logprobs", output.target_logprobs)
            rank.observe(f"{name}.logits", output.logits)
            rank.observe(f"{name}.top_values", output.top_k.values)


@_EITHER_SHARING
def test_gradients_of_slots(rank: Rank, trainer: Trainer, adapter: Adapter) -> None:
    """Factors are summed over CP and DP, and over TP where each rank saw its own rows alone.

    All forwards come before all backwards, so that a slot chosen late takes another's gradient.
    """
    _load(trainer, adapter, "wide", "narrow")
    for request in rank.split(requests(rank, 3)):
        outputs = [_scored(trainer, request, slot) for slot in ("narrow", None, "wide")]
        for weight, output in enumerate(outputs, start=1):
            (_loss(output, request) * weight).backward()
    rank.observe_gradients(trainer.named_gradients())


def test_slots_in_any_order(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """What ran before leaves nothing behind: a slot gives the same whenever it runs."""
    trainer = build(sharing="full")
    _load(trainer, adapter, "wide", "twin")
    orders: list[list[str | None]] = [
        ["wide", "twin", None],
        [None, "twin", "wide"],
        ["twin", "wide", "wide", None, "twin"],
    ]
    for request in rank.split(requests(rank)):
        seen: dict[str, Tensor] = {}
        for number, order in enumerate(orders):
            for at, slot in enumerate(order):
                name = f"{request.name}.{slot or 'bare'}"
                states = trainer.forward(request.ask(hidden_states=True, slot=slot)).hidden_states
                assert states is not None
                if name not in seen:
                    seen[name] = states
                    rank.observe(name, states)
                else:
                    changed = states - seen[name]
                    rank.observe(f"{name}.changed_in_{number}_{at}", changed, zero=True)


def test_gradients_stay_in_their_slot(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """A slot that did not run has no gradient, and one that ran has its own alone.

    The slots have equal shapes, so that nothing but values tells them apart.
    """
    trainer = build()
    _load(trainer, adapter, "wide", "twin")
    for number, used in enumerate([("wide",), ("twin",), ("wide", "twin"), (None,)]):
        trainer.zero_gradients()
        for request in rank.split(requests(rank)):
            outputs = [_scored(trainer, request, slot) for slot in used]
            torch.stack([_loss(output, request) for output in outputs]).sum().backward()
        rank.observe_gradients(_of_slots(trainer), prefix=f"step{number}")


def test_bare_model_beside_slots(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """Slots that don't run change nothing of the model's own gradients; an empty shard neither."""
    trainer = build(sharing="full", plan="empty")
    _load(trainer, adapter, "wide")
    for request in rank.split(requests(rank)):
        _loss(_scored(trainer, request, None), request).backward()
    rank.observe_gradients(trainer.named_gradients())


def test_each_target_alone(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """One slot for each target: the delta goes to its own part of a fused layer, and no other."""
    trainer = build(plan="empty")
    for number, target in enumerate(TARGETS):
        options = {"rank": 3, "alpha": 5, "targets": (target,), "seed": 10 + number}
        trainer.load_slot(target, adapter(target, **options))
    trainer.freeze("base")
    for request in rank.split([make_request(rank, name, [(3, 6), (3, 10)]) for name in "ab"]):
        for target in TARGETS:
            output = _scored(trainer, request, target)
            rank.observe(f"{request.name}.{target}.logprobs", output.target_logprobs)
            _loss(output, request).backward()
    rank.observe_gradients(_of_slots(trainer))


def test_ranks_with_slots_of_their_own(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """Under DP one rank runs one slot alone, another the other, and the third input nobody's."""
    trainer = build(sharing="full")
    _load(trainer, adapter, "wide", "narrow", "twin")
    for request, slot in rank.split(list(zip(requests(rank), ("wide", "narrow"), strict=True))):
        _loss(_scored(trainer, request, slot), request).backward()
    rank.observe_gradients(trainer.named_gradients())


def test_head_of_tied_embeddings(
    rank: Rank, build: BuildTrainer, checkpoint: Callable[..., Path], adapter: Adapter
) -> None:
    """An adapter of the head alone, where its matrix is the embeddings' and its vocabulary odd.

    That matrix is the decoder's: freezing the head leaves it as it was.
    """
    checkpoint("tiny", tied=True)
    trainer = build(tied=True)
    _load(trainer, adapter, "head")
    trainer.freeze("head")
    for request in rank.split(requests(rank)):
        output = trainer.forward(
            request.ask(target_tokens=request.targets, top_k=4, logits=True, slot="head")
        )
        assert output.top_k is not None
        assert output.logits is not None
        rank.observe(f"{request.name}.logits", output.logits)
        rank.observe(f"{request.name}.top_tokens", output.top_k.tokens)
        top = output.top_k.values.square().sum()
        (_loss(output, request) + top + output.logits.square().mean()).backward()
    rank.observe_gradients(trainer.named_gradients())


def test_slots_trained_alone(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """With a frozen model the gradient still passes through every layer to every factor."""
    trainer = build(sharing="full")
    _load(trainer, adapter, "wide")
    trainer.freeze("base")
    for request in rank.split(requests(rank)):
        _loss(_scored(trainer, request, "wide"), request).backward()
    rank.observe_gradients(trainer.named_gradients())


@pytest.mark.parity("dp2xtp2xcp2", **_OPTIONS)
def test_slots_on_all_axes(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """Eight ranks: a reduction over a wrong pair of axes shows where all three have several."""
    trainer = build(sharing="full")
    _load(trainer, adapter, "wide", "narrow")
    for request in rank.split(requests(rank, 3)):
        for slot in ("wide", "narrow"):
            output = _scored(trainer, request, slot)
            rank.observe(f"{request.name}.{slot}.logprobs", output.target_logprobs)
            _loss(output, request).backward()
    rank.observe_gradients(trainer.named_gradients())


def test_added_slot(rank: Rank, build: BuildTrainer) -> None:
    """A fresh slot changes nothing while its B is zero, and then learns in B alone.

    Without a factory A is drawn within 1 / sqrt(in). The factory runs on the first rank, and every
    rank gets its slice of what it gave there.
    """
    trainer = build()

    def factory(name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.zeros(shape, dtype=torch.float32)
        if name.endswith("lora_A"):
            values.normal_(0.0, shape[1] ** -0.5, generator=rank.generator(name))
        return values

    trainer.add_slot("new", rank=3, alpha=5.0, targets=("v_proj", "down_proj"), factory=factory)
    trainer.add_slot("drawn", rank=2)
    assert trainer.slots == ("new", "drawn")
    for name, parameter, _ in trainer.named_parameters():
        if name.startswith("drawn/") and name.endswith("q_proj.lora_A"):
            bound, a = parameter.shape[1] ** -0.5, parameter.detach().abs()
            limits = {"within": bool(a.max() <= bound), "spread": bool(a.std() > bound / 8)}
            rank.observe(f"{name}.limits", limits)
    for request in rank.split(requests(rank)):
        bare = trainer.forward(request.ask(hidden_states=True, no_grad=True)).hidden_states
        for slot in trainer.slots:
            output = _scored(trainer, request, slot)
            assert bare is not None
            assert output.hidden_states is not None
            changed = output.hidden_states.detach() - bare
            rank.observe(f"{request.name}.{slot}_changed", changed, zero=True)
            if slot == "new":
                _loss(output, request).backward()
    for name, gradient, placement in _of_slots(trainer, "new"):
        assert gradient is not None
        shard: Any = placement.get("shard")
        rank.observe(name, gradient, shard=shard, zero=name.endswith("lora_A"))


def test_load_change_and_restore(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """A snapshot is a copy: it comes back bit for bit after the slot was changed in place.

    What the slot owns besides is parted with. Refused are ranks that were given other values, a
    backward that comes after the change, and a snapshot of a slot with another alpha.
    """
    trainer = build(sharing="full")
    _load(trainer, adapter, "wide", "narrow")
    owned = trainer.buffer("owned", lambda: torch.ones(3), slot="wide")
    snapshot = trainer.snapshot_slot("wide")
    late = trainer.forward(requests(rank)[0].ask(hidden_states=True, slot="wide")).hidden_states
    assert late is not None
    with torch.no_grad():
        for _, parameter, _ in trainer.named_parameters():
            parameter.mul_(-0.75)

    def run(step: str) -> None:
        for request in rank.split(requests(rank)):
            for slot in trainer.slots:
                states = trainer.forward(request.ask(hidden_states=True, slot=slot)).hidden_states
                rank.observe(f"{step}.{request.name}.{slot}", states)

    run("changed")
    if not rank.is_reference:
        last = int(rank.index == rank.world_size - 1)
        values = {name: value + last for name, value in snapshot.values.items()}
        with pytest.raises(ValueError, match="different things"):
            trainer.restore_slot("wide", replace(snapshot, values=values))
        with pytest.raises(RuntimeError, match="of slot 'wide' was changed in place"):
            late.sum().backward()
        # Two files of one configuration.
        files = [adapter("wide", **ADAPTERS["wide"]), rank.case_dir / f"own-{rank.topology.name}"]
        trainer.save_slot("wide", files[1])
        with pytest.raises(ValueError, match="contents is"):
            trainer.load_slot("wide", files[last])
    trainer.restore_slot("wide", snapshot)
    if not rank.is_reference:
        with pytest.raises(RuntimeError, match="was used after"):
            owned.sum()
    for name, parameter, placement in trainer.named_parameters():
        if name.startswith("wide/"):
            shard: Any = placement.get("shard")
            rank.observe(f"restored.{name}", parameter.detach(), shard=shard, exact=True)
    run("restored")
    trainer.load_slot("narrow", adapter("twin", **ADAPTERS["twin"]))
    if not rank.is_reference:
        with pytest.raises(ValueError, match="the snapshot is of"):
            trainer.restore_slot("narrow", snapshot)
    run("replaced")
    trainer.remove_slot("wide")
    assert trainer.slots == ("narrow",)
    run("removed")


@_FEWER
def test_gradients_and_moments_of_a_slot(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """A slot that is restored keeps both, one that is loaded anew has neither.

    The optimizer forgets the one before at its next step.
    """
    trainer = build(sharing="full")
    _load(trainer, adapter, "wide", "twin")
    optimizer = trainer.optimizer("sgd", lr=0.01, momentum=0.7)
    for request in rank.split(requests(rank)):
        for slot in trainer.slots:
            _loss(_scored(trainer, request, slot), request).backward()
    optimizer.step()
    trainer.restore_slot("wide", trainer.snapshot_slot("wide"))
    factor = "twin/model.layers.0.self_attn.q_proj.lora_A"
    before = ref({name: value for name, value, _ in trainer.named_parameters()}[factor])
    _load(trainer, adapter, "twin")
    rank.observe_gradients(_of_slots(trainer))
    for name, moment, placement in optimizer.moments():
        rank.observe(f"moment.{name}", moment, **placement)  # type: ignore[arg-type]
    optimizer.step()
    # PEFT may keep what it likes; of the trainer nothing holds the parameters that are gone.
    gc.collect()
    rank.observe("lives_on", before() is not None and not rank.is_reference)


def test_saved_files(rank: Rank, build: BuildTrainer, adapter: Adapter) -> None:
    """The files are those that PEFT writes, whole: every tensor, and what their numbers mean.

    A file that holds one rank's slices, or zeros for those of others, shows in its own tensor.
    """
    from safetensors.torch import load_file

    trainer = build()
    _load(trainer, adapter, "wide", "narrow")
    with torch.no_grad():
        for _, parameter, _ in trainer.named_parameters():
            parameter.mul_(1.25)
    # The reference is run again and under noise at the same time, each time with its own files.
    where = f"reference{os.getpid()}" if rank.is_reference else rank.topology.name
    for name in ("wide", "narrow"):
        directory = rank.case_dir / f"saved-{where}-{name}"
        trainer.save_slot(name, directory)
        found = load_file(directory / "adapter_model.safetensors")
        for key, value in sorted(found.items()):
            assert value.dtype == rank.dtype
            rank.observe(f"{name}.file.{key}", value)
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        rank.observe(
            f"{name}.config",
            {
                "r": config["r"],
                "alpha": config["lora_alpha"],
                "rslora": config["use_rslora"],
                "targets": [target in config["target_modules"] for target in TARGETS],
            },
        )
        trainer.load_slot("again", directory)
        for request in rank.split(requests(rank)):
            states = trainer.forward(request.ask(hidden_states=True, slot="again")).hidden_states
            rank.observe(f"{name}.{request.name}.again", states)
