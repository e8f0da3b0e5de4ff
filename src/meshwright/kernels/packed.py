"""Bits and four-bit numbers for narrower saved results: pack, and read while computing, without a full-size temporary.

Arrays are flat and contiguous. Bit i of an array is bit i % 8 of byte i // 8.
"""

from __future__ import annotations

from .compile import kernel

__all__ = ["clear_unless", "pack_bits", "pack_offsets", "pack_signs", "pass_where", "scatter_offsets", "unpack_bits"]


@kernel
def pack_bits(flags, bits):  # type: ignore[no-untyped-def]
    """flags: n bytes, 0 or not; bits: ceil(n / 8) bytes."""
    whole = len(flags) >> 3
    for j in range(whole):  # eight at a time: the compiler makes vector instructions of it
        byte = 0
        for k in range(8):
            byte |= (flags[8 * j + k] != 0) << k
        bits[j] = byte
    if 8 * whole < len(flags):
        bits[whole] = 0
        for i in range(8 * whole, len(flags)):
            bits[whole] |= (flags[i] != 0) << (i & 7)


@kernel
def unpack_bits(bits, flags):  # type: ignore[no-untyped-def]
    whole = len(flags) >> 3
    for j in range(whole):
        byte = bits[j]
        for k in range(8):
            flags[8 * j + k] = (byte >> k) & 1
    for i in range(8 * whole, len(flags)):
        flags[i] = (bits[i >> 3] >> (i & 7)) & 1


@kernel
def pack_signs(values, bits):  # type: ignore[no-untyped-def]
    """A bit is set where the value is not <= 0 (NaN among them); bits: ceil(n / 8) bytes."""
    whole = len(values) >> 3
    for j in range(whole):
        byte = 0
        for k in range(8):
            byte |= (not values[8 * j + k] <= 0) << k
        bits[j] = byte
    if 8 * whole < len(values):
        bits[whole] = 0
        for i in range(8 * whole, len(values)):
            bits[whole] |= (not values[i] <= 0) << (i & 7)


@kernel
def pass_where(bits, gradient, out):  # type: ignore[no-untyped-def]
    """out = gradient where the bit is set, else 0; for `out` that is `gradient` see `clear_unless`."""
    whole = len(out) >> 3
    for j in range(whole):
        byte = bits[j]
        for k in range(8):
            i = 8 * j + k
            out[i] = gradient[i] if byte & (1 << k) else 0
    for i in range(8 * whole, len(out)):
        out[i] = gradient[i] if (bits[i >> 3] >> (i & 7)) & 1 else 0


@kernel
def clear_unless(bits, words):  # type: ignore[no-untyped-def]
    """Sets the numbers behind these integers to 0 where the bit is not set. One array only: with a second the compiler must expect it to overlap."""
    whole = len(words) >> 3
    for j in range(whole):
        byte = bits[j]
        for k in range(8):
            words[8 * j + k] &= -((byte >> k) & 1)
    for i in range(8 * whole, len(words)):
        words[i] &= -((bits[i >> 3] >> (i & 7)) & 1)


@kernel
def pack_offsets(indices, packed, geometry, outside, inside):  # type: ignore[no-untyped-def]
    """Four bits per output of a two-dimensional pooling: the place of its maximum in its window.

    indices: planes x outside[0] x outside[1], flat places in a plane of inside[0] x inside[1]; geometry: kernel, stride, padding, dilation (2 each).
    """
    rows, columns = outside[0], outside[1]
    packed[:] = 0
    for i in range(len(indices)):
        r, c = (i // columns) % rows, i % columns
        row, column = indices[i] // inside[1], indices[i] % inside[1]
        a = (row - r * geometry[2] + geometry[4]) // geometry[6]
        b = (column - c * geometry[3] + geometry[5]) // geometry[7]
        packed[i >> 1] |= (a * geometry[1] + b) << (4 * (i & 1))


@kernel
def scatter_offsets(packed, gradient, out, geometry, outside, inside):  # type: ignore[no-untyped-def]
    """Adds every output's gradient to the place of its maximum; `out` is set to 0 first. Sums in the order of the outputs."""
    rows, columns, size = outside[0], outside[1], inside[0] * inside[1]
    i, planes = 0, len(gradient) // max(rows * columns, 1)
    for plane in range(planes):
        for at in range(plane * size, (plane + 1) * size):  # plane by plane: the sums find it in the cache
            out[at] = 0
        for r in range(rows):
            start = plane * size + (r * geometry[2] - geometry[4]) * inside[1] - geometry[5]
            for c in range(columns):
                place = (packed[i >> 1] >> (4 * (i & 1))) & 15
                across = place // geometry[1]
                out[start + across * geometry[6] * inside[1] + c * geometry[3] + (place - across * geometry[1]) * geometry[7]] += gradient[i]
                i += 1
