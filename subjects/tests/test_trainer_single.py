"""The trainer on one rank: against transformers, its states, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from oracles.checkpoints import tiny_checkpoint
from oracles.transformers_oracle import TransformersTrainer
from subjects.tests import scenario
from subjects.trainer import ForwardInput, TrainerRank, allgather, ring
from subjects.trainer.packing import Sharing


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), tied=request.param)


@pytest.fixture
def trainer(alone: Any, checkpoint: Path) -> TrainerRank:
    return TrainerRank.build(checkpoint, alone, sharing="full")


@pytest.mark.parametrize("sharing", ["none", "full"])
def test_outputs_and_gradients_are_those_of_transformers(
    alone: Any, checkpoint: Path, sharing: Sharing
) -> None:
    batches = list(enumerate(scenario.requests()))
    oracle = TransformersTrainer(checkpoint, alone)
    expected = scenario.step(oracle, batches)
    expected |= {f"grad {n}": value for n, (value, _) in scenario.gradients(oracle).items()}
    trainer = TrainerRank.build(checkpoint, alone, sharing=sharing)
    found = scenario.worst(
        scenario.step(trainer, batches), scenario.gradients(trainer), expected, tp=(0, 1)
    )
    assert found.keys() == expected.keys()
    assert max(found.values()) < 1e-13, found


@pytest.mark.parametrize(
    ("limit", "taken"), [(0, "ring"), (10**6, "allgather"), (None, "allgather")]
)
def test_keys_and_values_come_the_way_that_the_limit_says(
    alone: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, taken: str
) -> None:
    """Values are the same either way, so that no comparison can tell."""
    ways: list[str] = []
    for module in (allgather, ring):

        def noted(
            *args: Any, module: ModuleType = module, forward: Any = module.forward, **kw: Any
        ) -> Any:
            ways.append(module.__name__.rpartition(".")[2])
            return forward(*args, **kw)

        monkeypatch.setattr(module, "forward", noted)
    given: dict[str, Any] = {} if limit is None else {"gather_limit": limit}
    trainer = TrainerRank.build(checkpoint, alone, **given)
    trainer.forward(ForwardInput([1, 2, 3], hidden_states=True))
    assert set(ways) == {taken}


def test_a_reduction_of_no_gradients_is_one(trainer: TrainerRank) -> None:
    for _, parameter, _ in trainer.named_parameters():
        parameter.requires_grad_(False)
    trainer.reduce_gradients()
    request = ForwardInput([1, 2], hidden_states=True)
    with pytest.raises(ValueError, match="the gradients have been reduced over the ranks"):
        trainer.forward(request)
    trainer.zero_gradients()
    trainer.forward(request)


def test_sharing_computes_fewer_rows_and_gives_the_same(alone: Any, checkpoint: Path) -> None:
    request = scenario.requests()[0]
    outputs = [
        TrainerRank.build(checkpoint, alone, sharing=sharing).forward(request).hidden_states
        for sharing in ("none", "full")
    ]
    assert outputs[0] is not None
    assert outputs[1] is not None
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-13, atol=1e-13)


def test_garbage_in_the_padded_vocabulary_changes_nothing(
    alone: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor-parallel rank whose slice is part padding, seen from one rank."""
    from subjects.trainer.architecture import Architecture

    request = ForwardInput([1, 2, 130], [3, 130, -100], top_k=3, logits=True)
    plain = TrainerRank.build(checkpoint, alone).forward(request)
    monkeypatch.setattr(Architecture, "padded_vocabulary", lambda *_: 140)
    padded = TrainerRank.build(checkpoint, alone)
    for name, parameter in padded.model.named_parameters():
        if parameter.shape[0] == 140:
            with torch.no_grad():
                parameter[131:] = 1e3
            assert name in ("embedding.word_embeddings.weight", "output_layer.weight")
    found = padded.forward(request)
    assert plain.logits is not None
    assert found.logits is not None
    assert found.logits.shape == (3, 131)
    torch.testing.assert_close(found.logits, plain.logits)
    torch.testing.assert_close(found.target_logprobs, plain.target_logprobs)
    assert found.top_k is not None
    assert plain.top_k is not None
    assert found.top_k.tokens.equal(plain.top_k.tokens)


