"""Which operation is computed in another order, and by what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._ops import OpOverload

from . import attention, linear, matmul, reduce, scatter, softmax
from .ops import Traits
from .perturb import Noise

Handler = Callable[..., Any]
"""Called as ``handler(noise, *args, **kwargs)`` with the operation's own arguments."""

# Keyed by the name in the schema. A name with a trailing underscore works in place.
_HANDLERS: Final[dict[str, Handler]] = {
    "mm": matmul.mm,
    "bmm": matmul.bmm,
    "addmm": matmul.addmm,
    "addmm_": matmul.addmm_,
    "_addmm_activation": matmul.addmm_activation,
    "baddbmm": matmul.baddbmm,
    "baddbmm_": matmul.baddbmm_,
    "addbmm": matmul.addbmm,
    "mv": matmul.mv,
    "addmv": matmul.addmv,
    "dot": matmul.dot,
    "vdot": matmul.vdot,
    "sum": reduce.sum_,
    "mean": reduce.mean,
    "nansum": reduce.nansum,
    "var": reduce.var,
    "std": reduce.std,
    "var_mean": reduce.var_mean,
    "std_mean": reduce.std_mean,
    "linalg_vector_norm": reduce.vector_norm,
    "norm": reduce.norm,
    "dist": reduce.dist,
    "_foreach_norm": reduce.foreach_norm,
    "cumsum": reduce.cumsum,
    "_softmax": softmax.softmax,
    "_safe_softmax": softmax.safe_softmax,
    "_log_softmax": softmax.log_softmax,
    "logsumexp": softmax.logsumexp,
    "_softmax_backward_data": softmax.softmax_backward,
    "_log_softmax_backward_data": softmax.log_softmax_backward,
    "index_add_": scatter.index_add_,
    "scatter_add_": scatter.scatter_add_,
    "scatter_reduce_": scatter.scatter_reduce_,
    "index_put_": scatter.index_put_,
    "_index_put_impl_": scatter.index_put_,
    "embedding_dense_backward": scatter.embedding_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention.attention_backward,
}

# Called as ``handler(noise, op, args)``.
_LINEAR: Final[dict[str, Handler]] = {
    "convolution": linear.convolution,
    "convolution_backward": linear.convolution_backward,
    "_fft_r2c": linear.transform,
    "_fft_c2r": linear.transform,
    "_fft_c2c": linear.transform,
    "trace": linear.transform,
    "col2im": linear.transform,
    "unfold_backward": linear.transform,
    "avg_pool2d": linear.transform,
    "avg_pool2d_backward": linear.transform,
    "avg_pool3d": linear.transform,
    "_adaptive_avg_pool2d": linear.transform,
    "_adaptive_avg_pool2d_backward": linear.transform,
}

# torch's own decompositions of fused operations into parts that the mode sees one by one.
_DECOMPOSED: Final = frozenset(
    {
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "_native_batch_norm_legit",
        "nll_loss_forward",
        "nll_loss2d_forward",
        "mse_loss",
        "huber_loss",
        "smooth_l1_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    }
)

# Functional forms whose in-place form has another name.
_IN_PLACE_FORMS: Final = {"_unsafe_index_put": "index_put_"}


@functools.cache
def handler_of(op: OpOverload, name: str) -> Handler | None:
    """What computes the functional or in-place overload ``op``, called ``name``; None: nothing."""
    if name in _LINEAR:
        run = _LINEAR[name]
        return lambda noise, *args: run(noise, op, args)
    if name in _HANDLERS:
        return _HANDLERS[name]
    in_place = _HANDLERS.get(_IN_PLACE_FORMS.get(name, name + "_"))
    if in_place is not None:

        def functional(noise: Noise, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return in_place(noise, first.clone(), *args, **kwargs)

        return functional
    if name.endswith("_") and name[:-1] in _HANDLERS:
        plain = _HANDLERS[name[:-1]]

        def into(noise: Noise, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return first.copy_(plain(noise, first, *args, **kwargs))

        return into
    return None


@functools.cache
def decomposition_of(op: OpOverload, name: str) -> Callable[..., Any] | None:
    """torch's decomposition of a fused operation into visible parts; None: it has none."""
    if name not in _DECOMPOSED:
        return None
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found


def write_out(traits: Traits, result: Any, kwargs: dict[str, Any]) -> Any:
    """Copy a functional result into the call's ``out=`` tensors and return those."""
    given = [kwargs[name] for name in traits.outs]
    results = result if isinstance(result, tuple | list) else (result,)
    if len(given) == 1 and isinstance(given[0], list | tuple):
        for into, value in zip(given[0], results, strict=True):
            into.copy_(value)
        return None
    for into, value in zip(given, results, strict=True):
        if into.shape != value.shape:
            into.resize_(value.shape)
        into.copy_(value)
    return given[0] if len(given) == 1 else tuple(given)
