"""Random numbers that are a function of (key, position): the same on every rank, in any order, on a CPU and on a GPU.

Two rounds of a 32-bit mixer (multiply, shift, xor; constants of C. Wellons's search for low bias) keyed by 64 bits. Good enough for rounding and for
choosing elements, vectorises, and has no state. Not for secrets.
`permuted`: a permutation of 0..n-1 as a six-round Feistel network on the next even power of two, walked until it falls inside: k distinct
uniform positions cost O(k) whatever n is.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from .compile import inlined, kernel

__all__ = ["bits_at", "key_of", "permuted"]

FEISTEL_ROUNDS = 6  # four suffice in Luby and Rackoff's theorem, which assumes random round functions


def key_of(*numbers: int) -> tuple[np.uint32, np.uint32]:
    """A key from a seed, a step, a rank, ...: any whole numbers, order matters."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return np.uint32(int.from_bytes(digest[:4], "little")), np.uint32(int.from_bytes(digest[4:], "little"))


@inlined  # type: ignore[untyped-decorator]
def mixed(h: np.uint32) -> np.uint32:
    """A bijection of 32-bit numbers in which every input bit changes half of the output bits."""
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ (h >> np.uint32(15)))
    h = np.uint32(h * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


@inlined  # type: ignore[untyped-decorator]
def bits_at(position: int, key0: np.uint32, key1: np.uint32) -> np.uint32:
    """32 random bits; positions beyond 2^32 - 1 continue with another key."""
    low, high = np.uint32(position & 0xFFFFFFFF), np.uint32(position >> 32)
    first = mixed(np.uint32(low + key0))
    return np.uint32(mixed(np.uint32(first ^ np.uint32(key1 + np.uint32(high * np.uint32(0x9E3779B9))))))


@kernel  # type: ignore[untyped-decorator]
def _permuted(n: int, half: int, key0: np.uint32, key1: np.uint32, out: NDArray[np.int64]) -> None:
    low_mask = (1 << half) - 1
    for i in range(out.shape[0]):
        x = i
        while True:
            left, right = x >> half, x & low_mask
            # Each round is invertible whatever the mixed bits are, so the network permutes 0 .. 2^(2 half) - 1; the round number enters above
            # the position's bits, so no two rounds draw alike.
            for r in range(FEISTEL_ROUNDS):
                left, right = right, left ^ (int(bits_at(right + (r << 40), key0, key1)) & low_mask)
            x = (left << half) | right
            # Walking a cycle of a permutation until it comes back below n is a permutation of 0 .. n-1. The domain is less than four times n,
            # so few steps are needed.
            if x < n:
                break
        out[i] = x


def permuted(n: int, k: int, key: tuple[np.uint32, np.uint32]) -> NDArray[np.int64]:
    """The first k of a random order of 0..n-1, k <= n."""
    out = np.empty(k, np.int64)
    _permuted(n, max(1, (max(n - 1, 1).bit_length() + 1) // 2), *key, out)
    return out
