"""Longest common subsequences, exact, in memory that does not grow with the product of the lengths.

Cite: D. S. Hirschberg, A linear space algorithm for computing maximal common subsequences, CACM 18(6), 1975: the first half of one
sequence is aligned with every prefix of the other and its second half with every suffix; the best split point lies on an optimal path.
Below `MAX_DIRECT_CELLS` the whole table of directions is kept instead. What both sequences begin and end with is taken off first.
Invariant: the pairs increase in both coordinates, join equal items, and are as many as can be. Cost: O(n·m) time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import kernel

__all__ = ["common_subsequence"]

I32 = NDArray[np.int32]

MAX_DIRECT_CELLS = 1 << 25  # cells of a table of directions that is kept whole (a byte each); larger ones are split in halves


def common_subsequence(a: I32, b: I32, *, direct_cells: int = MAX_DIRECT_CELLS) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places in `a` and in `b` of a longest common subsequence; among equals, pairs early in `a` with early items of `b`."""
    pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    _align(np.ascontiguousarray(a, np.int32), np.ascontiguousarray(b, np.int32), 0, 0, direct_cells, pairs)
    if not pairs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate([p for p, _ in pairs]), np.concatenate([q for _, q in pairs])


def _align(a: I32, b: I32, base_a: int, base_b: int, direct_cells: int, out: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> None:
    least = min(len(a), len(b))
    if least == 0:
        return
    differ = np.flatnonzero(a[:least] != b[:least])
    head = int(differ[0]) if len(differ) else least
    if head:
        out.append((base_a + np.arange(head), base_b + np.arange(head)))
        _align(a[head:], b[head:], base_a + head, base_b + head, direct_cells, out)
        return
    # What both end with belongs to some longest common subsequence, as does what both begin with.
    differ = np.flatnonzero(a[::-1][:least] != b[::-1][:least])
    tail = int(differ[0]) if len(differ) else least
    inner_a, inner_b = a[: len(a) - tail], b[: len(b) - tail]
    if len(inner_a) * len(inner_b) <= direct_cells or len(inner_a) < 2:
        direction = np.zeros((len(inner_a) + 1, len(inner_b) + 1), np.uint8)
        length = np.zeros((2, len(inner_b) + 1), np.int32)
        found = np.zeros((least + 1, 2), np.int64)
        count = _direct(inner_a, inner_b, direction, length, found)
        part = found[:count][::-1]
        out.append((base_a + part[:, 0], base_b + part[:, 1]))
    else:
        # Hirschberg: of all places to cut b, one is right for this half of a; lengths from both ends find it without a table.
        middle = len(inner_a) // 2
        ahead, behind = np.zeros((2, len(inner_b) + 1), np.int32), np.zeros((2, len(inner_b) + 1), np.int32)
        _lengths(inner_a[:middle], inner_b, ahead)
        _lengths(np.ascontiguousarray(inner_a[middle:][::-1]), np.ascontiguousarray(inner_b[::-1]), behind)
        split = int((ahead[middle % 2] + behind[(len(inner_a) - middle) % 2][::-1]).argmax())
        _align(inner_a[:middle], inner_b[:split], base_a, base_b, direct_cells, out)
        _align(inner_a[middle:], inner_b[split:], base_a + middle, base_b + split, direct_cells, out)
    if tail:
        out.append((base_a + len(inner_a) + np.arange(tail), base_b + len(inner_b) + np.arange(tail)))


@kernel  # type: ignore[untyped-decorator]
def _lengths(a: I32, b: I32, length: I32) -> None:
    """Row `len(a) % 2` of `length`: the longest common subsequence of `a` with every prefix of `b`. `length` begins as zeros."""
    for i in range(len(a)):
        now, before = (i + 1) % 2, i % 2
        length[now, 0] = 0
        for j in range(len(b)):
            # Two rows in turn: a row needs only the one before it.
            if a[i] == b[j]:
                length[now, j + 1] = length[before, j] + 1
            else:
                length[now, j + 1] = max(length[before, j + 1], length[now, j])


@kernel  # type: ignore[untyped-decorator]
def _direct(a: I32, b: I32, direction: NDArray[np.uint8], length: I32, found: NDArray[np.int64]) -> int:
    """Fill `found` with the pairs, last first; returns how many. Directions: 1 both back, 2 back in `a`, 3 back in `b`."""
    for i in range(len(a)):
        now, before = (i + 1) % 2, i % 2
        for j in range(len(b)):
            if a[i] == b[j]:
                length[now, j + 1] = length[before, j] + 1
                direction[i + 1, j + 1] = 1
            elif length[before, j + 1] >= length[now, j]:
                length[now, j + 1] = length[before, j + 1]
                direction[i + 1, j + 1] = 2
            else:
                length[now, j + 1] = length[now, j]
                direction[i + 1, j + 1] = 3
    i, j, count = len(a), len(b), 0
    # Back from the corner along what was best there; ties go back in `a`.
    while i > 0 and j > 0:
        if direction[i, j] == 1:
            i -= 1
            j -= 1
            found[count, 0], found[count, 1] = i, j
            count += 1
        elif direction[i, j] == 2:
            i -= 1
        else:
            j -= 1
    return count
