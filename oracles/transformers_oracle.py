"""transformers' Qwen3ForCausalLM on one device, as a trainer.

Every document runs alone: no packing, no sharing, no parallelism, and none of our code between its
tokens and its hidden states. In a float64 run it is float64 throughout (see precise.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from oracles import batches
from oracles.adapters import Adapters, checkpoint_name
from oracles.custom import CustomParts
from oracles.optimizer import TorchOptimizer
from oracles.precise import keep_float64
from subjects.protocol import OptimizerOptions, OwnModule, Placement, RankContext, ReduceOp, Value
from subjects.types import (
    IGNORED,
    TARGETS,
    ForwardInput,
    ForwardOutput,
    LocalLogits,
    MicroBatch,
    Nested,
    TopK,
    check_request,
    logprob_dtype,
)


class TransformersTrainer:
    """The reference that a trainer of the same checkpoint is judged by."""

    def __init__(
        self, checkpoint_dir: str | Path, rank: RankContext, *, layers: int | None = None
    ) -> None:
        self.device, self.dtype = rank.device, rank.dtype
        # Eager attention, so that no kernel is chosen by what the machine happens to offer.
        self.model = Qwen3ForCausalLM.from_pretrained(
            str(checkpoint_dir),
            config=first_layers(checkpoint_dir, layers),
            dtype=self.dtype,
            attn_implementation="eager",
            local_files_only=True,
        ).to(self.device)
        if self.dtype == torch.float64:
            keep_float64(self.model)
        self.adapters = Adapters(self.model)
        self.custom = CustomParts(self.device, self.dtype)

    def forward(self, request: ForwardInput) -> ForwardOutput:
        """Run each document alone and lay the results end to end.

        Raises:
            ValueError: as for any trainer, what the request can't mean; a slot that is not there.
        """
        check_request(request, vocabulary=self.model.config.vocab_size)
        grad = torch.is_grad_enabled() and not request.no_grad
        with self.adapters.use(request.slot), torch.set_grad_enabled(grad):
            states = self._hidden(request.documents())
            targets = request.targets()
            if targets is None and not (request.top_k or request.logits or request.entropy):
                return ForwardOutput(hidden_states=states if request.hidden_states else None)
            logits = self.model.lm_head(states)
            logprobs = logits.to(logprob_dtype(self.dtype)).log_softmax(dim=-1)
            return ForwardOutput(
                hidden_states=states if request.hidden_states else None,
                logits=logits if request.logits is True else None,
                local_logits=LocalLogits(logits, torch.arange(len(logits), device=self.device), 0)
                if request.logits == "local"
                else None,
                entropy=entropy(logprobs) if request.entropy else None,
                target_logprobs=None
                if targets is None
                else pick_targets(logprobs, targets.to(self.device)),
                top_k=None if request.top_k is None else pick_top(logits, request.top_k, logprobs),
            )

    def forward_micro_batches(
        self,
        inputs: Sequence[Nested],
        *,
        yield_empty: bool = False,  # noqa: ARG002 - one device has an element in every wave
    ) -> Iterator[MicroBatch]:
        """Every element of ``inputs`` in turn."""
        return batches.one_by_one(inputs, self.forward)

    def dp_rank_forward(self, inputs: Nested) -> Any:
        """All of ``inputs``, nested as they came."""
        return batches.answer(inputs, self.forward)

    @property
    def slots(self) -> tuple[str, ...]:
        """The adapters that there are."""
        return self.adapters.names

    def add_slot(
        self,
        name: str,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = TARGETS,
        factory: Callable[[str, tuple[int, ...]], Tensor] | None = None,
    ) -> None:
        """Make an adapter by PEFT, with the factory's values."""
        self.adapters.add(name, rank=rank, alpha=alpha, targets=targets, factory=factory)

    def load_slot(self, name: str, directory: str | Path) -> None:
        """Read an adapter by PEFT, in place of one of this name."""
        self.custom.drop(name)
        self.adapters.load(name, directory)

    def save_slot(self, name: str, directory: str | Path) -> None:
        """Write an adapter by PEFT."""
        self.adapters.save(name, directory)

    def snapshot_slot(self, name: str) -> Any:
        """Copies of an adapter's values."""
        return self.adapters.snapshot(name)

    def restore_slot(self, name: str, snapshot: Any) -> None:
        """Set an adapter's values to those of a snapshot."""
        self.custom.drop(name)
        self.adapters.restore(name, snapshot)

    def remove_slot(self, name: str) -> None:
        """Forget an adapter and what it owns."""
        self.custom.drop(name)
        self.adapters.remove(name)

    def module(
        self, name: str, factory: Callable[[], OwnModule], *, slot: str | None = None
    ) -> OwnModule:
        """Register a module of the caller's own.

        Raises:
            ValueError: the name is taken.
        """
        self.custom.check_free(name, slot, self._taken())
        return self.custom.module(name, factory, slot)

    def parameter(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> torch.nn.Parameter:
        """Register a parameter of the caller's own.

        Raises:
            ValueError: the name is taken.
        """
        self.custom.check_free(name, slot, self._taken())
        return self.custom.parameter(name, factory, slot)

    def buffer(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> Tensor:
        """Register a tensor of the caller's own that is not trained.

        Raises:
            ValueError: the name is taken.
        """
        self.custom.check_free(name, slot, self._taken())
        return self.custom.buffer(name, factory, slot)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        """Factors of adapters and parameters of the caller's own, whole."""
        for name, parameter in (*self.adapters.named_parameters(), *self.custom.named_parameters()):
            yield name, parameter, {}

    def optimizer(
        self,
        kind: Literal["adamw", "sgd"],
        **options: Unpack[OptimizerOptions],
    ) -> TorchOptimizer:
        """torch's own optimizer of ``named_parameters``."""
        return TorchOptimizer(
            lambda: ((name, parameter) for name, parameter, _ in self.named_parameters()),
            kind,
            **options,
        )

    def freeze(self, part: Literal["decoder", "head", "base"]) -> None:
        """Take no gradients of the decoder (with tied embeddings, of all), of the head, of both.

        Raises:
            ValueError: an unknown part.
        """
        if part not in ("decoder", "head", "base"):
            raise ValueError(f"freeze: got {part!r}; expected 'decoder', 'head' or 'base'")
        for name, parameter in self._base_parameters():
            if part == "base" or name.startswith("lm_head.") == (part == "head"):
                parameter.requires_grad_(False)

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None, Placement]]:
        """The gradients, whole."""
        for name, parameter in self._base_parameters():
            yield name, parameter.grad, {}
        for name, parameter, _ in self.named_parameters():
            yield name, parameter.grad, {}

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        custom = (parameter for _, parameter in self.custom.named_parameters())
        for parameter in (*self.model.parameters(), *custom):
            parameter.grad = None

    def dp_reduce(self, value: Value, op: ReduceOp = "sum") -> Value:
        """The value, whatever ``op``: one device has every batch.

        Raises:
            ValueError: an unknown operation.
        """
        if op not in ("sum", "max", "min"):
            raise ValueError(f"dp_reduce: op is {op!r}; expected sum, max or min")
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _base_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The model's own parameters by their names in the checkpoint."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                yield checkpoint_name(name), parameter

    def _taken(self) -> set[str]:
        return {checkpoint_name(name) for name, _ in self.model.named_parameters()}

    def _hidden(self, documents: list[Tensor]) -> Tensor:
        """Hidden states [T, H], each document through the layers alone.

        Tokens are looked up together: the gradient of a look-up has the size of the vocabulary.
        """
        looked_up = self.model.model.embed_tokens(torch.cat(documents).to(self.device))
        parts = looked_up.split([len(document) for document in documents])
        return torch.cat(
            [
                self.model.model(inputs_embeds=part[None], use_cache=False).last_hidden_state[0]
                for part in parts
            ]
        )


