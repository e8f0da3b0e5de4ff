"""The chain of work and waiting that decided when the last rank was done, across ranks and devices.

Walked backwards from the end: work was preceded by what its lane did before; a wait by the meeting that ended it, and that meeting by the rank
that arrived last (or by the meeting before it in the same queue); a kernel by whichever came last of the kernel before it in its stream, a
kernel of another stream that ended just before it, and its launch on the host. So the links tile the time from start to end: what shortens
none of them does not shorten the run, and time on the path is an upper limit of what removing a cause can gain.
Deviation from tools that build a graph of all events: only the path itself is looked at. Cost: O(pieces + links x log pieces).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .clocks import Shared
from .lanes import Activities, Kind, RankView, Stage

__all__ = ["CriticalPath", "Late", "critical_path"]

MAX_CROSS_STREAM_NS = 20_000  # between the end of a kernel of another stream and a start that it is taken to have released
MAX_OVERLAP_NS = 1_000  # what ends and starts of dependent kernels may overlap by rounding
I64 = NDArray[np.int64]


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """A meeting on the path that began with `rank`'s arrival: the next to last was there `gain_ns` before (`since`)."""

    meeting: int
    rank: int
    since: int
    until: int


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """Links from the first to the last; they tile [start, end]. `rank`, and `meeting` (a row of the shared meetings, -1: none) per link.

    `links.meeting` is the view's own; `view` indexes the views.
    """

    links: Activities
    view: NDArray[np.int32]
    meeting: NDArray[np.int32]
    late: tuple[Late, ...]
    start: int
    end: int


def critical_path(views: Sequence[RankView], shared: Shared) -> CriticalPath:
    """The path over all steps of all views, which are on one clock."""
    return _Walk(views, shared).run()


class _Lane:
    """What the walk asks of one view."""

    def __init__(self, view: RankView, shared_row: NDArray[np.int32]) -> None:
        self.view = view
        host = view.host
        kind = host.kind
        # Between waits the walk need not look at single pieces: `special_before` leads to the last one that matters.
        special = (kind == Kind.WAIT) | ((kind == Kind.SYNC) if view.device is not None else np.zeros(len(kind), bool))
        self.special_before = np.maximum.accumulate(np.where(special, np.arange(len(kind)), -1))
        self.shared = np.full(len(view.meetings), -1, np.int64)
        here = np.flatnonzero(shared_row >= 0)
        self.shared[shared_row[here]] = here
        m = view.meetings
        self.queue_before = np.full(len(m), -1, np.int64)
        last: dict[str, int] = {}
        for i in range(len(m)):
            # Meetings of one queue (a group, or a pair of ranks) run one after another.
            self.queue_before[i] = last.get(m.queue[i], -1)
            last[m.queue[i]] = i
        if view.device is not None:
            d = view.device
            self.by_end = np.argsort(d.work.end, kind="stable")
            self.ends = d.work.end[self.by_end]
            self.stream_before = np.full(len(d.work), -1, np.int64)
            together = np.argsort(d.stream, kind="stable")
            follows = np.diff(d.stream[together]) == 0
            self.stream_before[together[1:][follows]] = together[:-1][follows]
            self.kernel_of = np.full(len(m), -1, np.int64)
            rows = np.flatnonzero(d.work.meeting >= 0)
            self.kernel_of[d.work.meeting[rows]] = rows


