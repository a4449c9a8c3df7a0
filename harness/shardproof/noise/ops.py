"""What an operation is, as far as rounding goes: read once from its schema and its name."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch._ops import OpOverload


class Kind(enum.Enum):
    """How an operation's floating results come about."""

    EXACT = "exact"  # moves, selects or compares; never rounds
    FACTORY = "factory"  # makes values from no tensor's values
    RANDOM = "random"  # makes random values: an input, whose own values are not perturbed
    CONVERSION = "conversion"  # moves, and rounds where the dtype gets coarser
    ARITHMETIC = "arithmetic"  # rounds
    OPAQUE = "opaque"  # many roundings inside, which cannot be seen: inputs are perturbed too


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# In-place names (with a trailing underscore) and the `_foreach_` forms follow the plain name.
_EXACT: Final = _names(
    """
    abs alias alias_copy amax amin argmax argmin argsort as_strided as_strided_copy
    as_strided_scatter bernoulli bincount bucketize cat channel_shuffle clamp clamp_max clamp_min
    clone concat concatenate constant_pad_nd copysign count_nonzero cummax cummin diag diag_embed
    diagonal diagonal_backward diagonal_copy diagonal_scatter embedding equal expand expand_copy
    fill flip floor ceil trunc round frexp gather hardtanh hardtanh_backward heaviside im2col
    index index_copy index_fill index_select isfinite isinf isnan kthvalue ldexp lift lift_fresh
    lift_fresh_copy local_scalar_dense masked_fill masked_scatter masked_select max max_pool1d
    max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices maximum median min minimum mode movedim nan_to_num nanmedian
    narrow_copy neg negative nextafter nonzero pad permute_copy pixel_shuffle pixel_unshuffle
    positive record_stream reflection_pad1d reflection_pad2d relu relu6 repeat
    repeat_interleave replication_pad1d replication_pad2d resize reshape_alias rot90 roll
    scatter searchsorted segment_ids select_backward select_copy select_scatter set sgn sign
    slice_backward slice_copy slice_inverse slice_scatter sort split_copy squeeze_copy stack
    t_copy take take_along_dim threshold threshold_backward topk transpose_copy tril triu
    unbind_copy unfold_copy unique_consecutive unique_dim unique unique2 unsafe_index
    unsafe_masked_index unsqueeze_copy unsafe_split unsafe_split_with_sizes unsafe_view
    split_with_sizes_copy value_selecting_reduction_backward view_as_complex view_as_real
    view_copy where zero real imag conj conj_physical resolve_conj resolve_neg aminmax
    is_same_size adaptive_max_pool2d
    chunk_cat pin_memory to_sparse to_sparse_csr to_dense sparse_mask values indices
    """
)

_FACTORIES: Final = _names(
    """
    arange bartlett_window blackman_window efficientzerotensor empty empty_like empty_permuted
    empty_strided eye full full_like hamming_window hann_window kaiser_window linspace logspace
    new_empty new_empty_strided new_full new_ones new_zeros ones ones_like range scalar_tensor
    tril_indices triu_indices zeros zeros_like sym_constrain_range
    """
)

# Seeded operations that compute with a floating input: they round like any other.
_SEEDED_ARITHMETIC: Final = _names(
    """
    native_dropout rrelu rrelu_with_noise rrelu_with_noise_functional
    """
)

_CONVERSIONS: Final = _names("to_copy copy copy_from convert_element_type")

_OPAQUE_PREFIXES: Final = (
    "linalg_",
    "flash_attention_",
    "efficient_attention_",
    "cudnn_attention_",
    "scaled_dot_product_",
    "cholesky",
    "lu_",
    "mkldnn_rnn",
    "thnn_fused_",
    "ctc_loss",
    "cudnn_ctc",
    "grouped_mm",
    "scaled_mm",
    "scaled_grouped_mm",
    "triangular_solve",
    "ormqr",
    "geqrf",
    "pdist",
    "cdist",
    "embedding_bag",
    "segment_reduce",
)

# What they write is not a rounded value, or is a counter.
_UNPERTURBED_ARGUMENTS: Final[dict[str, frozenset[str]]] = {
    "_amp_foreach_non_finite_check_and_unscale_": frozenset({"found_inf"}),
    "_amp_update_scale_": frozenset({"growth_tracker"}),
}
_COUNTERS: Final = frozenset({"state_steps", "found_inf", "grads"})

# They replace what stood there, so the old value says nothing about the new one.
_OVERWRITES: Final = _names("copy_ fill_ zero_ _foreach_copy_ _foreach_zero_ set_ resize_")

