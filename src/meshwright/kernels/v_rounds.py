"""Orders on the V placement in rounds: every device runs a backward, then every device a forward; weight gradients fill what is left. Compiled.

Cite: P. Qi, X. Wan et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (the greedy construction for the V that its authors publish and run).
Deviations: seconds and messages of every stage of its own; the fastest of all runs is kept, not that with the least idle time; where a run gets stuck
    it gives nothing instead of an error.
Device d of D holds stages d and 2·D-1-d. Warm-up: first forwards while they fit before the first micro-batch comes back. Then the rounds. A weight
gradient runs where it fits before the next action can begin, and where the device would otherwise have idled longer than the most idle one. A run
tells how long every device idled; the next run allows a device so much more as the most idle one was worse, until that no longer helps.
Cost: O(actions · devices) a run, some eight runs; deterministic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, helper

__all__ = ["fastest_rounds"]

I64 = NDArray[np.int64]
MAX_REFINED = 20  # runs that follow one another for one way of filling; the published ones need two or three


@helper
def _arrives(kind, s, m, device, up, down, ends):  # type: ignore[no-untyped-def]
    """When what F (0) or I (1) of a stage waits for is there; infinite: not known yet."""
    stages = len(device)
    if kind == 0:
        if s == 0:
            return 0.0
        return ends[0, s - 1, m] + (up[s - 1] if device[s - 1] != device[s] else 0.0)
    if s == stages - 1:
        return ends[0, s, m]
    return ends[1, s + 1, m] + (down[s] if device[s + 1] != device[s] else 0.0)


@helper
def _put(kind, s, device, seconds, up, down, cap, ends, done, free, held, idle, queue, head, tail, orders, length):  # type: ignore[no-untyped-def]
    """Runs the next micro-batch of a stage; False where it may not."""
    d, m, many = device[s], done[kind, s], ends.shape[2]
    if m >= many or (kind == 0 and held[d] >= cap[d]):
        return False
    begin = free[d]
    if kind < 2:
        begin = max(begin, _arrives(kind, s, m, device, up, down, ends))
    if begin == np.inf:
        return False
    if done[0, d]:  # what it waits for its very first forward is nobody's to save
        idle[d] += begin - free[d]
    free[d] = ends[kind, s, m] = begin + seconds[kind, s]
    done[kind, s] += 1
    orders[d, length[d]] = (kind * len(device) + s) * many + m
    length[d] += 1
    if kind == 0:
        held[d] += 1
    elif kind == 1:
        queue[d, tail[d]] = s
        tail[d] += 1
    else:
        held[d] -= 1
        head[d] += 1
    return True


@helper
def _spends(d, waits, allowed, idle):  # type: ignore[no-untyped-def]
    """Whether waiting so long makes device d idle longer than any, or than the last run leaves it."""
    return waits > max(idle.max(), allowed.max() - allowed[d]) - idle[d]


@allocating
def _run(device, seconds, up, down, cap, many, fill_i, fill_f, allowed, idle, orders, length):  # type: ignore[no-untyped-def]
    """One run; fills idle and orders; returns the makespan, infinite when stuck. `allowed`: what devices idled in the run before."""
    stages, devices = len(device), len(cap)
    ends, done = np.full((3, stages, many), np.inf), np.zeros((3, stages), np.int64)
    free, held = np.zeros(devices), np.zeros(devices, np.int64)
    queue, head, tail = np.zeros((devices, 2 * many), np.int64), np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    length[:] = 0
    idle[:] = 0.0
    given = (device, seconds, up, down, cap, ends, done, free, held, idle, queue, head, tail, orders, length)
    for d in range(devices):
        if not _put(0, d, *given):
            return np.inf
    for d in range(devices - 1, -1, -1):
        back = _arrives(0, stages - 1 - d, 0, device, up, down, ends)
        while d < devices - 1 and held[d] + 2 + 2 * d <= cap[d] and free[d] + seconds[0, d] <= back and done[0, d] < many:
            for e in range(d + 1):
                if not _put(0, e, *given):
                    return np.inf
        if not _put(0, stages - 1 - d, *given):
            return np.inf
    second = False
    for d in range(1, devices):
        own, before = stages - 1 - d, stages - d
        while done[0, d] + done[0, own] < done[0, d - 1] + done[0, before] or done[0, own] <= done[0, before] < many:
            for e in range(devices - 1, d - 1, -1):
                s = stages - 1 - e if second else e
                if done[0, s] < many and not _put(0, s, *given):
                    return np.inf
            second = not second
    chosen = np.zeros(devices, np.int64)
    for _ in range(2 * many):
        for d in range(devices):
            s, other = d, stages - 1 - d
            known = d == devices - 1 or done[1, other] >= many or ends[1, d + 1, min(done[1, d], many - 1)] < np.inf
            chosen[d] = s if done[1, s] < done[1, other] and known else other
        for turn in range(2 * devices):
            d = devices - 1 - turn if turn < devices else turn - devices
            s = chosen[d]
            if (s == d) != (turn < devices):
                continue
            at = _arrives(1, s, min(done[1, s], many - 1), device, up, down, ends)
            far = device[s + 1] != d if s + 1 < stages else False
            while far and at < np.inf and tail[d] > head[d] and at >= free[d] + seconds[2, queue[d, head[d]]]:
                _put(2, queue[d, head[d]], *given)
            if far and at < np.inf and tail[d] > head[d] and (s == d or fill_i) and _spends(d, at - free[d], allowed, idle):
                _put(2, queue[d, head[d]], *given)
            if not _put(1, s, *given):
                return np.inf
        for d in range(devices):
            first, other = d, stages - 1 - d
            if done[0, other] >= many:
                continue
            s = -1
            if done[0, other] >= done[0, first]:
                s = first
            elif d == devices - 1 or ends[0, other - 1, done[0, other]] < np.inf:
                s = other
            elif done[0, first] < many and (d == 0 or ends[0, d - 1, done[0, first]] < np.inf):
                s = first
            if s < 0:
                continue
            while held[d] >= cap[d]:
                if tail[d] == head[d]:
                    return np.inf
                _put(2, queue[d, head[d]], *given)
            at = _arrives(0, s, done[0, s], device, up, down, ends)
            far = device[s - 1] != d if s else False
            while far and at < np.inf and tail[d] > head[d] and at >= free[d] + seconds[2, queue[d, head[d]]]:
                _put(2, queue[d, head[d]], *given)
            if far and at < np.inf and tail[d] > head[d] and fill_f and _spends(d, at - free[d], allowed, idle):
                _put(2, queue[d, head[d]], *given)
            if not _put(0, s, *given):
                return np.inf
    for d in range(devices):
        while tail[d] > head[d]:
            _put(2, queue[d, head[d]], *given)
    return free.max() if done.min() == many else np.inf


def fastest_rounds(line, orders: I64, length: I64) -> float:  # type: ignore[no-untyped-def]
    """The least makespan of all runs, its orders as `kernels.bubble_budget` writes them; infinite where all got stuck. `line`: on the V, sizes 1."""
    trial, count, best = np.zeros_like(orders), np.zeros_like(length), float("inf")
    given = (line.device, line.seconds, line.up_s, line.down_s, line.cap, line.microbatches)
    for fill in range(4):
        allowed, least = np.full(len(line.cap), -1.0), float("inf")
        for _ in range(MAX_REFINED):
            idle = np.zeros(len(line.cap))
            span = _run(*given, bool(fill & 1), bool(fill & 2), allowed, idle, trial, count)
            if span < best:
                best = float(span)
                orders[:], length[:] = trial, count
            if span == np.inf or idle.max() >= least:
                break
            allowed, least = idle, float(idle.max())
    return best
