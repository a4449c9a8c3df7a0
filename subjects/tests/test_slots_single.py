"""Slots on one rank: what they hold, what is refused, and whom they tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from oracles.adapters import write_adapter
from oracles.checkpoints import tiny_checkpoint
from oracles.transformers_oracle import TransformersTrainer
from subjects.trainer import ForwardInput, TrainerRank
from subjects.types import TARGETS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), checkpoint, rank=3, alpha=5)


@pytest.fixture
def trainer(alone: Any, checkpoint: Path) -> TrainerRank:
    return TrainerRank.build(checkpoint, alone, sharing="full")


def _states(trainer: Any, slot: str | None) -> Tensor:
    request = ForwardInput([5, 6, 7, 130], hidden_states=True, logits=True, slot=slot)
    output = trainer.forward(request)
    assert output.hidden_states is not None
    assert output.logits is not None
    return torch.cat([output.hidden_states, output.logits], dim=1)


def test_a_slot_is_pefts_adapter(
    trainer: TrainerRank, alone: Any, checkpoint: Path, adapter: Path
) -> None:
    oracle = TransformersTrainer(checkpoint, alone)
    for one in (trainer, oracle):
        one.load_slot("a", adapter)
    found, expected = _states(trainer, "a"), _states(oracle, "a")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    bare = _states(trainer, None)
    assert (found - bare).norm() > 0.1 * bare.norm()


def test_a_slot_that_is_not_there_is_named_with_those_that_are(
    trainer: TrainerRank, adapter: Path, tmp_path: Path
) -> None:
    trainer.load_slot("a", adapter)
    trainer.load_slot("b", adapter)
    snapshot = trainer.snapshot_slot("a")
    for use in (
        lambda: trainer.forward(ForwardInput([1], hidden_states=True, slot="c")),
        lambda: trainer.save_slot("c", tmp_path),
        lambda: trainer.snapshot_slot("c"),
        lambda: trainer.restore_slot("c", snapshot),
        lambda: trainer.remove_slot("c"),
    ):
        with pytest.raises(ValueError, match="slot 'c' does not exist; there are: 'a', 'b'"):
            use()
    trainer.remove_slot("a")
    assert trainer.slots == ("b",)
    trainer.remove_slot("b")
    with pytest.raises(ValueError, match="there are: none"):
        trainer.snapshot_slot("a")


@pytest.mark.parametrize("name", ["", "a/b", "a.b", 3, "x\ud800", "a\n"])
def test_names_that_could_not_be_part_of_a_gradients_are_refused(
    trainer: TrainerRank, adapter: Path, name: Any
) -> None:
    with pytest.raises(ValueError, match="slot name"):
        trainer.add_slot(name)
    with pytest.raises(ValueError, match="slot name"):
        trainer.load_slot(name, adapter)


def quantized(name: str, shape: tuple[int, ...]) -> Tensor:
    del name
    made: Tensor = torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)
    return made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": True}, "rank is True"),
        ({"rank": 2.0}, "rank is 2.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": 10**400}, "alpha is an integer of 1329 bits; expected a finite number"),
        ({"rank": 10**400}, "rank is an integer of 1329 bits; expected an integer"),
        ({"targets": ()}, "at least one"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
        ({"targets": ("embed_tokens",)}, "unknown"),
        ({"targets": "q_proj"}, "targets is 'q_proj'; expected a list or tuple of some of q_proj"),
        ({"factory": lambda *_: torch.ones(2, 2)}, r"returned shape \[2, 2\] for .*; expected"),
        ({"targets": None}, "targets is None; expected a list or tuple of some of q_proj"),
        ({"targets": (one for one in TARGETS)}, "targets is of type generator; expected a list"),
        ({"factory": 5}, r"factory is 5; expected a function \(name, shape\) -> tensor, or None"),
        ({"factory": list}, r"lora_A: list expected .* expected a function \(name, shape\)"),
        ({"factory": lambda: None}, r"lora_A: .*takes 0 .* expected a function \(name, shape\)"),
        ({"factory": lambda *_: [1.0]}, r"factory returned \[1\.0\] for .*lora_A; expected a func"),
        (
            {"factory": lambda _, s: torch.ones(s) * 1j},
            "lora_A has dtype torch.complex64; expected",
        ),
        ({"factory": lambda _, s: torch.ones(s).to_sparse()}, "lora_A lies on cpu as torch.sparse"),
        ({"factory": lambda _, s: torch.ones(s, device="meta")}, "lora_A lies on meta as"),
        ({"factory": quantized}, "lora_A is quantized; expected plain numbers"),
        ({"targets": np.array(["q_proj", "q_proj"])}, "each once"),
        ({"rank": 10**13}, r"no memory on cpu for its factors, [\d,]+ elements of torch\.float64"),
        ({"rank": 2**62}, r"no memory on cpu for its factors, [\d,]+ elements of torch\.float64"),
    ],
)
def test_slots_that_can_not_be_are_refused(
    trainer: TrainerRank, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        trainer.add_slot("a", **options)
    assert trainer.slots == ()
    trainer.add_slot("a")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda one: one.restore_slot("a", {}), "snapshot is of type dict; expected what snapshot"),
        (lambda one: one.restore_slot("a", None), "snapshot is None; expected what snapshot_slot"),
        (lambda one: one.load_slot("b", 5), "directory is 5; expected the path of a directory"),
        (lambda one: one.save_slot("a", None), "directory is None; expected the path of a direc"),
        (lambda one: one.save_slot(["a"], "x"), r"slot \['a'\] does not exist; there are: 'a'"),
        (lambda one: one.remove_slot({}), r"slot \{\} does not exist; there are: 'a'"),
    ],
)
def test_what_is_no_slot_snapshot_or_directory_is_told(
    trainer: TrainerRank, call: Any, words: str
) -> None:
    trainer.add_slot("a", rank=2)
    with pytest.raises((ValueError, TypeError), match=words):
        call(trainer)
    assert trainer.slots == ("a",)


def test_a_factorys_own_error_is_the_cause(trainer: TrainerRank) -> None:
    def factory(name: str, shape: tuple[int, ...]) -> Tensor:
        raise KeyError(name)

    with pytest.raises(
        ValueError, match=r"^slot 'a': the factory failed on .*lora_A: KeyError"
    ) as e:
        trainer.add_slot("a", factory=factory)
    assert isinstance(e.value.__cause__, ValueError)
    assert isinstance(e.value.__cause__.__cause__, KeyError)


def test_what_is_made_in_inference_mode_is_trained_outside(
    alone: Any, checkpoint: Path, adapter: Path
) -> None:
    request = ForwardInput([5, 6, 7, 130], hidden_states=True, slot="added")
    with torch.inference_mode():
        trainer = TrainerRank.build(checkpoint, alone)
        trainer.add_slot("added", factory=lambda _, shape: torch.ones(shape))
        trainer.load_slot("loaded", adapter)
        head = trainer.module("head", lambda: torch.nn.Linear(40, 1))
        probe = trainer.parameter("probe", lambda: torch.ones(1), slot="added")
        trainer.buffer("mean", lambda: torch.zeros(1))
        states = trainer.forward(request).hidden_states
        optimizer = trainer.optimizer("adamw", lr=0.1)
        trainer.restore_slot("added", trainer.snapshot_slot("added"))
    assert states is not None
    assert not states.requires_grad
    for _ in range(2):
        found = trainer.forward(request).hidden_states
        assert found is not None
        head(found).sum().backward()
        with torch.inference_mode():
            assert optimizer.step().stepped
            optimizer.load_state_dict(optimizer.state_dict())
        assert found.requires_grad
        trainer.zero_gradients()
    assert not any(value.is_inference() for _, value, _ in optimizer.moments())
    with pytest.raises(RuntimeError, match="slot 'added' was restored"):
        probe.sum()


def test_a_slot_is_not_added_twice(trainer: TrainerRank) -> None:
    trainer.add_slot("a", rank=2)
    with pytest.raises(ValueError, match=r"slot 'a' exists; remove_slot\('a'\)"):
        trainer.add_slot("a", rank=2)


def test_a_fresh_slot_is_drawn_from_the_seed_and_the_names(trainer: TrainerRank) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for name in ("a", "b"):
        trainer.add_slot(name, rank=4)
    assert torch.get_rng_state().equal(before)
    drawn = {name: value for name, value, _ in trainer.named_parameters()}
    for name, value in drawn.items():
        if name.endswith("lora_B"):
            assert not value.any()
            continue
        bound = value.shape[1] ** -0.5
        assert value.abs().max() <= bound
        assert value.std() > bound / 3
    first, second = (drawn[f"{name}/lm_head.lora_A"] for name in ("a", "b"))
    assert not first.equal(second)
    trainer.remove_slot("a")
    trainer.add_slot("a", rank=4)
    again = {name: value for name, value, _ in trainer.named_parameters()}
    assert again["a/lm_head.lora_A"].equal(first)
    torch.manual_seed(4)
    trainer.remove_slot("a")
    trainer.add_slot("a", rank=4)
    assert not {n: v for n, v, _ in trainer.named_parameters()}["a/lm_head.lora_A"].equal(first)


def test_another_models_adapter_is_refused_and_nothing_replaced(
    trainer: TrainerRank, adapter: Path, tmp_path: Path
) -> None:
    trainer.load_slot("a", adapter)
    before = _states(trainer, "a")
    deeper = tiny_checkpoint(tmp_path / "deeper", layers=3)
    for other, words in (
        (write_adapter(tmp_path / "other", deeper, rank=3, alpha=5), "model.layers.2"),
        (tmp_path / "nowhere", "no adapter_config.json"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            trainer.load_slot("a", other)
    assert _states(trainer, "a").equal(before)


def test_a_copy_of_the_head_must_be_the_checkpoints(
    trainer: TrainerRank, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    """PEFT saves the head of the base model beside its factors, unless told not to."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    head = load_file(checkpoint / "model.safetensors")["lm_head.weight"].clone()
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    name = "base_model.model.lm_head.base_layer.weight"
    save_file({**tensors, name: head}, tmp_path / "adapter_model.safetensors")
    trainer.load_slot("a", tmp_path)
    trainer.load_slot("b", adapter)
    assert _states(trainer, "a").equal(_states(trainer, "b"))
    head[130, 39] += 1
    save_file({**tensors, name: head}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="a head of its own"):
        trainer.load_slot("a", tmp_path)


