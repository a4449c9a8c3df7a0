"""transformers' Qwen3ForCausalLM on one device, as a trainer.

Every document runs alone: no packing, no sharing, no parallelism, and none of our code between its
tokens and its hidden states. In a float64 run it is float64 throughout (see precise.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from oracles.precise import keep_float64
from subjects.protocol import Placement, RankContext, ReduceOp, Value
from subjects.types import (
    IGNORED,
    ForwardInput,
    ForwardOutput,
    LocalLogits,
    TopK,
    check_request,
    logprob_dtype,
)


class TransformersTrainer:
    """The reference that a trainer of the same checkpoint is judged by."""

    def __init__(self, checkpoint_dir: str | Path, rank: RankContext) -> None:
        self.device, self.dtype = rank.device, rank.dtype
        # Eager attention, so that no kernel is chosen by what the machine happens to offer.
        self.model = Qwen3ForCausalLM.from_pretrained(
            str(checkpoint_dir),
            dtype=self.dtype,
            attn_implementation="eager",
            local_files_only=True,
        ).to(self.device)
        if self.dtype == torch.float64:
            keep_float64(self.model)
        self.custom: dict[str, torch.nn.Parameter] = {}

    def forward(self, request: ForwardInput) -> ForwardOutput:
        """Run each document alone and lay the results end to end.

        Raises:
            ValueError: as for any trainer, what the request can't mean; and any slot.
        """
        check_request(request, vocabulary=self.model.config.vocab_size)
        if request.slot is not None:
            raise ValueError(f"slot is {request.slot!r}; the oracle has no slots: leave it None")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not request.no_grad):
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

    def parameter(self, name: str, factory: Callable[[], Tensor]) -> torch.nn.Parameter:
        """Register a parameter of the caller's own.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.custom or name in dict(self.model.named_parameters()):
            raise ValueError(f"parameter {name!r}: the name is taken; give each its own")
        value = factory().detach().to(device=self.device, dtype=self.dtype, copy=True)
        self.custom[name] = torch.nn.Parameter(value)
        return self.custom[name]

    def freeze(self, part: Literal["decoder", "head"]) -> None:
        """Take no gradients of the decoder (with tied embeddings, of all) or of the head.

        Raises:
            ValueError: an unknown part.
        """
        if part not in ("decoder", "head"):
            raise ValueError(f"freeze: got {part!r}; expected 'decoder' or 'head'")
        for name, parameter in self.model.named_parameters():
            if name.startswith("lm_head.") == (part == "head"):
                parameter.requires_grad_(False)

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None, Placement]]:
        """The gradients, whole."""
        for name, parameter in (*self.model.named_parameters(), *self.custom.items()):
            yield name, parameter.grad, {}

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.model.parameters(), *self.custom.values()):
            parameter.grad = None

    def dp_reduce(self, value: Value, op: ReduceOp = "sum") -> Value:
        """The value, whatever ``op``: one device has every batch.

        Raises:
            ValueError: an unknown operation.
        """
        if op not in ("sum", "max", "min"):
            raise ValueError(f"dp_reduce: op is {op!r}; expected sum, max or min")
        return value.detach().clone() if isinstance(value, Tensor) else value

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
