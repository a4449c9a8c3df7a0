"""One rank of the trainer: the public interface. How each is done is in the modules beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from subjects.protocol import OptimizerOptions, OwnModule, Placement, RankContext, ReduceOp, Value
from subjects.trainer import agreement, batches, build, forward, gradients, reductions, weights
from subjects.trainer.architecture import Architecture
from subjects.trainer.attention import ATTENTION_BLOCK, GATHER_LIMIT, Exchange
from subjects.trainer.build import Options
from subjects.trainer.custom import CustomParts
from subjects.trainer.head_rows import HEAD_ROWS
from subjects.trainer.logprobs import VocabularySlice
from subjects.trainer.optimizer import Optimizer
from subjects.trainer.packing import Sharing
from subjects.trainer.plan import PlanPolicy
from subjects.trainer.precision import outside_inference
from subjects.trainer.reductions import Groups
from subjects.trainer.slot_state import SlotSnapshot
from subjects.trainer.slot_values import Factory
from subjects.trainer.slots import Slots
from subjects.types import TARGETS, ForwardInput, ForwardOutput, MicroBatch, Nested


class TrainerRank:
    """This rank's part of a Qwen3 trainer under data, context and tensor parallelism.

    All ranks of a batch (every TP and CP coordinate of one DP coordinate) call ``forward`` with the
    same request and get the same outputs. **Losses must be identical on all TP and CP replicas of a
    batch**: compute them from the outputs alone. Ranks of different DP coordinates may call
    ``forward`` as often as they have batches; ``build``, ``freeze``, ``module``, ``parameter``,
    ``buffer``, ``reduce_gradients``, ``named_gradients`` and ``dp_reduce`` are collectives of all
    ranks.

    Gradients accumulate over forwards. They are reduced once, by ``reduce_gradients`` or the first
    ``named_gradients``; then ``zero_gradients`` begins anew.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        architecture: Architecture,
        rank: RankContext,
        options: Options,
    ) -> None:
        self.model: Any = model
        self.architecture = architecture
        self.groups = Groups(tp=rank.group("tp"), cp=rank.group("cp"), dp=rank.group("dp"))
        self.device, self.dtype = rank.device, rank.dtype
        self.sharing, self.policy = options.sharing, options.plan
        self.attention_options = build.attention_options(options)
        self.head_rows, self.memory_limit = options.head_rows, options.memory_limit
        tp_rank, tp = self.groups.tp.rank(), self.groups.tp.size()
        self.layouts = dict(weights.layouts(architecture, tp_rank=tp_rank, tp=tp))
        start, stop = weights.bounds(architecture.vocabulary, (tp_rank, tp))
        # The model keeps its parameters: walking its modules in each forward would find the same.
        self.weights = {
            ", ".join(self.layouts[name].names): one for name, one in model.named_parameters()
        }
        self.part = VocabularySlice(
            start=start, columns=stop - start, size=architecture.vocabulary, group=self.groups.tp
        )
        self.slot_table = Slots(
            model, architecture, self.groups, device=self.device, dtype=self.dtype
        )
        self.custom = CustomParts(
            self.groups,
            device=self.device,
            dtype=self.dtype,
            taken=self._taken,
            slots=lambda: self.slot_table.names,
            borrowed=lambda: list(model.parameters()),
        )
        self.slot_table.on_replace.append(self.custom.retire)
        self.reduced: gradients.Stamps | None = None
        self.check_losses = options.check_losses
        self.forwards = 0
        self.batch = agreement.batch(self.groups, self.device)
        self.world = agreement.world(self.groups, self.device)

    @classmethod
    @outside_inference
    def build(
        cls,
        checkpoint_dir: str | Path,
        rank: RankContext,
        *,
        sharing: Sharing = "none",
        plan: PlanPolicy = "uneven",
        attention: Exchange = "auto",
        attention_block: int = ATTENTION_BLOCK,
        gather_limit: int = GATHER_LIMIT,
        head_rows: int = HEAD_ROWS,
        check_losses: bool = True,
        memory_limit: int | None = None,
        layers: int | None = None,
    ) -> TrainerRank:
        """Build the model for the topology of ``rank`` and load this rank's slices.

        ``checkpoint_dir`` is a Qwen3 directory as ``save_pretrained`` writes it. Megatron's
        parallel state must exist for this topology. ``plan`` is a policy of ``make_plan``.
        ``attention`` says how keys and values come to other ranks: ``"gather"``, ``"ring"``, or
        ``"auto"``, which gathers up to ``gather_limit`` numbers of a layer and takes the ring
        above. ``attention_block`` rows are attended to at a time.
        ``head_rows`` is how many rows the head computes logits of at a time. ``check_losses`` has
        every backward compare the losses of a batch's TP and CP ranks (two tiny collectives).
        ``memory_limit`` is how many bytes the head and the outputs of a forward may take: without
        one, on a GPU what is free, on a CPU any number. ``layers`` runs the first ones alone.

        A collective of all ranks, which pass the same, but for ``memory_limit``. Of a function as
        ``plan`` its shards are compared in every forward.

        Raises:
            FileNotFoundError: the directory holds no checkpoint.
            DisagreementError: a ValueError: ranks that pass different options or models, or some
                that refuse theirs.
            ValueError: a model that is not supported, a topology that does not divide it, or
                Megatron's parallel state missing or made for another one, or an option that can't
                be.
            TypeError: an option of another type, or a directory that is no path.
        """
        options = Options(
            sharing=sharing,
            plan=plan,
            attention=attention,
            attention_block=attention_block,
            gather_limit=gather_limit,
            head_rows=head_rows,
            check_losses=check_losses,
            memory_limit=memory_limit,
            layers=layers,
        )
        return build.build(cls, checkpoint_dir, rank, options)

    def forward(self, request: ForwardInput) -> ForwardOutput:
        """Run one forward; see ``ForwardInput`` and ``ForwardOutput``.

        A collective of the TP and CP ranks of a batch, which must pass the same request. What is
        wrong with one of theirs is raised on all of them, and so it is in backward where their
        losses differ.

        Raises:
            ValueError: an empty document, targets that don't fit the tokens, an id outside the
                vocabulary, a ``top_k`` that can't be, a slot that doesn't exist, or gradients that
                were reduced and not zeroed.
            DisagreementError: a ValueError: not all ranks pass the same, or some refuse it.
            AdmissionError: the head and the outputs would not fit into memory.
        """
        return forward.run(self, request)

    def forward_micro_batches(
        self, inputs: Sequence[Nested], *, yield_empty: bool = False
    ) -> Iterator[MicroBatch]:
        """Deal the elements of ``inputs`` over the data-parallel ranks and run each one's own.

        Every rank passes the same ``inputs``: a list or tuple whose elements are requests, or
        lists, tuples and dicts of them. Wave w runs element w * dp + dp_rank; in the last one a
        rank may have none, and then yields nothing, or with ``yield_empty`` a
        ``MicroBatch(None, None)``, so that all ranks loop equally often. The call itself is a
        collective of all ranks; each wave runs when it is asked for.

        Raises:
            TypeError: no such nesting, on any rank.
            ValueError: a request that ``forward`` would refuse, with its path, or ranks whose
                ``inputs`` differ.
        """
        batches.agree_on_sequence(inputs, partial(forward.check, self), self.world)
        dp = self.groups.dp
        return batches.micro_batches(
            list(inputs), self.forward, dp_rank=dp.rank(), dp=dp.size(), yield_empty=yield_empty
        )

    def dp_rank_forward(self, inputs: Nested) -> Any:
        """Run ``inputs`` that are this data-parallel rank's own, and return answers nested alike.

        Other data-parallel ranks may pass others, or nothing (``[]``). A collective of the TP and
        CP ranks of a batch.

        Raises:
            TypeError: no nesting of lists, tuples and dicts of requests.
            ValueError: a request that ``forward`` would refuse, with its path, or ranks of a batch
                whose ``inputs`` differ.
        """
        batches.agree_on_nesting(inputs, partial(forward.check, self), self.batch)
        return batches.run(inputs, self.forward)

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the LoRA slots that there are."""
        return self.slot_table.names

    @outside_inference
    def add_slot(
        self,
        name: str,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = TARGETS,
        factory: Factory | None = None,
    ) -> None:
        """Make a LoRA slot on ``targets`` of every layer; a collective of all ranks.

        A forward with ``slot=name`` adds alpha / rank * B A to their weights. A is drawn within
        1 / sqrt(in), from the first rank's torch seed and the names, and B is zero; or
        ``factory(factor, shape)`` gives the values of each whole factor, such as
        ``model.layers.0.self_attn.q_proj.lora_A``, on the first rank, for all ranks. Gradients are
        summed over CP and DP, those of factors that TP replicates over TP too.

        Raises:
            ValueError: on every rank: a name that is taken or can't be, a rank, alpha or targets
                that can't be, ranks that were told different things, a factory that fails.
            TypeError: on every rank: targets that are no list, a factory that can't be called or
                returns no tensor.
        """
        self.slot_table.add(name, rank=rank, alpha=alpha, targets=targets, factory=factory)

    @outside_inference
    def load_slot(self, name: str, directory: str | Path) -> None:
        """Read a LoRA slot from PEFT's files, in place of any of this name.

        A collective of all ranks. Every rank reads its slices of ``adapter_model.safetensors``.

        Raises:
            FileNotFoundError: no adapter there, on any rank.
            ValueError: on every rank: an adapter that the trainer can't run or read, with what it
                has.
            TypeError: on every rank: a directory that is no path.
        """
        self.slot_table.load(name, directory)

    def save_slot(self, name: str, directory: str | Path) -> None:
        """Write a LoRA slot as PEFT's files, whole, in the dtype of the run.

        A collective of all ranks: the first one writes, and no rank returns before that is done.

        Raises:
            ValueError: on every rank: no such slot, or the first rank can't write.
        """
        self.slot_table.save(name, directory)

    def snapshot_slot(self, name: str) -> SlotSnapshot:
        """Copy a slot's values, those of this rank alone; no collective.

        Raises:
            ValueError: no such slot.
        """
        return self.slot_table.snapshot(name)

    @outside_inference
    def restore_slot(self, name: str, snapshot: SlotSnapshot) -> None:
        """Set a slot's values to those of a snapshot, bit for bit; a collective of all ranks.

        The factors stay the same parameters and keep their gradients. What the slot owns besides
        them is no part of a snapshot and is parted with, as when the slot is replaced.

        Raises:
            ValueError: on every rank: no such slot, a snapshot of another configuration, or ranks
                that must hold the same values and were given others.
            TypeError: on every rank: something that is no snapshot.
        """
        self.slot_table.restore(name, snapshot)

    def remove_slot(self, name: str) -> None:
        """Forget a slot, its gradients and what it owns; a collective of all ranks.

        Raises:
            ValueError: on every rank: no such slot.
        """
        self.slot_table.remove(name)

    @outside_inference
    def module(
        self, name: str, factory: Callable[[], OwnModule], *, slot: str | None = None
    ) -> OwnModule:
        """Register a module of the caller's own (a head), equal on all ranks.

        ``factory`` runs on every rank; floating tensors are cast to the dtype of the run, and the
        values of the first rank's are sent to all. Gradients of its parameters are named
        ``name.parameter``, averaged over CP and TP replicas and summed over DP; a parameter that
        the module holds twice stays one, with one gradient under its first name. Buffers are equal
        at first and not trained. With ``slot`` all of it belongs to that slot: names begin with
        ``slot/``, and once the slot is replaced or removed using the module is an error.

        Raises:
            ValueError: on every rank: the name is taken, no such slot, or a tensor that can't be
                shared; or the factory fails on some ranks, or makes different structures on them.
        """
        return self.custom.module(name, factory, slot=slot)

    @outside_inference
    def parameter(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> torch.nn.Parameter:
        """Register a parameter of the caller's own (a probe); as for ``module``.

        It is trained, unless the factory returns a ``Parameter`` that is not.
        """
        return self.custom.parameter(name, factory, slot=slot)

    @outside_inference
    def buffer(
        self, name: str, factory: Callable[[], Tensor], *, slot: str | None = None
    ) -> Tensor:
        """Register a tensor of the caller's own that is not trained; as for ``module``."""
        return self.custom.buffer(name, factory, slot=slot)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Placement]]:
        """What an optimizer steps: slots, and the parameters of ``module`` and ``parameter``.

        Yields the name of its gradient, this rank's part and its placement.
        """
        for name, parameter, factor in self.slot_table.named_factors():
            yield name, parameter, factor.placement
        for name, parameter in self.custom.named_parameters():
            yield name, parameter, {}

    def optimizer(
        self, kind: Literal["adamw", "sgd"], **options: Unpack[OptimizerOptions]
    ) -> Optimizer:
        """An optimizer of ``named_parameters``; the model itself is never stepped.

        Options are those of torch.optim's AdamW and SGD, and their defaults. ``max_norm`` clips
        the gradients of each slot, and those of what belongs to none, by their own norm. A
        collective of all ranks.

        Raises:
            ValueError: an unknown kind or an option out of range, or ranks whose options differ.
            TypeError: an option of the other kind or of another type, or no ``lr``.
        """
        return Optimizer(self, kind, **options)

    def freeze(self, part: Literal["decoder", "head", "base"]) -> None:
        """Take no gradients of the decoder (embeddings, layers, last norm), of the head, of both.

        With tied embeddings the one matrix belongs to the decoder. ``"base"`` is all of the model,
        so that slots and parameters of the caller's own are trained alone. A collective of all
        ranks.

        Raises:
            ValueError: on every rank: an unknown part, or ranks that pass different ones.
        """
        gradients.freeze(self, part)

    @outside_inference
    def reduce_gradients(self) -> None:
        """Reduce all gradients over the ranks, in place and once; a collective of all ranks.

        Raises:
            ValueError: on every rank: a backward has added to gradients that were reduced, or a
                module of the caller's holds other parameters than those registered.
        """
        self.reduced = gradients.reduce_once(self, self.reduced)

    def named_gradients(self) -> Iterator[tuple[str, Tensor | None, Placement]]:
        """Reduced gradients by their names in the checkpoint, then of slots and ``parameter``.

        Reduces first where that has not been done: a collective of all ranks. Yields name, gradient
        (None where no rank has one) and placement; fused weights come apart into the checkpoint's
        tensors, of which a tensor-parallel rank holds its slice.
        """
        self.reduce_gradients()
        yield from gradients.by_name(self)

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        others = (parameter for _, parameter, _ in self.named_parameters())
        for parameter in (*self.model.parameters(), *others):
            parameter.grad = None
        self.reduced = None

    def dp_reduce(self, value: Value, op: ReduceOp = "sum") -> Value:
        """Reduce a number or tensor over the data-parallel ranks alone; a collective of all ranks.

        ``op`` is sum, max or min. It divides by nothing: an average is a sum of values and a sum of
        counts. The result carries no gradient. A NaN on any rank gives NaN on all.

        Raises:
            TypeError: on every data-parallel rank: not an int, a float or a tensor of a dtype that
                can be sent.
            ValueError: on every data-parallel rank: an unknown operation, or a sum of integers that
                their dtype can't hold (64 bits for an int).
        """
        return reductions.dp_reduce(value, op, self.groups, device=self.device)

    def _taken(self) -> set[str]:
        """The names of gradients that are none of the caller's."""
        model = {name for layout in self.layouts.values() for name in layout.names}
        return model | {name for name, _, _ in self.slot_table.named_factors()}
