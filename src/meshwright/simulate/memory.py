"""Bytes that each rank holds over the simulated run.

A buffer is alive from the start of the first step that writes it (a receive: from when it is posted) to the end of the last of
its `last` steps, all iterations; without `last` to the end. Persistent buffers are alive throughout, and one that is read no later than
it is written, or never written, from the beginning; gradients and activations are sums that begin at zero. Views count with the
buffer they lie in. An op's workspace is alive from its first start to its last end. Staging (`depth` messages at the receiver
of every channel) is counted where asked for. Symbolic sizes count `upper` bytes. Only device memory of ranks counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..program import BUFFER_ROLES, I64, Kind, Part, Program, Space

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
    csr = getattr(p.ops, which)
    steps = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
    op = p.steps.op[steps]
    width = (csr.ptr[op + 1] - csr.ptr[op]) // 3
    step = np.repeat(steps, width)
    offset = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    at = np.repeat(csr.ptr[op], width) + 3 * offset
    return step, csr.values[at].astype(np.int64)


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


def _lifetimes(p: Program, first_start: F64, last_end: F64, makespan_s: float) -> tuple[F64, F64]:
    """Start and end of life of every buffer that owns memory (of a view: of what it adds to its owner)."""
    b = p.buffers
    root = root_of(p)
    begin = np.full(len(b), np.inf)
    step, buffer = _writes(p)
    np.minimum.at(begin, root[buffer], first_start[step])
    seen = np.full(len(b), np.inf)
    step, buffer = _reads(p)
    np.minimum.at(seen, root[buffer], first_start[step])
    fresh = np.isin(b.role, [BUFFER_ROLES.index("gradient"), BUFFER_ROLES.index("activation")])  # sums that begin at zero
    begin = np.where((b.persistent != 0) | (~fresh & (begin >= seen)) | ~np.isfinite(begin), 0.0, begin)
    end = np.full(len(b), -np.inf)
    rows = np.diff(b.last.ptr)
    np.maximum.at(end, root[np.repeat(np.arange(len(b)), rows)], last_end[b.last.values])
    # alive to the end: persistent, an owner without `last`, an owner one of whose views has none but is written later
    end = np.where((b.persistent != 0) | ((rows == 0) & (root == np.arange(len(b)))), makespan_s, end)
    return begin, np.maximum(end, begin)


def memory_over_time(
    p: Program, first_start: F64, last_end: F64, makespan_s: float, *, staging: bool = False, curves: bool = True
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
    base = _staging(p) if staging else np.zeros(p.ranks + p.switches, np.int64)
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


def _staging(p: Program) -> I64:
    """`depth` of the largest message of every channel, at its receiver."""
    largest = np.zeros(len(p.channels), np.int64)
    s = p.steps
    single = (s.kind == Kind.TRANSFER) & ((s.parts & Part.RECV) != 0) & ((s.parts & Part.IN_SET) == 0)
    size = p.message_bytes()
    np.maximum.at(largest, s.chan_in[single], size[single])
    for step in np.flatnonzero((s.kind == Kind.TRANSFER) & ((s.parts & Part.IN_SET) != 0)):
        for channel in p.channels.sets[int(s.chan_in[step])]:
            largest[channel] = max(largest[channel], size[step])
    out = np.zeros(p.ranks + p.switches, np.int64)
    np.add.at(out, p.channels.dst, largest * p.channels.depth)
    return out
