"""Peak and time of a step's schedule from when each forward storage is held: the inner loop of planning a step's memory.

A schedule is two numbers per storage. Stage 0 is the forward pass, stage t the t-th backward node. What is computed in a stage s >= `hold_from` is
held until stage `hold_to` (if anything still reads it), otherwise it is there in its own stage only; `hold_from` 0 means: kept from the forward pass.
Backward nodes run in their order; what one of them reads and is not there is computed again right before it, with everything that needs,
in the forward order. A forward node whose result only backward reads runs in forward if its storages are kept, otherwise when it is first needed.
Results go after their last use. So every assignment of the two numbers is a schedule, and peak and time are exact for it.
Cost: O(runs * operands).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compile import called, fill, kernel

__all__ = ["NEVER", "IMPOSSIBLE", "ScheduleArrays", "Scratch", "evaluate", "scratch_for"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]

NEVER = 1 << 30  # a hold time after every step: what is held from then on is made anew each time
IMPOSSIBLE = np.int64(1 << 62)
MAX_RUNS_PER_NODE = 24  # a schedule that runs more nodes than this many times the graph's is given up: arrays are made for as many


class ScheduleArrays(NamedTuple):
    """A step graph in columns; `place*`: storages a node's result lies in, `make*`: those it makes (both only storages the step allocates).

    `rerun`: may run again. `wanted`: anything needs it. `forward_wanted`: must run in forward. `backward_reads`: a backward node reads it.
    `in_flight`: micro-batches, of which all but one hold what is held at the end of the forward pass.
    """

    boundary: int
    fixed_bytes: int
    input_ptr: I32
    inputs: I32
    place_ptr: I32
    places: I32
    make_ptr: I32
    makes: I32
    maker: I32
    size: I64
    time: F64
    workspace: I64
    given: Flags
    result: Flags
    rerun: Flags
    wanted: Flags
    forward_wanted: Flags
    backward_reads: Flags
    in_flight: int


class Scratch(NamedTuple):
    """What `evaluate` leaves behind: `runs[:count]` (nodes), their `stage`, bytes alive at each (`live`), and the allocations: storage, runs of birth
    and last use, stage of birth. `lies[j]`: the allocation of `places[j]` as last computed."""

    runs: I32
    stage: I32
    live: I64
    birth: I32
    last: I32
    storage: I32
    born_in: I32
    ran: I32
    lies: I32
    mark: I32
    stack: I32
    closure: I32
    counts: I64  # runs, runs of the forward pass, instances, run at the peak


def scratch_for(graph: ScheduleArrays) -> Scratch:
    nodes = len(graph.time)
    cap = MAX_RUNS_PER_NODE * nodes + 64
    most = MAX_RUNS_PER_NODE * (nodes + len(graph.makes)) + 64

    def column(n: int) -> I32:
        return np.zeros(n, np.int32)

    return Scratch(
        column(cap), column(cap), np.zeros(cap + 1, np.int64), column(most), column(most), column(most), column(most), column(nodes),
        column(len(graph.places) + 1), column(nodes), column(4 * nodes + len(graph.inputs) + 64), column(nodes), np.zeros(4, np.int64),
    )  # fmt: skip


@called
def _run(g, w, x, t):  # type: ignore[no-untyped-def]
    """Node x runs in stage t. False: too many runs."""
    c = w.counts[0]
    if c + 1 >= len(w.runs):
        return False
    w.runs[c] = x
    w.stage[c] = t
    w.counts[0] = c + 1
    w.ran[x] = 1
    for i in range(g.input_ptr[x], g.input_ptr[x + 1]):
        y = g.inputs[i]
        for j in range(g.place_ptr[y], g.place_ptr[y + 1]):
            # Reading keeps the allocation alive until this run.
            k = w.lies[j]
            if w.last[k] < c:
                w.last[k] = c
    for j in range(g.place_ptr[x], g.place_ptr[x + 1]):
        s = g.places[j]
        k = -1
        # A result may lie in a storage of its input (a view, or in place): then it is the input's allocation, no new one.
        if g.maker[s] != x:
            for i in range(g.input_ptr[x], g.input_ptr[x + 1]):
                y = g.inputs[i]
                for q in range(g.place_ptr[y], g.place_ptr[y + 1]):
                    if g.places[q] == s:
                        k = w.lies[q]
        if k < 0:
            k = w.counts[2]
            if k >= len(w.birth):
                return False
            w.counts[2] = k + 1
            w.birth[k] = c
            w.last[k] = c
            w.born_in[k] = t
            w.storage[k] = s
        w.lies[j] = k
        # Results of the step outlive it.
        if g.result[x]:
            w.last[k] = 1 << 30
    return True


@called
def _there(g, w, hold_from, hold_to, y, t):  # type: ignore[no-untyped-def]
    """Is the result of y, as last computed, there in stage t?"""
    if w.ran[y] == 0:
        return False
    for j in range(g.place_ptr[y], g.place_ptr[y + 1]):
        s = g.places[j]
        b = w.born_in[w.lies[j]]
        # Made in another stage, it is there only if its hold covers both the stage of birth and this one.
        if b != t and (hold_from[s] > b or t > hold_to[s]):
            return False
    return True


@called
def _forward(g, w, hold_from):  # type: ignore[no-untyped-def]
    for x in range(g.boundary):
        w.mark[x] = 0
    # Backwards, so that whoever needs a node has been looked at before it: forward runs what must run, what is kept, and what those read.
    for x in range(g.boundary - 1, -1, -1):
        if g.given[x] or not g.wanted[x]:
            continue
        if w.mark[x] == 0:
            if g.forward_wanted[x]:
                w.mark[x] = 1
            elif g.backward_reads[x] or g.make_ptr[x + 1] > g.make_ptr[x]:
                kept = True
                for j in range(g.place_ptr[x], g.place_ptr[x + 1]):
                    if hold_from[g.places[j]] > 0:
                        kept = False
                if kept:
                    w.mark[x] = 1
        if w.mark[x] == 1:
            for i in range(g.input_ptr[x], g.input_ptr[x + 1]):
                w.mark[g.inputs[i]] = 1
    for x in range(g.boundary):
        if g.given[x]:
            w.ran[x] = 1
        elif w.mark[x] == 1 and not _run(g, w, np.int64(x), np.int64(0)):
            return False
    return True


@called
def _sort(values, count):  # type: ignore[no-untyped-def]
    """The first `count`, in place, rising (Shell's sort): that of NumPy allocates."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            x, j = values[i], i
            while j >= gap and values[j - gap] > x:
                values[j] = values[j - gap]
                j -= gap
            values[j] = x
        gap //= 3


@called
def _again(g, w, hold_from, hold_to, t, until):  # type: ignore[no-untyped-def]
    """Runs what the backward nodes of stages t..until read and is not there."""
    depth, count = 0, 0
    for b in range(g.boundary + t - 1, g.boundary + until):
        if not g.wanted[b]:
            continue
        for i in range(g.input_ptr[b], g.input_ptr[b + 1]):
            y = g.inputs[i]
            if y < g.boundary and w.mark[y] != t + 1 and not _there(g, w, hold_from, hold_to, y, t):
                # Marks are stage numbers plus one, so they need no clearing between stages.
                w.mark[y] = t + 1
                w.stack[depth] = y
                depth += 1
    while depth > 0:
        depth -= 1
        y = w.stack[depth]
        # What must not run twice and is gone makes the schedule impossible.
        if w.ran[y] > 0 and not g.rerun[y]:
            return False
        w.closure[count] = y
        count += 1
        for i in range(g.input_ptr[y], g.input_ptr[y + 1]):
            z = g.inputs[i]
            if w.mark[z] != t + 1 and not _there(g, w, hold_from, hold_to, z, t):
                w.mark[z] = t + 1
                w.stack[depth] = z
                depth += 1
    _sort(w.closure, count)  # node numbers are a topological order
    for i in range(count):  # noqa: SIM110 - compiled
        if not _run(g, w, np.int64(w.closure[i]), t):
            return False
    return True


@kernel
def evaluate(g, w, hold_from, hold_to, ahead):  # type: ignore[no-untyped-def]
    """(peak bytes, seconds), or (IMPOSSIBLE, inf) when a node that must not run again would have to.

    `ahead[t]`: in stage t also everything that stages up to this one read is computed (t itself: as late as possible).
    """
    for i in range(3):
        w.counts[i] = 0
    fill(w.ran, 0)
    if not _forward(g, w, hold_from):
        return IMPOSSIBLE, np.inf
    w.counts[1] = w.counts[0]
    for t in range(1, len(g.time) - g.boundary + 1):
        b = g.boundary + t - 1
        if not g.wanted[b]:
            continue
        if not _again(g, w, hold_from, hold_to, t, ahead[t]) or not _run(g, w, b, t):
            return IMPOSSIBLE, np.inf
    count = w.counts[0]
    for c in range(count + 1):
        w.live[c] = 0
    others = 0
    for k in range(w.counts[2]):
        size = g.size[w.storage[k]]
        # Born in forward and used after it: every other micro-batch in flight holds as much.
        if w.birth[k] < w.counts[1] <= w.last[k]:
            others += size
        w.live[w.birth[k]] += size
        if w.last[k] < count:
            w.live[w.last[k] + 1] -= size
    alive = g.fixed_bytes + (g.in_flight - 1) * others
    peak, seconds = alive, 0.0
    w.counts[3] = 0
    for c in range(count):
        alive += w.live[c]
        x = w.runs[c]
        w.live[c] = alive + g.workspace[x]
        seconds += g.time[x]
        if w.live[c] > peak:
            peak = w.live[c]
            w.counts[3] = c
    return peak, seconds
