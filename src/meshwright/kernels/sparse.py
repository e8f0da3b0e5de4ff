"""Reading and adding the few elements of a dense float32 vector that a list of indices names. Indices must be in range: nothing is checked here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import kernel
from .select import Floats, Indices

__all__ = ["add_at", "gather", "put_at"]


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
