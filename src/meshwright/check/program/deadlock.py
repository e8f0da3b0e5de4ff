"""Deadlock, decided exactly: a program is live if and only if its edges of lag 0 have no cycle.

Edges between parts of steps: lane order; `after` with lag 0; matching (send part -> receive part); credit (the receive part of
message j -> the send part of message j + depth, which has lag 0 only while both fall into one iteration). A fused step receives, then sends, so
it has two nodes. Nothing is unrolled: an edge of lag >= 1 leads to a later iteration and cannot close a cycle. O(steps + edges).

`at_once`: the fused steps of NCCL's and MSCCL's kernels, which wait for the data and for room to send before they do anything, and return the
credit last (`genericOp` in NCCL's prims_simple.h: both waits, the copy, both posts). Such a step is one node.
"""

from __future__ import annotations

import numpy as np

from ...program.program import Kind, Part, Program
from ...program.tables import I32
from ..verdict import Finding
from .order import Ints, Order, messages, topological, wait_once
from .wellformed import witness

__all__ = ["check_deadlock", "find_cycle", "smallest_depth"]

_LANE, _FUSED, _AFTER, _MATCH, _CREDIT = range(5)
_WHY = ("follows in its lane", "sends after it receives", "waits for", "waits for the message of", "waits for the credit of")


class _Graph:
    """Node of step s: its receive part s + fused steps before it, then (fused steps only) its send part."""

    def __init__(self, p: Program, depth: Ints | None = None, *, at_once: bool = False) -> None:
        s, self.program = p.steps, p
        n = len(s)
        self.fused = (s.kind == Kind.TRANSFER) & ((s.parts & Part.RECV) != 0) & ((s.parts & Part.SEND) != 0) & (not at_once)
        # A fused step takes two numbers, so later steps move up by the fused steps before them.
        self.begin = np.arange(n) + np.concatenate([[0], np.cumsum(self.fused)[:-1]]) if n else np.zeros(0, np.int64)
        self.end = self.begin + self.fused
        self.n = n + int(self.fused.sum())
        self.step_of = np.repeat(np.arange(n), 1 + self.fused)
        lane_of = p.lane_of_step()
        follows = np.flatnonzero(lane_of[1:] == lane_of[:-1]) if n else np.zeros(0, np.int64)
        owner = np.repeat(np.arange(n), np.diff(s.after_ptr))
        # Only waits within one turn can close a cycle; a lane that is waited for once is waited for in turn 0.
        now = wait_once(p, lane_of.astype(np.int64)) | (s.after_lag == 0)
        m = self.messages = messages(p)
        d = (p.channels.depth.astype(np.int64) if depth is None else depth)[m.channel]
        here = np.arange(len(m.channel))
        # Message j + depth may be sent only once message j is taken; beyond the last message of a turn the credit belongs to the next turn.
        credit = here[m.ordinal + d < m.per_channel[m.channel]]
        fused = np.flatnonzero(self.fused)
        edges = (
            (self.end[follows], self.begin[follows + 1]),
            (self.begin[fused], self.end[fused]),
            (self.end[s.after_step[now]], self.begin[owner[now]]),
            (self.end[m.send], self.begin[m.recv]),
            (self.begin[m.recv[credit]], self.end[m.send[credit + d[credit]]]),
        )
        self.src = np.concatenate([a for a, _ in edges])
        self.dst = np.concatenate([b for _, b in edges])
        self.kind = np.repeat(np.arange(len(edges)), [len(a) for a, _ in edges])

    def cycle(self) -> list[tuple[int, int]]:
        """(step, kind of the edge by which it waits for the step before it, cyclically) around one cycle; empty if live."""
        # What a topological sort leaves over are the cycles and all that waits for them.
        order = topological(self.n, self.src, self.dst)
        if len(order) == self.n:
            return []
        left = np.ones(self.n, bool)
        left[order] = False
        at = np.flatnonzero(left[self.src] & left[self.dst])
        into = np.full(self.n, -1, np.int64)
        into[self.dst[at]] = at  # one edge into every node left: walking back must come around
        seen: dict[int, int] = {}
        walk: list[int] = []
        v = int(np.flatnonzero(left)[0])
        while v not in seen:
            seen[v] = len(walk)
            walk.append(v)
            v = int(self.src[into[v]])
        loop = walk[seen[v] :][::-1]
        return [(int(self.step_of[v]), int(self.kind[into[v]])) for v in loop]


