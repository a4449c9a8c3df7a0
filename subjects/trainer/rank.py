"""One rank of the trainer: the public interface, put together from the modules beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from subjects.protocol import Placement, RankContext, ReduceOp, Value
from subjects.trainer import (
    attention,
    collectives,
    heads,
    packing,
    plan,
    reductions,
    rope,
    shims,
    weights,
)
from subjects.trainer.architecture import Architecture, read_architecture
from subjects.trainer.attention import ATTENTION_BLOCK, AttentionOptions, Exchange
from subjects.trainer.head_rows import HEAD_ROWS, HeadWeights, Place
from subjects.trainer.layer_spec import build_model
from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.packing import Sharing
from subjects.trainer.plan import LocalRows, PlanPolicy
from subjects.trainer.reductions import Groups
from subjects.types import ForwardInput, ForwardOutput, check_request

_MAX_DIMS = 8


class TrainerRank:
    """This rank's part of a Qwen3 trainer under data, context and tensor parallelism.

    All ranks of a batch (every TP and CP coordinate of one DP coordinate) call ``forward`` with the
    same request and get the same outputs. **Losses must be identical on all TP and CP replicas of a
    batch**: compute them from the outputs alone. Ranks of different DP coordinates may call
    ``forward`` as often as they have batches; ``parameter``, ``reduce_gradients``,
    ``named_gradients`` and ``dp_reduce`` are collectives of all ranks.

    Gradients accumulate over forwards. They are reduced once, by ``reduce_gradients`` or the first
    ``named_gradients``; then ``zero_gradients`` begins anew.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        architecture: Architecture,
        rank: RankContext,
        *,
        sharing: Sharing,
        policy: PlanPolicy,
        attention_options: AttentionOptions | None = None,
        head_rows: int = HEAD_ROWS,
    ) -> None:
        self.model: Any = model
        self.architecture = architecture
        self.groups = Groups(tp=rank.group("tp"), cp=rank.group("cp"), dp=rank.group("dp"))
        self.device, self.dtype = rank.device, rank.dtype
        self.sharing: Sharing = sharing
        self.policy = policy
        self.attention_options = attention_options or AttentionOptions()
        self.head_rows = head_rows
        tp_rank, tp = self.groups.tp.rank(), self.groups.tp.size()
        self.layouts = dict(weights.layouts(architecture, tp_rank=tp_rank, tp=tp))
        start, stop = weights.bounds(architecture.vocabulary, (tp_rank, tp))
        self.part = VocabularySlice(
            start=start, columns=stop - start, size=architecture.vocabulary, group=self.groups.tp
        )
        self.custom: dict[str, torch.nn.Parameter] = {}
        self._reduced: dict[str, tuple[int, int]] | None = None

    @classmethod
    def build(
        cls,
        checkpoint_dir: str | Path,
        rank: RankContext,
        *,
        sharing: Sharing = "none",
        plan: PlanPolicy = "uneven",
        attention: Exchange = "auto",
        attention_block: int = ATTENTION_BLOCK,
        head_rows: int = HEAD_ROWS,
    ) -> TrainerRank:
        """Build the model for the topology of ``rank`` and load this rank's slices.

        ``checkpoint_dir`` is a Qwen3 directory as ``save_pretrained`` writes it. Megatron's
        parallel state must exist for this topology. ``plan`` is a policy of ``make_plan``.
        ``attention`` says how keys and values come to other ranks: ``"gather"``, ``"ring"``, or by
        their size; ``attention_block`` rows are attended to at a time.
        ``head_rows`` is how many rows the head computes logits of at a time.

        Raises:
            FileNotFoundError: the directory holds no checkpoint.
            ValueError: a model that is not supported, a topology that does not divide it, or
                Megatron's parallel state missing or made for another one, or ``head_rows`` below 1.
        """
        heads.check_rows(head_rows)
        options = AttentionOptions(attention, attention_block)
        directory = Path(checkpoint_dir)
        architecture = read_architecture(directory)
        tp, cp = rank.group("tp"), rank.group("cp")
        architecture.check_tp(tp.size())
        shims.place_buffers(rank.device)
        shims.quiet_rng()
        shims.check_parallel_state(rank)
        model = build_model(
            architecture, tp=tp.size(), cp=cp.size(), dtype=rank.dtype, device=rank.device
        )
        trainer = cls(
            model,
            architecture,
            rank,
            sharing=sharing,
            policy=plan,
            attention_options=options,
            head_rows=head_rows,
        )
        weights.load(model, weights.Checkpoint(directory), trainer.layouts, (tp.rank(), tp.size()))
        return trainer

    def forward(self, request: ForwardInput) -> ForwardOutput:
        """Run one forward; see ``ForwardInput`` and ``ForwardOutput``.

        A collective of the TP and CP ranks of a batch, which must pass the same request.

        Raises:
            ValueError: an empty document, targets that don't fit the tokens, an id outside the
                vocabulary, a ``top_k`` that can't be, a slot that doesn't exist, or gradients that
                were reduced and not zeroed.
        """
        check_request(request, vocabulary=self.architecture.vocabulary)
        if request.slot is not None:
            raise ValueError(f"slot is {request.slot!r}; this trainer has no slots: leave it None")
        grad = torch.is_grad_enabled() and not request.no_grad
        if grad and self._reduced is not None:
            raise ValueError(
                "the gradients have been reduced over the ranks, and what a further backward adds "
                "would not be; call zero_gradients() before the next forward, or pass no_grad"
            )
        with torch.set_grad_enabled(grad):
            local = self._local_rows(request)
            hidden = self._decode(local)
            return self._outputs(request, hidden, local)

    def parameter(self, name: str, factory: Callable[[], Tensor]) -> torch.nn.Parameter:
        """Register a trained parameter of the caller's own, equal on all ranks.

        ``factory`` runs on the first rank; its tensor is cast to the dtype of the run and sent to
        all others. Its gradient is averaged over CP and TP replicas and summed over DP.

        Raises:
            ValueError: the name is taken, or the tensor has more than 8 dimensions.
        """
        taken = {tensor for layout in self.layouts.values() for tensor in layout.names}
        if name in self.custom or name in taken:
            raise ValueError(f"parameter {name!r}: the name is taken; give each its own")
        groups = (self.groups.dp, self.groups.cp, self.groups.tp)
        first = all(group.rank() == 0 for group in groups)
        value = factory().detach() if first else None
        header = torch.zeros(1 + _MAX_DIMS, dtype=torch.int64, device=self.device)
        if value is not None:
            if value.dim() > _MAX_DIMS:
                raise ValueError(f"parameter {name!r} has {value.dim()} dimensions; at most 8")
            header[: 1 + value.dim()] = torch.tensor([value.dim(), *value.shape])
        for group in groups:
            collectives.broadcast_first(header, group)
        dims, *shape = header.tolist()
        data = torch.empty(shape[:dims], dtype=self.dtype, device=self.device)
        if value is not None:
            data.copy_(value)
        for group in groups:
            collectives.broadcast_first(data, group)
        self.custom[name] = torch.nn.Parameter(data)
        return self.custom[name]

    def freeze(self, part: Literal["decoder", "head"]) -> None:
        """Take no gradients of the decoder (embeddings, layers, last norm) or of the head.

        With tied embeddings the one matrix belongs to the decoder.

        Raises:
            ValueError: an unknown part.
        """
        if part not in ("decoder", "head"):
            raise ValueError(f"freeze: got {part!r}; expected 'decoder' or 'head'")
        for name, parameter in self.model.named_parameters():
            if name.startswith("output_layer.") == (part == "head"):
                parameter.requires_grad_(False)

    def reduce_gradients(self) -> None:
        """Reduce all gradients over the ranks, in place and once; a collective of all ranks.

        Raises:
            ValueError: a backward has added to gradients that were reduced.
        """
        own: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        every = {**own, **self.custom}
        if self._reduced is not None:
            if _stamps(every) != self._reduced:
                raise ValueError(
                    "a backward has added to gradients that were reduced over the ranks already; "
                    "call zero_gradients() between reading gradients and the next backward"
                )
            return
        present = reductions.agree_on_presence(
            [parameter.grad for parameter in every.values()], self.groups, device=self.device
        )
        for (name, parameter), there in zip(every.items(), present, strict=True):
            if not there:
                continue
            local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            local = local.contiguous()
            if name in own:
                over_tp = reductions.sum_over_tp(name, parameter)
                parameter.grad = reductions.reduce_weight(local, self.groups, over_tp=over_tp)
            else:
                parameter.grad = reductions.reduce_probe(local, self.groups)
        self._reduced = _stamps(every)

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None, Placement]]:
        """Reduced gradients by their names in the checkpoint, then those of ``parameter``.

        Reduces first where that has not been done: a collective of all ranks. Yields name, gradient
        (None where no rank has one) and placement; fused weights come apart into the checkpoint's
        tensors, of which a tensor-parallel rank holds its slice.
        """
        self.reduce_gradients()
        for name, parameter in self.model.named_parameters():
            layout = self.layouts[name]
            placement: Placement = {} if layout.dim is None else {"shard": {"tp": layout.dim}}
            pieces = (
                [None] * len(layout.names)
                if parameter.grad is None
                else layout.split(parameter.grad)
            )
            for tensor, piece in zip(layout.names, pieces, strict=True):
                yield tensor, piece, placement
        for name, parameter in self.custom.items():
            yield name, parameter.grad, {}

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.model.parameters(), *self.custom.values()):
            parameter.grad = None
        self._reduced = None

    def dp_reduce(self, value: Value, op: ReduceOp = "sum") -> Value:
        """Reduce a number or tensor over the data-parallel ranks alone; a collective of all ranks.

        ``op`` is sum, max or min. It divides by nothing: an average is a sum of values and a sum of
        counts. The result carries no gradient.

        Raises:
            TypeError: not an int, a float or a tensor.
            ValueError: an unknown operation.
        """
        return reductions.dp_reduce(value, op, self.groups, device=self.device)

    def _local_rows(self, request: ForwardInput) -> LocalRows:
        packed = packing.pack(request.documents(), sharing=self.sharing).to(self.device)
        work = plan.row_work(packed, linear=plan.linear_work(self.architecture))
        shards = plan.make_plan(self.policy, work=work, cp=self.groups.cp.size())
        return plan.local_rows(
            packed, shards, cp_rank=self.groups.cp.rank(), tp=self.groups.tp.size()
        )

    def _decode(self, local: LocalRows) -> Tensor:
        """This rank's rows -> hidden states [p / tp, 1, H] after the last norm."""
        tokens = plan.padded(plan.tokens_for(local), local)[None, :]
        positions = plan.padded(plan.positions_for(local), local)
        embedded = self.model.embedding(input_ids=tokens, position_ids=None)
        hidden: Tensor = self.model.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=rope.angles(
                positions,
                head_size=self.architecture.head_size,
                base=self.architecture.rope_base,
                dtype=self.dtype,
            ),
            packed_seq_params=attention.attention_rows(
                local,
                self.attention_options,
                cp_rank=self.groups.cp.rank(),
                group=self.groups.cp,
            ),
        )
        return hidden

    def _outputs(self, request: ForwardInput, hidden: Tensor, local: LocalRows) -> ForwardOutput:
        owner = self.model.embedding.word_embeddings if self.architecture.tied else None
        head = HeadWeights((owner or self.model.output_layer).weight)
        place = Place(local=local, part=self.part, groups=self.groups, head_rows=self.head_rows)
        return heads.outputs(request, hidden, head, place)


def _stamps(parameters: dict[str, torch.nn.Parameter]) -> dict[str, tuple[int, int]]:
    """Identity and version of each gradient, which change when a backward adds to it."""
    return {
        name: (id(parameter.grad), parameter.grad._version)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
