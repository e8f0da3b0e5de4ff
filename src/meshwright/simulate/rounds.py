"""Rounds of equal messages, timed by their links instead of one by one: for fabrics of thousands of devices.

All messages of a round begin together and have one size; the next round begins when all have arrived. Max-min fair links (`fair`) give the messages
on the busiest link the least rate of all. They keep it to the end, because that link stays full and limits them. So a round takes what its busiest
link takes, and the latency of a route; with equal routes that is the event engine's own time, without its events. Routes are the fabric's
(`fabric.route`), found for all pairs at once. Cost: a look at every link and destination per hop of the longest route.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import Disconnected, Unsupported
from ..fabric.fabric import Fabric

__all__ = ["Round", "round_of_all_pairs", "round_of_pairs"]

GOALS_AT_ONCE = 256  # destinations of one sweep: a few numbers per link and destination are held
FAR, THROUGH_DEVICE = 1 << 30, 1 << 15  # above every distance; one device passed through weighs more than any number of links
Ints = NDArray[np.int64]


class Round(NamedTuple):
    """`s_per_byte`: of the busiest link, when every message has one byte. `flight_s`: the largest latency of a route."""

    s_per_byte: float
    flight_s: float

    def seconds(self, message_bytes: float) -> float:
        return self.s_per_byte * message_bytes + self.flight_s


def round_of_pairs(fabric: Fabric, pairs: Sequence[tuple[int, int]]) -> Round:
    """One message from each device (by number) to the other. Raises: Disconnected, Unsupported (token buckets, latencies of a library)."""
    load, flight_s = np.zeros(len(fabric.links)), 0.0
    for a, b in pairs:
        route = fabric.route(a, b)
        load[list(route)] += 1
        flight_s = max(flight_s, sum(fabric.links[x].latency_s for x in route))
    return _round(fabric, load, flight_s)


def round_of_all_pairs(fabric: Fabric) -> Round:
    """One message from every device to every other. Raises: as `round_of_pairs`."""
    load, flight_s = np.zeros(len(fabric.links)), 0.0
    for first in range(0, len(fabric.devices), GOALS_AT_ONCE):
        routes = _Routes(fabric, np.arange(first, min(first + GOALS_AT_ONCE, len(fabric.devices))))
        for width in np.unique(routes.width[: len(fabric.devices)]).tolist() if routes.width is not None else [None]:
            if width != np.inf:  # of a destination itself
                flight_s = max(flight_s, routes.walk(width, load))
    return _round(fabric, load, flight_s)


def _round(fabric: Fabric, load: NDArray[np.float64], flight_s: float) -> Round:
    if any(x.burst_bytes or x.library_latency_s for x in fabric.links):
        raise Unsupported("token buckets and latencies of a library are simulated message by message", where=fabric.name, hint="fewer devices")
    rates = np.array([x.rate_Bps for x in fabric.links], np.float64)
    return Round(float((load / rates).max(initial=0.0)), flight_s)


class _Routes:
    """Towards some destinations: columns. Links are kept by the actor that they leave; of one actor in the fabric's order."""

    def __init__(self, fabric: Fabric, goals: Ints) -> None:
        ends = np.array(fabric.link_ends, np.int64).reshape(-1, 2)
        self.link = np.argsort(ends[:, 0], kind="stable")
        self.tail, self.head = ends[self.link].T
        self.starts = np.flatnonzero(np.diff(self.tail, prepend=-1))
        self.senders, self.goals, self.column = self.tail[self.starts], goals, np.arange(len(goals))
        self.fabric, devices = fabric, len(fabric.devices)
        self.cost = np.full((len(fabric.actor_names), len(goals)), FAR, np.int32)
        self.cost[goals, self.column] = 0
        step = ((self.head < devices)[:, None] & (self.head[:, None] != goals)) * np.int32(THROUGH_DEVICE) + np.int32(1)
        while True:
            via = np.minimum(self.cost[self.head] + step, FAR)
            least = np.minimum(self.cost[self.senders], np.minimum.reduceat(via, self.starts, axis=0))
            if np.array_equal(least, self.cost[self.senders]):
                break
            self.cost[self.senders] = least
        self.on = (via == self.cost[self.tail]) & (via < FAR)  # on a shortest way
        if (cut := np.argwhere(self.cost[:devices] == FAR)).size:
            a, b = (fabric.devices[int(x)].name for x in (cut[0, 0], goals[cut[0, 1]]))
            raise Disconnected(f"no path from {a} to {b} in fabric {fabric.name!r}", data={"src": a, "dst": b})
        self.latency_s = np.array([x.latency_s for x in fabric.links])[self.link]
        self.rate = np.array([x.rate_Bps for x in fabric.links], np.float64)[self.link][:, None]
        self.width = self._widths() if len(np.unique(self.rate)) > 1 else None

    def _widths(self) -> NDArray[np.float64]:
        """[actor, destination]: the narrowest link of the widest shortest way."""
        width = np.zeros(self.cost.shape)
        width[self.goals, self.column] = np.inf
        while True:
            wide = np.maximum.reduceat(np.where(self.on, np.minimum(self.rate, width[self.head]), 0.0), self.starts, axis=0)
            wide = np.maximum(width[self.senders], wide)
            if np.array_equal(wide, width[self.senders]):
                return width
            width[self.senders] = wide

    def walk(self, width: float | None, load: NDArray[np.float64]) -> float:
        """Add to the links what passes on routes of this width (None: of all, where links are alike). The largest latency of one."""
        fits, start = self.on, self.cost[: len(self.fabric.devices)] > 0
        if self.width is not None and width is not None:
            fits = fits & (self.rate >= width) & (self.width[self.head] >= width)
            start &= self.width[: len(start)] == width
        last = len(self.link)
        place = np.where(fits, np.arange(last)[:, None], last)
        following = np.full(self.cost.shape, last)
        following[self.senders] = np.minimum.reduceat(place, self.starts, axis=0)
        actor, column = np.nonzero(start)
        many, late = np.ones(len(actor)), np.zeros(len(actor))
        flight_s, columns = 0.0, len(self.goals)
        while len(actor):
            by = following[actor, column]
            load += np.bincount(self.link[by], weights=many, minlength=len(load))
            at, where = np.unique(self.head[by] * columns + column, return_inverse=True)
            late_there = np.zeros(len(at))
            np.maximum.at(late_there, where, late + self.latency_s[by])
            many_there = np.bincount(where, weights=many)
            arrived = at // columns == self.goals[at % columns]
            flight_s = max(flight_s, float(late_there[arrived].max(initial=0.0)))
            actor, column, many, late = at[~arrived] // columns, at[~arrived] % columns, many_there[~arrived], late_there[~arrived]
        return flight_s
