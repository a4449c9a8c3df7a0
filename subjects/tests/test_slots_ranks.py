"""Slots on four ranks: files cross topologies, and no rank changes its slots alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from subjects.tests import worlds
from subjects.types import TARGETS

# For grad = rank + 1, what rank 0 gets: of a factor that TP replicates, and of a slice.
RULES = {
    "dp2": (3.0, 3.0),
    "tp2": (3.0, 1.0),
    "cp2": (3.0, 3.0),
    "tp2xcp2": (10.0, 4.0),
    "dp2xcp2": (10.0, 10.0),
}


@pytest.mark.slow
def test_four_ranks(alone: worlds.TestRank, tmp_path: Path) -> None:
    """One world for all of it: starting four processes costs more than what they do."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    from oracles.adapters import write_adapter
    from oracles.checkpoints import tiny_checkpoint
    from oracles.transformers_oracle import TransformersTrainer

    checkpoint = tiny_checkpoint(tmp_path / "checkpoint")
    write_adapter(tmp_path / "adapter", checkpoint, rank=5, alpha=7)
    oracle = TransformersTrainer(checkpoint, worlds.TestRank(coordinates={}, groups={}))
    oracle.load_slot("a", tmp_path / "adapter")
    torch.save(_outputs(oracle), tmp_path / "expected")
    with_head_copy(tmp_path, oracle.model.lm_head.weight)
    worlds.spawn(body, tmp_path, ranks=4)
    # What four ranks saved, where nothing is cut.
    from subjects.trainer import TrainerRank

    trainer = TrainerRank.build(checkpoint, alone)
    trainer.load_slot("a", tmp_path / "saved")
    expected = torch.load(tmp_path / "expected")
    torch.testing.assert_close(_outputs(trainer), expected, rtol=1e-12, atol=1e-12)


def with_head_copy(directory: Path, head: torch.Tensor) -> None:
    """The adapter as PEFT writes it where it saves the head that an lm_head's factors adapt."""
    shutil.copytree(directory / "adapter", directory / "with head")
    file = directory / "with head" / "adapter_model.safetensors"
    tensors = load_file(file)
    copied = head.detach().to(torch.float32).clone()
    save_file({**tensors, "base_model.model.lm_head.base_layer.weight": copied}, file)


def _outputs(trainer: Any) -> torch.Tensor:
    from subjects.types import ForwardInput

    documents = [[5, 6, 7, 130, 8], [9, 10, 11, 12, 13, 14]]
    output = trainer.forward(ForwardInput(documents, hidden_states=True, logits=True, slot="a"))
    assert output.hidden_states is not None
    assert output.logits is not None
    return torch.cat([output.hidden_states, output.logits], dim=1).detach()


def _build(directory: Path, name: str) -> tuple[Any, Any]:
    from subjects.trainer import TrainerRank

    rank = worlds.make_rank(name)
    worlds.make_parallel_state(rank)
    return TrainerRank.build(directory / "checkpoint", rank), rank


def body(directory: Path) -> None:
    rules()
    expected = torch.load(directory / "expected")
    saver, _ = _build(directory, "tp2xcp2")
    saver.load_slot("a", directory / "adapter")
    torch.testing.assert_close(_outputs(saver), expected, rtol=1e-12, atol=1e-12)
    saver.save_slot("a", directory / "saved")
    for name in ("dp2xcp2", "dp2xtp2", "tp2xcp2"):
        trainer, _ = _build(directory, name)
        trainer.load_slot("a", directory / "saved")
        torch.testing.assert_close(_outputs(trainer), expected, rtol=1e-12, atol=1e-12)
        # Each TP rank compares the copy of its own rows of the head.
        trainer.load_slot("a", directory / "with head")
        torch.testing.assert_close(_outputs(trainer), expected, rtol=1e-12, atol=1e-12)
    whole(directory)
    snapshots(directory)
    mixtures(directory)
    late_backwards(directory)
    disagreements(directory)


