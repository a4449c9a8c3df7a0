"""LoRA by PEFT itself: adapter directories as it writes them, and adapters on the oracle's model.

PEFT replaces the targeted layers of a transformers model by layers of its own. Several adapters
stay resident, one of them is active in a forward, and the parameters of all remain trainable.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subjects.types import TARGETS


def write_adapter(
    directory: str | Path,
    checkpoint: str | Path,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] = TARGETS,
    rslora: bool = False,
    seed: int = 0,
) -> Path:
    """Write an adapter of ``checkpoint`` through PEFT's own save_pretrained, float32.

    Every number of A and of B is drawn, none is zero, and a delta is about as large as what it is
    added to. Returns ``directory``.
    """
    from peft import get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # Names and shapes are PEFT's; the base model's own values are not needed for them.
    with torch.device("meta"):
        base = Qwen3ForCausalLM(Qwen3Config.from_pretrained(str(checkpoint)))
    with _no_advice():
        model = get_peft_model(base, _config(rank, alpha, targets, rslora=rslora))
        config = model.peft_config["default"]
        config.base_model_name_or_path = str(checkpoint)
        generator = torch.Generator().manual_seed(seed)
        scale = alpha / (rank**0.5 if rslora else rank)
        drawn = {}
        for name, parameter in model.named_parameters():
            if ".lora_" not in name:
                continue
            # x A^T then has the scale of x, and so has scale * (x A^T) B^T.
            size = parameter.shape[1] ** -0.5 / (1.0 if ".lora_A." in name else scale)
            drawn[name] = torch.randn(parameter.shape, generator=generator) * size
        model.save_pretrained(str(directory), state_dict=drawn, save_embedding_layers=False)
    return Path(directory)


class Adapters:
    """The adapters of one transformers model, in place; see ``subjects.trainer.slots``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that there are."""
        return () if self._peft is None else tuple(self._peft.peft_config)

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Let the model compute with the adapter, or bare, in the block.

        Raises:
            ValueError: no adapter of this name.
        """
        self._check(name)
        if self._peft is None:
            yield
            return
        with self._grads_as_they_are():
            if name is None:
                self._peft.base_model.disable_adapter_layers()
            else:
                self._peft.set_adapter(name)
        try:
            yield
        finally:
            with self._grads_as_they_are():
                self._peft.base_model.enable_adapter_layers()

    def load(self, name: str, directory: str | Path) -> None:
        """Read an adapter by PEFT, in place of one of this name."""
        if name in self.names:
            self.remove(name)
        self._add(name, lambda peft: self._load(peft, name, str(directory)))

    def add(
        self,
        name: str,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        factory: Callable[[str, tuple[int, ...]], Tensor] | None,
    ) -> None:
        """Make an adapter as PEFT does, or with the factory's values.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.names:
            raise ValueError(f"adapter {name!r} exists already")
        config = _config(rank, alpha, targets)
        self._add(name, lambda peft: self._make(peft, name, config))
        with torch.no_grad():
            for full, parameter in self._parameters(name).items():
                if factory is not None:
                    factor = full.partition("/")[2]
                    parameter.copy_(factory(factor, tuple(parameter.shape)))

    def save(self, name: str, directory: str | Path) -> None:
        """Write an adapter by PEFT's save_pretrained."""
        self._check(name)
        with tempfile.TemporaryDirectory() as made, _no_advice():
            self._peft.save_pretrained(made, selected_adapters=[name], save_embedding_layers=False)
            # PEFT writes an adapter into a folder of its name, except one called default.
            found = Path(made) if name == "default" else Path(made) / name
            Path(directory).mkdir(parents=True, exist_ok=True)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(found / file, Path(directory) / file)

    def snapshot(self, name: str) -> dict[str, Tensor]:
        """Copies of the values."""
        self._check(name)
        return {full: value.detach().clone() for full, value in self._parameters(name).items()}

    def restore(self, name: str, snapshot: Mapping[str, Tensor]) -> None:
        """Set the values to those of a snapshot."""
        self._check(name)
        with torch.no_grad():
            for full, parameter in self._parameters(name).items():
                parameter.copy_(snapshot[full])

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        self._check(name)
        with self._grads_as_they_are(), _no_advice():
            self._peft.delete_adapter(name)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every factor by adapter/module.lora_A."""
        for name in self.names:
            yield from self._parameters(name).items()

    def _parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        found = {full: value for full, value in self._model.named_parameters() if ".lora_" in full}
        return {
            checkpoint_name(full): value
            for full, value in found.items()
            if checkpoint_name(full).startswith(f"{name}/")
        }

    def _check(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ValueError(f"slot is {name!r}; the oracle has {list(self.names)}")

    def _add(self, name: str, make: Callable[[Any], Any]) -> None:
        with self._grads_as_they_are(), _no_advice():
            self._peft = make(self._peft)
        for parameter in self._parameters(name).values():
            parameter.requires_grad_(True)

    def _load(self, peft: Any, name: str, directory: str) -> Any:
        # Without autocast PEFT would widen half precisions, so that a run had two dtypes.
        options: dict[str, Any] = {"is_trainable": True, "autocast_adapter_dtype": False}
        if peft is None:
            from peft import PeftModel

            return PeftModel.from_pretrained(self._model, directory, adapter_name=name, **options)
        peft.load_adapter(directory, adapter_name=name, **options)
        return peft

    def _make(self, peft: Any, name: str, config: Any) -> Any:
        if peft is None:
            from peft import get_peft_model

            return get_peft_model(
                self._model, config, adapter_name=name, autocast_adapter_dtype=False
            )
        peft.add_adapter(name, config, autocast_adapter_dtype=False)
        return peft

    @contextmanager
    def _grads_as_they_are(self) -> Iterator[None]:
        """PEFT freezes the base model and every adapter but one; here each stays as it was."""
        wanted = {id(value): value.requires_grad for value in self._model.parameters()}
        yield
        for value in self._model.parameters():
            value.requires_grad_(wanted.get(id(value), value.requires_grad))


def checkpoint_name(name: str) -> str:
    """A parameter's name in the checkpoint, or adapter/module.lora_A, from that inside PEFT's."""
    if ".lora_" not in name:
        return name.replace(".base_layer.", ".")
    module, _, rest = name.partition(".lora_")
    which, adapter, _ = rest.split(".")
    return f"{adapter}/{module}.lora_{which}"


def _config(rank: int, alpha: float, targets: Sequence[str], *, rslora: bool = False) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )


@contextmanager
def _no_advice() -> Iterator[None]:
    """PEFT advises on merging into tied embeddings, which is done nowhere here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
