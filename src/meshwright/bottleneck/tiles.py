"""A rank's time as tiles: at every instant one thing stands for it, so that sums over stages, modules and kinds are the time itself.

On the host that is what its lane does. Where there is a device, it is what the device does: computing before collectives before copies to and from
the host; when it does nothing, what it waits for: data loading, the host that has not launched yet, or nothing that was recorded. Idle time
belongs to the stage and module of the kernel that comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..kernels.pieces import flatten, places
from .lanes import Activities, Kind, Meetings, RankView

__all__ = ["busy_before", "covering", "distinct", "overlap_ns", "tiles", "union_ns"]

I64 = NDArray[np.int64]
_WORK = (int(Kind.COMPUTE), int(Kind.COPY))


def tiles(view: RankView) -> Activities:
    """Non-overlapping pieces from the first step's start to the end of the last step and of what it launched."""
    if view.device is None:
        return view.host
    work, host = view.device.work, view.host
    low = int(host.start[0])
    high = max(int(host.end[-1]), int(work.end.max(initial=0)))
    layers = [_flat(work, np.isin(work.kind, kinds)) for kinds in (_WORK, (int(Kind.COLLECTIVE),), (int(Kind.TRANSFER),))]
    edges = distinct(np.clip(np.concatenate([[low, high], host.start, *(x for a, b, _ in layers for x in (a, b))]), low, high))
    row = np.full(len(edges) - 1, -1, np.int64)
    for start, end, rows in reversed(layers):
        over = covering(edges, start, end, rows)
        row = np.where(over >= 0, over, row)
    under = np.clip(places(host.start, edges[:-1], right=True) - 1, 0, len(host) - 1)
    waits = host.kind[under]
    cause = np.select([waits == Kind.DATA, np.isin(waits, (Kind.LAUNCH, Kind.HOST))], [int(Kind.DATA), int(Kind.LAUNCH)], default=int(Kind.IDLE))
    following = np.minimum(places(work.start, edges[:-1]), len(work) - 1)
    like = np.where(row >= 0, row, following)
    out = Activities(
        start=edges[:-1], end=edges[1:], kind=np.where(row >= 0, work.kind[like], cause).astype(np.int8),
        stage=np.where((row < 0) & (cause == Kind.DATA), host.stage[under], work.stage[like]).astype(np.int8), module=work.module[like],
        name=np.where(row >= 0, work.name[like], -1).astype(np.int32), meeting=np.where(row >= 0, work.meeting[like], -1).astype(np.int32),
    )  # fmt: skip
    return _merged(out)


def distinct(times: I64) -> I64:
    """Sorted, each once. Times come in sorted runs, which a merging sort finishes in one pass; `np.unique` hashes them first."""
    times = np.sort(times, kind="stable")
    new = np.ones(len(times), bool)
    new[1:] = times[1:] != times[:-1]
    return times[new]


def _flat(work: Activities, chosen: NDArray[np.bool_]) -> tuple[I64, I64, I64]:
    rows = np.flatnonzero(chosen)
    rows = rows[np.lexsort((-work.end[rows], work.start[rows]))]
    return flattened(work.start, work.end, rows)


def flattened(start: I64, end: I64, rows: I64) -> tuple[I64, I64, I64]:
    """Pieces (start, end, row) of slices that may overlap; `rows` are sorted by start, then longest first."""
    out = [np.zeros(2 * len(rows), np.int64) for _ in range(3)]
    made = flatten(start[rows], end[rows], np.zeros(len(rows), np.int64), *out)
    return out[0][:made], out[1][:made], rows[out[2][:made]]


def covering(edges: I64, start: I64, end: I64, row: I64) -> I64:
    """For every interval between edges the row of the piece over it, or -1. Pieces do not overlap and are sorted."""
    if not len(start):
        return np.full(len(edges) - 1, -1, np.int64)
    at = places(start, edges[:-1], right=True) - 1
    inside = (at >= 0) & (end[np.maximum(at, 0)] > edges[:-1])
    return np.where(inside, row[np.maximum(at, 0)], -1)


def _merged(pieces: Activities) -> Activities:
    """Neighbours that say the same become one piece."""
    columns = (pieces.kind, pieces.stage, pieces.module, pieces.name, pieces.meeting)
    new = np.ones(len(pieces), bool)
    new[1:] = np.any([c[1:] != c[:-1] for c in columns], axis=0) if len(pieces) else False
    first = np.flatnonzero(new)
    out = pieces.take(first)
    return msgspec.structs.replace(out, end=np.append(out.start[1:], pieces.end[-1]))


def union_ns(start: I64, end: I64) -> int:
    """Length of the union of intervals."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    return int(reach[-1] - start[0] - np.maximum(start[1:] - reach[:-1], 0).sum())


def busy_before(start: I64, end: I64, times: I64) -> I64:
    """Length of the union of intervals up to each time."""
    if not len(start):
        return np.zeros(len(times), np.int64)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    new = np.concatenate([[True], start[1:] > reach[:-1]])
    low, high = start[new], reach[np.concatenate([np.flatnonzero(new)[1:] - 1, [len(start) - 1]])]
    before = np.concatenate([[0], np.cumsum(high - low)])
    at = places(low, times, right=True)
    cut = np.where(at > 0, np.maximum(high[np.maximum(at - 1, 0)] - times, 0), 0)
    return np.asarray(before[at] - cut, np.int64)


def overlap_ns(view: RankView) -> tuple[int, int]:
    """(communication under way, of it while the rank computes)."""
    if view.device is not None:
        work = view.device.work
        chosen = work.kind == Kind.COLLECTIVE
        starts, ends, of = (work.start, work.end, np.isin(work.kind, _WORK))
        return _both((work.start[chosen], work.end[chosen]), (starts[of], ends[of]))
    busy = np.isin(view.host.kind, _WORK)
    return _both(_within(view.meetings, view.host), (view.host.start[busy], view.host.end[busy]))


def _within(meetings: Meetings, host: Activities) -> tuple[I64, I64]:
    low, high = int(host.start[0]), int(host.end[-1])
    start, end = np.clip(meetings.arrives, low, high), np.clip(meetings.leaves, low, high)
    return start[end > start], end[end > start]


def _both(a: tuple[I64, I64], b: tuple[I64, I64]) -> tuple[int, int]:
    one, two = union_ns(*a), union_ns(*b)
    parts: Sequence[I64] = [np.concatenate([a[i], b[i]]) for i in (0, 1)]
    return one, one + two - union_ns(parts[0], parts[1])
