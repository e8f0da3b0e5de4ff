"""Bytes that each rank holds over the simulated run.

A buffer is alive from the start of the first step that writes it (a receive: from when it is posted, see `_posted`) to the end of the last of
its `last` steps, all iterations; without `last` to the end. Persistent buffers are alive throughout, and one that is read no later than
it is written, or never written, from the beginning; gradients and activations are sums that begin at zero. Views count with the
buffer they lie in. An op's workspace is alive from its first start to its last end. Staging (`depth` messages at the receiver of a
channel whose messages cannot go straight into their place) is counted where asked for. Symbolic sizes count `upper` bytes. Only device
memory of ranks counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..program.program import BUFFER_ROLES, Kind, Part, Program, Space
from ..program.tables import I64

__all__ = ["buffer_bytes", "memory_over_time", "root_of"]

F64 = NDArray[np.float64]


def buffer_bytes(p: Program) -> I64:
    """Bytes of every buffer, all its resident iterations: `window` slices, or for window 0 one per iteration of its actor's lanes."""
    b = p.buffers
    per = b.chunk_bytes.astype(np.int64)
    if len(p.sizes):
        per = np.where(b.size >= 0, p.sizes.upper[np.maximum(b.size, 0)], per)
    turns = np.ones(p.ranks + p.switches, np.int64)
    np.maximum.at(turns, p.lanes.actor, p.lanes.repeat)
    slices = turns[b.actor]
    slices = np.where(b.window > 0, np.minimum(b.window, slices), slices)
    out: I64 = per * b.chunks * slices
    return out


def root_of(p: Program) -> NDArray[np.int64]:
    """The buffer that owns the memory of each buffer."""
    alias = p.buffers.alias_of
    root = np.where(alias >= 0, alias, np.arange(len(alias)))
    for _ in range(len(alias)):
        onward = root[root]
        if np.array_equal(onward, root):
            break
        root = onward
    return root.astype(np.int64)


