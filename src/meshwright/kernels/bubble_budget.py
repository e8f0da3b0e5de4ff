"""Pipeline orders built towards a makespan: every device has so much idle time to spend, and weight gradients save it. Compiled.

A device that has to wait for its next forward or backward fills the gap with a weight gradient if one fits; a smaller gap it leaves, unless that
would spend more idle time than the makespan aimed at allows, its late start included. Weight gradients also make room for a forward that is ready.
Forwards and backwards take turns, or backwards come first. Decisions are made in the order of time, or of turns.
Memory: as in `pipeline_search`, a forward is begun only while one micro-batch on every later stage of its device still fits.
Cost: O(actions · stages per device) for one target; deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, copy_into, helper, largest
from .v_rounds import fastest_rounds

__all__ = ["Line", "build", "fastest_build"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
# What is tried, see `_build`: those that were best of all 64 for some profile and shape (benchmarks/zero_bubble.py).
STYLES = (42, 106, 234, 9, 38, 2, 18, 23)
SLACKS = (0, 1 << 30)  # micro-batches that a stage may run ahead of where they come back to its device, beyond the stages between
STEPS = 12  # targets between the least makespan and the greedy one
MAX_BUILT_ACTIONS = 4_000_000  # over all constructions of one call, some seconds: large steps aim at fewer targets, two at least


@dataclass(frozen=True)
class Line:
    """Stages in model order: device, seconds of F, I, W, of a message to the next stage and back; what a stage keeps, and caps by device."""

    device: I64
    seconds: F64  # [3, stages]
    up_s: F64
    down_s: F64
    size: I64
    cap: I64
    microbatches: int


@helper
def _nested(device, size, devices):  # type: ignore[no-untyped-def]
    """How the stages of a device follow one another.

    Per stage: `level` (stages of its device before it), `below` (their size), `onward` (the next one of its device, 0: none). Per device: `above`
    (by level, the size of its stages beyond that level), `top` (its last level), `mine` (its stages) and `hosts` (how many).
    """
    stages = len(device)
    level, below, onward = np.zeros(stages, np.int64), np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    top, mine, hosts = np.zeros(devices, np.int64), np.zeros((devices, stages), np.int64), np.zeros(devices, np.int64)
    for s in range(stages):
        for before in range(s):
            if device[before] == device[s]:
                level[s] += 1
                onward[before] = s if onward[before] == 0 else onward[before]
                below[s] += size[before]
        top[device[s]] = level[s]
        mine[device[s], hosts[device[s]]] = s
        hosts[device[s]] += 1
    above = np.zeros((devices, largest(level) + 1), np.int64)
    for s in range(stages):
        for before in range(level[s]):
            above[device[s], before] += size[s]
    return level, below, onward, above, top, mine, hosts


@allocating
def _build(device, seconds, up, down, size, cap, many, target, style, slack, orders, length):  # type: ignore[no-untyped-def]
    """Fills orders[device, place] = (kind · stages + stage) · many + micro-batch; returns the makespan, infinite when stuck.

    Bits of style: 1 forwards and backwards in turn (else backwards first); 2 later stages' forwards first; 4 earlier stages' backwards first;
    8 rather wait for a backward that comes before a forward could be done; 16 weight gradients at once where a forward lacks room;
    32 turns are kept strictly once backwards have begun, and work known to come is waited for in its turn; then 1 and 8 say that forwards, and
    backwards, go to the device's stages in turn; 64 devices decide in rounds, the one with the fewest turns first, so that each knows what the
    others begin in a round; 128 a turn passes where no forward is known to come.
    `slack`: see SLACKS.
    """
    stages, devices = len(device), len(cap)
    turns, late_f, early_i, patient, rooms, strict = style & 1, style & 2, style & 4, style & 8, style & 16, style & 32
    rounds, passes = style & 64, style & 128
    ready = np.empty((2, stages, many))
    for s in range(stages):
        for i in range(many):
            ready[0, s, i], ready[1, s, i] = 0.0 if s == 0 else np.inf, np.inf
    done = np.zeros((3, stages), np.int64)
    free, now, idle = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    loose, begun = np.zeros(devices, np.bool_), np.zeros((2, devices), np.int64)
    taken = np.zeros(devices, np.int64)
    previous = np.zeros((2, devices), np.int64)
    wrapped = np.zeros(devices, np.bool_)  # whether the last forward was of the device's last stage
    quota, skipped = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    last, work, left = np.zeros(devices, np.int64), np.zeros(devices), np.zeros(devices, np.int64)
    head, tail, most = np.zeros(devices, np.int64), np.zeros(devices, np.int64), 0
    level, below, onward, above, top, mine, hosts = _nested(device, size, devices)
    held = np.zeros_like(above)
    for s in range(stages):
        work[device[s]] += many * (seconds[0, s] + seconds[1, s] + seconds[2, s])
        left[device[s]] += 3 * many
        quota[device[s]] += many
        most = max(most, left[device[s]])
    queue = np.zeros((devices, most), np.int64)
    for d in range(devices):
        previous[0, d] = previous[1, d] = -1
        last[d], length[d] = 1, 0
    remaining = 3 * many * stages
    while remaining:
        d, t = -1, np.inf
        for e in range(devices):
            if left[e] and now[e] < np.inf:
                turn_of = float(taken[e]) if rounds else now[e]
                if turn_of < t or (turn_of == t and now[e] < now[d]):
                    d, t = e, turn_of
        if d < 0:
            # everybody waits for its turn: the first that could do something else may
            for e in range(devices):
                if left[e] and not loose[e] and strict:
                    loose[e], now[e] = True, free[e]
                    d = e
            if d < 0:
                return np.inf
            continue
        t = free[d] if rounds else t
        best_kind, best_stage, best_begin, best_rank = -1, -1, np.inf, np.inf
        blocked, soon_i = False, np.inf
        in_turn = strict and begun[1, d] and not loose[d]
        # the turn of a stage whose forwards are over is left out, not given to a later one, which would run dry
        over = 0
        for i in range(hosts[d]):
            over += done[0, mine[d, i]] == many
        turn = 1 if last[d] == 1 and skipped[d] < over and wrapped[d] and not passes else 1 - last[d]
        for i in range(hosts[d]):
            s = mine[d, i]
            for kind in range(2):
                m = done[kind, s]
                if in_turn and kind != turn and begun[turn, d] < quota[d]:
                    continue
                if m >= many or ready[kind, s, m] == np.inf:
                    continue
                # ahead of where the micro-batch comes back to the device: at its next stage there, or as the backward of this one
                back = m - done[0, onward[s]] - onward[s] if onward[s] else m - done[1, s] - stages
                if kind == 0 and back + s >= slack:
                    continue
                begin = max(t, ready[kind, s, m])
                if kind == 0:
                    # what has reached a stage, and one micro-batch on every later stage of the device, must fit, from this stage on
                    total, fits = size[s], True
                    for c in range(top[d] + 1):
                        total += held[d, c]
                        fits = fits and (c < level[s] or total + above[d, c] <= cap[d])
                    if not fits:
                        blocked = blocked or begin <= t
                        continue
                else:
                    soon_i = min(soon_i, begin)
                # what is less comes first, of what begins at the same time
                rank = 0.0 if kind == 1 - last[d] else 1.0
                if not turns:
                    rank = 1.0 - kind
                within = s if (early_i if kind else not late_f) else stages - s
                rank += 0.25 * within / (stages + 1)
                if strict and (patient if kind else turns) and s == previous[kind, d]:
                    rank += 0.5
                if in_turn:
                    better = rank < best_rank
                else:
                    better = begin < best_begin or (begin == best_begin and rank < best_rank)
                if better:
                    best_kind, best_stage, best_begin, best_rank = kind, s, begin, rank
        if passes and in_turn and turn == 0 and best_kind < 0 and not blocked and begun[0, d] < quota[d]:
            last[d] = 0  # no forward is known to come: its turn passes
            taken[d] += 1
            continue
        waiting = tail[d] > head[d]
        sooner = soon_i > best_begin and soon_i < best_begin + seconds[0, best_stage]
        if best_kind == 0 and patient and not strict and sooner and not (turns and last[d] == 1):
            best_kind, best_begin = 1, soon_i
            for s in range(stages):
                if device[s] == d and done[1, s] < many and max(t, ready[1, s, done[1, s]]) == soon_i:
                    best_stage = s
        use_w = False
        if waiting:
            w = seconds[2, queue[d, head[d]] // many]
            gap = best_begin - t
            spends = gap > 0.0 and idle[d] + (best_begin - free[d]) > target - work[d]
            makes_room = blocked and rooms and (gap > 0.0 or (best_kind == 1 - turns and last[d] == 1))
            use_w = best_kind < 0 or gap >= w or spends or makes_room
        if use_w:
            code = queue[d, head[d]]
            head[d] += 1
            kind, s, m, begin = 2, code // many, code % many, t
        elif best_kind < 0:
            now[d] = np.inf  # until something is released to it
            continue
        elif best_begin > t and not rounds:
            now[d] = best_begin
            # nothing else can come to be known before it, unless somebody acts earlier: then it decides again
            continue
        else:
            kind, s, begin = best_kind, best_stage, best_begin
            m = done[kind, s]
        loose[d] = False
        idle[d] += begin - free[d]
        end = begin + seconds[kind, s]
        free[d] = now[d] = end
        done[kind, s] += 1
        orders[d, length[d]] = (kind * stages + s) * many + m
        length[d] += 1
        left[d] -= 1
        remaining -= 1
        if kind == 2:
            held[d, top[d]] -= size[s]
            continue
        skipped[d] = 0 if kind == 0 else skipped[d] + (last[d] == 1)
        previous[kind, d] = s
        taken[d] += 1
        if kind == 0:
            wrapped[d] = level[s] == top[d]
        last[d] = kind
        begun[kind, d] += 1
        if kind == 0:
            held[d, level[s]] += size[s] + below[s]
            if level[s]:
                held[d, level[s] - 1] -= below[s]
            if s + 1 < stages:
                e, at = device[s + 1], end + (up[s] if device[s + 1] != d else 0.0)
                ready[0, s + 1, m] = at
            else:
                e, at = d, end
                ready[1, s, m] = at
        else:
            queue[d, tail[d]] = s * many + m
            tail[d] += 1
            if s:
                e, at = device[s - 1], end + (down[s - 1] if device[s - 1] != d else 0.0)
                ready[1, s - 1, m] = at
            else:
                e, at = d, end
        if e != d:
            now[e] = min(now[e], max(free[e], t)) if now[e] < np.inf else max(free[e], t)
    return largest(free)


@helper
def _keep(to, length_to, orders, length):  # type: ignore[no-untyped-def]
    copy_into(length_to, length)
    for d in range(len(length)):
        copy_into(to[d], orders[d])


@allocating
def _fastest(device, seconds, up, down, size, cap, many, least, steps, styles, slacks, best_orders, best_length):  # type: ignore[no-untyped-def]
    orders, length = np.zeros_like(best_orders), np.zeros_like(best_length)
    best = np.inf
    for run in range(len(styles) * len(slacks)):
        style, slack = styles[run // len(slacks)], slacks[run % len(slacks)]
        greedy = _build(device, seconds, up, down, size, cap, many, np.inf, style, slack, orders, length)
        if greedy < best:
            best = greedy
            _keep(best_orders, best_length, orders, length)
        if greedy == np.inf:
            greedy = 2 * least
        for step in range(steps):
            if best <= least:
                return best
            # closer together near the least
            target = least + (greedy - least) * (step / steps) ** 2
            span = _build(device, seconds, up, down, size, cap, many, target, style, slack, orders, length)
            if span < best:
                best = span
                _keep(best_orders, best_length, orders, length)
    return best


def build(line: Line, target_s: float, style: int, slack: int) -> tuple[float, list[list[tuple[int, int, int]]]]:
    """One construction: (makespan, per device its (kind, stage, micro-batch), kinds 0 F, 1 I, 2 W)."""
    orders, length = _arrays(line)
    span = _build(line.device, line.seconds, line.up_s, line.down_s, line.size, line.cap, line.microbatches, target_s, style, slack, orders, length)
    return float(span), _decoded(line, orders, length)


def fastest_build(line: Line, least_s: float) -> tuple[float, list[list[tuple[int, int, int]]]]:
    """The best over all styles and over targets from `least_s` (which no order can beat) up, and over rounds on a V; infinite where all got stuck."""
    orders, length = _arrays(line)
    steps = min(STEPS, max(2, MAX_BUILT_ACTIONS // (len(STYLES) * len(SLACKS) * 3 * len(line.device) * line.microbatches)))
    span = _fastest(
        line.device, line.seconds, line.up_s, line.down_s, line.size, line.cap, line.microbatches, least_s, steps, np.array(STYLES),
        np.array(SLACKS), orders, length,
    )  # fmt: skip
    if span > least_s and _on_a_v(line):
        others, lengths = _arrays(line)
        rounds_span = fastest_rounds(line, others, lengths)
        if rounds_span < span:
            span, orders, length = rounds_span, others, lengths
    return float(span), _decoded(line, orders, length)


def _on_a_v(line: Line) -> bool:
    """Device d holds stages d and 2·devices-1-d, each of size 1."""
    half = np.arange(len(line.cap))
    return np.array_equal(line.device, np.concatenate((half, half[::-1]))) and bool(np.all(line.size == 1))


def _arrays(line: Line) -> tuple[I64, I64]:
    devices = len(line.cap)
    most = 3 * line.microbatches * int(np.bincount(line.device, minlength=devices).max())
    return np.zeros((devices, most), np.int64), np.zeros(devices, np.int64)


def _decoded(line: Line, orders: I64, length: I64) -> list[list[tuple[int, int, int]]]:
    stages, many = len(line.device), line.microbatches
    found = []
    for row, size in zip(orders, length.tolist(), strict=True):
        code, m = np.divmod(row[:size], many)
        kind, stage = np.divmod(code, stages)
        found.append(list(zip(kind.tolist(), stage.tolist(), m.tolist(), strict=True)))
    return found
