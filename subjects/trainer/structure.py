"""What ranks must have made alike: the structure of a module, the form of a tensor.

Values are no part of it, since all ranks get those of the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from subjects.trainer import ownership
from subjects.trainer.agreement import Fact


def facts_of(kind: str, made: object, borrowed: Collection[Tensor]) -> dict[str, Fact]:
    """What must be equal of what a factory made, in an order that must be equal too.

    ``kind``: module, parameter or buffer. ``borrowed``: tensors that no module may hold.

    Raises:
        TypeError: it is of another kind.
        ValueError: it is, or holds, a tensor that can't be shared between ranks.
    """
    if kind == "module":
        if not isinstance(made, torch.nn.Module):
            raise TypeError(f"the factory returned {_short(made)}; expected a torch.nn.Module")
        return dict(describe_module(made, borrowed))
    if not isinstance(made, Tensor):
        raise TypeError(f"the factory returned {_short(made)}; expected a tensor")
    check_tensor(kind, "of the factory", made)
    return {"value": of_tensor(made, trained=kind == "parameter" and is_trained(made))}


def describe_module(
    module: torch.nn.Module, borrowed: Collection[Tensor]
) -> Iterator[tuple[str, Fact]]:
    """What must be equal on all ranks: the modules inside, and each tensor, in their order.

    A tensor that is another one under a second name says so.

    Raises:
        ValueError: a tensor that can't be shared between ranks.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        found = type(part)
        yield f"submodule {path!r}", in_words(f"{found.__module__}.{found.__qualname__}")
    names: dict[int, str] = {}
    memory: dict[int, str] = {}
    foreign = {id(tensor) for tensor in borrowed}
    for kind, name, tensor in ownership.tensors_of(module):
        if id(tensor) in names:
            yield f"{kind} {name}", in_words(f"the same as {names[id(tensor)]}")
            continue
        names[id(tensor)] = f"{kind} {name}"
        if id(tensor) in foreign:
            raise ValueError(f"{kind} {name} belongs to the model; give the module a copy")
        check_tensor(kind, name, tensor)
        where = tensor.untyped_storage().data_ptr()
        if where and where in memory:
            raise ValueError(
                f"{kind} {name} lies in the memory of {memory[where]} without being the same "
                "object; share a tensor by assigning it under both names, or clone it"
            )
        memory[where] = names[id(tensor)]
        trained = kind == "parameter" and tensor.requires_grad
        yield f"{kind} {name}", of_tensor(tensor, trained=trained)


def check_tensor(kind: str, name: str, value: Tensor) -> None:
    """Refuse what can't be sent to the other ranks, or would not be a tensor of this trainer's.

    Raises:
        ValueError: with what it is.
    """
    problem = ""
    if isinstance(value, ownership.CustomParameter | ownership.CustomBuffer):
        owner = ownership.owner_of(value)
        problem = f"is {owner.what if owner else 'registered'} already; make a new one"
    elif is_lazy(value):
        problem = "has no shape yet; run the module once in the factory"
    elif type(value) not in (Tensor, torch.nn.Parameter):
        problem = f"is a {type(value).__name__}; expected a plain tensor"
    elif value.is_meta or value.layout != torch.strided:
        problem = f"lies on {value.device} as {value.layout}; expected a dense tensor with values"
    elif value.is_quantized:
        problem = "is quantized; expected plain numbers, as value.dequantize() gives"
    elif value.is_complex():
        problem = f"has dtype {value.dtype}; expected real numbers"
    elif kind == "parameter" and not value.is_floating_point():
        problem = f"has dtype {value.dtype}; expected floating values, or register a buffer"
    if problem:
        raise ValueError(f"{kind} {name} {problem}")


def in_words(text: str) -> Fact:
    """A fact that its words say in full."""
    return Fact(text.encode(), text)


def of_tensor(value: Tensor, *, trained: bool) -> Fact:
    """Dtype, shape and whether it is trained."""
    dtype = str(value.dtype).removeprefix("torch.")
    return in_words(f"{dtype} {list(value.shape)}, {'trained' if trained else 'not trained'}")


def is_trained(value: Tensor) -> bool:
    """A plain tensor becomes a trained parameter; a parameter says for itself."""
    return value.requires_grad or not isinstance(value, torch.nn.Parameter)


def _short(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:80]
