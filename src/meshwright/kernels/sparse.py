"""Reading and adding the few elements of a dense float32 vector that a list of indices names. Only `within` checks indices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import kernel
from .select import CACHED_ELEMENTS, MAGNITUDE_MASK, Floats, Indices

__all__ = ["add_at", "add_momentum", "gather", "put_at", "within"]


@kernel  # type: ignore[untyped-decorator]
def within(indices: Indices, elements: int) -> bool:
    """Whether all indices are from 0 to elements - 1."""
    wrong = 0
    for i in range(indices.shape[0]):
        wrong += indices[i] < 0 or indices[i] >= elements
    return wrong == 0


@kernel  # type: ignore[untyped-decorator]
def gather(x: Floats, indices: NDArray[np.int64], values: Floats, narrow: Indices) -> None:
    """values[i] = x[indices[i]]; narrow[i] = indices[i] in its own type."""
    for i in range(indices.shape[0]):
        values[i] = x[indices[i]]
        narrow[i] = indices[i]


@kernel  # type: ignore[untyped-decorator]
def add_at(x: Floats, indices: Indices, values: Floats) -> None:
    """x[indices[i]] += values[i], in order."""
    for i in range(indices.shape[0]):
        x[indices[i]] += values[i]


@kernel  # type: ignore[untyped-decorator]
def put_at(x: Floats, indices: Indices, value: np.float32) -> None:
    """x[indices[i]] = value."""
    for i in range(indices.shape[0]):
        x[indices[i]] = value


@kernel  # type: ignore[untyped-decorator]
def add_momentum(velocity: Floats, residual: Floats, x: Floats, momentum: np.float32, factor: np.float32) -> int:
    """velocity = momentum * velocity + factor * x; residual += velocity. The largest magnitude of the residual, as the integer of its bits."""
    largest = np.int32(0)
    bits = residual.view(np.int32)
    for start in range(0, x.shape[0], CACHED_ELEMENTS):
        end = start + CACHED_ELEMENTS
        u, v, g, made = velocity[start:end], residual[start:end], x[start:end], bits[start:end]
        for i in range(u.shape[0]):
            u[i] = momentum * u[i] + factor * g[i]
            v[i] += u[i]
        for i in range(made.shape[0]):
            largest = max(largest, made[i] & np.int32(MAGNITUDE_MASK))
    return int(largest)
