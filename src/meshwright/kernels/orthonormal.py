"""Orthonormal columns of a thin float32 matrix, in place: modified Gram-Schmidt with float64 sums.

A column that is, to rounding, a combination of those before it becomes zero; so does a column of zeros. NaN spreads to every later column.
"""

from __future__ import annotations

import numpy as np

from .compile import kernel
from .select import Floats

__all__ = ["orthonormalise"]

MIN_SHARE_OF_LENGTH = 1e-5  # a column of which less than this share of its length is left is a combination of those before it, to float32 rounding


@kernel  # type: ignore[untyped-decorator]
def orthonormalise(x: Floats) -> None:
    """x [rows, columns]: columns become orthonormal or zero."""
    rows, columns = x.shape
    for c in range(columns):
        before, after = 0.0, 0.0
        for i in range(rows):
            before += np.float64(x[i, c]) * np.float64(x[i, c])
        for _ in range(2):  # twice: once leaves an error of rounding over the length that remains
            for d in range(c):
                along = 0.0
                for i in range(rows):
                    along += np.float64(x[i, c]) * np.float64(x[i, d])
                for i in range(rows):
                    x[i, c] = np.float64(x[i, c]) - along * np.float64(x[i, d])
        for i in range(rows):
            after += np.float64(x[i, c]) * np.float64(x[i, c])
        factor = 1 / np.sqrt(after)
        if after <= before * MIN_SHARE_OF_LENGTH * MIN_SHARE_OF_LENGTH:
            factor = 0.0
        for i in range(rows):
            x[i, c] = np.float64(x[i, c]) * factor
