"""Which tensors the Triton kernels take; what their callers need to know without importing triton."""

from __future__ import annotations

from importlib.util import find_spec

import torch

__all__ = ["BAND", "usable"]

BAND = 8  # block rows of a product that programs of one time share
HAS_TRITON = find_spec("triton") is not None


def usable(x: torch.Tensor) -> bool:
    """Can the kernels of this package take the tensor: is it on a GPU, and is triton installed?"""
    return HAS_TRITON and x.is_cuda
