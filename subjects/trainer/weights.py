"""Weights and gradients between a transformers checkpoint and Megatron's layout.

Megatron fuses q, k and v (interleaved by key-value head) and gate and up, pads the vocabulary and
holds one slice of each on a tensor-parallel rank. A ``Layout`` says this for one parameter, in both
directions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from subjects.trainer.architecture import Architecture


class Checkpoint:
    """Reads slices of the tensors of a safetensors checkpoint, sharded over files or not."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        if index.is_file():
            mapping: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {name: directory / file for name, file in mapping.items()}
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise FileNotFoundError(
                f"no model.safetensors and no index of one in {directory}; expected a directory "
                "written by save_pretrained"
            )

    def read(self, name: str, *, dim: int | None = None, part: tuple[int, int] = (0, 1)) -> Tensor:
        """The tensor, or piece ``part[0]`` of ``part[1]`` of it along ``dim`` (0 or 1).

        Pieces are ceil(size / pieces) long and the last ones what is left.

        Raises:
            KeyError: the checkpoint has no such tensor.
        """
        if name not in self._files:
            raise KeyError(
                f"{self.directory} has no tensor {name!r}; it has {len(self._files)}, such as "
                f"{sorted(self._files)[:3]}"
            )
        with safe_open(self._files[name], framework="pt") as file:
            if dim is None:
                return file.get_tensor(name)  # type: ignore[no-any-return]
            view = file.get_slice(name)
            start, stop = bounds(view.get_shape()[dim], part)
            return view[start:stop] if dim == 0 else view[:, start:stop]  # type: ignore[no-any-return]


