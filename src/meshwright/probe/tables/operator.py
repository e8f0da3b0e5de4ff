"""The lookup of several shards as one training step has it: forward, backward and SGD, by fbgemm's table-batched operator or `embedding_bag`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["CacheEvictor", "Lookup", "operator_name", "weights_buffer"]

EVICTED_BYTES = 64 << 20  # written between two runs: twice the last-level cache of the machines this was tried on
LEARNING_RATE = 0.01


def operator_name() -> str:
    """`fbgemm` where it is installed, else `embedding_bag`."""
    try:
        import fbgemm_gpu  # type: ignore[import-not-found]  # noqa: F401
    except (ImportError, OSError):
        return "embedding_bag"
    return "fbgemm"


def weights_buffer(elements: int) -> torch.Tensor:
    """Room for the weights of any lookup of at most that many elements."""
    return torch.zeros(elements)


class CacheEvictor:
    """Writes more than the caches hold."""

    def __init__(self, size_bytes: int = EVICTED_BYTES) -> None:
        self._held = torch.zeros(size_bytes // 4)

    def __call__(self) -> None:
        self._held.add_(1)


class Lookup:
    """Shards of (rows, columns) with a batch's (indices, offsets) each. `step_s` runs one step and gives processor seconds of this thread."""

    def __init__(
        self, shards: Sequence[tuple[int, int]], inputs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], *, buffer: torch.Tensor,
        operator: str = "",
    ) -> None:  # fmt: skip
        sizes = [r * d for r, d in shards]
        self.operator = operator or operator_name()
        self.inputs = [(torch.from_numpy(i), torch.from_numpy(o)) for i, o in inputs]
        if self.operator == "fbgemm":
            self._module = _batched(shards, buffer[: sum(sizes)])
            self._indices = torch.cat([i for i, _ in self.inputs])
            starts = np.cumsum([0, *(len(i) for i, _ in self.inputs)])
            self._offsets = torch.cat([*(o[:-1] + int(s) for (_, o), s in zip(self.inputs, starts, strict=False)), torch.tensor([int(starts[-1])])])
        else:
            ends = np.cumsum(sizes)
            self.weights = [buffer[e - s : e].view(r, d).requires_grad_() for e, s, (r, d) in zip(ends, sizes, shards, strict=True)]
        self._gradient = torch.ones(len(inputs[0][1]) - 1, sum(d for _, d in shards))

    @property
    def held_bytes(self) -> int:
        """Beside the weights: inputs, of which fbgemm has a copy, and pooled rows with their gradients."""
        indices = sum(i.nbytes + o.nbytes for i, o in self.inputs)
        return 2 * int(indices + self._gradient.nbytes)

    def _forward(self) -> torch.Tensor:
        if self.operator == "fbgemm":
            found: torch.Tensor = self._module(self._indices, self._offsets)
            return found
        bag = torch.nn.functional.embedding_bag
        found = [bag(i, w, o, mode="sum", sparse=True, include_last_offset=True) for w, (i, o) in zip(self.weights, self.inputs, strict=True)]
        return torch.cat(found, 1)

    def step_s(self) -> float:
        began = time.thread_time()
        self._forward().backward(self._gradient)
        if self.operator != "fbgemm":  # fbgemm's backward pass has updated its weights
            with torch.no_grad():
                for w in self.weights:
                    w.add_(w.grad, alpha=-LEARNING_RATE)
                    w.grad = None
        return time.thread_time() - began


def _batched(shards: Sequence[tuple[int, int]], buffer: torch.Tensor) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    specs = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shards]
    return SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=EmbOptimType.EXACT_SGD, learning_rate=LEARNING_RATE, preallocated_host_buffers={"weights": buffer},
    )  # fmt: skip
