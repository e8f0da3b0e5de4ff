"""Sparse vectors as lists of entries: taken from float32 vectors above a threshold, added to them, merged, hashed.

An entry is an index and a value, in a row of an integer array `entries` of shape (rows, 2): (index, bits of the value) as int32, or as int64 where
indices need it. `entry_values(entries)` is the strided float32 view of the values. A list is sent as it lies in memory.

Magnitudes are the integers of `select`; a threshold is one of them, at least 1: zeros are never taken. The k-th largest of several vectors together
comes from the sum of their histograms, over bits 30-20, then 19-9, then 8-0 (`LEVELS`, `descend`).
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from .compile import kernel
from .select import INFINITE, MAGNITUDE_MASK

__all__ = [
    "LEVELS", "add_entries", "add_select", "clear_all", "clear_chosen", "count_from", "descend", "entry_values", "histogram",
    "merge_entries", "moments", "move_tail", "rehash", "scatter_hashed", "select_from", "sum_squares",
]  # fmt: skip

LEVELS = ((20, 31), (9, 20), (0, 9))  # bits [low, high) of each level's bins; the bits above are the prefix found so far
RUN_ELEMENTS = 64  # looked at together: most runs of a sparse selection hold nothing to select


def entry_values(entries: NDArray[np.signedinteger]) -> NDArray[np.float32]:
    """The values of entries, as a strided view that can be written."""
    wide = entries.itemsize // 4
    flat: NDArray[np.float32] = entries.reshape(-1).view(np.float32)
    return flat[(wide if sys.byteorder == "little" else 2 * wide - 1) :: 2 * wide]


def descend(counts: NDArray[np.int64], k: int) -> tuple[int, int]:
    """(bin that holds the k-th largest, how many lie in higher bins); bin -1 when there are fewer than k."""
    above = 0
    for b in range(len(counts) - 1, -1, -1):
        if above + int(counts[b]) >= k:
            return b, above
        above += int(counts[b])
    return -1, above


@kernel
def histogram(bits, low, high, prefix, counts):  # type: ignore[no-untyped-def]
    """Add to `counts` the elements by bits [low, high) of their magnitude, of those whose bits from `high` on are `prefix`; zeros are left out."""
    mask = (1 << (high - low)) - 1
    for i in range(len(bits)):
        b = bits[i] & MAGNITUDE_MASK
        # Bits of non-negative floats sort as the floats do, so bins of their upper bits are ranges of magnitude.
        if b != 0 and (b >> high) == prefix:
            counts[(b >> low) & mask] += 1


@kernel
def add_select(residual, gradient, out, bits, low, entries):  # type: ignore[no-untyped-def]
    """out = residual + gradient, and entries of |out| from `low` on in order of index, as many as there are rows for.

    bits: int32 view of `out`. Returns (how many there are, with or without a row; how many of them are not finite; one that is not, or -1).
    """
    n, rows = len(out), len(entries)
    found, wrong, where = 0, 0, -1
    for start in range(0, n, RUN_ELEMENTS):
        hits, end = np.int32(RUN_ELEMENTS), n
        if start + RUN_ELEMENTS <= n:  # a constant number of turns, so that it runs on vectors
            hits, end = np.int32(0), start + RUN_ELEMENTS
            for i in range(RUN_ELEMENTS):
                out[start + i] = residual[start + i] + gradient[start + i]
            for i in range(RUN_ELEMENTS):
                hits += np.int32((bits[start + i] & np.int32(MAGNITUDE_MASK)) >= low)
        else:
            for i in range(start, n):
                out[i] = residual[i] + gradient[i]
        if hits:
            for i in range(start, end):
                b = bits[i] & np.int32(MAGNITUDE_MASK)
                if b >= low:
                    if found < rows:
                        entries[found, 0] = i
                        entries[found, 1] = bits[i]
                    found += 1
                    if b >= INFINITE:
                        wrong += 1
                        where = i
    return found, wrong, where


@kernel
def select_from(bits, base, low, ties, entries):  # type: ignore[no-untyped-def]
    """Entries of magnitude above `low`, and the first `ties` of exactly `low`, in order of index (`base` added), as rows allow.

    Returns (how many above, how many equal), with or without a row.
    """
    n, rows = len(bits), len(entries)
    above, equal, found = 0, 0, 0
    for start in range(0, n, RUN_ELEMENTS):
        hits, end = np.int32(RUN_ELEMENTS), n
        if start + RUN_ELEMENTS <= n:  # a constant number of turns, so that it runs on vectors
            hits, end = np.int32(0), start + RUN_ELEMENTS
            for i in range(RUN_ELEMENTS):
                hits += np.int32((bits[start + i] & np.int32(MAGNITUDE_MASK)) >= low)
        if hits:
            for i in range(start, end):
                b = bits[i] & np.int32(MAGNITUDE_MASK)
                if b < low:
                    continue
                if b == low:
                    equal += 1
                    if equal > ties:
                        continue
                else:
                    above += 1
                if found < rows:
                    entries[found, 0] = base + i
                    entries[found, 1] = bits[i]
                    found += 1
    return above, equal


@kernel
def count_from(bits, low):  # type: ignore[no-untyped-def]
    """Elements of magnitude `low` and above."""
    found = 0
    for i in range(len(bits)):
        found += (bits[i] & np.int32(MAGNITUDE_MASK)) >= low
    return found


@kernel
def moments(x):  # type: ignore[no-untyped-def]
    """(sum, sum of squares) in double precision."""
    total, squares = 0.0, 0.0
    for i in range(len(x)):
        total += x[i]
        squares += np.float64(x[i]) * x[i]
    return total, squares


@kernel
def add_entries(dense, base, entries, values):  # type: ignore[no-untyped-def]
    """dense[index - base] += value. Returns -1, or the first row whose index lies outside, with nothing after it added."""
    n = len(dense)
    for j in range(len(entries)):
        i = entries[j, 0] - base
        if i < 0 or i >= n:
            return j
        dense[i] += values[j]
    return -1


@kernel
def clear_all(x, own, values):  # type: ignore[no-untyped-def]
    """x[i] = 0 for every index of `own`. Returns (sum of its values, sum of their magnitudes)."""
    given, size = 0.0, 0.0
    for j in range(len(own)):
        x[own[j, 0]] = 0.0
        given += values[j]
        size += abs(values[j])
    return given, size


@kernel
def clear_chosen(x, own, values, chosen):  # type: ignore[no-untyped-def]
    """x[i] = 0 where i is an index of both `own` and `chosen` (rising). Returns (sum of those own values, sum of their magnitudes)."""
    j, given, size = 0, 0.0, 0.0
    for i in range(len(own)):
        at = own[i, 0]
        while j < len(chosen) and chosen[j, 0] < at:
            j += 1
        if j < len(chosen) and chosen[j, 0] == at:
            x[at] = 0.0
            given += values[i]
            size += abs(values[i])
    return given, size


@kernel
def merge_entries(a, a_values, b, b_values, out, out_values):  # type: ignore[no-untyped-def]
    """The union of two lists of rising index, values of equal indices added; returns its length. `out` has rows for both."""
    i, j, m = 0, 0, 0
    while i < len(a) or j < len(b):
        # Like the merge of merge sort: the smaller index goes next, equal ones become one entry.
        if j == len(b) or (i < len(a) and a[i, 0] < b[j, 0]):
            out[m, 0], out[m, 1] = a[i, 0], a[i, 1]
            i += 1
        elif i == len(a) or b[j, 0] < a[i, 0]:
            out[m, 0], out[m, 1] = b[j, 0], b[j, 1]
            j += 1
        else:
            out[m, 0], out[m, 1] = a[i, 0], 0
            out_values[m] = a_values[i] + b_values[j]
            i += 1
            j += 1
        m += 1
    return m


@kernel
def move_tail(entries, low, ties, dropped):  # type: ignore[no-untyped-def]
    """Keep entries of magnitude above `low` and the first `ties` of exactly `low`, moved to the front in order; the others go to `dropped`.

    Returns (kept, dropped).
    """
    kept, left, equal = 0, 0, 0
    for j in range(len(entries)):
        index, value = entries[j, 0], entries[j, 1]
        b = value & MAGNITUDE_MASK
        equal += b == low
        if b > low or (b == low and equal <= ties):
            entries[kept, 0], entries[kept, 1] = index, value
            kept += 1
        else:
            dropped[left, 0], dropped[left, 1] = index, value
            left += 1
    return kept, left


@kernel
def sum_squares(a, b):  # type: ignore[no-untyped-def]
    """Sum of (a - b)^2 in double precision."""
    total = 0.0
    for i in range(len(a)):
        d = np.float64(a[i]) - np.float64(b[i])
        total += d * d
    return total


@kernel
def scatter_hashed(entries, factor, shift, n, length, starts, out):  # type: ignore[no-untyped-def]
    """Group entries by owner: element i has place (factor * i + shift) mod n, its owner is place // length. Stable.

    starts: as many zeros as owners + 1; becomes the first row of each owner in `out`, and the number of rows.
    """
    for j in range(len(entries)):
        starts[(factor * np.int64(entries[j, 0]) + shift) % n // length + 1] += 1
    # Counting sort: counts become first rows, move on while rows are filled, and are moved back below.
    for owner in range(1, len(starts)):
        starts[owner] += starts[owner - 1]
    for j in range(len(entries)):
        owner = (factor * np.int64(entries[j, 0]) + shift) % n // length
        out[starts[owner], 0], out[starts[owner], 1] = entries[j, 0], entries[j, 1]
        starts[owner] += 1
    for owner in range(len(starts) - 1, 0, -1):
        starts[owner] = starts[owner - 1]
    starts[0] = 0


@kernel
def rehash(entries, factor, shift, n):  # type: ignore[no-untyped-def]
    """Every index i becomes (factor * i + shift) mod n, in place."""
    for j in range(len(entries)):
        entries[j, 0] = (factor * np.int64(entries[j, 0]) + shift) % n
