"""All of an aggregation in one thread: a switch and its workers by the functions that the socket loops call, over a network that does its worst.

Per seed a schedule: which packet arrives next is drawn; a packet, on its way up or down, is lost, doubled, or kept and sent again when its slot has
served three chunks or more since. Timers run out at drawn moments. Tensors follow each other on one stream. Sums are those of 32-bit numbers, so a
packet that counts twice, or for another chunk, shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels.compile import fingerprint, inlined, kernel
from ..run.aggregate import protocol
from ..run.aggregate.protocol import ADDED, FIRST, REPEAT, accept, first_chunk, row_of, take

__all__ = ["DONE", "STUCK", "WRONG", "Faults", "Tally", "run_schedule"]

DONE, WRONG, STUCK = 0, 1, 2
MAX_FLYING, MAX_KEPT = 512, 256  # packets under way and packets kept to be sent again; more are lost
LATE_TURNS = 3  # turns of its slot after which a kept packet is sent again
MAX_EVENTS = 200_000  # of a schedule; a hundred times what the longest of 100,000 took
_LOST, _DOUBLED, _KEPT, _REPLAYED, _EVENTS = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Faults:
    """Probabilities per packet, each way: lost, sent twice, kept for a late replay. `timer`: that of a timer running out, per event."""

    lost: float = 0.05
    doubled: float = 0.05
    kept: float = 0.05
    timer: float = 0.1


@dataclass(frozen=True)
class Tally:
    """How a schedule ended and what was done to its packets."""

    verdict: int
    lost: int
    doubled: int
    kept: int
    replayed: int
    events: int


def run_schedule(seed: int, *, workers: int, slots: int, chunks: int, tensors: int = 1, faults: Faults | None = None) -> Tally:
    """One schedule, a function of its arguments."""
    faults = faults or Faults()
    rates = np.array([faults.lost, faults.doubled, faults.kept, faults.timer])
    counts = np.zeros(5, np.int64)
    total = chunks * tensors
    rows = 2 * slots
    network = (np.zeros((MAX_FLYING, 5), np.int64), np.zeros((MAX_KEPT, 5), np.int64), np.zeros(2, np.int64), np.array([2 * seed + 1], np.uint64))
    switch = (np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.uint8), np.zeros(rows, np.int32))
    worker = (np.zeros((workers, slots), np.int64), np.zeros((workers, total), np.int32))
    verdict = int(_schedule(slots, chunks, tensors, network, switch, worker, rates, counts))
    return Tally(verdict, *(int(x) for x in counts))


@inlined
def _draw(network):  # type: ignore[no-untyped-def]
    """splitmix64: a fraction of 1."""
    network[3][0] += np.uint64(0x9E3779B97F4A7C15)
    z = network[3][0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)) * (1.0 / (1 << 53))


@inlined
def _value(worker, number):  # type: ignore[no-untyped-def]
    return np.int32((worker * 7919 + number * 104729 + 12345) * 2654435761 & 0xFFFFFFF)


@inlined
def _fly(network, up, worker, number, value):  # type: ignore[no-untyped-def]
    flying, count = network[0], network[2]
    if count[0] < flying.shape[0]:
        i = count[0]
        flying[i, 0], flying[i, 1], flying[i, 2], flying[i, 3] = up, worker, number, value
        count[0] += 1


@inlined
def _post(network, rates, counts, up, worker, number, value):  # type: ignore[no-untyped-def]
    """Hand a packet to the network, which does with it what it likes."""
    kept, count = network[1], network[2]
    if _draw(network) < rates[2] and count[1] < kept.shape[0]:
        i = count[1]
        kept[i, 0], kept[i, 1], kept[i, 2], kept[i, 3] = up, worker, number, value
        count[1] += 1
        counts[_KEPT] += 1
    if _draw(network) < rates[0]:
        counts[_LOST] += 1
        return
    _fly(network, up, worker, number, value)
    if _draw(network) < rates[1]:
        counts[_DOUBLED] += 1
        _fly(network, up, worker, number, value)


@inlined
def _replay(network, counts, due, slots):  # type: ignore[no-untyped-def]
    """Send one kept packet whose slot has gone on for long enough."""
    kept, count = network[1], network[2]
    if not count[1]:
        return
    i = int(_draw(network) * count[1])
    if due[0, kept[i, 2] % slots] < kept[i, 2] + LATE_TURNS * slots:
        return
    _fly(network, kept[i, 0], kept[i, 1], kept[i, 2], kept[i, 3])
    counts[_REPLAYED] += 1
    for j in range(4):
        kept[i, j] = kept[count[1] - 1, j]
    count[1] -= 1


def _entry(sources: int) -> Any:
    """Closes over the sources of what it uses: code that was kept for others is not taken."""

    @kernel
    def _schedule(slots, chunks, tensors, network, switch, worker, rates, counts):  # type: ignore[no-untyped-def]
        if sources < 0:
            return STUCK
        number_of, (due, out) = switch[0], worker
        n, total = out.shape
        for row in range(len(number_of)):
            number_of[row] = first_chunk(row, slots)
        end = np.int64(chunks)  # of the tensor that everybody is in or has finished
        for w in range(n):
            for slot in range(slots):
                due[w, slot] = slot
                if slot < end:
                    _post(network, rates, counts, 1, w, slot, _value(w, slot))
        while True:
            counts[_EVENTS] += 1
            if counts[_EVENTS] > MAX_EVENTS:
                return STUCK
            left = 0
            for w in range(n):
                for slot in range(slots):
                    left += due[w, slot] < end
            if not left:
                if end == total:
                    break
                end += chunks  # every worker has the result, which is when each begins its next tensor, whatever is still under way
                for w in range(n):
                    for slot in range(slots):
                        if due[w, slot] < end:
                            _post(network, rates, counts, 1, w, due[w, slot], _value(w, due[w, slot]))
                continue
            _replay(network, counts, due, slots)
            if not network[2][0] or _draw(network) < rates[3]:
                w, slot = int(_draw(network) * n), int(_draw(network) * slots)
                if due[w, slot] < end:
                    _post(network, rates, counts, 1, w, due[w, slot], _value(w, due[w, slot]))
                continue
            _arrive(slots, end, network, switch, worker, rates, counts)
        for number in range(total):
            wanted = np.int32(0)
            for w in range(n):
                wanted += _value(w, number)
            for w in range(n):
                if out[w, number] != wanted:
                    return WRONG
        return DONE

    return _schedule


_schedule = _entry(fingerprint(__file__, protocol.__file__))


@inlined
def _arrive(slots, end, network, switch, worker, rates, counts):  # type: ignore[no-untyped-def]
    """One packet, any of those under way."""
    number_of, seen, ready, pool = switch
    due, out = worker
    n = out.shape[0]
    flying, count = network[0], network[2]
    i = int(_draw(network) * count[0])
    up, w, number, value = flying[i, 0], flying[i, 1], flying[i, 2], np.int32(flying[i, 3])
    for j in range(4):
        flying[i, j] = flying[count[0] - 1, j]
    count[0] -= 1
    if not up:
        if accept(due[w], slots, number):
            out[w, number] = value
            if number + slots < end:
                _post(network, rates, counts, 1, w, number + slots, _value(w, number + slots))
        return
    row = row_of(number, slots)
    action = take(number_of, seen, ready, row, slots, w, number)
    if action == REPEAT:
        _post(network, rates, counts, 0, w, number, pool[row])
    if action == FIRST:
        pool[row] = value
    if action == ADDED:
        pool[row] += value
    if action in (FIRST, ADDED) and seen[row] == (1 << n) - 1:
        ready[row] = 1
        for other in range(n):
            _post(network, rates, counts, 0, other, number, pool[row])
