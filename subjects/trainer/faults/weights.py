"""A checkpoint that is read or cut wrongly, and one matrix that serves at both ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subjects.trainer import heads, reductions
from subjects.trainer.faults.fault import Fault
from subjects.trainer.head_rows import HeadWeights, Place
from subjects.trainer.weights import Checkpoint, FusedGateUp, FusedQkv
from subjects.types import ForwardInput, ForwardOutput

_read = Checkpoint.read
_outputs = heads.outputs
_sum_over_tp = reductions.sum_over_tp


def _first_slice(
    checkpoint: Checkpoint, name: str, *, dim: int | None = None, part: tuple[int, int] = (0, 1)
) -> Tensor:
    # The vocabulary's slices differ in size here, and would be refused.
    return _read(checkpoint, name, dim=dim, part=(0, part[1]) if "layers" in name else part)


def _one_block(layout: FusedQkv, pieces: Sequence[Tensor]) -> Tensor:
    del layout
    return torch.cat(list(pieces))


def _cut_as_one_block(layout: FusedQkv, value: Tensor) -> Sequence[Tensor]:
    size = len(value) // (layout.per_group + 2)
    return torch.split(value, [layout.per_group * size, size, size])


def _up_first(layout: FusedGateUp, value: Tensor) -> Sequence[Tensor]:
    del layout
    return value.chunk(2)[::-1]


def _copy_of_head(
    request: ForwardInput, hidden: Tensor, head: HeadWeights, place: Place
) -> ForwardOutput:
    copied = head.weight.detach().clone().requires_grad_()
    return _outputs(request, hidden, head._replace(weight=copied), place)


def _both_uses(
    request: ForwardInput, hidden: Tensor, head: HeadWeights, place: Place
) -> ForwardOutput:
    # The same value; its gradient is 2.
    twice = 2 * head.weight - head.weight.detach()
    return _outputs(request, hidden, head._replace(weight=twice), place)


def _embedding_over_tp(name: str, parameter: Tensor) -> bool:
    return _sum_over_tp(name, parameter) or "word_embeddings" in name


FAULTS: dict[str, Fault] = {
    "every rank reads the first slice": Fault(
        module=Checkpoint,
        name="read",
        function=_first_slice,
        axis="tp",
        case="test_weights.test_a_checkpoint_in_several_files",
        shows="*.hidden_states",
        catalogue=(89,),
    ),
    "fused q, k and v filled as one block": Fault(
        module=FusedQkv,
        name="fuse",
        function=_one_block,
        axis="any",
        case="test_weights.test_a_checkpoint_in_several_files",
        shows="*.hidden_states",
        catalogue=(90,),
    ),
    "gradient of fused q, k and v cut as one block": Fault(
        module=FusedQkv,
        name="split",
        function=_cut_as_one_block,
        axis="any",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*.self_attn.[qk]_proj.weight",
        catalogue=(90,),
    ),
    "gradients of gate and up exchanged": Fault(
        module=FusedGateUp,
        name="split",
        function=_up_first,
        axis="any",
        case="test_gradients.test_decoder_and_head_gradients",
        shows="grad.model.layers.*.mlp.gate_proj.weight",
    ),
    "head untied with equal values": Fault(
        module=heads,
        name="outputs",
        function=_copy_of_head,
        axis="any",
        case="test_gradients.test_tied_embeddings",
        shows="grad.model.embed_tokens.weight",
        catalogue=(101,),
    ),
    "head's part of a tied gradient counted twice": Fault(
        module=heads,
        name="outputs",
        function=_both_uses,
        axis="any",
        case="test_gradients.test_tied_embeddings",
        shows="grad.model.embed_tokens.weight",
    ),
    "tied gradient summed over slices of the vocabulary": Fault(
        module=reductions,
        name="sum_over_tp",
        function=_embedding_over_tp,
        axis="tp",
        case="test_gradients.test_tied_embeddings",
        shows="grad.model.embed_tokens.weight",
    ),
}