def rules() -> None:
    from subjects.trainer import lora, reductions, slots

    replicated = lora.Factor(name="a", shape=(2, 2), dim=None)
    sliced = lora.Factor(name="b", shape=(2, 2), dim=0)
    for name, expected in RULES.items():
        rank = worlds.make_rank(name)
        groups = reductions.Groups(rank.group("tp"), rank.group("cp"), rank.group("dp"))
        size = groups.tp.size() * groups.cp.size() * groups.dp.size()
        here = float(dist.get_rank() % size + 1)
        found = tuple(
            slots.reduce_factor(torch.tensor([here]), factor, groups).item()
            for factor in (replicated, sliced)
        )
        if here == 1.0:
            assert found == expected, name


def whole(directory: Path) -> None:
    """The saved file is the one that was read, in the dtype of the run."""
    from safetensors.torch import load_file

    read = load_file(directory / "adapter" / "adapter_model.safetensors")
    saved = load_file(directory / "saved" / "adapter_model.safetensors")
    assert saved.keys() == read.keys()
    for name, value in saved.items():
        assert value.dtype == torch.float64
        assert value.equal(read[name].double()), name


def snapshots(directory: Path) -> None:
    """Each rank's own slices come back."""
    trainer, rank = _build(directory, "tp2xcp2")
    trainer.load_slot("a", directory / "adapter")
    before = {name: value.detach().clone() for name, value, _ in trainer.named_parameters()}
    # ceil(131 / 2) rows of the head on the first tensor-parallel rank, what is left on the last.
    assert len(before["a/lm_head.lora_B"]) == 66 - rank.coordinates["tp"]
    snapshot = trainer.snapshot_slot("a")
    with torch.no_grad():
        for _, value, _ in trainer.named_parameters():
            value.zero_()
    trainer.restore_slot("a", snapshot)
    for name, value, _ in trainer.named_parameters():
        assert value.equal(before[name])


def mixtures(directory: Path) -> None:
    """Ranks whose snapshots hold other values; of a slice, those of its TP coordinate alone."""
    # Of rank 3 (tp=1, cp=1) and, for the last, of the whole tp=1: slices may differ over TP.
    for factor, odd, words in (
        ("q_proj.lora_A", (3,), r"q_proj\.lora_A is .*digest"),
        ("q_proj.lora_A", (1, 3), r"q_proj\.lora_A is .*digest"),
        ("q_proj.lora_B", (3,), r"cp=1, tp=1: .*q_proj\.lora_B is .*wrong on cp=0, tp=0 \|"),
        ("q_proj.lora_B", (1, 3), None),
    ):
        trainer, _ = _build(directory, "tp2xcp2")
        trainer.load_slot("a", directory / "adapter")
        before = {name: value.detach().clone() for name, value, _ in trainer.named_parameters()}
        snapshot = trainer.snapshot_slot("a")
        name = f"model.layers.1.self_attn.{factor}"
        if dist.get_rank() in odd:
            snapshot = replace(
                snapshot, values={**snapshot.values, name: snapshot.values[name] + 1}
            )
        if words is None:
            trainer.restore_slot("a", snapshot)
            continue
        with pytest.raises(ValueError, match=f"(?s)restore_slot.*{words}"):
            trainer.restore_slot("a", snapshot)
        assert all(value.equal(before[name]) for name, value, _ in trainer.named_parameters())


def late_backwards(directory: Path) -> None:
    """A slot that one rank changes, then one that all of them remove, before a backward."""
    from subjects.types import ForwardInput

    trainer, _ = _build(directory, "tp2xcp2")
    trainer.load_slot("a", directory / "adapter")
    request = ForwardInput([5, 6, 7, 130], [6, 7, 130, 5], slot="a")
    changed, removed = (trainer.forward(request).target_logprobs.sum() for _ in range(2))
    if dist.get_rank() == 3:
        with torch.no_grad():
            for _, value, _ in trainer.named_parameters():
                value.mul_(1)
    with pytest.raises(ValueError, match=r"(?s)out of step: the backward of forward 1 on .*slot"):
        changed.backward()
    trainer.remove_slot("a")
    trainer.add_slot("a", rank=2)
    with pytest.raises((ValueError, RuntimeError), match=r"forward 2 .*after slot 'a' was removed"):
        removed.backward()
    assert all(value.grad is None for _, value, _ in trainer.named_parameters())
    trainer.zero_gradients()
    trainer.forward(request).target_logprobs.sum().backward()


