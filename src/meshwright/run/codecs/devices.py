"""Which kernels a tensor's codec runs: numba in the processor's memory, Triton and torch on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import Unsupported
from . import on_cpu

__all__ = ["kernels_of", "require_device"]


def kernels_of(tensor: torch.Tensor) -> Any:
    """The module of kernels for the tensor's device: `on_cpu`, or `on_gpu`, which needs triton."""
    if tensor.device.type == "cpu":
        return on_cpu
    from . import on_gpu

    return on_gpu


def require_device(tensor: torch.Tensor, where: str) -> None:
    """Raises: Unsupported for devices that are neither, and for a GPU without triton."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"codecs run on processors and CUDA or ROCm GPUs, not on {tensor.device}", where=where, hint="move the gradient first")
    if tensor.device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            raise Unsupported("codecs on a GPU need triton", where=where, hint="pip install triton, or move the gradient to the processor") from None