def bounds(size: int, part: tuple[int, int]) -> tuple[int, int]:
    """Where piece ``part[0]`` of ``part[1]`` of ``size`` starts and stops."""
    index, pieces = part
    length = -(-size // pieces)
    return min(index * length, size), min((index + 1) * length, size)


class Layout(Protocol):
    """How one Megatron parameter holds tensors of the checkpoint, on one tensor-parallel rank."""

    @property
    def names(self) -> Sequence[str]:
        """Names in the checkpoint."""

    @property
    def dim(self) -> int | None:
        """The dimension of the checkpoint's tensors that tensor parallelism splits, if any."""

    def fuse(self, pieces: Sequence[Tensor]) -> Tensor:
        """This rank's slices of the checkpoint's tensors -> the parameter."""

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The parameter, or its gradient -> slices of the checkpoint's tensors."""


@dataclass(frozen=True)
class Plain:
    """One tensor, as it is."""

    name: str
    dim: int | None = None

    @property
    def names(self) -> Sequence[str]:
        """Names in the checkpoint."""
        return (self.name,)

    def fuse(self, pieces: Sequence[Tensor]) -> Tensor:
        """The tensor."""
        return pieces[0]

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The tensor."""
        return (value,)


@dataclass(frozen=True)
class Vocabulary:
    """A matrix with a row per id: ``columns`` real rows on this rank, padded to ``rows``."""

    name: str
    columns: int
    rows: int
    dim: int | None = 0

    @property
    def names(self) -> Sequence[str]:
        """Names in the checkpoint."""
        return (self.name,)

    def fuse(self, pieces: Sequence[Tensor]) -> Tensor:
        """[columns, H] -> [rows, H] with zeros in the padding."""
        return torch.nn.functional.pad(pieces[0], (0, 0, 0, self.rows - self.columns))

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """[rows, H] -> [columns, H]."""
        return (value[: self.columns],)


@dataclass(frozen=True)
class FusedQkv:
    """q, k and v, interleaved: the query heads of a key-value head, its key, its value."""

    prefix: str
    head_size: int
    per_group: int
    dim: int | None = 0

    @property
    def names(self) -> Sequence[str]:
        """Names in the checkpoint."""
        return [f"{self.prefix}.{part}_proj.weight" for part in "qkv"]

    def fuse(self, pieces: Sequence[Tensor]) -> Tensor:
        """q [G * per_group * D, H], k and v [G * D, H] -> [G * (per_group + 2) * D, H]."""
        hidden = pieces[0].shape[1]
        groups = len(pieces[1]) // self.head_size
        heads = [piece.view(groups, -1, self.head_size, hidden) for piece in pieces]
        return torch.cat(heads, dim=1).reshape(-1, hidden)

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The inverse of ``fuse``."""
        hidden = value.shape[1]
        grouped = value.view(-1, self.per_group + 2, self.head_size, hidden)
        parts = grouped.split((self.per_group, 1, 1), dim=1)
        return [part.reshape(-1, hidden) for part in parts]


@dataclass(frozen=True)
class FusedGateUp:
    """The gate's rows of this rank, then the up projection's."""

    prefix: str
    dim: int | None = 0

    @property
    def names(self) -> Sequence[str]:
        """Names in the checkpoint."""
        return [f"{self.prefix}.gate_proj.weight", f"{self.prefix}.up_proj.weight"]

    def fuse(self, pieces: Sequence[Tensor]) -> Tensor:
        """Gate [F, H] and up [F, H] -> [2 F, H]."""
        return torch.cat(list(pieces))

    def split(self, value: Tensor) -> Sequence[Tensor]:
        """The inverse of ``fuse``."""
        return value.chunk(2)


def layouts(architecture: Architecture, *, tp_rank: int, tp: int) -> Iterator[tuple[str, Layout]]:
    """Every parameter of the model by Megatron's name, with its layout."""
    start, stop = bounds(architecture.vocabulary, (tp_rank, tp))
    rows = architecture.padded_vocabulary(tp) // tp
    yield (
        "embedding.word_embeddings.weight",
        Vocabulary("model.embed_tokens.weight", stop - start, rows),
    )
    for index in range(architecture.layers):
        ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
        yield f"{ours}.input_layernorm.weight", Plain(f"{theirs}.input_layernorm.weight")
        yield (
            f"{ours}.self_attention.linear_qkv.weight",
            FusedQkv(
                f"{theirs}.self_attn",
                architecture.head_size,
                architecture.heads // architecture.kv_heads,
            ),
        )
        for norm, name in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            yield f"{ours}.self_attention.{norm}.weight", Plain(f"{theirs}.self_attn.{name}.weight")
        yield (
            f"{ours}.self_attention.linear_proj.weight",
            Plain(f"{theirs}.self_attn.o_proj.weight", 1),
        )
        yield f"{ours}.pre_mlp_layernorm.weight", Plain(f"{theirs}.post_attention_layernorm.weight")
        yield f"{ours}.mlp.linear_fc1.weight", FusedGateUp(f"{theirs}.mlp")
        yield f"{ours}.mlp.linear_fc2.weight", Plain(f"{theirs}.mlp.down_proj.weight", 1)
    yield "decoder.final_layernorm.weight", Plain("model.norm.weight")
    if not architecture.tied:
        yield "output_layer.weight", Vocabulary("lm_head.weight", stop - start, rows)


def load(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    known: Mapping[str, Layout],
    part: tuple[int, int],
) -> None:
    """Overwrite every parameter of ``model`` with tensor-parallel slice ``part`` of its tensors.

    Raises:
        ValueError: the model has parameters that no layout names (or the reverse), or a shape
            differs.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != known.keys():
        raise ValueError(
            "megatron-core built other parameters than the trainer knows: unknown "
            f"{sorted(parameters.keys() - known.keys())}, missing "
            f"{sorted(known.keys() - parameters.keys())}"
        )
    for name, parameter in parameters.items():
        layout = known[name]
        pieces = [checkpoint.read(tensor, dim=layout.dim, part=part) for tensor in layout.names]
        value = layout.fuse(pieces)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{', '.join(layout.names)}: the checkpoint gives shape {tuple(value.shape)} for "
                f"slice {part[0]} of {part[1]}, {name} has {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(value)
