"""An event queue for simulators: a binary heap of slots ordered by (time, key, slot), with decrease-key and removal.

Every slot (a lane, a channel, a message in flight) has at most one pending event, so a heap with as many places as slots can
never overflow: its size is known before the simulation starts. Compiled; `tests/kernels` holds the plain twin.

A heap is four arrays and a counter, made by `make_heap(slots)`: `order` (slots in heap order), `place` (where each slot is, -1 =
not queued), `time` and `key` of every slot, `queued` (how many).
Cost: O(log queued) per operation, no allocation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compile import inlined, kernel

__all__ = ["EventHeap", "heap_pop", "heap_put", "heap_repair", "make_heap"]


class EventHeap(NamedTuple):
    order: NDArray[np.int32]
    place: NDArray[np.int32]
    time: NDArray[np.float64]
    key: NDArray[np.int64]
    queued: NDArray[np.int64]


def make_heap(slots: int) -> EventHeap:
    """An empty queue for slots 0..slots-1."""
    return EventHeap(
        np.full(slots, -1, np.int32), np.full(slots, -1, np.int32), np.zeros(slots, np.float64), np.zeros(slots, np.int64), np.zeros(1, np.int64)
    )


@inlined
def _sift_up(heap, at, slot):  # type: ignore[no-untyped-def]
    order, place, time, key = heap.order, heap.place, heap.time, heap.key
    t, k = time[slot], key[slot]
    while at > 0:
        up = (at - 1) >> 1
        other = order[up]
        if time[other] < t or (time[other] == t and (key[other] < k or (key[other] == k and other < slot))):
            break
        order[at] = other
        place[other] = at
        at = up
    order[at] = slot
    place[slot] = at
    return at


@inlined
def _sift_down(heap, at, slot):  # type: ignore[no-untyped-def]
    order, place, time, key = heap.order, heap.place, heap.time, heap.key
    t, k, n = time[slot], key[slot], heap.queued[0]
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        low = order[child]
        if child + 1 < n:
            right = order[child + 1]
            if time[right] < time[low] or (time[right] == time[low] and (key[right] < key[low] or (key[right] == key[low] and right < low))):
                child += 1
                low = right
        if t < time[low] or (t == time[low] and (k < key[low] or (k == key[low] and slot < low))):
            break
        order[at] = low
        place[low] = at
        at = child
    order[at] = slot
    place[slot] = at


@kernel
def heap_put(heap, slot, t, k):  # type: ignore[no-untyped-def]
    """Queue `slot` at (t, k), or move it there if it is queued already."""
    at = np.int64(heap.place[slot])
    heap.time[slot] = t
    heap.key[slot] = k
    if at < 0:
        at = heap.queued[0]
        heap.queued[0] += 1
        _sift_up(heap, at, slot)
    elif _sift_up(heap, at, slot) == at:
        _sift_down(heap, at, slot)


@kernel
def heap_repair(heap):  # type: ignore[no-untyped-def]
    """Restore the order after the times of many queued slots were written directly; cheap when their order hardly changed."""
    # Heapify from the last parent up: linear, and nothing moves where the order still holds.
    for at in range((heap.queued[0] >> 1) - 1, -1, -1):
        _sift_down(heap, at, np.int64(heap.order[at]))


@kernel
def heap_pop(heap):  # type: ignore[no-untyped-def]
    """Take out and return the slot with the smallest (time, key, slot); the heap must not be empty."""
    slot = heap.order[0]
    heap.place[slot] = -1
    heap.queued[0] -= 1
    if heap.queued[0] > 0:
        _sift_down(heap, np.int64(0), np.int64(heap.order[heap.queued[0]]))
    return np.int64(slot)
