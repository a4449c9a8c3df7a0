from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from subjects.trainer.architecture import Architecture
from subjects.trainer.weights import Checkpoint, FusedQkv, Vocabulary, bounds, layouts, load

ARCHITECTURE = Architecture(
    layers=2,
    hidden=40,
    heads=4,
    kv_heads=2,
    head_size=12,
    mlp=56,
    vocabulary=131,
    norm_epsilon=1e-6,
    rope_base=1e4,
    tied=False,
)


def shape_of(name: str) -> tuple[int, ...]:
    """Shapes of the checkpoint's tensors, by the last part of their name."""
    sizes = {
        "q_proj": (48, 40),
        "k_proj": (24, 40),
        "v_proj": (24, 40),
        "o_proj": (40, 48),
        "gate_proj": (56, 40),
        "up_proj": (56, 40),
        "down_proj": (40, 56),
        "embed_tokens": (131, 40),
        "lm_head": (131, 40),
        "q_norm": (12,),
        "k_norm": (12,),
    }
    return sizes.get(name.split(".")[-2], (40,))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    names = [n for _, layout in layouts(ARCHITECTURE, tp_rank=0, tp=1) for n in layout.names]
    return {name: torch.randn(shape_of(name)) for name in names}


@pytest.fixture
def directory(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint over two files with an index."""
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index, part in enumerate((names[:7], names[7:])):
        file = f"model-{index}.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    text = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("tp", [1, 2])
def test_slices_of_all_ranks_are_the_checkpoint(
    directory: Path, tensors: dict[str, torch.Tensor], tp: int
) -> None:
    checkpoint = Checkpoint(directory)
    held: dict[str, list[torch.Tensor]] = {}
    dims = {}
    for rank in range(tp):
        for _, layout in layouts(ARCHITECTURE, tp_rank=rank, tp=tp):
            pieces = [checkpoint.read(n, dim=layout.dim, part=(rank, tp)) for n in layout.names]
            back = layout.split(layout.fuse(pieces))
            for name, piece in zip(layout.names, back, strict=True):
                held.setdefault(name, []).append(piece)
                dims[name] = layout.dim
    assert held.keys() == tensors.keys()
    for name, pieces in held.items():
        dim = dims[name]
        if dim is None:
            assert all(piece.equal(tensors[name]) for piece in pieces)
        else:
            assert torch.cat(pieces, dim=dim).equal(tensors[name])


def test_q_k_and_v_are_interleaved_by_key_value_head() -> None:
    """A uniform cut of [q; k; v] loads with the right shape and computes the wrong model."""
    layout = FusedQkv("layer", head_size=1, per_group=2)
    q, k, v = (
        torch.arange(4.0)[:, None],
        torch.tensor([[10.0], [11.0]]),
        torch.tensor([[20.0], [21.0]]),
    )
    assert layout.fuse([q, k, v]).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_the_vocabulary_is_padded_with_zeros() -> None:
    layout = Vocabulary("embed", columns=2, rows=4)
    assert layout.fuse([torch.ones(2, 3)]).sum(1).tolist() == [3, 3, 0, 0]
    assert layout.split(torch.ones(4, 3))[0].shape == (2, 3)


def test_bounds_are_those_of_torch_chunk() -> None:
    for size in (1, 5, 8, 131):
        for pieces in (1, 2, 3, 4):
            sizes = [
                stop - start for start, stop in (bounds(size, (i, pieces)) for i in range(pieces))
            ]
            chunks = [len(chunk) for chunk in torch.zeros(size).chunk(pieces)]
            assert sizes[: len(chunks)] == chunks
            assert not any(sizes[len(chunks) :])


def test_a_missing_tensor_is_named(directory: Path) -> None:
    with pytest.raises(KeyError, match=r"no tensor 'model\.norm\.bias'"):
        Checkpoint(directory).read("model.norm.bias")


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no index"):
        Checkpoint(tmp_path)


def test_a_parameter_that_no_layout_names(directory: Path) -> None:
    known = dict(layouts(ARCHITECTURE, tp_rank=0, tp=1))
    model = torch.nn.Module()
    model.register_parameter("surprise", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"unknown \['surprise'\], missing \['decoder"):
        load(model, Checkpoint(directory), known, (0, 1))


def test_a_shape_that_differs(directory: Path) -> None:
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(41)))
    layout = dict(layouts(ARCHITECTURE, tp_rank=0, tp=1))["decoder.final_layernorm.weight"]
    with pytest.raises(ValueError, match=r"shape \(40,\) for slice 0 of 1, weight has \(41,\)"):
        load(model, Checkpoint(directory), {"weight": layout}, (0, 1))