def _op_ranges(p: Program, which: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(step, buffer) for every range that a compute step reads or writes."""
    step, buffer, _, _ = _op_rows(p, which)
    return step, buffer


def _op_rows(p: Program, which: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(step, buffer, first chunk, chunks) for every range that a compute step reads or writes."""
    csr = getattr(p.ops, which)
    steps = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
    op = p.steps.op[steps]
    width = (csr.ptr[op + 1] - csr.ptr[op]) // 3
    step = np.repeat(steps, width)
    offset = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    at = np.repeat(csr.ptr[op], width) + 3 * offset
    values = csr.values.astype(np.int64)
    return step, values[at], values[at + 1], values[at + 2]


def _writes(p: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    s = p.steps
    stores = np.flatnonzero((s.kind == Kind.TRANSFER) & ((s.parts & Part.STORE) != 0) & (s.dst_buffer >= 0))
    step, buffer = _op_ranges(p, "writes")
    return np.concatenate([stores, step]), np.concatenate([s.dst_buffer[stores].astype(np.int64), buffer])


def _reads(p: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    s = p.steps
    reads = np.flatnonzero((s.kind == Kind.TRANSFER) & (s.src_buffer >= 0))
    step, buffer = _op_ranges(p, "reads")
    return np.concatenate([reads, step]), np.concatenate([s.src_buffer[reads].astype(np.int64), buffer])


def _posted(p: Program, first_start: F64, last_end: F64) -> F64:
    """`first_start`, and for receives when they are posted: a channel of depth d has d receives open at once.

    A receive that only receives may be open together with the receives right before it in its lane, back to the one whose message returns
    its credit (the d-th before it on its channel). So it is posted at the end of the step before those, or of the last step that one of them,
    or itself, is `after`. Lanes with `repeat` keep the start of the first iteration.
    """
    s, lane = p.steps, p.lane_of_step()
    plain = (s.kind == Kind.TRANSFER) & ((s.parts & (Part.RECV | Part.READ | Part.SEND | Part.IN_SET)) == Part.RECV) & (p.lanes.repeat[lane] == 1)
    step = np.flatnonzero(plain)
    if not len(step):
        return first_start
    index = np.arange(len(s))
    begins_run = plain & ((index == p.lanes.start[lane]) | ~np.concatenate([[False], plain[:-1]]))
    run = np.maximum.accumulate(np.where(begins_run, index, 0))
    by_channel = step[np.lexsort((step, s.chan_in[step]))]
    channel = s.chan_in[by_channel]
    place = np.arange(len(by_channel))
    credit = place - p.channels.depth[channel]
    known = (credit >= 0) & (channel[np.maximum(credit, 0)] == channel)
    earliest = run[by_channel]
    earliest[known] = np.maximum(earliest[known], by_channel[credit[known]] + 1)
    ready = np.zeros(len(s))
    waiting = np.repeat(index, np.diff(s.after_ptr))
    now = s.after_lag == 0
    np.maximum.at(ready, waiting[now], last_end[s.after_step[now]])
    moment = np.where(earliest > p.lanes.start[lane[by_channel]], last_end[np.maximum(earliest - 1, 0)], 0.0)
    back = by_channel - earliest
    left = np.arange(len(by_channel))
    for k in range(int(back.max()) + 1):
        left = left[back[left] >= k]
        moment[left] = np.maximum(moment[left], ready[by_channel[left] - k])
    out = first_start.copy()
    out[by_channel] = np.minimum(out[by_channel], moment)
    return out


def _lifetimes(p: Program, first_start: F64, last_end: F64, makespan_s: float) -> tuple[F64, F64]:
    """Start and end of life of every buffer that owns memory (of a view: of what it adds to its owner)."""
    b = p.buffers
    root = root_of(p)
    begin = np.full(len(b), np.inf)
    (writer, written), (reader, read) = ((step, root[buffer]) for step, buffer in (_writes(p), _reads(p)))
    np.minimum.at(begin, written, _posted(p, first_start, last_end)[writer])
    seen = np.full(len(b), np.inf)
    np.minimum.at(seen, read, first_start[reader])
    fresh = np.isin(b.role, [BUFFER_ROLES.index("gradient"), BUFFER_ROLES.index("activation")])  # sums that begin at zero
    at_once = (begin == seen) & (b.persistent == 0) & (b.role != BUFFER_ROLES.index("input"))
    if at_once.any():
        # First written and first read at one instant: a step without duration has filled it by then (a copy that costs nothing, before its message is
        # sent). A step that changes what it reads does not fill.
        fills = at_once[written] & ~np.isin(writer * len(b) + written, reader * len(b) + read)
        filled = np.full(len(b), np.inf)
        np.minimum.at(filled, written[fills], last_end[writer[fills]])
        fresh |= at_once & (filled <= seen)
    begin = np.where((b.persistent != 0) | (~fresh & (begin >= seen)) | ~np.isfinite(begin), 0.0, begin)
    end = np.full(len(b), -np.inf)
    rows = np.diff(b.last.ptr)
    np.maximum.at(end, root[np.repeat(np.arange(len(b)), rows)], last_end[b.last.values])
    # alive to the end: persistent, an owner without `last`, an owner one of whose views has none but is written later
    end = np.where((b.persistent != 0) | ((rows == 0) & (root == np.arange(len(b)))), makespan_s, end)
    return begin, np.maximum(end, begin)


def memory_over_time(
    p: Program, first_start: F64, last_end: F64, makespan_s: float, *, staging: bool, curves: bool
) -> tuple[tuple[int, ...], dict[int, tuple[F64, F64]]]:
    """Peak bytes per rank, and per rank its curve (times, bytes held from that time on).

    Args:
        first_start, last_end: seconds per step over all its iterations.
    """
    b = p.buffers
    begin, end = _lifetimes(p, first_start, last_end, makespan_s)
    counts = (root_of(p) == np.arange(len(b))) & (b.space == Space.DEVICE)
    work = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
    work = work[p.ops.workspace_bytes[p.steps.op[work]] > 0] if len(work) else work
    actor = np.concatenate([b.actor[counts], p.lanes.actor[p.lane_of_step()[work]]])
    size = np.concatenate([buffer_bytes(p)[counts], p.ops.workspace_bytes[p.steps.op[work]]])
    alive_from = np.concatenate([begin[counts], first_start[work]])
    alive_to = np.concatenate([end[counts], last_end[work]])
    base = _staging(p, first_start, last_end) if staging else np.zeros(p.ranks + p.switches, np.int64)
    peaks, out = [], {}
    order = np.argsort(actor, kind="stable")
    bounds = np.searchsorted(actor[order], np.arange(p.ranks + 1))
    for rank in range(p.ranks):
        mine = order[bounds[rank] : bounds[rank + 1]]
        until = np.maximum(alive_to[mine], np.nextafter(alive_from[mine], np.inf))  # a step without duration still holds what it uses
        time = np.concatenate([alive_from[mine], until])
        change = np.concatenate([size[mine], -size[mine]])
        by_time = np.lexsort((change, time))  # at one instant, what dies makes room first
        held = np.cumsum(change[by_time]) + base[rank]
        peaks.append(int(max(held.max(), base[rank])) if len(held) else int(base[rank]))
        if curves:
            out[rank] = _curve(time[by_time], held, int(base[rank]))
    return tuple(peaks), out


def _curve(time: F64, held: NDArray[np.int64], base: int) -> tuple[F64, F64]:
    """Drop all but the last value of each instant."""
    if not len(time):
        return np.zeros(1), np.array([float(base)])
    keep = np.append(time[1:] != time[:-1], True)
    return time[keep], held[keep].astype(np.float64)


def _staging(p: Program, first_start: F64, last_end: F64) -> I64:
    """`depth` of the largest staged message of every channel, at its receiver.

    A receive is posted when its credit is there (the d-th message before it was consumed; at the beginning for the first d). It goes into
    staging when its message is added or only passed on, or when its place is still used by other steps after that moment.
    """
    s = p.steps
    largest = np.zeros(len(p.channels), np.int64)
    size = p.message_bytes("upper")
    receives = (s.kind == Kind.TRANSFER) & ((s.parts & Part.RECV) != 0)
    single = receives & ((s.parts & Part.IN_SET) == 0)
    through = single & (((s.parts & Part.ADD) != 0) | ((s.parts & Part.STORE) == 0))
    np.maximum.at(largest, s.chan_in[through], size[through])
    for step in np.flatnonzero(receives & ~single):
        for channel in p.channels.sets[int(s.chan_in[step])]:
            largest[int(channel)] = max(int(largest[int(channel)]), int(size[step]))
    credit = _credits(p, np.flatnonzero(single), last_end)
    used = _Uses(p)
    for at in np.flatnonzero(single & ~through & (s.dst_buffer >= 0)).tolist():
        to = int(s.chan_in[at])
        if size[at] > largest[to]:
            others = used.of(int(s.dst_buffer[at]), int(s.dst_chunk[at]), int(s.count[at]))
            others = others[others != at]
            if np.any((last_end[others] > credit[at]) & (first_start[others] < last_end[at])):
                largest[to] = int(size[at])
    out = np.zeros(p.ranks + p.switches, np.int64)
    np.add.at(out, p.channels.dst, largest * p.channels.depth)
    return out


def _credits(p: Program, receives: NDArray[np.int64], last_end: F64) -> F64:
    """Per step, for receives: when the d-th one before it on its channel ends; -inf for the first d."""
    order = receives[np.lexsort((receives, p.steps.chan_in[receives]))]
    channel = p.steps.chan_in[order]
    before = np.arange(len(order)) - p.channels.depth[channel]
    known = (before >= 0) & (channel[np.maximum(before, 0)] == channel)
    out = np.full(len(p.steps), -np.inf)
    out[order[known]] = last_end[order[before[known]]]
    return out


class _Uses:
    """Steps that read or write a range of bytes."""

    def __init__(self, p: Program) -> None:
        b, s = p.buffers, p.steps
        self.unit = buffer_bytes(p) // np.maximum(b.chunks, 1)
        self.root = root_of(p)
        self.offset = np.zeros(len(b), np.int64)
        up = b.alias_of.astype(np.int64)
        inside = b.alias_offset_bytes.astype(np.int64)
        while np.any(up >= 0):
            self.offset += np.where(up >= 0, inside, 0)
            above = np.maximum(up, 0)
            inside, up = b.alias_offset_bytes.astype(np.int64)[above], np.where(up >= 0, b.alias_of[above], -1)
        moves = s.kind == Kind.TRANSFER
        reads = np.flatnonzero(moves & ((s.parts & Part.READ) != 0) & (s.src_buffer >= 0))
        stores = np.flatnonzero(moves & ((s.parts & Part.STORE) != 0) & (s.dst_buffer >= 0))
        rows: list[tuple[NDArray[Any], ...]] = [(reads, s.src_buffer[reads], s.src_chunk[reads], s.count[reads])]
        rows += [(stores, s.dst_buffer[stores], s.dst_chunk[stores], s.count[stores]), _op_rows(p, "reads"), _op_rows(p, "writes")]
        step, buffer, chunk, count = (np.concatenate([r[k] for r in rows]).astype(np.int64) for k in range(4))
        first = self.offset[buffer] + chunk * self.unit[buffer]
        order = np.lexsort((first, self.root[buffer]))
        self.step, self.first, self.end = step[order], first[order], (first + count * self.unit[buffer])[order]
        self.bounds = np.searchsorted(self.root[buffer][order], np.arange(len(b) + 1))
        self.widest = np.zeros(len(b), np.int64)
        np.maximum.at(self.widest, self.root[buffer], count * self.unit[buffer])

    def of(self, buffer: int, chunk: int, count: int) -> I64:
        root = int(self.root[buffer])
        lo, hi = int(self.bounds[root]), int(self.bounds[root + 1])
        first = int(self.offset[buffer] + chunk * self.unit[buffer])
        end = first + count * int(self.unit[buffer])
        near = np.searchsorted(self.first[lo:hi], [first - int(self.widest[root]), end]) + lo
        lo, hi = int(near[0]), int(near[1])
        found: I64 = self.step[lo:hi][self.end[lo:hi] > first]
        return found
