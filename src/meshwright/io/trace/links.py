"""Links in a trace: a process with one track per link that carries something, its messages in time, and how much of its rate they use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...timeline import Timeline, Transfers
from ..quantity import show_size
from .slices import Counter, Slices, Trace, layers, no_slices

__all__ = ["link_slices"]


def link_slices(trace: Trace, timeline: Timeline, label: str, zero: float, *, counters: bool = True) -> Slices:
    """A track per link, times from `zero` on: its transfers where the timeline has them, with a counter of use if wanted; else one slice for all its
    time."""
    if not timeline.link_busy_s or timeline.makespan_s <= 0:
        return no_slices()
    process = trace.process_id(f"links · {label}")
    shares = {link: f"{100 * busy_s / timeline.makespan_s:.0f} % busy" for link, busy_s in timeline.link_busy_s.items()}
    if timeline.transfers is not None:
        return _transfers(trace, timeline.transfers, process, shares, zero, counters)
    track = [trace.track_id(process, link) for link in shares]
    name = [trace.name_id(f"{share}, {timeline.link_busy_s[link] * 1e3:.3f} ms") for link, share in shares.items()]
    n = len(track)
    return Slices(
        track=np.array(track), start_s=np.zeros(n), end_s=np.full(n, timeline.makespan_s), name=np.array(name),
        category=np.full(n, trace.category_id("link")), step=np.full(n, -1), iteration=np.zeros(n, np.int64),
    )  # fmt: skip


def _transfers(trace: Trace, t: Transfers, process: int, shares: dict[str, str], zero: float, counters: bool) -> Slices:
    starts, ends = t.start_s - zero, t.end_s - zero
    bounds = np.searchsorted(t.link, np.arange(len(t.links) + 1))
    track = np.zeros(len(t), np.int64)
    for link, name in enumerate(t.links):
        rows = slice(int(bounds[link]), int(bounds[link + 1]))
        if rows.start == rows.stop:
            continue
        title = f"{name} · {shares[name]}" if name in shares else name
        for layer, members in enumerate(layers(starts[rows], ends[rows])):
            track[rows][members] = trace.track_id(process, title if layer == 0 else f"{title} (also under way, {layer})")
        if counters:
            time_s, value = _use(starts[rows], ends[rows], t.size_bytes[rows], float(t.rate_Bps[link]))
            trace.counters.append(Counter(process, f"use of {name}", "percent", time_s, value))
    sizes, which = np.unique(t.size_bytes, return_inverse=True)
    names = np.array([trace.name_id(f"message, {show_size(int(size))}") for size in sizes], np.int64)
    return Slices(
        track=track, start_s=starts, end_s=ends, name=names[which] if len(t) else np.zeros(0, np.int64),
        category=np.full(len(t), trace.category_id("link")), step=t.step.astype(np.int64), iteration=t.iteration.astype(np.int64),
    )  # fmt: skip


def _use(
    start: NDArray[np.float64], end: NDArray[np.float64], size: NDArray[np.int64], rate_Bps: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(instants, percent of the rate from there on): every message counts with its mean rate while it is on the link."""
    length = end - start
    lasting = length > 0
    mean = size[lasting] / length[lasting] / rate_Bps * 100
    time_s, at = np.unique(np.concatenate([start[lasting], end[lasting]]), return_inverse=True)
    change = np.bincount(at, weights=np.concatenate([mean, -mean]), minlength=len(time_s))
    return time_s, np.maximum(np.round(np.cumsum(change), 6), 0.0)
