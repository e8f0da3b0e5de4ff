"""Staging: which messages cannot go straight into their place at the receiver, in some order that the program allows.

Filled rows of buffers (sizes named `filled:`) are packed by the sender and put in their places by the receiver: both hold them beside the buffers.
"""

from __future__ import annotations

import numpy as np

from ...program.program import Part, Program
from .order import Addresses, Ints, Order, accesses

__all__ = ["PACKED", "staging_bytes"]

PACKED = "filled:"  # begins names of sizes of messages that are packed
CHUNK_PAIRS = 1 << 18  # (receive, step that shares its place) looked at together, so that memory stays bounded


def staging_bytes(p: Program, order: Order) -> Ints:
    """Per actor: depth x the largest message of each channel that needs staging.

    A receive's message is staged when it is added or only passed on, or when a step that touches its place may come after the receive is
    posted: after the step begins (the first `depth` messages of a channel), else after the message `depth` before it was consumed.
    """
    size, s = p.message_bytes("upper"), p.steps
    largest = np.zeros(len(p.channels), np.int64)
    named = np.array([name.startswith(PACKED) for name in p.sizes.name] + [False])
    packed = named[s.size]  # -1: the last one
    single = ((s.parts & Part.RECV) != 0) & ((s.parts & Part.IN_SET) == 0)
    # What is added or only passed on never lies at its destination as it arrives: such messages are staged without a look at the place.
    through = single & (((s.parts & Part.ADD) != 0) | ((s.parts & Part.STORE) == 0) | packed)
    # One figure per channel settles it: a channel stages `depth` messages of its largest, so smaller ones need no look any more.
    np.maximum.at(largest, s.chan_in[through], size[through])
    receives = np.flatnonzero(single)
    receives = receives[np.lexsort((receives, s.chan_in[receives]))]
    channel, place = s.chan_in[receives], np.arange(len(receives))
    credit = place - p.channels.depth[channel]  # the receive whose message returns the credit, -1: none is needed
    credit = np.where((credit >= 0) & (channel[np.maximum(credit, 0)] == channel), receives[np.maximum(credit, 0)], -1)
    first = np.searchsorted(channel, channel)  # first messages of all channels first: one that is staged settles most of its channel
    by = np.argsort(place - first, kind="stable")
    receives, credit = receives[by], credit[by]
    uses, at, width = _Uses(p), 0, 64
    while at < len(receives):
        v, back = receives[at : at + width], credit[at : at + width]
        # Blocks grow: the first few, the first messages of the channels, often make all others superfluous.
        left = (size[v] > largest[s.chan_in[v]]) & (s.dst_buffer[v] >= 0)
        staged = _used_before(uses, order, v[left], back[left])
        np.maximum.at(largest, s.chan_in[staged], size[staged])
        at, width = at + width, min(2 * width, 1 << 14)
    out = np.zeros(p.ranks + p.switches, np.int64)
    np.add.at(out, p.channels.dst, largest * p.channels.depth)
    sending = packed & ((s.parts & Part.SEND) != 0)
    largest = np.zeros(len(p.channels), np.int64)
    np.maximum.at(largest, s.chan_out[sending], size[sending])
    np.add.at(out, p.channels.src, largest * p.channels.depth)
    return out


class _Uses:
    """Steps that touch a range of bytes."""

    def __init__(self, p: Program) -> None:
        a, self.where, self.steps = accesses(p), Addresses(p), p.steps
        root, low, high = self.where.span(a.buffer, a.chunk, a.count, np.zeros(len(a.buffer), np.int64))
        by = np.lexsort((low, root))
        self.root, self.low, self.high, self.step = root[by], low[by], high[by], a.step[by]
        self.widest = np.zeros(len(p.buffers), np.int64)
        np.maximum.at(self.widest, root, high - low)
        # one sorted key for (root, first byte): a root's bytes lie after those of all roots before it
        extent = np.zeros(len(p.buffers) + 1, np.int64)
        np.maximum.at(extent, root + 1, high)
        self.base = np.cumsum(extent + 1)[:-1]
        self.key = self.base[self.root] + self.low

    def of(self, receives: Ints) -> tuple[Ints, Ints, Ints]:
        """For each of the receives, by its index: the rows from `begin` on, `count` of them, that may share bytes with its place."""
        root, first, end = self._place(receives)
        # A range that reaches into the place begins at most `widest` bytes before it, so the rows stand side by side in the sorted table.
        begin = np.searchsorted(self.key, self.base[root] + np.maximum(first - self.widest[root], 0))
        until = np.searchsorted(self.key, self.base[root] + end)
        return begin, np.maximum(until - begin, 0), first

    def _place(self, receives: Ints) -> tuple[Ints, Ints, Ints]:
        s = self.steps
        buffer, chunk, count = (x[receives].astype(np.int64) for x in (s.dst_buffer, s.dst_chunk, s.count))
        root, first, end = self.where.span(buffer, chunk, count, np.zeros(len(receives), np.int64))
        return root, first, end


def _used_before(uses: _Uses, order: Order, receives: Ints, credit: Ints) -> Ints:
    """The receives whose place another step touches that comes before the receive, and not before its credit (-1: none)."""
    begin, count, first = uses.of(receives)
    found = np.zeros(len(receives), bool)
    done = np.zeros(len(receives), np.int64)  # rows looked at; a place that many steps use is looked at piece by piece
    while len(left := np.flatnonzero(~found & (done < count))):
        take = np.minimum(count[left] - done[left], max(1, CHUNK_PAIRS // len(left)))
        of = np.repeat(left, take)
        row = np.repeat(begin[left] + done[left] - (np.cumsum(take) - take), take) + np.arange(len(of))
        done[left] += take
        step, mine, back = uses.step[row], receives[of], credit[of]
        # The receive itself, and the step whose end returned the credit, do not count as other users of the place.
        near = (uses.high[row] > first[of]) & (step != mine) & (step != back)
        of, step, mine, back = of[near], step[near], mine[near], back[near]
        node = order.node(step, 0)
        early = order.before(node, order.node(mine, 0))
        needs = np.flatnonzero(early & (back >= 0))
        # A use before the credit is over when the message may be sent.
        early[needs] = ~order.before(node[needs], order.node(back[needs], 0))
        found[of[early]] = True
    return receives[found]
