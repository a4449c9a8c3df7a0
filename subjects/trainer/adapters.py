"""LoRA adapters in PEFT's file format: ``adapter_config.json`` and ``adapter_model.safetensors``.

A module ``m`` of the checkpoint has the tensors ``base_model.model.m.lora_A.weight`` [r, in] and
``base_model.model.m.lora_B.weight`` [out, r]; it computes x W^T + scale * (x A^T) B^T (LoRA,
section 4.1), where scale is alpha / r, or alpha / sqrt(r) with ``use_rslora`` (rsLoRA, section 3).
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subjects.token_ids import shown
from subjects.trainer import checks
from subjects.trainer.weights import bounds
from subjects.types import TARGETS

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_DTYPES = ("F64", "F32", "F16", "BF16")

# What changes nothing of what a loaded adapter computes. Every other key must be empty or off.
_NEUTRAL = {
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "use_rslora",
    "init_lora_weights",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "auto_mapping",
    "inference_mode",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
}
# Initialisations that leave the base weights as they were; others move a part of them into A and B.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Rank, alpha and targets (in the order of ``TARGETS``) of one adapter, on every layer."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapter_config(
    *, rank: int, alpha: float, targets: Sequence[str], rslora: bool = False
) -> AdapterConfig:
    """A checked configuration.

    Raises:
        ValueError: a rank below 1, an alpha that is not finite, or no, unknown or repeated targets.
        TypeError: targets that are no list, or rslora that is no bool.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= checks.LARGEST:
        raise ValueError(f"rank is {shown(rank)}; expected an integer of at least 1")
    if not checks.is_number(alpha) or not abs(alpha) <= sys.float_info.max:
        raise ValueError(f"alpha is {shown(alpha)}; expected a finite number")
    if isinstance(targets, str | Mapping) or not isinstance(targets, Collection):
        # To PEFT a text is a pattern over the names of modules.
        raise TypeError(
            f"targets is {shown(targets)}; expected a list or tuple of some of {', '.join(TARGETS)}"
        )
    targets = tuple(targets)
    unknown = [target for target in targets if target not in TARGETS]
    if not isinstance(rslora, bool):
        raise TypeError(f"rslora is {shown(rslora)}; expected True or False")
    if unknown or not targets or len(set(targets)) != len(targets):
        raise ValueError(
            f"targets are {list(targets)}; expected at least one of {', '.join(TARGETS)}, each "
            f"once{f' (unknown: {unknown})' if unknown else ''}"
        )
    ordered = tuple(target for target in TARGETS if target in targets)
    return AdapterConfig(rank=rank, alpha=float(alpha), targets=ordered, rslora=rslora)


