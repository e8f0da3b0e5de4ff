"""Few-bit forms of a float32 vector, block by block: signs, random rounding to levels, packing of small codes into bytes.

A block is `block` consecutive elements (the last one may be shorter) with scales of its own. A code of b bits (1, 2, 4 or 8) lies in its byte
from the lowest bits on, 8/b codes to a byte. Loops run over slices from 0: numba guards indices that might be negative, which keeps LLVM from
vectorising. Sums run in four float64 lanes in a fixed order, so that equal input gives equal bits everywhere.
Triton twins of these kernels: `kernels/gpu`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import inlined, kernel
from .counter_random import bits_at
from .select import Floats

__all__ = [
    "add_levels", "add_looked_up", "add_two_values", "block_maxima", "block_means", "block_norms", "block_sides", "blocks_of", "pack_codes",
    "pack_signs", "round_levels", "round_nearest", "scale_blocks",
]  # fmt: skip

Bytes = NDArray[np.uint8]


def blocks_of(elements: int, block: int) -> int:
    return -(-elements // block)


@inlined  # type: ignore[untyped-decorator]
def _lane_sum(x: Floats, square: bool) -> float:
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = x.shape[0] // 4
    for j in range(whole):
        p, q, r, s = np.float64(x[4 * j]), np.float64(x[4 * j + 1]), np.float64(x[4 * j + 2]), np.float64(x[4 * j + 3])
        if square:
            a, b, c, d = a + p * p, b + q * q, c + r * r, d + s * s
        else:
            a, b, c, d = a + abs(p), b + abs(q), c + abs(r), d + abs(s)
    for i in range(4 * whole, x.shape[0]):
        p = np.float64(x[i])
        a += p * p if square else abs(p)
    return (a + b) + (c + d)


@kernel  # type: ignore[untyped-decorator]
def block_means(x: Floats, block: int, out: Floats) -> None:
    """out[b] = mean of |x| over block b."""
    for b in range(out.shape[0]):
        part = x[b * block : (b + 1) * block]
        out[b] = _lane_sum(part, False) / part.shape[0]


@kernel  # type: ignore[untyped-decorator]
def block_norms(x: Floats, block: int, out: Floats) -> None:
    """out[b] = 2-norm of block b."""
    for b in range(out.shape[0]):
        out[b] = np.sqrt(_lane_sum(x[b * block : (b + 1) * block], True))


@kernel  # type: ignore[untyped-decorator]
def block_maxima(bits: NDArray[np.int32], block: int, out: NDArray[np.int32]) -> None:
    """out[b] = largest magnitude of block b, as the integer that its bits make; NaN is larger than infinity."""
    for b in range(out.shape[0]):
        part = bits[b * block : (b + 1) * block]
        largest = np.int32(0)
        for i in range(part.shape[0]):
            largest = max(largest, part[i] & np.int32(0x7FFFFFFF))
        out[b] = largest


@kernel  # type: ignore[untyped-decorator]
def block_sides(x: Floats, block: int, out: Floats) -> None:
    """out[2b], out[2b + 1] = mean of the elements of block b whose sign bit is clear, and of those where it is set; 0 where there are none.

    From the sums of x and of |x|, so that NaN comes through.
    """
    for b in range(out.shape[0] // 2):
        part = x[b * block : (b + 1) * block]
        total, magnitude, negative = 0.0, _lane_sum(part, False), 0
        for i in range(part.shape[0]):
            negative += np.signbit(part[i])
        for i in range(part.shape[0]):
            total += np.float64(part[i])
        out[2 * b] = (magnitude + total) / 2 / max(1, part.shape[0] - negative)
        out[2 * b + 1] = (total - magnitude) / 2 / max(1, negative)


@kernel  # type: ignore[untyped-decorator]
def pack_signs(bits: NDArray[np.int32], out: Bytes) -> None:
    """Sign bits of float32 numbers, eight to a byte; missing ones are 0."""
    n = bits.shape[0]
    whole = n // 8
    for j in range(whole):
        byte = np.int32(0)
        for i in range(8):
            byte |= ((bits[8 * j + i] >> np.int32(31)) & np.int32(1)) << np.int32(i)
        out[j] = byte
    if whole < out.shape[0]:
        byte = np.int32(0)
        for i in range(8 * whole, n):
            byte |= ((bits[i] >> np.int32(31)) & np.int32(1)) << np.int32(i - 8 * whole)
        out[whole] = byte


@kernel  # type: ignore[untyped-decorator]
def pack_codes(codes: Bytes, width: int, out: Bytes) -> None:
    """Codes of 2 or 4 bits, four or two to a byte; missing ones are 0."""
    per = 8 // width
    whole = codes.shape[0] // per
    if width == 4:
        for j in range(whole):
            out[j] = codes[2 * j] | (codes[2 * j + 1] << 4)
    else:
        for j in range(whole):
            out[j] = codes[4 * j] | (codes[4 * j + 1] << 2) | (codes[4 * j + 2] << 4) | (codes[4 * j + 3] << 6)
    if whole < out.shape[0]:
        byte = np.int32(0)
        for i in range(whole * per, codes.shape[0]):
            byte |= np.int32(codes[i]) << np.int32(i % per * width)
        out[whole] = byte


@inlined  # type: ignore[untyped-decorator]
def _inverse(scale: np.float32, numerator: np.float32) -> np.float32:
    """numerator / scale, or 0 where the scale is 0, not finite, or so small that the quotient overflows."""
    quotient = numerator / scale
    return quotient if quotient < np.float32(3.0e38) else np.float32(0)


@kernel  # type: ignore[untyped-decorator]
def round_levels(x: Floats, block: int, scales: Floats, levels: int, key0: np.uint32, key1: np.uint32, first: int, codes: Bytes) -> None:
    """codes[i] = levels + sign(x) * round(|x| levels / scale), rounded up or down at random so that the expectation is exact.

    `scales[b]` >= the magnitudes of block b; `first` is the position of x[0] in the stream of random numbers. A scale of 0 or NaN gives level 0.
    """
    for b in range(scales.shape[0]):
        factor = _inverse(scales[b], np.float32(levels))
        part, into, at = x[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], first + b * block
        for i in range(part.shape[0]):
            y = abs(part[i]) * factor
            u = np.float32(np.int32(bits_at(at + i, key0, key1) >> np.uint32(8))) * np.float32(2.0**-24)
            level = np.int32(y)
            # Up with the probability of the part that is cut off: the expectation is y.
            level += np.int32(u < y - np.float32(level))
            # Rounding of the product may lift the largest element just above the last level.
            level = min(level, np.int32(levels))
            into[i] = np.int32(levels) + (-level if part[i] < np.float32(0) else level)


@kernel  # type: ignore[untyped-decorator]
def round_nearest(x: Floats, block: int, scales: Floats, levels: int, codes: Bytes) -> None:
    """As `round_levels`, to the nearest level, halves to even."""
    for b in range(scales.shape[0]):
        factor = _inverse(scales[b], np.float32(levels))
        part, into = x[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        for i in range(part.shape[0]):
            y = np.rint(part[i] * factor)
            into[i] = np.int32(levels) + np.int32(min(max(y, np.float32(-levels)), np.float32(levels)))


@kernel  # type: ignore[untyped-decorator]
def add_levels(packed: Bytes, width: int, levels: int, block: int, scales: Floats, out: Floats, keep: bool) -> None:
    """out[i] = (code - levels) * scale / levels, added to what is there if `keep`. A block is a multiple of 8/width elements."""
    per, mask = 8 // width, (1 << width) - 1
    for b in range(scales.shape[0]):
        unit = scales[b] / np.float32(levels)
        into, codes = out[b * block : (b + 1) * block], packed[b * block // per :]
        if not keep:
            into[:] = np.float32(0)
        whole = into.shape[0] // per
        if width == 8:
            for i in range(into.shape[0]):
                into[i] += np.float32(np.int32(codes[i]) - np.int32(levels)) * unit
        elif width == 4:
            for j in range(whole):
                byte = np.int32(codes[j])
                into[2 * j] += np.float32((byte & 15) - np.int32(levels)) * unit
                into[2 * j + 1] += np.float32((byte >> 4) - np.int32(levels)) * unit
        else:
            for j in range(whole):
                byte = np.int32(codes[j])
                into[4 * j] += np.float32((byte & 3) - np.int32(levels)) * unit
                into[4 * j + 1] += np.float32(((byte >> 2) & 3) - np.int32(levels)) * unit
                into[4 * j + 2] += np.float32(((byte >> 4) & 3) - np.int32(levels)) * unit
                into[4 * j + 3] += np.float32((byte >> 6) - np.int32(levels)) * unit
        if width < 8:
            for i in range(whole * per, into.shape[0]):
                into[i] += np.float32(np.int32((codes[i // per] >> (i % per * width)) & mask) - np.int32(levels)) * unit


@kernel  # type: ignore[untyped-decorator]
def add_two_values(packed: Bytes, block: int, values: Floats, out: Floats, keep: bool) -> None:
    """out[i] = values[2b] where the bit of element i is clear, values[2b + 1] where it is set; added to what is there if `keep`.

    A block is a multiple of 8 elements.
    """
    for b in range(values.shape[0] // 2):
        clear, other = values[2 * b], values[2 * b + 1]
        into, signs = out[b * block : (b + 1) * block], packed[b * block // 8 :]
        if not keep:
            into[:] = np.float32(0)
        for j in range(into.shape[0] // 8):
            byte = np.int32(signs[j])
            for i in range(8):
                into[8 * j + i] += other if (byte >> np.int32(i)) & np.int32(1) else clear
        for i in range(into.shape[0] // 8 * 8, into.shape[0]):
            into[i] += other if (signs[i >> 3] >> (i & 7)) & 1 else clear


@kernel  # type: ignore[untyped-decorator]
def scale_blocks(x: Floats, block: int, scales: Floats, out: Floats) -> None:
    """out = x / scale of its block; 0 where the inverse of the scale is not finite."""
    for b in range(scales.shape[0]):
        part, into = x[b * block : (b + 1) * block], out[b * block : (b + 1) * block]
        factor = _inverse(scales[b], np.float32(1))
        for i in range(part.shape[0]):
            into[i] = part[i] * factor


@kernel  # type: ignore[untyped-decorator]
def add_looked_up(codes: Bytes, values: Floats, block: int, scales: Floats, out: Floats, keep: bool) -> None:
    """out[i] = values[code] * scale of its block, added to what is there if `keep`."""
    for b in range(scales.shape[0]):
        part, into = codes[b * block : (b + 1) * block], out[b * block : (b + 1) * block]
        if not keep:
            into[:] = np.float32(0)
        for i in range(part.shape[0]):
            into[i] += values[part[i]] * scales[b]
