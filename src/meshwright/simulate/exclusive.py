"""Exclusive links: every link serves one message (or segment) at a time, in the order of asking, cut-through per hop.

A message asks for link l of its route when its head gets there. It is served from s = max(head, link free) and its tail leaves
at max(s + bytes/rate, tail of the hop before + that hop's latency); the head is at the next link at s + latency, and the
message arrives at tail + latency (+ the library's). Each hop is an event: booking later hops in advance would block idle gaps.
The sender is released when the last byte has left the first link. With segments, the next segment asks when the one before has
left the first link, so that messages of several senders take turns.
"""

from __future__ import annotations

import numpy as np

from ..kernels.compile import inlined
from ..kernels.event_heap import heap_put

__all__ = ["exclusive_inject", "exclusive_pass"]


@inlined
def _book(k, s, link, asked, size, tail_before):  # type: ignore[no-untyped-def]
    """Serve `size` bytes on `link`: (start, tail)."""
    start = max(asked, s.link[link].free)
    service = size / k.rate[link]
    if k.burst[link] > 0.0:
        have = min(k.burst[link], s.link[link].tokens + k.rate[link] * (start - s.link[link].tokens_at))
        service = max(0.0, size - have) / k.rate[link]
        s.link[link].tokens = max(0.0, have - size)
        s.link[link].tokens_at = start + service
    tail = max(start + service, tail_before)
    s.link[link].free = tail
    s.link[link].busy += service
    return start, tail


@inlined
def exclusive_pass(k, s, first_slot, place, key, now):  # type: ignore[no-untyped-def]
    """The message at `place` asks for the next link of its route. Returns when its tail leaves that link."""
    c = np.int64(s.slot[place].channel)
    at = k.route_ptr[c] + s.slot[place].hop
    stop = k.route_ptr[c + 1]
    if at >= stop:  # both ends on one device
        if s.slot[place].last:
            heap_put(s.heap, first_slot + place, now + k.library[c], key)
        return now
    link = k.route_link[at]
    start, tail = _book(k, s, link, now, s.slot[place].size, s.slot[place].tail)
    s.slot[place].hop += 1
    if at + 1 < stop:
        s.slot[place].tail = tail + k.latency[link]
        heap_put(s.heap, first_slot + place, start + k.latency[link], key)
    elif s.slot[place].last:
        s.slot[place].hop = stop - k.route_ptr[c]
        heap_put(s.heap, first_slot + place, tail + k.latency[link] + k.library[c], key)
    return tail


@inlined
def exclusive_inject(t, k, s, c, now):  # type: ignore[no-untyped-def]
    """Put the next segment of the message that channel `c` is sending onto its first link; plan the sender's release."""
    lanes, channels = len(t.lane_start), len(t.depth)
    size = s.channel[c].left
    if k.segment > 0.0 and size > k.segment:
        size = k.segment
    s.channel[c].left -= size
    sequence = s.channel[c].injected
    s.channel[c].injected += 1
    place = s.channel[c].place_first + sequence % s.channel[c].place_count
    s.slot[place].channel = c
    s.slot[place].hop = 0
    s.slot[place].size = size
    s.slot[place].tail = now
    s.slot[place].last = s.channel[c].left <= 0.0
    key = ((lanes + c) << 32) | (sequence & 0xFFFFFFFF)
    leaves = exclusive_pass(k, s, lanes + channels, place, key, now)
    if s.channel[c].left > 0.0:
        heap_put(s.heap, lanes + c, leaves, (lanes + c) << 32)
        return
    lane = np.int64(t.sender[c])
    s.lane[lane].pending -= 1
    s.lane[lane].release = max(s.lane[lane].release, leaves)
    if s.lane[lane].pending == 0:
        heap_put(s.heap, lane, s.lane[lane].release, lane << 32)
