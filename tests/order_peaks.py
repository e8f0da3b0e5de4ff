"""The peak of memory in one given order of a program's steps, by adding up its events: what the worst order is never below."""

from __future__ import annotations

import numpy as np

from meshwright.check.program.memory import _lifetimes
from meshwright.check.program.order import Ints, Order
from meshwright.check.program.sweep import posted_ahead
from meshwright.program.program import Program


def order_peak(p: Program, start_s: Ints | np.ndarray, end_s: Ints | np.ndarray, order: Order | None = None) -> tuple[int, ...]:
    """Peak bytes per actor of one timeline: `start_s`, `end_s` per step (repeat 1). At one instant, ends free before starts take.

    A receive's buffer counts from when the receive may be posted: the end of what it follows in its lane and by `after`, save the receives
    right before it that its channel's depth lets be open at the same time (`posted_ahead`); it waits for what those wait for.
    """
    order = order or Order(p)
    life = _lifetimes(p, order)
    ends = np.asarray(end_s, dtype=np.float64)
    ready = np.zeros(order.n)  # when what a node is `after` is done
    local = ~order.cross_match
    # A receive may be posted before its message is sent, so messages do not count here; `after` edges do.
    np.maximum.at(ready, order.cross_dst[local], ends[order.step[order.cross_src[local]]])
    start = np.asarray(start_s, dtype=np.float64)[order.step]
    ahead = posted_ahead(order)
    for v in np.flatnonzero(ahead >= 0).tolist():
        # The receives right before it may still be open, so it waits for what they waited for.
        first = v - int(ahead[v])
        before = float(ends[order.step[first - 1]]) if order.position[first] > 0 else 0.0
        start[v] = min(start[v], max(before, float(ready[first : v + 1].max())))
    end = np.asarray(end_s, dtype=np.float64)[order.step]
    peaks = []
    for actor in range(p.ranks + p.switches):
        events: list[tuple[float, int, int]] = []
        for e in (e for e, who in enumerate(life.actor) if who == actor):
            begin = float(start[life.begins[e]].min()) if life.begins[e] else -np.inf
            until = float(end[life.ends[e]].max()) if life.ends[e] else np.inf
            if until == begin:  # a step without duration still holds what it uses
                until = float(np.nextafter(until, np.inf))
            events += [(begin, 1, life.size[e]), (until, 0, -life.size[e])]
        now = peak = 0
        # At one instant ends sort before starts: what is freed can be taken again.
        for _, _, change in sorted(events):
            now += change
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
