"""What recurrent layers of oneDNN keep for their backward: torch's fake kernels say 0 bytes of it.

On processors an LSTM in fp32 runs as one call per layer and direction, `mkldnn_rnn_layer`. Its fourth result holds gates and states of every
time step, as bytes that only oneDNN can read. Fake tensors give it no elements: a graph would lack most of what such a net keeps. Its size is asked
of the real operator, for few time steps: it grows evenly with them, but for rounding to pages (tens of KiB).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["KEPT", "is_recurrent", "kept_bytes"]

KEPT = 3  # which result of the call
FEW, MORE = 8, 24  # time steps that are really computed


def is_recurrent(target: Any) -> bool:
    """Whether a call's result number `KEPT` is what `kept_bytes` tells the size of."""
    return bool(target is torch.ops.aten.mkldnn_rnn_layer.default)


def kept_bytes(args: Sequence[Any]) -> int:
    """Bytes of a call with these arguments, whose tensors may be fake: (input, two weights, two biases, states h and c, reverse, ...)."""
    tensors = tuple((tuple(int(d) for d in x.shape), x.dtype) for x in args[:7])
    options = tuple(tuple(x) if isinstance(x, list) else x for x in args[7:])
    steps = tensors[0][0][0]
    if steps <= MORE:
        return _asked(tensors, options, steps)
    few, more = (_asked(tensors, options, n) for n in (FEW, MORE))
    return few + (more - few) * (steps - FEW) // (MORE - FEW)


@cache
def _asked(tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...], options: tuple[Any, ...], steps: int) -> int:
    """Bytes that the operator really keeps of zeros."""
    with _disable_current_modes(), torch.enable_grad():  # without, nothing is kept
        (first, dtype), *others = tensors
        given = [torch.zeros((steps, *first[1:]), dtype=dtype), *(torch.zeros(shape, dtype=kind) for shape, kind in others)]
        kept = torch.ops.aten.mkldnn_rnn_layer.default(*given, *(list(x) if isinstance(x, tuple) else x for x in options))[KEPT]
    return int(kept.untyped_storage().nbytes())