def disagreements(directory: Path) -> None:
    """One rank that is told something else, or can't, stops all of them; nothing is changed."""
    trainer, _ = _build(directory, "tp2xcp2")
    last = dist.get_rank() == 3

    def failing(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise ZeroDivisionError(f"{name} {shape}")

    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: trainer.add_slot("a", rank=3 if last else 2), "rank"),
        (lambda: trainer.add_slot("b" if last else "a", rank=2), "name"),
        (lambda: trainer.load_slot("a", directory / ("no" if last else "adapter")), "no adapter_"),
        (lambda: trainer.load_slot("a", 5 if last else directory / "adapter"), "directory is 5"),
        (lambda: trainer.add_slot("a", targets=None if last else TARGETS), "targets is None"),
        (lambda: trainer.add_slot("a", factory=5 if last else None), "factory is 5"),
        (lambda: trainer.optimizer("adamw", lr="x" if last else 1.0), "lr is 'x'"),
    ]
    for change, words in refused:
        with pytest.raises(ValueError, match=words):
            change()
        assert trainer.slots == ()
    # Only the first rank makes values; the others hear why it could not.
    by = "^add_slot, values from its factory, failed on the first rank, which does it for all: "
    by += "slot 'a': the "
    with pytest.raises(ValueError, match=f"{by}factory failed on .*lora_A: ZeroDivisionError"):
        trainer.add_slot("a", factory=failing)
    with pytest.raises(TypeError, match=f"{by}factory failed on .*lora_A: list expected"):
        trainer.add_slot("a", factory=list)
    made: list[str] = []

    def leaving(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        made.append(name)
        raise SystemExit(f"{shape}")

    def calling(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        made.append(name)
        list(trainer.named_gradients())
        return torch.zeros(shape)

    first = dist.get_rank() == 0
    with pytest.raises(SystemExit if first else ValueError, match=None if first else "SystemExit"):
        trainer.add_slot("a", factory=leaving)
    with pytest.raises(ValueError, match=r"out of step: .*named|out of step: .*reading"):
        trainer.add_slot("a", factory=calling)
    assert len(made) == 2 * first, "the first rank alone makes values"
    with pytest.raises(ValueError, match=r"factory is .*given on"):
        trainer.add_slot("a", factory=failing if last else None)
    assert trainer.slots == ()
    trainer.add_slot("a", rank=2)
    with pytest.raises(ValueError, match="does not exist"):
        trainer.remove_slot("b" if last else "a")
    snapshot = trainer.snapshot_slot("a")
    with pytest.raises(ValueError, match="snapshot is of type dict"):
        trainer.restore_slot("a", {} if last else snapshot)
    forms: list[tuple[Callable[[torch.Tensor], object], str]] = [
        (torch.Tensor.to_sparse, "sparse_coo, on cpu; expected a dense one"),
        (lambda value: value.to("meta"), "on meta; expected a dense one"),
        (lambda value: value * 1j, "tensor of torch.complex128"),
        (lambda _: None, "is None; expected a tensor"),
    ]
    for form, words in forms:
        values = {name: form(value) for name, value in snapshot.values.items()}
        odd: Any = replace(snapshot, values=values)
        with pytest.raises(ValueError, match=words):
            trainer.restore_slot("a", odd if last else snapshot)
    negated = {name: torch._neg_view(value) for name, value in snapshot.values.items()}
    negative = replace(snapshot, values=negated) if last else snapshot
    with pytest.raises(ValueError, match=r"is .*digest"):
        trainer.restore_slot("a", negative)
    with pytest.raises(ValueError, match="directory is None"):
        trainer.save_slot("a", None if last else directory / "unwritten")
    assert not (directory / "unwritten").exists()
    # Only the first rank writes; the others hear why it could not.
    (directory / "taken").touch()
    with pytest.raises(ValueError, match=r"failed on the first rank.*FileExistsError: .*taken"):
        trainer.save_slot("a", directory / "taken")
    assert trainer.slots == ("a",)
