"""Bits and four-bit numbers for narrower saved results: pack, and read while computing, without a full-size temporary.

Arrays are flat and contiguous. Bit i of an array is bit i % 8 of byte i // 8.
"""

from __future__ import annotations

from .compile import kernel

__all__ = ["pack_bits", "pack_offsets", "pass_where", "scatter_offsets", "unpack_bits"]


@kernel
def pack_bits(flags, bits):  # type: ignore[no-untyped-def]
    """flags: n bytes, 0 or not; bits: ceil(n / 8) bytes."""
    for j in range(len(bits)):
        byte = 0
        for k in range(min(8, len(flags) - 8 * j)):
            if flags[8 * j + k] != 0:
                byte |= 1 << k
        bits[j] = byte


@kernel
def unpack_bits(bits, flags):  # type: ignore[no-untyped-def]
    for i in range(len(flags)):
        flags[i] = (bits[i >> 3] >> (i & 7)) & 1


@kernel
def pass_where(bits, gradient, out):  # type: ignore[no-untyped-def]
    """out = gradient where the bit is set, else 0; `out` may be `gradient`."""
    for i in range(len(out)):
        out[i] = gradient[i] if (bits[i >> 3] >> (i & 7)) & 1 else 0


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
    rows, columns = outside[0], outside[1]
    out[:] = 0
    for i in range(len(gradient)):
        plane, r, c = i // (rows * columns), (i // columns) % rows, i % columns
        place = (packed[i >> 1] >> (4 * (i & 1))) & 15
        row = r * geometry[2] - geometry[4] + (place // geometry[1]) * geometry[6]
        column = c * geometry[3] - geometry[5] + (place % geometry[1]) * geometry[7]
        out[plane * inside[0] * inside[1] + row * inside[1] + column] += gradient[i]
