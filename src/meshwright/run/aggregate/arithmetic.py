"""What a worker does to floats on the way: chunks of them to whole numbers with a common exponent, and back.

Cite: Sapio et al. (NSDI 2021), appendix C, and the repository p4lang/p4app-switchML (exponents travel one chunk ahead).
Left open by the paper: overflow by rounding, zero and denormal blocks, infinities. Our answer: the scale is a whole number of steps such that all
workers at their largest stay inside 32 bits, times a power of two; a block without a normal number has the least exponent; what is not finite is
refused before anything is sent.
Deviations: two words per element (`limbs`) where 32 bits are too few.
Invariant: sums are those of whole numbers, so no order of arrival, no slot and no tree of switches changes a bit.
Cost: one pass over a chunk.
Error of an element's sum, from n workers, block maximum m: n * n * m / 2^31 with one word, and one rounding to float32.
"""

from __future__ import annotations

import numpy as np

from ...kernels.compile import inlined

__all__ = ["from_steps", "largest_exponent", "limb_bits", "split_bits", "steps_of", "to_steps"]

LEAST_EXPONENT = -126  # of a float32's exponent field 0: below it all is denormal


def steps_of(workers: int, limbs: int) -> float:
    """Steps from 0 to the block's power of two. One word: as many as all workers may send at once; two: a power of two, `split_bits` twice."""
    return float((2**31 - workers) // workers) if limbs == 1 else float(2 ** (2 * split_bits(workers)))


def split_bits(workers: int) -> int:
    """Bits of the lower of two words, of which so many add up below 2^31."""
    return 31 - (workers - 1).bit_length()


def limb_bits(workers: int, limbs: int) -> int:
    """0 for one word."""
    return split_bits(workers) if limbs == 2 else 0


@inlined
def largest_exponent(bits, first, count):  # type: ignore[no-untyped-def]
    """The exponent field of the largest magnitude among float32s given as 32-bit words; 255: one is infinite or not a number."""
    most = np.int32(0)
    for i in range(first, first + count):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))
    return np.int64(most >> np.int32(23))


@inlined
def _power(exponent):  # type: ignore[no-untyped-def]
    """2 to a power within a double's range."""
    return np.ldexp(1.0, exponent)


@inlined
def to_steps(floats, first, count, field, steps, split, out, row):  # type: ignore[no-untyped-def]
    """Floats as steps of the block whose agreed exponent field is `field`, into `out[row]`; two words: the upper ones first."""
    scale = steps * _power(-(field + LEAST_EXPONENT))
    if split == 0:
        for i in range(count):
            out[row, i] = np.int32(np.rint(floats[first + i] * scale))
        return
    for i in range(count):
        whole = np.int64(np.rint(floats[first + i] * scale))
        out[row, i] = np.int32(whole >> split)
        out[row, count + i] = np.int32(whole & ((1 << split) - 1))


@inlined
def from_steps(numbers, row, at, count, field, steps, split, floats, first):  # type: ignore[no-untyped-def]
    """The sum of steps as floats."""
    scale = _power(field + LEAST_EXPONENT)
    for i in range(count):
        whole = np.int64(numbers[row, at + i])
        if split:
            whole = (whole << split) + np.int64(numbers[row, at + count + i])
        floats[first + i] = np.float32(whole / steps * scale)