def test_only_what_was_asked_for_comes_back(trainer: TrainerRank) -> None:
    output = trainer.forward(ForwardInput([1, 2, 3], [4, -100, 5]))
    assert (output.logits, output.hidden_states, output.top_k) == (None, None, None)
    assert output.target_logprobs is not None
    assert output.target_logprobs[1] == 0
    assert output.target_logprobs[0] < 0
    nothing = trainer.forward(ForwardInput([1]))
    assert nothing == type(nothing)()


def test_all_targets_left_out(trainer: TrainerRank) -> None:
    output = trainer.forward(ForwardInput([1, 2, 3], [-100, -100, -100]))
    assert output.target_logprobs is not None
    output.target_logprobs.sum().backward()
    assert output.target_logprobs.tolist() == [0, 0, 0]
    assert all(g.eq(0).all() for _, g, _ in trainer.named_gradients() if g is not None)


def test_no_grad_keeps_no_graph(trainer: TrainerRank) -> None:
    request = ForwardInput([1, 2], [3, 4], top_k=2, logits=True, hidden_states=True, no_grad=True)
    output = trainer.forward(request)
    assert output.hidden_states is not None
    assert output.target_logprobs is not None
    assert output.logits is not None
    assert output.top_k is not None
    outputs = (output.hidden_states, output.target_logprobs, output.logits, output.top_k.values)
    assert not any(value.requires_grad for value in outputs)


@pytest.mark.parametrize("part", ["decoder", "head"])
def test_a_frozen_part_has_no_gradient_and_the_rest_has_the_same(
    alone: Any, checkpoint: Path, part: Any
) -> None:
    batches = list(enumerate(scenario.requests()))
    found = []
    for trainer in (
        TrainerRank.build(checkpoint, alone),
        TransformersTrainer(checkpoint, alone),
    ):
        trainer.freeze(part)
        scenario.step(trainer, batches)
        found.append(scenario.gradients(trainer))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert not any(name.startswith("lm_head" if part == "head" else "model.") for name in ours)
    for name, (value, _) in ours.items():
        torch.testing.assert_close(value, theirs[name][0], rtol=1e-12, atol=1e-12)


def test_freeze_knows_its_parts(trainer: TrainerRank) -> None:
    with pytest.raises(ValueError, match="expected 'decoder', 'head' or 'base'"):
        trainer.freeze("norms")  # type: ignore[arg-type]


def test_gradients_are_reduced_once_and_then_zeroed(trainer: TrainerRank) -> None:
    request = ForwardInput([1, 2], [3, 4])
    output = trainer.forward(request)
    assert output.target_logprobs is not None
    loss = output.target_logprobs.sum()
    loss.backward(retain_graph=True)
    first = {name: value for name, value, _ in trainer.named_gradients() if value is not None}
    again = {name: value for name, value, _ in trainer.named_gradients() if value is not None}
    assert all(value.equal(again[name]) for name, value in first.items())
    with pytest.raises(ValueError, match=r"call zero_gradients\(\) before the next forward"):
        trainer.forward(request)
    trainer.forward(ForwardInput([1, 2], [3, 4], no_grad=True))
    loss.backward()
    with pytest.raises(ValueError, match="a backward has added to gradients that were reduced"):
        next(trainer.named_gradients())
    trainer.zero_gradients()
    trainer.forward(request)
    assert all(value is None for _, value, _ in trainer.named_gradients())