# Collectives and waiting move data (their sums are the system's own, and one rank has none).
_EXACT_NAMESPACES: Final = _names(
    """
    c10d c10d_functional _c10d_functional _c10d_functional_autograd _dtensor fsdp profiler
    """
)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the mode needs to know about one overload."""

    name: str
    """Base name with its underscores, such as ``add_`` or ``_softmax``."""
    namespace: str
    kind: Kind
    composite: bool
    """It is defined by other operations, which are better seen one by one."""
    writes: tuple[tuple[int, str], ...]
    """Arguments that it writes (position or -1, name), `out=` apart."""
    outs: tuple[str, ...]
    """Names of its ``out=`` arguments."""
    overwrites: bool
    steady: frozenset[str]
    """Written arguments that are not perturbed."""
    foreach: bool
    views: bool
    """It only looks at a storage otherwise: what it returns is as tainted as what it was given."""

    def written(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> list[tuple[str, object]]:
        """The arguments of this call that it writes, `out=` apart, by name."""
        found = []
        for position, name in self.writes:
            if 0 <= position < len(args):
                found.append((name, args[position]))
            elif name in kwargs:
                found.append((name, kwargs[name]))
        return found


def base_name(name: str) -> str:
    """``_foreach_add_`` -> ``add``; ``_to_copy`` -> ``to_copy``."""
    return name.removeprefix("_foreach_").strip("_")


_KNOWN: Final[dict[int, tuple[OpOverload, Traits]]] = {}


def traits(op: OpOverload) -> Traits:
    """The traits of an overload, read from its schema once."""
    # An overload hashes in Python, and this is asked for each operation of a run.
    known = _KNOWN.get(id(op))
    if known is None:
        known = _KNOWN[id(op)] = (op, _read(op))
    return known[1]


def _read(op: OpOverload) -> Traits:
    schema = op._schema
    namespace, _, name = schema.name.partition("::")
    writes: list[tuple[int, str]] = []
    outs: list[str] = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        if argument.is_out:
            outs.append(argument.name)
        else:
            writes.append((-1 if argument.kwarg_only else position, argument.name))
    returns_view = any(
        item.alias_info is not None and not item.alias_info.is_write for item in schema.returns
    )
    if namespace in _EXACT_NAMESPACES and not writes:
        # c10d's own schemas do not always say what they write.
        writes = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if "Tensor" in str(argument.type) and name.endswith("_")
        ]
    steady = _UNPERTURBED_ARGUMENTS.get(name, frozenset())
    if name.startswith("_fused_"):
        steady = _COUNTERS
    kind = _kind(op, namespace, name, returns_view)
    return Traits(
        name=name,
        namespace=namespace,
        kind=kind,
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), "CompositeImplicitAutograd"
        ),
        writes=tuple(writes),
        outs=tuple(outs),
        overwrites=name in _OVERWRITES,
        steady=steady,
        foreach=name.startswith("_foreach_"),
        views=returns_view and kind is Kind.EXACT and not writes and not outs,
    )


def _kind(op: OpOverload, namespace: str, name: str, returns_view: bool) -> Kind:
    base = base_name(name)
    if namespace in _EXACT_NAMESPACES:
        return Kind.EXACT
    if base in _CONVERSIONS:
        return Kind.CONVERSION
    if namespace == "prims":
        return Kind.EXACT if returns_view else Kind.ARITHMETIC
    if namespace != "aten":
        return Kind.OPAQUE
    if base in _FACTORIES:
        return Kind.FACTORY
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    if seeded and base not in _SEEDED_ARITHMETIC and not base.startswith(_OPAQUE_PREFIXES):
        return Kind.RANDOM
    if returns_view:
        return Kind.EXACT
    if base == "scatter" and op._overloadname.startswith(("reduce", "value_reduce")):
        return Kind.ARITHMETIC
    if base in _EXACT:
        return Kind.EXACT
    if base.startswith(_OPAQUE_PREFIXES):
        return Kind.OPAQUE
    return Kind.ARITHMETIC


def tensors(value: object) -> list[Tensor]:
    """All tensors in an argument or a result, through lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, list | tuple):
        return []
    found: list[Tensor] = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found.extend(tensors(item))
    return found


def power_of_two(value: object) -> bool:
    """Whether multiplication by the number ``value`` is exact."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if value == 0 or not math.isfinite(value):
        return False
    mantissa = abs(float(value)).hex().partition("p")[0]
    return mantissa in ("0x1.0000000000000", "0x1")