def test_a_snapshot_fits_its_own_configuration_alone(trainer: TrainerRank) -> None:
    trainer.add_slot("a", rank=2, alpha=4)
    snapshot = trainer.snapshot_slot("a")
    for options in ({"rank": 3, "alpha": 4}, {"rank": 2, "alpha": 5}):
        trainer.remove_slot("a")
        trainer.add_slot("a", **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"snapshot is of .*rank=2, alpha=4\.0"):
            trainer.restore_slot("a", snapshot)


def test_restoring_keeps_the_parameters_and_their_gradients(
    trainer: TrainerRank, adapter: Path
) -> None:
    trainer.load_slot("a", adapter)
    _states(trainer, "a").square().sum().backward()
    held = {name: value for name, value, _ in trainer.named_parameters()}
    grads = {name: value.grad for name, value in held.items()}
    values = {name: value.detach().clone() for name, value in held.items()}
    snapshot = trainer.snapshot_slot("a")
    with torch.no_grad():
        for value in held.values():
            value.normal_()
    trainer.restore_slot("a", snapshot)
    for name, value, _ in trainer.named_parameters():
        assert value is held[name]
        assert value.equal(values[name])
        assert value.grad is grads[name]


def test_replacing_restoring_and_removing_are_told(trainer: TrainerRank, adapter: Path) -> None:
    told: list[tuple[str, str]] = []
    trainer.slot_table.on_replace.append(lambda *what: told.append(what))
    trainer.load_slot("a", adapter)
    trainer.add_slot("b")
    assert told == []
    trainer.load_slot("a", adapter)
    trainer.restore_slot("a", trainer.snapshot_slot("a"))
    trainer.remove_slot("b")
    assert told == [
        ("a", "slot 'a' was replaced"),
        ("a", "slot 'a' was restored"),
        ("b", "slot 'b' was removed"),
    ]


