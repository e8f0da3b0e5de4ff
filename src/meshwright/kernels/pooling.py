"""Max pooling that notes where every maximum is in four bits, not eight bytes: one pass over its input, nothing beside its results.

Arrays are flat and contiguous; `geometry`, `outside`, `inside` as in `packed`, whose `scatter_offsets` is the way back.
"""

from __future__ import annotations

from .compile import kernel

__all__ = ["pool_offsets"]


@kernel
def pool_offsets(x, y, packed, geometry, outside, inside):  # type: ignore[no-untyped-def]
    """y: the largest of every window, or its last NaN; packed: its place in the window, the first of equal ones. Windows have at most 16 places.

    Without branches inside: which of a window's values is the largest is what a processor cannot guess.
    """
    rows, columns, height, width = outside[0], outside[1], inside[0], inside[1]
    packed[:] = 0
    wide = (geometry[1] - 1) * geometry[7]
    i, planes = 0, len(y) // max(rows * columns, 1)
    for plane in range(planes):
        for r in range(rows):
            top = r * geometry[2] - geometry[4]
            above = (max(-top, 0) + geometry[6] - 1) // geometry[6]
            below = min(geometry[0], (height - 1 - top) // geometry[6] + 1)
            for c in range(columns):
                left, first, last = c * geometry[3] - geometry[5], 0, geometry[1]
                if left < 0 or left + wide >= width:  # a window over the edge
                    first = (max(-left, 0) + geometry[7] - 1) // geometry[7]
                    last = min(last, (width - 1 - left) // geometry[7] + 1)
                start = (plane * height + top) * width + left
                best, place = x[start + above * geometry[6] * width + first * geometry[7]], above * geometry[1] + first
                for a in range(above, below):
                    at = start + a * geometry[6] * width
                    for b in range(first, last):
                        v = x[at + b * geometry[7]]
                        better = (v > best) | (v != v)
                        best = v if better else best
                        place = a * geometry[1] + b if better else place
                y[i] = best
                packed[i >> 1] |= place << (4 * (i & 1))
                i += 1
