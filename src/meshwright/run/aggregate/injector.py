"""Faults on purpose, drawn from a seed: packets lost, doubled, and kept to be sent again when their slot has gone on by three turns or more.

It sits in the switch, on both ways of every worker. What is kept comes late, so packets are reordered without bound. For tests and benchmarks: where
the kernel has no `netem`, this is how loss is rehearsed. `rates[0]`: whether anything is injected; then per packet lost, doubled, kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.compile import inlined
from .frames import HEADER_BYTES

__all__ = ["LATE_TURNS", "Injector", "again", "injector", "keep", "strikes"]

LATE_TURNS = 3  # turns of its slot after which a kept packet is sent again
MAX_KEPT = 64  # packets that wait for that


class Injector(NamedTuple):
    """`kept`: packets, `numbers` the same memory; `about`: whether up, job, worker, chunk, bytes.

    `state`: how many are kept, were sent late, lost, doubled.
    """

    rates: Any
    random: Any
    kept: Any
    numbers: Any
    about: Any
    state: Any
    at: Any


def injector(payload_bytes: int, *, lost: float = 0.0, doubled: float = 0.0, kept: float = 0.0, seed: int = 0) -> Injector:
    packets = np.zeros((MAX_KEPT, HEADER_BYTES // 8 + -(-payload_bytes // 8) + 1), np.int64)
    rates = np.array([float(any((lost, doubled, kept))), lost, doubled, kept])
    at = np.array([packets.ctypes.data, packets.strides[0]])
    state = np.zeros(4, np.int64)
    return Injector(rates, np.array([2 * seed + 1], np.uint64), packets, packets.view(np.int32), np.zeros((MAX_KEPT, 5), np.int64), state, at)


@inlined
def _draw(chaos):  # type: ignore[no-untyped-def]
    """splitmix64: a fraction of 1."""
    chaos.random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = chaos.random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)) * (1.0 / (1 << 53))


@inlined
def strikes(chaos):  # type: ignore[no-untyped-def]
    """How many of this packet get through: 0, 1 or 2."""
    if _draw(chaos) < chaos.rates[1]:
        chaos.state[2] += 1
        return 0
    if _draw(chaos) < chaos.rates[2]:
        chaos.state[3] += 1
        return 2
    return 1


@inlined
def keep(chaos):  # type: ignore[no-untyped-def]
    """Whether this packet is to be kept, too; its place is `state[0]`, and `again` says what it is."""
    return chaos.state[0] < chaos.kept.shape[0] and _draw(chaos) < chaos.rates[3]


@inlined
def again(chaos, up, j, worker, number, size):  # type: ignore[no-untyped-def]
    i = chaos.state[0]
    chaos.about[i, 0], chaos.about[i, 1], chaos.about[i, 2], chaos.about[i, 3], chaos.about[i, 4] = up, j, worker, number, size
    chaos.state[0] += 1
