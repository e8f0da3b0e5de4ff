"""Which measured message was on which link when: a run records the ends of messages, the program says which belong together, the fabric by which
links they went.

A message is on all links of its route from the moment its sender began to send it until its receiver had it. Nothing in between was measured, so
waiting at the ends counts as being under way: use of a link that follows from it is a lower bound, the time that it is busy an upper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...bottleneck.tiles import union_ns
from ...fabric.fabric import Fabric
from ...io.trace.events import matched_messages
from ...program.program import Program
from ...simulate import compile_network
from ...timeline import Spans, Timeline, Transfers

__all__ = ["with_link_times"]


def with_link_times(timeline: Timeline, program: Program, fabric: Fabric, placement: Sequence[str]) -> Timeline:
    """`timeline` of `program` with transfers and busy links; `placement` as for simulating it. A folded program's is returned as it is.

    Raises: what routing the program's channels raises.
    """
    if program.fold is not None:
        return timeline
    network, s = compile_network(program, fabric, placement), timeline.spans
    sent, arrived, channel = _pairs(program, s)
    hops = np.diff(network.route_ptr)[channel].astype(np.int64)
    owner = np.repeat(np.arange(len(channel)), hops)
    hop = np.arange(len(owner)) - np.repeat(np.cumsum(hops) - hops, hops)
    link = network.route_link[network.route_ptr[channel][owner] + hop]
    start, end = s.start_s[sent][owner], np.maximum(s.end_s[arrived], s.start_s[sent])[owner]
    order = np.lexsort((end, start, link))
    sending = sent[owner][order]
    moved = Transfers(
        links=network.link_names, rate_Bps=network.rate_Bps, link=link[order].astype(np.int32), step=s.step[sending],
        iteration=s.iteration[sending], size_bytes=program.message_bytes()[s.step[sending]].astype(np.int64), start_s=start[order], end_s=end[order],
    )  # fmt: skip
    return replace(timeline, transfers=moved, link_busy_s=_busy(moved))


def _pairs(program: Program, s: Spans) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per recorded message the row of the span that sent it, the row of the one that received it, and its channel."""
    send, receive, channel = matched_messages(program)
    order = np.argsort(send, kind="stable")
    send, receive, channel = send[order], receive[order], channel[order]
    first = np.searchsorted(send, s.step)
    count = np.searchsorted(send, s.step, side="right") - first
    row = np.repeat(np.arange(len(s)), count)
    message = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
    width = int(s.iteration.max(initial=0)) + 1
    keys = s.step.astype(np.int64) * width + s.iteration
    by_key = np.argsort(keys, kind="stable")
    wanted = receive[message] * width + s.iteration[row]
    at = by_key[np.minimum(np.searchsorted(keys, wanted, sorter=by_key), max(len(keys) - 1, 0))] if len(keys) else row
    known = keys[at] == wanted
    return row[known], at[known], channel[message][known]


def _busy(t: Transfers) -> dict[str, float]:
    """Seconds in which each link that carries anything has something under way."""
    bounds = np.searchsorted(t.link, np.arange(len(t.links) + 1))
    ns = [np.rint(x * 1e9).astype(np.int64) for x in (t.start_s, t.end_s)]
    return {
        name: union_ns(ns[0][low:high], ns[1][low:high]) / 1e9
        for name, low, high in zip(t.links, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        if high > low
    }
