"""Which message was on which link when, from what the engine has recorded: sending, release and arrival of every message.

Fair links: a message is on every link of its route for as long as it is sent, each link later by the latencies before it. That is what
the model says. Exclusive links: the model's own recurrence, replayed in the order of sending. It is exact where no two channels share a
link, which is where `auto` uses exclusive links, and there are no token buckets or segments; else the arrival, which is exact, limits it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.compile import kernel
from ..timeline import Transfers
from .network import Network
from .tables import ProgramTables, State

__all__ = ["link_transfers"]


def link_transfers(t: ProgramTables, s: State, network: Network) -> Transfers:
    """The transfers of a finished, recorded simulation."""
    sending = np.repeat(np.arange(len(t.kind)), np.diff(t.out_ptr))  # step of every (step, channel) entry
    repeat = t.repeat[sending].astype(np.int64)
    entry = np.repeat(np.arange(len(sending)), repeat)
    iteration = _count_up(repeat)
    step, channel = sending[entry], t.out_channel[entry].astype(np.int64)
    message = s.channel["message_at"][channel] + iteration * np.bincount(t.out_channel, minlength=len(t.depth))[channel]
    message += _place_in_channel(t.out_channel)[entry]
    sent, arrived = s.instance["send"][t.record_at[step] + iteration], s.arrival[message]
    hops = np.diff(network.route_ptr)[channel].astype(np.int64)
    row_ptr = np.zeros(len(channel) + 1, np.int64)
    np.cumsum(hops, out=row_ptr[1:])
    start, end = np.zeros(int(row_ptr[-1])), np.zeros(int(row_ptr[-1]))
    _link_times(
        np.lexsort((channel, sent)), channel, sent, arrived, t.size[step], row_ptr, network.route_ptr, network.route_link, network.rate_Bps,
        network.latency_s, network.library_latency_s, network.mode == "fair", np.zeros(len(network.rate_Bps)), start, end,
    )  # fmt: skip
    owner = np.repeat(np.arange(len(channel)), hops)
    link = network.route_link[np.repeat(network.route_ptr[channel], hops) + _count_up(hops)]
    order = np.lexsort((end, start, link))
    return Transfers(
        links=network.link_names, rate_Bps=network.rate_Bps, link=link[order].astype(np.int32), step=step[owner][order].astype(np.int32),
        iteration=iteration[owner][order].astype(np.int32), size_bytes=t.size[step[owner][order]].astype(np.int64),
        start_s=start[order], end_s=end[order],
    )  # fmt: skip


def _count_up(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... for every length, one after the other."""
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(first, lengths)


def _place_in_channel(channel: NDArray[Any]) -> NDArray[np.int64]:
    """Of every entry, how many entries before it have the same channel. A channel is sent on by one lane, whose steps are in order."""
    order = np.argsort(channel, kind="stable")
    place = np.empty(len(channel), np.int64)
    place[order] = _count_up(np.bincount(channel).astype(np.int64)) if len(channel) else place
    return place


@kernel
def _link_times(order, channel, sent, arrived, size, row_ptr, route_ptr, route_link, rate, latency, library, fair, free, start, end):  # type: ignore[no-untyped-def]
    """Fill `start` and `end` of every (message, hop) row; `free` is work space, one cell per link."""
    for m in order:
        c = channel[m]
        rest = 0.0
        for at in range(route_ptr[c], route_ptr[c + 1]):
            rest += latency[route_link[at]]
        ends = arrived[m] - library[c] - rest  # when its last byte leaves the first link, if no later link holds it up
        head, tail, before = sent[m], sent[m], 0.0
        for hop in range(route_ptr[c + 1] - route_ptr[c]):
            link = route_link[route_ptr[c] + hop]
            row = row_ptr[m] + hop
            latest = max(ends + before, sent[m])
            begins = sent[m] + before
            if fair:
                tail = latest
            else:
                begins = max(head, free[link])
                tail = min(max(begins + size[m] / rate[link], tail), latest)
                free[link] = tail
            start[row] = min(begins, tail)
            end[row] = tail
            head = begins + latency[link]
            tail += latency[link]
            before += latency[link]