def test_gradients_of_what_left_are_gone(trainer: TrainerRank, adapter: Path) -> None:
    for name in ("a", "b"):
        trainer.load_slot(name, adapter)
        _states(trainer, name).square().sum().backward()
    trainer.load_slot("a", adapter)
    trainer.remove_slot("b")
    found = {name: value for name, value, _ in trainer.named_gradients() if "/" in name}
    assert found
    assert all(name.startswith("a/") and value is None for name, value in found.items())


def test_a_slot_replaced_between_two_readings_is_no_late_backward(
    trainer: TrainerRank, adapter: Path
) -> None:
    trainer.load_slot("a", adapter)
    _states(trainer, "a").square().sum().backward()
    list(trainer.named_gradients())
    trainer.load_slot("a", adapter)
    assert {name: value for name, value, _ in trainer.named_gradients()}["a/lm_head.lora_A"] is None


def test_placements_and_names(trainer: TrainerRank) -> None:
    trainer.add_slot("a", rank=2, targets=("o_proj", "q_proj", "lm_head"))
    placed = {name: placement for name, _, placement in trainer.named_parameters()}
    layer = "a/model.layers.1.self_attn"
    assert placed[f"{layer}.q_proj.lora_A"] == {}
    assert placed[f"{layer}.q_proj.lora_B"] == {"shard": {"tp": 0}}
    assert placed[f"{layer}.o_proj.lora_A"] == {"shard": {"tp": 1}}
    assert placed[f"{layer}.o_proj.lora_B"] == {}
    assert placed["a/lm_head.lora_B"] == {"shard": {"tp": 0}}
    assert len(placed) == 2 * (2 * 2 + 1)


