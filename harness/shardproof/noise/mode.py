"""Monte Carlo arithmetic as a dispatch mode: what rounding can do to each value of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .handlers import decomposition_of, handler_of, write_out
from .ops import Kind, Traits, base_name, power_of_two, tensors, traits
from .perturb import Noise
from .pool import coarser
from .precision import Fall, PrecisionWatch
from .taint import REGISTRY

_COMPILER: Final = "torch._dynamo"


class NoiseMode(TorchDispatchMode):
    """Run what is inside with other, equally valid roundings, the same ones for the same seed.

    Each floating operation's result moves by up to one unit of rounding of its own dtype, and
    each reduction is made in another order: forward, backward, in place and in optimizers. Moved
    are only values that depend on a parameter or on a floating input, so that tables and masks
    stay what they are on every topology. Infinities, zeros and NaN stay in place. The global
    random generators are not touched.

    What is known of a tensor's origin belongs to the process, not to the mode: a fixture built
    under one mode is judged rightly under the next one. Work done on such a tensor while no mode
    is active is not seen; keep a mode with ``perturb=False`` active there.

    Code given to ``torch.compile`` runs eagerly. With ``fullgraph=True`` this works where the
    compiler was imported before the mode became active; otherwise torch refuses.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method below in one that imports the compiler, which takes seconds.
        return False

    def __init__(
        self, seed: int, *, perturb: bool = True, expected: torch.dtype | None = None
    ) -> None:
        """Make a mode; it acts inside ``with``.

        Args:
            seed: which of the roundings.
            perturb: False only follows what depends on what, and leaves each value as it is. May
                be set at any time, also while the mode is active.
            expected: the dtype that the run is meant to have. Operations on tainted values that
                are computed below it from the start are then listed in ``lower``.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.perturb = perturb
        self._noise = Noise(seed)
        self._watch = PrecisionWatch(expected)
        self._stances: list[AbstractContextManager[Any] | None] = []
        self._uncompiled: Callable[..., Any] | None = None

    @property
    def fallen(self) -> list[Fall]:
        """Where a float64 value fell to a lower precision, in the order first seen."""
        return self._watch.fallen

    @property
    def lower(self) -> list[Fall]:
        """Operations that computed below ``expected`` without having met a wider value."""
        return self._watch.lower

    def __enter__(self) -> Self:
        # A compiled region is one opaque kernel to a mode. torch runs it eagerly under one, except
        # that it refuses `fullgraph=True`; asked for eager it runs that too.
        outermost = not self._stances and _COMPILER in sys.modules
        self._stances.append(torch.compiler.set_stance("force_eager") if outermost else None)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        stance = self._stances.pop()
        if stance is not None:
            stance.__exit__(kind, error, trace)

    @contextmanager
    def perturbing(self, perturb: bool) -> Iterator[None]:
        """Set ``perturb`` for a while."""
        before = self.perturb
        self.perturb = perturb
        try:
            yield
        finally:
            self.perturb = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _COMPILER not in sys.modules or (self._stances and self._stances[0] is not None):
            return self._dispatch(func, types, args, kwargs or {})
        # The compiler came while the mode was active, and may be at work on the caller's frame.
        if self._uncompiled is None:
            self._uncompiled = torch.compiler.disable(self._dispatch)
        return self._uncompiled(func, types, args, kwargs or {})

    def _dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        for kind in types:
            if issubclass(kind, FakeTensor):
                return func(*args, **kwargs)  # shapes alone: there is nothing to round
            if kind is not Tensor and _foreign(kind):
                # DTensor and its like come back with their local tensors.
                return NotImplemented
        if not isinstance(func, OpOverload):
            return self._higher_order(func, args, kwargs)
        known = traits(func)
        if known.composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inputs = _inputs(known, args, kwargs)
        tainted = [value for value in inputs if REGISTRY.tainted(value)]
        if known.kind is Kind.FACTORY or (not tainted and known.kind is not Kind.RANDOM):
            result = func(*args, **kwargs)
            if not known.overwrites and not known.outs:
                for value in tensors(result):
                    REGISTRY.mark_clean(value)
            return result
        if known.foreach and len(tainted) < len(inputs):
            clean = _clean_entries(known, args)
        else:
            clean = frozenset()
        if self.perturb and known.kind not in (Kind.EXACT, Kind.RANDOM):
            result = self._compute(func, known, args, kwargs, tainted, clean)
        else:
            result = func(*args, **kwargs)
        self._settle(func, known, args, kwargs, tainted, clean, result)
        return result

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on functions (flex attention, cond, ...) by its eager definition."""
        if isinstance(func, HigherOrderOperator):
            kernel: Callable[..., Any] | None = func.py_kernels.get(
                DispatchKey.CompositeExplicitAutograd
            )
            if kernel is not None:
                with self:
                    return kernel(*args, **kwargs)
        return func(*args, **kwargs)

    def _compute(
        self,
        func: OpOverload,
        known: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tainted: Sequence[Tensor],
        clean: frozenset[int],
    ) -> Any:
        """The operation under noise."""
        decomposed = decomposition_of(func, known.name)
        if decomposed is not None:
            with self:
                return decomposed(*args, **kwargs)
        handler = handler_of(func, known.name)
        if handler is not None:
            if not known.outs:
                return handler(self._noise, *args, **kwargs)
            own = {name: value for name, value in kwargs.items() if name not in known.outs}
            return write_out(known, handler(self._noise, *args, **own), kwargs)
        if known.kind is Kind.OPAQUE:
            args = self._moved_inputs(known, args, tainted)
        result = func(*args, **kwargs)
        if known.kind is Kind.CONVERSION and not _rounds(known, args, result):
            return result
        if _scales_exactly(known, args):
            return result
        for value in _results(known, args, kwargs, result, clean, steady=False):
            self._noise.perturb_(value)
        return result

    def _moved_inputs(
        self, known: Traits, args: tuple[Any, ...], tainted: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        written = {id(value) for _, item in known.written(args, {}) for value in tensors(item)}
        moved = {id(value) for value in tainted} - written

        def move(item: Any) -> Any:
            if isinstance(item, Tensor):
                return self._noise.perturb_(item.clone()) if id(item) in moved else item
            if isinstance(item, list | tuple):
                return type(item)(move(part) for part in item)
            return item

        return tuple(move(item) for item in args)

    def _settle(
        self,
        func: OpOverload,
        known: Traits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tainted: Sequence[Tensor],
        clean: frozenset[int],
        result: Any,
    ) -> None:
        """Note what became tainted, and what fell to a lower precision."""
        if known.views:
            # Its storage is known. One number by itself needs to be told from a constant.
            for value in tensors(result):
                if value.dim() == 0:
                    REGISTRY.mark_tainted(value)
            return
        outputs = _results(known, args, kwargs, result, clean, steady=True)
        for value in outputs:
            REGISTRY.mark_tainted(value)
        if known.kind not in (Kind.EXACT, Kind.RANDOM):
            self._watch.see(func, tainted, outputs)


def _foreign(kind: type) -> bool:
    """Whether a tensor class brings dispatch of its own."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own not in (
        Tensor.__torch_dispatch__,
        torch._C._disabled_torch_dispatch_impl,
    )


def _inputs(known: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that the result depends on."""
    read = args[1:] if known.overwrites else args
    if known.kind is Kind.RANDOM:
        return []
    found = tensors(read)
    for name, value in kwargs.items():
        if name not in known.outs:
            found.extend(tensors(value))
    return found


def _clean_entries(known: Traits, args: tuple[Any, ...]) -> frozenset[int]:
    """Positions in the lists of a ``_foreach_`` call where every tensor is clean."""
    lists = [item for item in args if isinstance(item, list | tuple) and tensors(item)]
    if known.overwrites:
        lists = lists[1:]
    if any(isinstance(item, Tensor) and REGISTRY.tainted(item) for item in args):
        return frozenset()
    length = min((len(item) for item in lists), default=0)
    return frozenset(
        position
        for position in range(length)
        if not any(
            REGISTRY.tainted(item[position]) for item in lists if isinstance(item[position], Tensor)
        )
    )


def _results(
    known: Traits,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    clean: frozenset[int],
    *,
    steady: bool,
) -> list[Tensor]:
    """What the call made or wrote, once each; ``steady`` counts unperturbed arguments too."""
    if not known.writes and not known.outs and not clean:
        return tensors(result)
    found: list[Tensor] = []
    written = known.written(args, kwargs)
    for name, item in written:
        if name in known.steady and not (steady and name not in ("state_steps", "found_inf")):
            continue
        found.extend(_entries(item, clean))
    for name in known.outs:
        found.extend(_entries(kwargs.get(name), clean))
    # An operation may both write and return; what it wrote is returned as the same object.
    kept = {id(value) for name, item in written if name in known.steady for value in tensors(item)}
    found.extend(value for value in _entries(result, clean) if steady or id(value) not in kept)
    unique: dict[int, Tensor] = {id(value): value for value in found}
    return list(unique.values())


def _entries(item: Any, clean: frozenset[int]) -> list[Tensor]:
    if clean and isinstance(item, list | tuple):
        return [value for i, part in enumerate(item) if i not in clean for value in tensors(part)]
    return tensors(item)


def _rounds(known: Traits, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a conversion lost digits: the source is floating and finer than the result."""
    into, source = tensors(result), tensors(args[0] if len(args) == 1 else args[:2])
    if known.writes:
        into, source = tensors(args[0]), tensors(args[1])
    if not into or not source:
        return False
    new, old = into[0].dtype, source[0].dtype
    return new.is_floating_point and old.is_floating_point and coarser(new, old)


def _scales_exactly(known: Traits, args: tuple[Any, ...]) -> bool:
    """Whether the call multiplies or divides by a power of two, which does not round."""
    return base_name(known.name) in ("mul", "div") and len(args) == 2 and power_of_two(args[1])
