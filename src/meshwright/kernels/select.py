"""Largest magnitudes of a float32 vector: exact top-k, selection above a threshold, in about one pass over memory.

A magnitude is compared as the integer that its bits make without the sign: the same order, NaN and infinity on top, and integer maxima
vectorise. A block of 16 elements is looked at one by one only when its maximum is above the threshold.
Exact top-k: a threshold that lies below the k-th magnitude almost surely is read from a jittered sample, one pass collects the candidates above
it, and the k-th is found among these. If the sample was wrong the pass is repeated without it: the answer is always exact.
Ties at the k-th magnitude: the lowest indices are taken. Indices ascend; int32, or int64 from 2^31 elements on.
Cost: O(n) reads in one pass, O(k) work after it (O(n) when k is a large part of n).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import kernel

__all__ = [
    "INFINITE", "Floats", "Indices", "Magnitudes", "Positions", "accumulate", "kth_magnitude", "magnitude", "magnitude_bits",
    "magnitude_of", "select_above", "top_k",
]  # fmt: skip

Floats = NDArray[np.float32]
Indices = NDArray[np.int32] | NDArray[np.int64]
Magnitudes = NDArray[np.int32]
Positions = NDArray[np.int64]

MAGNITUDE_MASK = 0x7FFFFFFF  # all bits of a float32 but the sign: magnitudes compare as these integers do
INFINITE = 0x7F800000  # magnitudes from here on are infinity and NaN
BLOCK_ELEMENTS = 16  # elements whose largest magnitude is compared first: most blocks hold nothing above the threshold
CACHED_ELEMENTS = 4096  # elements that stay in the first-level cache between two loops over them
SAMPLE_STRIDE = 256  # one element in so many is looked at for a first threshold


def magnitude_of(value: float) -> int:
    """The integer that stands for |value|, value rounded to float32."""
    return int(np.float32(value).view(np.int32)) & MAGNITUDE_MASK


def magnitude(bits: int) -> float:
    """The inverse: the float32 whose bits these are."""
    return float(np.int32(bits).view(np.float32))


def magnitude_bits(values: Floats) -> NDArray[np.int32]:
    """The bits of a contiguous float32 vector as int32, sign included; shares memory."""
    return values.view(np.int32)


@kernel  # type: ignore[untyped-decorator]
def _largest(bits: NDArray[np.int32]) -> int:
    found = np.int32(0)
    for i in range(bits.shape[0]):
        found = max(found, bits[i] & np.int32(MAGNITUDE_MASK))
    return int(found)


@kernel  # type: ignore[untyped-decorator]
def _accumulate(into: Floats, bits: NDArray[np.int32], values: Floats) -> int:
    largest = np.int32(0)
    for start in range(0, into.shape[0], CACHED_ELEMENTS):  # slices from 0: numba's guards against negative indices would keep LLVM from vectorising
        part, added, made = into[start : start + CACHED_ELEMENTS], values[start : start + CACHED_ELEMENTS], bits[start : start + CACHED_ELEMENTS]
        for i in range(part.shape[0]):
            part[i] += added[i]
        for i in range(made.shape[0]):
            largest = max(largest, made[i] & np.int32(MAGNITUDE_MASK))
    return int(largest)


def accumulate(into: Floats, values: Floats) -> int:
    """into += values; the largest magnitude of the result, as an integer (at least INFINITE when something is not finite)."""
    return int(_accumulate(into, magnitude_bits(into), values))


def largest_magnitude(values: Floats) -> int:
    return int(_largest(magnitude_bits(values)))


@kernel  # type: ignore[untyped-decorator]
def _select(bits: NDArray[np.int32], threshold: int, out: NDArray[np.int64]) -> int:
    n, count, room = bits.shape[0], 0, out.shape[0]
    t = np.int32(threshold)
    whole = n - n % BLOCK_ELEMENTS
    for start in range(0, whole, BLOCK_ELEMENTS):
        part = bits[start : start + BLOCK_ELEMENTS]
        largest = np.int32(0)
        for i in range(BLOCK_ELEMENTS):
            largest = max(largest, part[i] & np.int32(MAGNITUDE_MASK))
        if largest > t:
            for i in range(BLOCK_ELEMENTS):
                if part[i] & np.int32(MAGNITUDE_MASK) > t:
                    if count < room:
                        out[count] = start + i
                    count += 1
    for i in range(whole, n):
        if bits[i] & np.int32(MAGNITUDE_MASK) > t:
            if count < room:
                out[count] = i
            count += 1
    return count


@kernel  # type: ignore[untyped-decorator]
def _sample(bits: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    n, m = bits.shape[0], out.shape[0]
    for i in range(m):
        low, high = i * n // m, (i + 1) * n // m
        h = np.uint32(np.uint32(i + 1) * np.uint32(0x9E3779B1))  # jitter: a fixed stride could meet a matrix's columns
        h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x85EBCA6B))
        out[i] = bits[low + np.int64(h >> np.uint32(8)) % (high - low)] & np.int32(MAGNITUDE_MASK)


def select_above(values: Floats, threshold: int, *, expected: int = 0) -> NDArray[np.int64]:
    """Ascending indices of the elements whose magnitude is greater than `threshold` (an integer, see `magnitude_of`; -1: all)."""
    bits = magnitude_bits(values)
    out = np.empty(min(values.size, 2 * expected + 1024), np.int64)
    count = int(_select(bits, threshold, out))
    # There are more than guessed: the count is exact all the same, so the second pass has room for all.
    if count > out.size:
        out = np.empty(count, np.int64)
        _select(bits, threshold, out)
    return out[:count]


def sampled_threshold(values: Floats, k: int) -> int:
    """A magnitude below the k-th largest with probability about 1 - 1e-5 on exchangeable data; -1 when only all elements would do."""
    n = values.size
    m = min(n, max(8192, n // SAMPLE_STRIDE))
    if m == n:
        return -1
    sample = np.empty(m, np.int32)
    _sample(magnitude_bits(values), sample)
    expected = k * m / n
    # The number of the k largest in the sample is about Poisson: 4.5 standard deviations further down the threshold is surely low enough.
    place = int(expected + 4.5 * np.sqrt(expected) + 9)
    if place >= m:
        return -1
    return int(np.partition(sample, m - place)[m - place]) - 1


def _candidates(values: Floats, k: int) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Indices that hold the k largest magnitudes and perhaps more, their magnitudes, and the k-th largest of all."""
    found = select_above(values, sampled_threshold(values, k), expected=k)
    # The sample deceived (data that is not exchangeable): all elements are candidates then.
    if found.size < k:
        found = select_above(values, -1, expected=values.size)
    magnitudes = magnitude_bits(values)[found] & np.int32(MAGNITUDE_MASK)
    return found, magnitudes, int(np.partition(magnitudes, found.size - k)[found.size - k])


def kth_magnitude(values: Floats, k: int) -> int:
    """The k-th largest magnitude, 1 <= k <= n, as an integer: exactly so many elements are at or above it, ties aside."""
    return _candidates(values, k)[2]


def top_k(values: Floats, k: int) -> NDArray[np.int64]:
    """Ascending indices of the k largest magnitudes, 0 <= k <= n; of equal ones at the edge the lowest indices."""
    if k <= 0:
        return np.empty(0, np.int64)
    if k >= values.size:
        return np.arange(values.size, dtype=np.int64)
    found, magnitudes, kth = _candidates(values, k)
    keep = magnitudes > kth
    ties = np.flatnonzero(magnitudes == kth)
    keep[ties[: k - int(keep.sum())]] = True
    return found[keep]
