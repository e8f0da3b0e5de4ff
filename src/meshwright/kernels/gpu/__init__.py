"""Triton twins of the codec and expert kernels, for tensors on a GPU.

Codecs put the same bytes on the wire as `kernels.select`, `kernels.sparse`, `kernels.quantise`. Importing a module of this package needs `triton`.
Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, set before the import), which is how they are checked against the CPU
kernels. On a GPU they are compared and timed by `benchmarks/gpu.py`.
Sums over blocks add in another order than on a CPU: scales may differ in the last bit. Everything else of the codecs is equal bit for bit; fused
multiply-add is switched off for it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

__all__ = ["BAND", "usable"]

BAND = 8  # block rows of a product that programs of one time share
HAS_TRITON = find_spec("triton") is not None


def usable(x: torch.Tensor) -> bool:
    """Can the kernels of this package take the tensor: is it on a GPU, and is triton installed?"""
    return HAS_TRITON and x.is_cuda
