"""Rows of float32 at few bits: extremes, rounding at random, and back. What a row becomes is stated in `codec.rows`.

Codes of one width lie one after the other, row by row, 8/b to a byte, from the lowest bits on (`kernels.quantise.pack_codes`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import kernel
from .counter_random import bits_at

__all__ = ["ceil_bfloat16", "floor_bfloat16", "read_rows", "round_rows", "row_extremes", "weighted_rows"]

F32 = NDArray[np.float32]


@kernel
def row_extremes(x, rows, low, high):  # type: ignore[no-untyped-def]
    """low[r], high[r]: of x[rows[r]]; NaN where the row holds one."""
    for r in range(len(rows)):
        values = x[rows[r]]
        a, b = values[0], values[0]
        wrong = np.float32(0)
        for i in range(values.shape[0]):
            v = values[i]
            a, b = min(a, v), max(b, v)
            wrong += v - v  # 0, and NaN for NaN and infinities
        low[r], high[r] = a + wrong, b + wrong


@kernel
def round_rows(x, rows, zero, scale, levels, key0, key1, first, codes):  # type: ignore[no-untyped-def]
    """codes[r D + i] = (x[rows[r], i] - zero[r]) / scale[r], up or down at random so that the expectation is exact. A scale of 0 gives 0.

    `first`: position of the first number in the stream of random numbers."""
    wide = x.shape[1]
    for r in range(len(rows)):
        values, into, at = x[rows[r]], codes[r * wide : (r + 1) * wide], first + r * wide
        down = np.float32(1) / scale[r] if scale[r] > 0 else np.float32(0)
        origin = zero[r]
        for i in range(values.shape[0]):
            y = (values[i] - origin) * down
            u = np.float32(np.int32(bits_at(at + i, key0, key1) >> np.uint32(8))) * np.float32(2.0**-24)
            level = np.int32(y)
            level += np.int32(u < y - np.float32(level))
            into[i] = max(np.int32(0), min(level, np.int32(levels)))  # the quotient is off by a last bit at most


@kernel
def read_rows(packed, width, zero, scale, rows, out):  # type: ignore[no-untyped-def]
    """out[rows[r]] = zero[r] + code · scale[r]."""
    wide, per, mask = out.shape[1], 8 // width, (1 << width) - 1
    for r in range(len(rows)):
        into, first = out[rows[r]], r * wide
        a, s = zero[r], scale[r]
        if width == 8:
            codes = packed[first : first + wide]
            for i in range(wide):
                into[i] = a + np.float32(codes[i]) * s
        else:
            for i in range(wide):
                k = first + i
                into[i] = a + np.float32((packed[k // per] >> (k % per * width)) & mask) * s


@kernel
def weighted_rows(ptr, idx, weight, x, halo, out):  # type: ignore[no-untyped-def]
    """out[r] = sum over row r's entries of weight · row idx, of x, or of halo from number len(x) on."""
    own, wide = x.shape[0], out.shape[1]
    for r in range(out.shape[0]):
        into = out[r]
        for i in range(wide):
            into[i] = np.float32(0)
        for k in range(ptr[r], ptr[r + 1]):
            a, at = weight[k], idx[k]
            values = x[at] if at < own else halo[at - own]
            for i in range(wide):
                into[i] += a * values[i]


def floor_bfloat16(x: F32) -> NDArray[np.uint16]:
    """The largest bfloat16 not above each number, as its bits."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    top = (bits >> np.uint32(16)).astype(np.uint16)
    return (top + ((bits & np.uint32(0xFFFF)).astype(bool) & (x < 0))).astype(np.uint16)


def ceil_bfloat16(x: F32) -> NDArray[np.uint16]:
    """The smallest bfloat16 not below each number >= 0, as its bits."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    up: NDArray[np.uint16] = ((bits >> np.uint32(16)) + (bits & np.uint32(0xFFFF)).astype(bool)).astype(np.uint16)
    return up