class _Walk:
    def __init__(self, views: Sequence[RankView], shared: Shared) -> None:
        self.views, self.shared = views, shared
        self.lanes = [_Lane(v, shared.row[:, r]) for r, v in enumerate(views)]
        self.arrives, _ = shared.times(views)
        self.found: list[tuple[int, int, int, int, int, int, int, int, int]] = []  # view, start, end, kind, stage, module, name, own meeting, shared
        self.bulk: list[tuple[int, int, int, int, int]] = []  # place in found, view, first piece, last piece, end
        self.late: list[Late] = []

    def run(self) -> CriticalPath:
        ends = [max(int(v.host.end[-1]), int(v.device.work.end.max()) if v.device is not None and len(v.device.work) else 0) for v in self.views]
        view = int(np.argmax(ends))
        finish = t = ends[view]
        place: tuple[str, int] = ("host", -1)
        device = self.views[view].device
        if device is not None and t > int(self.views[view].host.end[-1]):
            place = ("kernel", int(self.lanes[view].by_end[-1]))
        while t > int(self.views[view].host.start[0]):
            before = (view, t, place)
            if place[0] == "host":
                view, t, place = self._host(view, t)
            elif place[0] == "kernel":
                view, t, place = self._kernel(view, t, place[1])
            elif place[0] == "start":
                view, t, place = self._before_kernel(view, t, place[1])
            else:
                view, t, place = self._meeting(view, t, place[1])
            # Zero-length links could send the walk around in place: one nanosecond back always makes progress.
            if (view, t, place) == before or (t == before[1] and len(self.found) > 50_000_000):
                t -= 1
        return self._path(t, finish)

    def _add(self, view: int, start: int, end: int, kind: Kind, like: Activities | None = None, row: int = -1, own: int = -1) -> None:
        if end > start:
            stage, module, name = (int(like.stage[row]), int(like.module[row]), int(like.name[row])) if like is not None else (0, 0, -1)
            shared = int(self.lanes[view].shared[own]) if own >= 0 else -1
            self.found.append((view, start, end, int(kind), stage, module, name, own, shared))

    # ---- places; each gives the next one, never later in time
    def _host(self, view: int, t: int) -> tuple[int, int, tuple[str, int]]:
        lane, host = self.lanes[view], self.views[view].host
        i = min(int(np.searchsorted(host.start, t, side="left")) - 1, len(host) - 1)
        kind = int(host.kind[i])
        # Nothing was running: idle time back to the end of the piece before.
        if t > int(host.end[i]):
            self._add(view, int(host.end[i]), t, Kind.IDLE)
            return view, int(host.end[i]), ("host", -1)
        if kind == Kind.WAIT:
            own = int(host.meeting[i])
            # Nobody else's trace is at hand, so the wait cannot be explained further.
            if lane.shared[own] < 0:
                self._add(view, int(host.start[i]), t, Kind.WAIT, host, i, own)
                return view, int(host.start[i]), ("host", -1)
            return view, t, ("meeting", own)
        if kind == Kind.SYNC and self.views[view].device is not None:
            # A synchronisation ends with the last kernel that ended within it.
            at = int(np.searchsorted(lane.ends, t, side="right")) - 1
            if at >= 0 and int(lane.ends[at]) > int(host.start[i]):
                self._add(view, int(lane.ends[at]), t, Kind.SYNC, host, i)
                return view, int(lane.ends[at]), ("kernel", int(lane.by_end[at]))
            self._add(view, int(host.start[i]), t, Kind.SYNC, host, i)
            return view, int(host.start[i]), ("host", -1)
        first = int(lane.special_before[i]) + 1
        self.bulk.append((len(self.found), view, first, i, t))
        return view, int(host.start[first]), ("host", -1)

    def _kernel(self, view: int, t: int, k: int) -> tuple[int, int, tuple[str, int]]:
        device = self.views[view].device
        assert device is not None
        own = int(device.work.meeting[k])
        if own >= 0 and self.lanes[view].shared[own] >= 0:
            return view, t, ("meeting", own)
        start = min(int(device.work.start[k]), t)
        self._add(view, start, t, Kind(int(device.work.kind[k])), device.work, k, own)
        return view, start, ("start", k)

    def _before_kernel(self, view: int, t: int, k: int) -> tuple[int, int, tuple[str, int]]:
        """At the start of kernel k: what it waited for."""
        lane, device = self.lanes[view], self.views[view].device
        assert device is not None
        launch = min(int(device.launch[k]), t)
        before = int(lane.stream_before[k])
        # Three could have held the kernel up: its stream, another stream's kernel, its launch. The latest of them did.
        ended = min(int(device.work.end[before]), t) if before >= 0 else -1
        at = int(np.searchsorted(lane.ends, t + MAX_OVERLAP_NS, side="right")) - 1
        while at >= 0 and int(device.work.start[lane.by_end[at]]) >= t:
            at -= 1
        if at >= 0 and min(int(lane.ends[at]), t) > max(ended, t - MAX_CROSS_STREAM_NS, launch):
            before, ended = int(lane.by_end[at]), min(int(lane.ends[at]), t)
        if launch >= ended and launch >= 0:
            self._add(view, launch, t, Kind.LAUNCH, device.work, k)
            return view, launch, ("host", -1)
        if before < 0:
            return view, t, ("host", -1)
        self._add(view, ended, t, Kind.IDLE, device.work, k)
        return view, ended, ("kernel", before)

    def _meeting(self, view: int, t: int, own: int) -> tuple[int, int, tuple[str, int]]:
        """In a meeting that ends at t: it began when the last rank arrived, or the meeting before it in its queue was over."""
        lane, meetings = self.lanes[view], self.views[view].meetings
        shared = int(lane.shared[own])
        arrivals = self.arrives[shared]
        # Arrivals at or after the end are errors of the clocks and decide nothing.
        there = np.flatnonzero((self.shared.row[shared] >= 0) & (arrivals < t))
        if not len(there):
            there = np.array([view])
        order = there[np.argsort(arrivals[there], kind="stable")]
        last = int(order[-1])
        # Strictly before the end, so that the walk moves on in time.
        begun = min(int(arrivals[last]), t - 1)
        before = int(lane.queue_before[own])
        # All were there, but the queue was still busy with the meeting before: that one is to blame.
        if before >= 0 and begun < int(meetings.leaves[before]) < t and lane.shared[before] >= 0:
            begun = int(meetings.leaves[before])
            self._link(view, begun, t, own)
            return view, begun, ("meeting", before)
        self._link(view, begun, t, own)
        waited = bool(meetings.everyone[own]) or int(meetings.source[own]) in (-1, self.views[last].rank)  # a sender waits for nobody
        if len(order) > 1 and waited:
            self.late.append(Late(meeting=shared, rank=last, since=int(arrivals[order[-2]]), until=begun))
        if self.views[last].device is not None:
            theirs = int(self.lanes[last].kernel_of[self.shared.row[shared, last]])
            if theirs >= 0:
                return last, begun, ("start", theirs)
        return last, begun, ("host", -1)

    def _link(self, view: int, start: int, end: int, own: int) -> None:
        shared = int(self.lanes[view].shared[own])
        self.found.append((view, start, end, int(Kind.COLLECTIVE), int(Stage.COMMUNICATION), 0, -1, own, shared))

    def _path(self, start: int, finish: int) -> CriticalPath:
        """Single links and runs of pieces as columns, in the order of time."""
        parts: list[tuple[NDArray[Any], ...]] = []
        done = 0
        for place, number, first, last, until in self.bulk:
            parts += self._single(done, place)
            host = self.views[number].host
            rows = np.arange(last, first - 1, -1)
            ends = np.minimum(host.end[rows], until)
            columns = (host.kind[rows], host.stage[rows], host.module[rows], host.name[rows], host.meeting[rows], np.full(len(rows), -1))
            parts.append((np.full(len(rows), number), host.start[rows], ends, *columns))
            done = place
        parts += self._single(done, len(self.found))
        view, begin, end, kind, stage, module, name, own, shared = (np.concatenate([p[i] for p in parts])[::-1] for i in range(9))
        links = Activities(
            start=begin.astype(np.int64), end=end.astype(np.int64), kind=kind.astype(np.int8), stage=stage.astype(np.int8),
            module=module.astype(np.int32), name=name.astype(np.int32), meeting=own.astype(np.int32),
        )  # fmt: skip
        return CriticalPath(
            links=links, view=view.astype(np.int32), meeting=shared.astype(np.int32), late=tuple(reversed(self.late)), start=int(begin[0]), end=finish
        )

    def _single(self, low: int, high: int) -> list[tuple[NDArray[Any], ...]]:
        return [tuple(np.array(self.found[low:high], np.int64).T)] if high > low else []
