"""Where the values of a slot come from: PEFT's initialisation, a caller's factory, or files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from subjects.token_ids import shown
from subjects.trainer import adapters, lora, structure
from subjects.trainer.adapters import AdapterConfig, AdapterFile
from subjects.trainer.agreement import DisagreementError
from subjects.trainer.architecture import Architecture
from subjects.trainer.lora import Factor

Factory = Callable[[str, tuple[int, ...]], Tensor]
"""From a factor's name (``model.layers.0.self_attn.q_proj.lora_A``) and shape to its values."""

# A copy of the base model's head, which PEFT saves beside the factors of an lm_head.
_HEAD_COPY = "lm_head.base_layer"


class Read(NamedTuple):
    """A slot as its files have it: this rank's slice of each factor, by name."""

    config: AdapterConfig
    factors: Mapping[str, Factor]
    values: Mapping[str, Tensor]


def factors_of(config: AdapterConfig, architecture: Architecture) -> dict[str, Factor]:
    """Every factor by its name, whole, in the order in which values are sent."""
    return {one.name: one for one in lora.factors(config, architecture)}


def room(
    slot: str, factors: Iterable[Factor], *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Memory for the whole factors of a slot, end to end.

    Raises:
        ValueError: there is none, with how much they take.
    """
    elements = sum(factor.shape[0] * factor.shape[1] for factor in factors)
    try:
        return torch.empty(elements, dtype=dtype, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"slot {slot!r}: no memory on {device} for its factors, {elements:,} elements of "
            f"{dtype}; expected a smaller rank, or fewer targets"
        ) from error


def pieces(flat: Tensor, factors: Iterable[Factor]) -> list[Tensor]:
    """Views of each factor in its shape, of all of them end to end."""
    shapes = [factor.shape for factor in factors]
    split = flat.split([rows * columns for rows, columns in shapes])
    return [piece.view(shape) for piece, shape in zip(split, shapes, strict=True)]


def draw(
    pieces: Iterable[Tensor], slot: str, factors: Iterable[Factor], factory: Factory | None
) -> None:
    """Fill the ``pieces`` of a new slot from ``factory``, or as PEFT begins.

    Raises:
        TypeError, ValueError: what a factory can't do, or gives in another form.
    """
    make = factory or Initial(slot)
    with torch.no_grad():
        for piece, factor in zip(pieces, factors, strict=True):
            piece.copy_(made_by(make, slot, factor.name, factor.shape))


class Initial:
    """PEFT's initialisation: A within 1 / sqrt(in), B zero."""

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Values of one factor, drawn without touching torch's own generator."""
        value = torch.zeros(shape)
        if not name.endswith("lora_A"):
            return value
        seed = zlib.crc32(f"{torch.initial_seed()}/{self.slot}/{name}".encode())
        bound = shape[1] ** -0.5
        return value.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def made_by(factory: Factory, slot: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """What the caller's factory returns for one factor.

    Raises:
        TypeError: it can't be called with a name and a shape, or returns no tensor.
        ValueError: it fails, or returns another shape, or values that are not plain real numbers.
    """
    expected = f"expected a function (name, shape) -> tensor of shape {list(shape)}"
    try:
        value: object = factory(name, shape)
    except TypeError as error:
        # Most often it takes other arguments, of which Python says neither whose nor why.
        raise TypeError(f"slot {slot!r}: the factory failed on {name}: {error}; {expected}") from (
            error
        )
    except DisagreementError:
        # Not the factory's: it made a call for which it needs the other ranks.
        raise
    except Exception as error:
        raise ValueError(
            f"slot {slot!r}: the factory failed on {name}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Tensor):
        raise TypeError(
            f"slot {slot!r}: the factory returned {shown(value)} for {name}; {expected}"
        )
    structure.check_tensor(f"slot {slot!r}: what the factory returned for", name, value)
    if tuple(value.shape) != shape:
        raise ValueError(
            f"slot {slot!r}: the factory returned shape {list(value.shape)} for {name}; expected "
            f"{list(shape)}"
        )
    return value


def check_factory(factory: object) -> None:
    """Refuse what can't be called.

    Raises:
        TypeError: it is no function, and not None.
    """
    if factory is not None and not callable(factory):
        raise TypeError(
            f"factory is {shown(factory)}; expected a function (name, shape) -> tensor, or None "
            "for fresh values"
        )


def directory_of(directory: object) -> Path:
    """The directory of an adapter.

    Raises:
        TypeError: it is no path.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"directory is {shown(directory)}; expected the path of a directory, as text or a Path"
        )
    return Path(directory)


def read(
    directory: Path, architecture: Architecture, *, part: tuple[int, int], head: Tensor
) -> Read:
    """What PEFT's files hold for tensor-parallel slice ``part[0]`` of ``part[1]``.

    ``head``: this rank's rows of the model's own head, [at least v, H].

    Raises:
        FileNotFoundError: no adapter there.
        ValueError: an adapter that the trainer can't run, or whose tensors don't fit.
    """
    config = adapters.read_config(directory)
    factors = factors_of(config, architecture)
    file = AdapterFile(directory)
    shapes: dict[str, tuple[int, ...]] = {name: one.shape for name, one in factors.items()}
    copied_head = _HEAD_COPY in file.shapes and "lm_head" in config.targets
    if copied_head:
        shapes[_HEAD_COPY] = (architecture.vocabulary, architecture.hidden)
    file.check(shapes)
    if copied_head:
        _check_head(file, part, head.detach())
    values = {name: read_slice(file, one, part) for name, one in factors.items()}
    return Read(config, factors, values)


def _check_head(file: AdapterFile, part: tuple[int, int], head: Tensor) -> None:
    """Refuse an adapter that brings another head than the checkpoint's."""
    copy = file.read(_HEAD_COPY, dim=0, part=part).to(head.device, head.dtype)
    if not torch.equal(copy, head[: len(copy)]):
        raise ValueError(
            f"{file.path} brings a head of its own ({_HEAD_COPY}), which differs from the "
            "checkpoint's; save the adapter with save_embedding_layers=False, or build the "
            "trainer on the model that it was trained with"
        )


def read_slice(file: AdapterFile, factor: Factor, part: tuple[int, int]) -> Tensor:
    """Slice ``part[0]`` of ``part[1]`` of a factor of a file."""
    return file.read(factor.name, dim=factor.dim, part=part)
