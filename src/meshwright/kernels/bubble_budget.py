"""Pipeline orders built towards a makespan: every device has so much idle time to spend, and weight gradients save it. Compiled.

A device that has to wait for its next forward or backward fills the gap with a weight gradient if one fits; a smaller gap it leaves, unless that
would spend more idle time than the makespan aimed at allows, its late start included. Weight gradients also make room for a forward that is ready.
Forwards and backwards take turns, or backwards come first. Decisions are made in the order of time, or of turns.
Memory: as in `pipeline_search`, a forward is begun only while one micro-batch on every later stage of its device still fits.
Cost: O(actions · stages per device) for one target; deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, copy_into, helper, inlined, largest
from .v_rounds import fastest_rounds

__all__ = ["Line", "build", "fastest_build"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
# Bits of a style.
IN_TURN = 1  # forwards and backwards take turns, else backwards come first; with STRICT: forwards go to the device's stages in turn
LATE_FORWARDS = 2  # later stages' forwards first
EARLY_BACKWARDS = 4  # earlier stages' backwards first
PATIENT = 8  # rather wait for a backward that comes before a forward could be done; with STRICT: backwards go to the device's stages in turn
ROOMS = 16  # weight gradients at once where a forward lacks room
STRICT = 32  # turns are kept once backwards have begun, and work known to come is waited for in its turn
ROUNDS = 64  # devices decide in rounds, the one with the fewest turns first, so that each knows what the others begin in a round
PASSING = 128  # a turn passes where no forward is known to come
# Styles that are tried: those that were best of all 64 for some profile and shape (benchmarks/zero_bubble.py).
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


class _Stages(NamedTuple):
    """How the stages of a device follow one another.

    Per stage: `level` (stages of its device before it), `below` (their size), `onward` (the next one of its device, 0: none). Per device: `above`
    (by level, the size of its stages beyond that level), `top` (its last level), `mine` (its stages) and `hosts` (how many).
    """

    level: I64
    below: I64
    onward: I64
    above: I64
    top: I64
    mine: I64
    hosts: I64


class _State(NamedTuple):
    """What has been ordered so far. Kinds: 0 F, 1 I, 2 W; by device where not said."""

    ready: F64  # [F or I, stage, micro-batch]: from when on it can begin, infinite while that is not known
    done: I64  # [kind, stage]: micro-batches
    free: F64  # when its work so far ends
    now: F64  # when it decides next, infinite while it waits to be told
    idle: F64  # seconds that it has waited
    loose: Bools  # everybody waited for his turn: it need not keep its own
    begun: I64  # [F or I, device]
    taken: I64  # turns
    previous: I64  # [F or I, device]: the stage of the last one
    wrapped: Bools  # whether its last forward was of its last stage
    skipped: I64  # backwards in a row
    last: I64  # kind of its last turn
    left: I64  # actions that are not ordered
    queue: I64  # [device, place]: stage · many + micro-batch whose weight gradient is due
    head: I64  # of that queue
    tail: I64
    held: I64  # [device, level]: size of what has reached that level of the device and is kept


@helper
def _nested(device, size, devices):  # type: ignore[no-untyped-def]
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
    return _Stages(level, below, onward, above, top, mine, hosts)


@helper
def _at_the_start(device, devices, many, levels):  # type: ignore[no-untyped-def]
    stages = len(device)
    ready = np.empty((2, stages, many))
    for s in range(stages):
        for i in range(many):
            ready[0, s, i], ready[1, s, i] = 0.0 if s == 0 else np.inf, np.inf
    left = np.zeros(devices, np.int64)
    for s in range(stages):
        left[device[s]] += 3 * many
    return _State(
        ready, np.zeros((3, stages), np.int64), np.zeros(devices), np.zeros(devices), np.zeros(devices), np.zeros(devices, np.bool_),
        np.zeros((2, devices), np.int64), np.zeros(devices, np.int64), np.full((2, devices), -1), np.zeros(devices, np.bool_),
        np.zeros(devices, np.int64), np.ones(devices, np.int64), left, np.zeros((devices, largest(left)), np.int64), np.zeros(devices, np.int64),
        np.zeros(devices, np.int64), np.zeros((devices, levels), np.int64),
    )  # fmt: skip


@inlined
def _who_decides(state, rounds):  # type: ignore[no-untyped-def]
    """The device that decides next: the earliest, or in rounds the one with the fewest turns; -1: all wait."""
    found, least = -1, np.inf
    for d in range(len(state.now)):
        if state.left[d] and state.now[d] < np.inf:
            order = float(state.taken[d]) if rounds else state.now[d]
            if order < least or (order == least and state.now[d] < state.now[found]):
                found, least = d, order
    return found


@inlined
def _let_loose(state):  # type: ignore[no-untyped-def]
    """Everybody waits for his turn: who could do something else may. Whether there is one."""
    found = False
    for d in range(len(state.now)):
        if state.left[d] and not state.loose[d]:
            state.loose[d], state.now[d] = True, state.free[d]
            found = True
    return found


@inlined
def _fits(d, s, size, cap, stages, state):  # type: ignore[no-untyped-def]
    """What has reached a stage, this forward, and one micro-batch on every later stage of the device, from this stage on."""
    total = size[s]
    for c in range(stages.top[d] + 1):
        total += state.held[d, c]
        if c >= stages.level[s] and total + stages.above[d, c] > cap[d]:
            return False
    return True


@inlined
def _whose_turn(d, many, style, stages, state):  # type: ignore[no-untyped-def]
    """The kind whose turn it is. The turn of a stage whose forwards are over is left out, not given to a later one, which would run dry."""
    over = 0
    for i in range(stages.hosts[d]):
        over += state.done[0, stages.mine[d, i]] == many
    if state.last[d] == 1 and state.skipped[d] < over and state.wrapped[d] and not style & PASSING:
        return np.int64(1)
    return 1 - state.last[d]


@inlined
def _next_of(d, t, turn, in_turn, size, cap, many, style, slack, stages, state):  # type: ignore[no-untyped-def]
    """The best forward or backward that is known to come: (kind, stage, begin), -1 without one; when the first backward can begin, and whether a
    forward that could begin now lacks room."""
    count = len(stages.level)
    best_kind, best_stage, best_begin, best_rank = -1, -1, np.inf, np.inf
    blocked, soon_i = False, np.inf
    for i in range(stages.hosts[d]):
        s = stages.mine[d, i]
        for kind in range(2):
            m = state.done[kind, s]
            if in_turn and kind != turn and state.begun[turn, d] < stages.hosts[d] * many:
                continue
            if m >= many or state.ready[kind, s, m] == np.inf:
                continue
            # ahead of where the micro-batch comes back to the device: at its next stage there, or as the backward of this one
            onward = stages.onward[s]
            back = m - state.done[0, onward] - onward if onward else m - state.done[1, s] - count
            if kind == 0 and back + s >= slack:
                continue
            begin = max(t, state.ready[kind, s, m])
            if kind == 1:
                soon_i = min(soon_i, begin)
            elif not _fits(d, s, size, cap, stages, state):
                blocked = blocked or begin <= t
                continue
            # what is less comes first, of what begins at the same time
            rank = 1.0 - kind
            if style & IN_TURN:
                rank = 0.0 if kind == 1 - state.last[d] else 1.0
            within = s if (style & EARLY_BACKWARDS if kind else not style & LATE_FORWARDS) else count - s
            rank += 0.25 * within / (count + 1)
            if style & STRICT and style & (PATIENT if kind else IN_TURN) and s == state.previous[kind, d]:
                rank += 0.5
            if ((in_turn or begin == best_begin) and rank < best_rank) or (not in_turn and begin < best_begin):
                best_kind, best_stage, best_begin, best_rank = kind, s, begin, rank
    return best_kind, best_stage, best_begin, soon_i, blocked


@inlined
def _backward_at(d, t, begin, many, stages, state):  # type: ignore[no-untyped-def]
    """The last stage of the device whose backward can begin then."""
    found = -1
    for i in range(stages.hosts[d]):
        s = stages.mine[d, i]
        if state.done[1, s] < many and max(t, state.ready[1, s, state.done[1, s]]) == begin:
            found = s
    return found


@inlined
def _take_turn(d, kind, s, m, end, device, size, up, down, many, stages, state):  # type: ignore[no-untyped-def]
    """Notes a forward or backward that ends then, and makes known what follows: the device that it is for, which may be the same."""
    state.skipped[d] = 0 if kind == 0 else state.skipped[d] + (state.last[d] == 1)
    state.previous[kind, d] = s
    state.taken[d] += 1
    state.last[d] = kind
    state.begun[kind, d] += 1
    if kind == 0:
        level = stages.level[s]
        state.wrapped[d] = level == stages.top[d]
        state.held[d, level] += size[s] + stages.below[s]
        if level:
            state.held[d, level - 1] -= stages.below[s]
        if s + 1 == len(device):
            state.ready[1, s, m] = end
            return d
        to = device[s + 1]
        state.ready[0, s + 1, m] = end + (up[s] if to != d else 0.0)
        return to
    state.queue[d, state.tail[d]] = s * many + m
    state.tail[d] += 1
    if s == 0:
        return d
    to = device[s - 1]
    state.ready[1, s - 1, m] = end + (down[s - 1] if to != d else 0.0)
    return to


@allocating
def _build(device, seconds, up, down, size, cap, many, target, style, slack, orders, length):  # type: ignore[no-untyped-def]
    """Fills orders[device, place] = (kind · stages + stage) · many + micro-batch; returns the makespan, infinite when stuck.

    `style`: a sum of the constants above. `slack`: see SLACKS.
    """
    devices = len(cap)
    rounds, strict = style & ROUNDS, style & STRICT
    stages = _nested(device, size, devices)
    state = _at_the_start(device, devices, many, stages.above.shape[1])
    work = np.zeros(devices)
    for s in range(len(device)):
        work[device[s]] += many * (seconds[0, s] + seconds[1, s] + seconds[2, s])
    for d in range(devices):
        length[d] = 0
    remaining = 3 * many * len(device)
    while remaining:
        d = _who_decides(state, rounds)
        if d < 0:
            if not strict or not _let_loose(state):
                return np.inf
            continue
        free = state.free[d]
        t = free if rounds else state.now[d]
        in_turn = strict and state.begun[1, d] and not state.loose[d]
        turn = _whose_turn(d, many, style, stages, state)
        kind, s, begin, soon_i, blocked = _next_of(d, t, turn, in_turn, size, cap, many, style, slack, stages, state)
        if style & PASSING and in_turn and turn == 0 and kind < 0 and not blocked and state.begun[0, d] < stages.hosts[d] * many:
            state.last[d] = 0  # no forward is known to come: its turn passes
            state.taken[d] += 1
            continue
        if kind == 0 and style & PATIENT and not strict and begin < soon_i < begin + seconds[0, s] and not (style & IN_TURN and state.last[d] == 1):
            kind, s, begin = 1, _backward_at(d, t, soon_i, many, stages, state), soon_i
        fills = False
        if state.tail[d] > state.head[d]:
            gap = begin - t
            spends = gap > 0.0 and state.idle[d] + (begin - free) > target - work[d]
            makes_room = blocked and style & ROOMS and (gap > 0.0 or (kind == 1 - (style & IN_TURN) and state.last[d] == 1))
            fills = kind < 0 or gap >= seconds[2, state.queue[d, state.head[d]] // many] or spends or makes_room
        if fills:
            code = state.queue[d, state.head[d]]
            state.head[d] += 1
            kind, s, m, begin = 2, code // many, code % many, t
        elif kind < 0:
            state.now[d] = np.inf  # until something is released to it
            continue
        elif begin > t and not rounds:
            state.now[d] = begin
            # nothing else can come to be known before it, unless somebody acts earlier: then it decides again
            continue
        else:
            m = state.done[kind, s]
        end = begin + seconds[kind, s]
        state.loose[d] = False
        state.idle[d] += begin - free
        state.free[d] = state.now[d] = end
        state.done[kind, s] += 1
        state.left[d] -= 1
        orders[d, length[d]] = (kind * len(device) + s) * many + m
        length[d] += 1
        remaining -= 1
        if kind == 2:
            state.held[d, stages.top[d]] -= size[s]
            continue
        to = _take_turn(d, kind, s, m, end, device, size, up, down, many, stages, state)
        if to != d:
            told = max(state.free[to], t)
            state.now[to] = min(state.now[to], told)
    return largest(state.free)


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
