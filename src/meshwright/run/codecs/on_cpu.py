"""The codecs' kernels for tensors in the processor's memory: numba on the arrays behind them. `on_gpu` has the same functions for GPUs.

Tensors are flat, contiguous and float32 unless said; indices are int64, bytes uint8. What a function means stands at the kernel it calls.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels import orthonormal, quantise, select, sparse
from ...kernels.select import magnitude_bits

__all__ = [
    "accumulate", "add_at", "add_levels", "add_looked_up", "add_momentum", "add_two_values", "block_maxima", "block_means", "block_norms",
    "block_sides", "gather", "kth_magnitude", "largest_magnitude", "orthonormalise", "pack_codes", "pack_signs", "put_at", "round_levels",
    "round_nearest", "scale_blocks", "select_above", "top_k", "within",
]  # fmt: skip



def _floats(x: Tensor) -> NDArray[np.float32]:
    """The array that shares the tensor's memory."""
    found: NDArray[np.float32] = x.numpy()
    return found


def largest_magnitude(x: Tensor) -> int:
    return select.largest_magnitude(_floats(x))


def accumulate(into: Tensor, x: Tensor) -> int:
    return select.accumulate(_floats(into), _floats(x))


def add_momentum(velocity: Tensor, residual: Tensor, x: Tensor, momentum: float, factor: float) -> int:
    return int(sparse.add_momentum(_floats(velocity), _floats(residual), _floats(x), np.float32(momentum), np.float32(factor)))


def kth_magnitude(x: Tensor, k: int) -> int:
    return select.kth_magnitude(_floats(x), k)


def select_above(x: Tensor, threshold: int, *, expected: int = 0) -> Tensor:
    return torch.from_numpy(select.select_above(_floats(x), threshold, expected=expected))


def top_k(x: Tensor, k: int) -> Tensor:
    return torch.from_numpy(select.top_k(_floats(x), k))


def within(indices: Tensor, elements: int) -> bool:
    return bool(sparse.within(indices.numpy(), elements))


def gather(x: Tensor, indices: Tensor, values: Tensor, narrow: Tensor | None) -> None:
    """`narrow` None: indices are not wanted."""
    into = np.empty(indices.numel(), np.int64) if narrow is None else narrow.numpy()
    sparse.gather(_floats(x), indices.numpy(), _floats(values), into)


def add_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    sparse.add_at(_floats(x), indices.numpy(), _floats(values))


def put_at(x: Tensor, indices: Tensor, value: float) -> None:
    sparse.put_at(_floats(x), indices.numpy(), np.float32(value))


def block_means(x: Tensor, block: int, out: Tensor) -> None:
    quantise.block_means(_floats(x), block, _floats(out))


def block_sides(x: Tensor, block: int, out: Tensor) -> None:
    quantise.block_sides(_floats(x), block, _floats(out))


def block_norms(x: Tensor, block: int, out: Tensor) -> None:
    quantise.block_norms(_floats(x), block, _floats(out))


def block_maxima(x: Tensor, block: int, out: Tensor) -> None:
    quantise.block_maxima(magnitude_bits(_floats(x)), block, out.view(torch.int32).numpy())


def scale_blocks(x: Tensor, block: int, scales: Tensor, out: Tensor) -> None:
    quantise.scale_blocks(_floats(x), block, _floats(scales), _floats(out))


def add_looked_up(codes: Tensor, values: Tensor, block: int, scales: Tensor, out: Tensor, keep: bool) -> None:
    quantise.add_looked_up(codes.numpy(), _floats(values), block, _floats(scales), _floats(out), keep)


def round_levels(x: Tensor, block: int, scales: Tensor, levels: int, key: tuple[np.uint32, np.uint32], codes: Tensor) -> None:
    quantise.round_levels(_floats(x), block, _floats(scales), levels, *key, 0, codes.numpy())


def round_nearest(x: Tensor, block: int, scales: Tensor, levels: int, codes: Tensor) -> None:
    quantise.round_nearest(_floats(x), block, _floats(scales), levels, codes.numpy())


def pack_codes(codes: Tensor, width: int, out: Tensor) -> None:
    quantise.pack_codes(codes.numpy(), width, out.numpy())


def add_levels(packed: Tensor, width: int, levels: int, block: int, scales: Tensor, out: Tensor, keep: bool) -> None:
    quantise.add_levels(packed.numpy(), width, levels, block, _floats(scales), _floats(out), keep)


def pack_signs(x: Tensor, out: Tensor) -> None:
    quantise.pack_signs(magnitude_bits(_floats(x)), out.numpy())


def add_two_values(packed: Tensor, block: int, values: Tensor, out: Tensor, keep: bool) -> None:
    quantise.add_two_values(packed.numpy(), block, _floats(values), _floats(out), keep)


def orthonormalise(x: Tensor) -> None:
    """`x`: [rows, columns]."""
    orthonormal.orthonormalise(_floats(x))