def test_what_a_trainer_refuses(trainer: TrainerRank) -> None:
    with pytest.raises(ValueError, match="slot 'a' does not exist"):
        trainer.forward(ForwardInput([1], slot="a"))
    with pytest.raises(ValueError, match="outside the vocabulary of 131"):
        trainer.forward(ForwardInput([131]))
    trainer.parameter("probe", lambda: torch.zeros(2))
    for name in ("probe", "model.norm.weight"):
        with pytest.raises(ValueError, match="is taken; give each its own"):
            trainer.parameter(name, lambda: torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sharing": "foo"}, ValueError, "sharing is 'foo'; expected one of none, full"),
        ({"plan": 5}, TypeError, "plan is 5; expected a list of rows"),
        ({"plan": None}, TypeError, "plan is None; expected a list of rows"),
        ({"plan": "zigzag"}, ValueError, "plan is 'zigzag'; expected one of balanced, runs"),
        ({"plan": [0, 1]}, TypeError, "plan has 0 in its shard 0"),
        ({"attention_block": "x"}, TypeError, "attention_block is 'x'; expected at least one row"),
        ({"head_rows": True}, TypeError, "head_rows is True; expected how many rows"),
        (
            {"memory_limit": True},
            TypeError,
            "memory_limit is True; expected a number of bytes, or None",
        ),
        (
            {"memory_limit": -1},
            ValueError,
            "memory_limit is -1; expected a number of bytes, or None",
        ),
        (
            {"memory_limit": 2**63},
            ValueError,
            "memory_limit is 9223372036854775808; expected a number of bytes",
        ),
        ({"check_losses": "no"}, TypeError, "check_losses is 'no'; expected True or False"),
        ({"layers": "1"}, TypeError, "layers is '1'; expected how many of the first layers"),
        ({"layers": 1.5}, TypeError, "layers is 1.5; expected how many of the first layers"),
        ({"layers": True}, TypeError, "layers is True; expected how many of the first layers"),
        ({"layers": 9}, ValueError, "layers is 9; expected 1 to 2, which"),
        ({"checkpoint_dir": 5}, TypeError, "directory is 5; expected the path of a directory"),
    ],
)
def test_options_are_refused_before_the_model_is_built(
    alone: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.delattr("subjects.trainer.build.build_model")
    with pytest.raises(error, match=words):
        TrainerRank.build(**{"checkpoint_dir": checkpoint, "rank": alone, **options})


def test_dp_reduce_keeps_the_kind_of_its_value(trainer: TrainerRank) -> None:
    assert trainer.dp_reduce(3) == 3
    assert isinstance(trainer.dp_reduce(3), int)
    assert trainer.dp_reduce(0.25, "max") == 0.25
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    reduced = trainer.dp_reduce(value)
    assert not reduced.requires_grad
    assert reduced.data_ptr() != value.data_ptr()
    with pytest.raises(ValueError, match="expected sum, max or min"):
        trainer.dp_reduce(1.0, "mean")  # type: ignore[arg-type]
    for wrong in (True, "1"):
        with pytest.raises(TypeError, match="expected an int, a float or a tensor"):
            trainer.dp_reduce(wrong)  # type: ignore[type-var]


def test_parallel_state_of_another_topology(alone: Any, checkpoint: Path) -> None:
    from megatron.core import parallel_state

    from subjects.tests import worlds

    parallel_state.destroy_model_parallel()
    try:
        with pytest.raises(ValueError, match="megatron-core's parallel state does not exist"):
            TrainerRank.build(checkpoint, alone)
    finally:
        worlds.make_parallel_state(alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
        with pytest.raises(ValueError, match="destroy the state of the last topology"):
            TrainerRank.build(checkpoint, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_agree_to_their_rounding(
    alone: Any, checkpoint: Path, dtype: torch.dtype
) -> None:
    from dataclasses import replace

    rank = replace(alone, dtype=dtype)
    request = ForwardInput([5, 6, 7, 8, 9], [6, 7, 8, 9, 10], hidden_states=True)
    ours = TrainerRank.build(checkpoint, rank).forward(request)
    theirs = TransformersTrainer(checkpoint, rank).forward(request)
    assert ours.hidden_states is not None
    assert ours.target_logprobs is not None
    assert theirs.hidden_states is not None
    assert theirs.target_logprobs is not None
    assert ours.hidden_states.dtype == dtype
    assert ours.target_logprobs.dtype == torch.float32
    bound = 30 * torch.finfo(dtype).eps
    assert scenario.distance(ours.hidden_states, theirs.hidden_states) < bound
    assert scenario.distance(ours.target_logprobs, theirs.target_logprobs) < bound