def test_a_caller_may_not_take_the_name_of_a_factor(trainer: TrainerRank) -> None:
    trainer.add_slot("a", rank=2)
    with pytest.raises(ValueError, match="taken"):
        trainer.parameter("lm_head.lora_A", lambda: torch.ones(2), slot="a")


def test_a_frozen_model_leaves_slots_to_train(trainer: TrainerRank, adapter: Path) -> None:
    trainer.load_slot("a", adapter)
    trainer.freeze("base")
    _states(trainer, "a").square().sum().backward()
    with_gradient = {name for name, value, _ in trainer.named_gradients() if value is not None}
    assert with_gradient == {name for name, _, _ in trainer.named_parameters()}
    with pytest.raises(ValueError, match="'decoder', 'head' or 'base'"):
        trainer.freeze("slots")  # type: ignore[arg-type]


def test_saved_files_are_those_of_peft(
    trainer: TrainerRank, alone: Any, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    """The keys that PEFT would read otherwise too: its file differs in nothing that ours sets."""
    oracle = TransformersTrainer(checkpoint, alone)
    found = []
    for name, one in (("ours", trainer), ("pefts", oracle)):
        one.load_slot("a", adapter)
        one.save_slot("a", tmp_path / name)
        found.append(json.loads((tmp_path / name / "adapter_config.json").read_text()))
    ours, pefts = found
    assert set(ours.pop("target_modules")) == set(pefts.pop("target_modules")) == set(TARGETS)
    assert ours == {key: pefts[key] for key in ours}


def test_exchanged_parameters_are_neither_reduced_nor_stepped(trainer: TrainerRank) -> None:
    head = trainer.module("head", lambda: torch.nn.Linear(40, 1))
    optimizer = trainer.optimizer("sgd", lr=0.1)
    registered = head.weight
    words = "module 'head' of the trainer: parameter 'head.weight' is another tensor"
    for use in (lambda: list(trainer.named_gradients()), optimizer.step):
        # The second time gradients are reduced already.
        head.weight = torch.nn.Parameter(torch.ones(1, 40, dtype=torch.float64))
        with pytest.raises(ValueError, match=words):
            use()
        head.weight = registered
        list(trainer.named_gradients())
    assert optimizer.step().stepped


CHANGES: dict[str, Callable[[TrainerRank, Path], object]] = {
    "slot 'a' was removed": lambda trainer, _: trainer.remove_slot("a"),
    "slot 'a' was replaced": lambda trainer, adapter: trainer.load_slot("a", adapter),
    r"layers\.0\.self_attn\.q_proj\.lora_A of slot 'a' was changed in place": (
        lambda trainer, _: trainer.restore_slot("a", trainer.snapshot_slot("a"))
    ),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_slot_that_changes_between_forward_and_backward_is_named(
    trainer: TrainerRank, adapter: Path, words: str
) -> None:
    trainer.load_slot("a", adapter)
    trainer.load_slot("b", adapter)
    states, others, bare = (_states(trainer, slot) for slot in ("a", "b", None))
    CHANGES[words](trainer, adapter)
    others.sum().backward()
    bare.sum().backward()
    with pytest.raises(RuntimeError, match=rf"backward of forward 1 came after .*{words}.*Finish"):
        states.sum().backward()
    assert all(p.grad is None for name, p, _ in trainer.named_parameters() if name[:2] == "a/")


@pytest.mark.parametrize("at", [0, 5, -1])
def test_whichever_factor_is_changed_is_named(trainer: TrainerRank, adapter: Path, at: int) -> None:
    trainer.load_slot("a", adapter)
    states = _states(trainer, "a")
    factors = {name: value for name, value, _ in trainer.named_parameters() if name[:2] == "a/"}
    name = list(factors)[at]
    with torch.no_grad():
        factors[name].mul_(1)
    words = rf"{name.removeprefix('a/')} of slot 'a' was changed in place"
    with pytest.raises(RuntimeError, match=words.replace(".", r"\.")):
        states.sum().backward()


@pytest.mark.parametrize("trained", [True, False])
def test_a_part_that_goes_between_forward_and_backward_is_named(
    trainer: TrainerRank, adapter: Path, *, trained: bool
) -> None:
    trainer.load_slot("a", adapter)
    trainer.load_slot("b", adapter)
    probe = trainer.parameter(
        "w", lambda: torch.nn.Parameter(torch.ones(40), requires_grad=trained), slot="a"
    )
    other = trainer.parameter("w", lambda: torch.ones(40), slot="b")
    probe.requires_grad_()
    states = _states(trainer, None)[:, :40]
    read, also = states.detach() @ probe, states @ other
    trainer.restore_slot("a", trainer.snapshot_slot("a"))
    also.sum().backward()
    with pytest.raises(RuntimeError, match="'w' of slot 'a' was given a gradient after"):
        read.sum().backward()