def find_cycle(p: Program, *, at_once: bool = False) -> list[tuple[int, str]]:
    """Steps of a cycle of waits, each with why it waits for the one before it; empty when the program is live."""
    return [(step, _WHY[kind]) for step, kind in _Graph(p, at_once=at_once).cycle()]


def check_deadlock(p: Program, *, at_once: bool = False) -> list[Finding]:
    cycle = find_cycle(p, at_once=at_once)
    if not cycle:
        return []
    shown = [(step, why) for k, (step, why) in enumerate(cycle) if why != _WHY[_LANE] or len(cycle) <= 8 or k < 2]
    text = "; ".join(f"{p.describe(step)} {why} the one before it" for step, why in shown[:8])
    more = f" ... ({len(cycle)} steps in all)" if len(shown) > 8 else ""
    facts = witness(p, cycle[0][0], cycle=[{"step": step, "waits": why} for step, why in cycle[:64]], cycle_length=len(cycle))
    return [Finding(check="deadlock", message=f"steps wait for each other in a circle: {text}{more}", witness=facts)]


def smallest_depth(p: Program) -> I32:
    """Per channel a smallest depth with which the program is live (no single one can be lowered); -1 everywhere if no depth helps.

    First what each channel needs when all others are unbounded: with K(j) the last send that happens before the receive of
    message j, depth must exceed K(j) - j (credits of later iterations never bind). That is necessary; where it does not suffice for
    all channels together, the channels on the cycles found get deeper one by one, and what was added too much is taken back.
    """
    order = Order(p, iterations=1)
    # Without credits there is a cycle already: no depth can help.
    if len(order.order) < order.n:
        return np.full(len(p.channels), -1, np.int32)
    m = messages(p)
    depth = np.ones(len(p.channels), np.int64)
    send, recv = order.node(m.send, 0), order.node(m.recv, 0)
    first = np.concatenate([[0], np.cumsum(m.per_channel)[:-1]]) if len(m.per_channel) else np.zeros(0, np.int64)
    for lane in np.unique(order.lane[send]).tolist():
        mine = np.flatnonzero(order.lane[send] == lane)
        seen = order.last_ancestor(recv[mine], lane)
        for chan in np.unique(m.channel[mine]).tolist():
            lo, hi = int(first[chan]), int(first[chan] + m.per_channel[chan])
            at = np.flatnonzero(m.channel[mine] == chan)
            # K(j) of the docstring: the last send of the channel among what precedes the receive of message j.
            k = np.searchsorted(order.position[send[lo:hi]], seen[at], side="right") - 1
            depth[chan] = max(1, int((k - m.ordinal[mine[at]]).max()) + 1)
    needed = depth.copy()
    rounds = 0
    while cycle := _Graph(p, depth).cycle():
        rounds += 1
        for i, (step, kind) in enumerate(cycle):
            if kind == _CREDIT:  # from the receive before it in the cycle
                on = set(m.channel[m.recv == cycle[i - 1][0]].tolist()) & set(m.channel[m.send == step].tolist())
                for chan in on:
                    # One at a time at first, which rarely overshoots; after 64 rounds doubled, so that the number of rounds is logarithmic.
                    depth[chan] += 1 if rounds < 64 else depth[chan]
    # Live is monotone in every depth: lowering one channel until the program is not live gives a vector in which none can be lowered.
    for chan in np.flatnonzero(depth > needed).tolist():
        while depth[chan] > needed[chan]:
            depth[chan] -= 1
            if _Graph(p, depth).cycle():
                depth[chan] += 1
                break
    return depth.astype(np.int32)