def first_layers(checkpoint_dir: str | Path, layers: int | None) -> Qwen3Config:
    """The checkpoint's configuration, cut to its first ``layers``; None keeps them all."""
    config = Qwen3Config.from_pretrained(str(checkpoint_dir), local_files_only=True)
    if layers is not None:
        config.num_hidden_layers = layers
        config.layer_types = config.layer_types[:layers]
    return config


def pick_targets(logprobs: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [T, V] at targets [T, ...]; exactly 0 where the target is -100."""
    flat = targets.reshape(len(targets), -1)
    picked = logprobs.gather(1, flat.clamp(min=0))
    return torch.where(flat == IGNORED, torch.zeros_like(picked), picked).view(targets.shape)


def entropy(logprobs: Tensor) -> Tensor:
    """-sum(p log(p)) [T] of log-probabilities [T, V], in nats."""
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def pick_top(logits: Tensor, k: int, logprobs: Tensor) -> TopK:
    """The k largest of each row of logits [T, V], equal ones by id, with their ``logprobs``."""
    rows = []
    for row in logits.detach():
        candidates = torch.nonzero(row >= row.topk(k).values[-1]).flatten().tolist()
        rows.append(sorted(candidates, key=lambda token: (-float(row[token]), token))[:k])
    tokens = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    return TopK(logprobs.gather(1, tokens), tokens)
