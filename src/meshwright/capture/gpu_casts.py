"""A GPU's autocast on a processor: the same calls get the types that torch.autocast("cuda") gives, so plans for GPUs count what GPUs store.

torch has a list of operators for each kind of device: which run in the narrow type, which in float32, which in the widest type of their operands. On
a GPU, layer norms, softmax, powers and most losses are float32, on a processor they are not. Within `gpu_casts()` the processor's kernels of the
autocast key are replaced by ones that follow the GPU's list; `torch.autocast("cpu")` then casts by it. Afterwards torch's own are there again.

Source: the macros AT_FORALL_* of ATen/autocast_mode.h (torch 2.13), which a test reads. Deviation: a weight that several calls read is cast by each,
not once and kept, which changes no value and no type. What the GPU's autocast refuses (binary cross-entropy of probabilities) is refused here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .torch_private import below_autocast, replaced_autocast

__all__ = ["FLOAT32", "FLOAT32_RESULT", "NARROW", "WIDEST", "gpu_casts"]



def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Operators by name and overload, as the header has them.
NARROW = _names(
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution "
    "prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
FLOAT32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus "
    "layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa"
)
FLOAT32_RESULT = _names(  # their `dtype` is float32 where none is asked for
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum "
    "sum.dim_IntList"
)
NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}  # and the overload that takes a type
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

_lock, _open, _libraries = threading.Lock(), 0, list[Any]()


@contextmanager
def gpu_casts() -> Iterator[None]:
    """While it is entered, by any thread, autocast on processors follows the GPU's list. It may be entered several times."""
    global _open
    with _lock:
        if not _open:
            _libraries.append(_replaced())
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                _libraries.pop()._destroy()


def _replaced() -> Any:
    """Torch's library that replaces the kernels until it is destroyed."""
    kernels = {name: kind(_operator(name)) for names, kind in _RULES for name in names}
    kernels |= {name: _with_type(_operator(name), getattr(torch.ops.aten.norm, wide)) for name, wide in NORMS.items()}
    kernels["binary_cross_entropy"] = _refused
    return replaced_autocast(kernels)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_cast(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == "cpu"


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_cast(y, dtype) for y in x)
    return x.to(dtype) if _is_cast(x) and x.dtype is not dtype else x


def _in(operator: Any, dtype: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        kind = dtype([*args, *kwargs.values()])
        return below_autocast(operator, _cast(args, kind), {k: _cast(v, kind) for k, v in kwargs.items()})

    return kernel


def _narrow(operator: Any) -> Callable[..., Any]:
    return _in(operator, lambda _: torch.get_autocast_dtype("cpu"))


def _float32(operator: Any) -> Callable[..., Any]:
    return _in(operator, lambda _: torch.float32)


def _widest(operator: Any) -> Callable[..., Any]:
    def widest(given: Any) -> torch.dtype:
        flat = [y for x in given for y in (x if isinstance(x, (list, tuple)) else [x])]
        wide = any(_is_cast(x) and x.dtype is torch.float32 for x in flat)
        return torch.float32 if wide else torch.get_autocast_dtype("cpu")

    return _in(operator, widest)


def _float32_result(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        names = [a.name for a in operator._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if _is_cast(given[names[0]]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        ahead = [a.name for a in operator._schema.arguments if not a.kwarg_only and a.name in given]
        return below_autocast(operator, [given.pop(n) for n in ahead], given)

    return kernel


def _with_type(operator: Any, wide: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _is_cast(args[0]):
            return below_autocast(operator, args, kwargs)
        left = [a for a in operator._schema.arguments[len(args) :] if a.name not in kwargs]  # defaults, which the other overload has not
        return below_autocast(wide, args, {**kwargs, **{a.name: a.default_value for a in left}, "dtype": torch.float32})

    return kernel


def _refused(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a GPU's autocast refuses binary_cross_entropy: use binary_cross_entropy_with_logits, which may be cast")


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], Callable[..., Any]]], ...] = (
    (NARROW, _narrow), (FLOAT32, _float32), (FLOAT32_RESULT, _float32_result), (WIDEST, _widest),
)  # fmt: skip