def read_config(directory: Path) -> AdapterConfig:
    """Read ``adapter_config.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file can't be read, the adapter is no LoRA, or it uses what the trainer does
            not compute; every such key is named.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"no {CONFIG} in {directory}; expected a directory written by PEFT's save_pretrained "
            "or by save_slot"
        )
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}); it may have been cut short: copy or save it again"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(  # noqa: TRY004 - what a file holds is a value
            f"{path} holds {shown(found)}; expected a JSON object, as PEFT's save_pretrained writes"
        )
    _refuse(path, found)
    try:
        return adapter_config(
            rank=found.get("r", 8),
            alpha=found.get("lora_alpha", 8),
            targets=() if found.get("target_modules") is None else found["target_modules"],
            rslora=False if found.get("use_rslora") is None else found["use_rslora"],
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _refuse(path: Path, found: Mapping[str, Any]) -> None:
    """Name everything that would be computed wrongly."""
    wrong = {
        key: value
        for key, value in found.items()
        # PEFT writes "none" for no biases.
        if key not in _NEUTRAL and value and (key, value) != ("bias", "none")
    }
    if found.get("peft_type") != "LORA":
        wrong["peft_type"] = found.get("peft_type")
    if found.get("init_lora_weights") not in _PLAIN_STARTS:
        wrong["init_lora_weights"] = found["init_lora_weights"]
    if wrong:
        listed = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        raise ValueError(
            f"{path}: the trainer runs plain LoRA of one rank and one alpha on linear layers, "
            f"without dropout or biases; this adapter has {listed}"
        )


class AdapterFile:
    """Reads slices of the factors of ``adapter_model.safetensors``, by names as in ``factors``."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / TENSORS
        if not self.path.is_file():
            other = directory / "adapter_model.bin"
            instead = f"; {other.name} is a pickle: save it again with safe_serialization=True"
            raise FileNotFoundError(
                f"no {TENSORS} in {directory}; expected PEFT's safetensors"
                f"{instead if other.exists() else ''}"
            )
        try:
            with safe_open(self.path, framework="pt") as file:
                slices = {
                    name.removeprefix(_PREFIX).removesuffix(_SUFFIX): file.get_slice(name)
                    for name in file.keys()  # noqa: SIM118  # it is no mapping
                }
                self.shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}
                self._dtypes = {name: str(one.get_dtype()) for name, one in slices.items()}
        except SafetensorError as error:
            raise ValueError(
                f"{self.path} is no safetensors file that can be read ({error}); it may have been "
                "cut short: copy or save it again"
            ) from error

    def check(self, expected: Mapping[str, tuple[int, ...]], *, extra: Sequence[str] = ()) -> None:
        """Refuse a file that has not exactly the ``expected`` tensors; ``extra`` may be there too.

        Raises:
            ValueError: with the tensors that are missing, not known, of another shape, or of a
                dtype that no adapter is trained in.
        """
        missing = sorted(expected.keys() - self.shapes.keys())
        unknown = sorted(self.shapes.keys() - expected.keys() - set(extra))
        shapes = [
            f"{name} is {list(self.shapes[name])} and should be {list(shape)}"
            for name, shape in expected.items()
            if self.shapes.get(name, shape) != shape
        ]
        odd = [f"{name} in {kind}" for name, kind in self._dtypes.items() if kind not in _DTYPES]
        if odd:
            raise ValueError(
                f"{self.path} has {'; '.join(odd[:4])}; expected factors in {', '.join(_DTYPES)}: "
                "convert them, and save the adapter again"
            )
        for what, names in (("lacks", missing), ("has also", unknown), ("has", shapes)):
            if names:
                rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
                raise ValueError(
                    f"{self.path} {what} {'; '.join(names[:4])}{rest}: it was made for another "
                    "base model, other layers or other targets than its configuration and this "
                    "trainer's checkpoint have"
                )

    def read(self, name: str, *, dim: int | None = None, part: tuple[int, int] = (0, 1)) -> Tensor:
        """The tensor ``name``, or piece ``part[0]`` of ``part[1]`` of it along ``dim`` (0 or 1)."""
        with safe_open(self.path, framework="pt") as file:
            view = file.get_slice(f"{_PREFIX}{name}{_SUFFIX}")
            if dim is None:
                return view[:]  # type: ignore[no-any-return]
            start, stop = bounds(view.get_shape()[dim], part)
            return view[start:stop] if dim == 0 else view[:, start:stop]  # type: ignore[no-any-return]

    def digest(self) -> str:
        """What stands for all that the file holds."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def write(
    directory: Path, config: AdapterConfig, factors: Mapping[str, Tensor], *, base_model: str | None
) -> None:
    """Write an adapter that PEFT reads; ``factors`` are whole, by names such as ``m.lora_A``.

    A file that is there is replaced by a whole one, never by half of one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in (TENSORS, CONFIG):
        # Before the other is replaced: both are of one adapter.
        if (directory / name).is_dir():
            raise IsADirectoryError(f"{directory / name} is a directory; expected a file or none")
    described: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        # PEFT writes whole numbers as such.
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "target_modules": list(config.targets),
        "use_rslora": config.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
    }
    tensors = {f"{_PREFIX}{name}{_SUFFIX}": value for name, value in factors.items()}
    # Clones: a slice of a larger tensor can't be stored, and two names must not share memory.
    stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(stored, directory / f".{TENSORS}", metadata={"format": "pt"})
    text = json.dumps(described, indent=2, sort_keys=True)
    (directory / f".{CONFIG}").write_text(text, encoding="utf-8")
    for name in (TENSORS, CONFIG):
        (directory / f".{name}").replace(directory / name)
