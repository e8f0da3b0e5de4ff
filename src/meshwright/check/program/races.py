"""Races: two steps touch overlapping bytes, at least one writes, and neither happens before the other. And uses after death.

Every (buffer, byte range) a step touches is cut at all ends of ranges on its root buffer, and every cell is swept in one
topological order: only neighbouring writes and the reads between them need comparing, because happens-before is transitive.
Iterations: a buffer of window k holds iterations i and i + k in the same slot, so window + 1 turns are unrolled (later pairs
follow by lane order); window 0 gives each iteration its own bytes. Credits of channels are deliberately not used.
"""

from __future__ import annotations

import numpy as np

from ...program.program import Program
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .order import Addresses, Ints, Order, accesses
from .wellformed import witness

__all__ = ["check_races", "turns_needed"]


def turns_needed(p: Program) -> int:
    """Turns to unroll so that every pair of iterations that share a slot is seen; all of them where a collective's lanes differ in `repeat`,
    since what holds in the first turns then need not hold in the last."""
    longest = int(p.lanes.repeat.max()) if len(p.lanes) else 1
    if p.contracts and len(np.unique(p.lanes.repeat)) > 1:
        return longest
    windows = p.buffers.window[p.buffers.window < longest]
    return min(longest, 1 + (int(windows.max()) if len(windows) else 0))


def check_races(p: Program, order: Order | None = None) -> list[Finding]:
    """`order` must hold `turns_needed(p)` turns. The program must be well-formed and live."""
    order = order or Order(p, iterations=turns_needed(p))
    a, where = accesses(p), Addresses(p)
    rows, node = _unrolled(order, a.step)
    root, lo, hi = where.span(a.buffer[rows], a.chunk[rows], a.count[rows], order.iteration[node])
    # Accesses of no bytes conflict with nothing.
    keep = hi > lo
    rows, node, root, lo, hi = rows[keep], node[keep], root[keep], lo[keep], hi[keep]
    first, second, cell = _pairs(root, lo, hi, a.write[rows], order.rank_in_order[node])
    differ = node[first] != node[second]
    first, second, cell = first[differ], second[differ], cell[differ]
    # Two nodes may meet in many cells: ordered once is ordered everywhere, so each pair is asked for once.
    pair, at = np.unique(node[first] * order.n + node[second], return_index=True)
    bad = at[~order.before(pair // order.n, pair % order.n)]
    found = []
    for k in bad[np.argsort(node[first[bad]], kind="stable")][:MAX_FINDINGS_OF_A_KIND].tolist():
        one, two = int(rows[first[k]]), int(rows[second[k]])
        x, y = int(node[first[k]]), int(node[second[k]])
        buffer = int(a.buffer[two])
        chunk = where.chunk_at(buffer, int(cell[k]))
        what = [("writes" if a.write[r] else "reads") for r in (one, two)]
        text = (
            f"{p.describe(int(order.step[x]))} {what[0]} and {p.describe(int(order.step[y]))} {what[1]} chunk {chunk} of {p.buffer_name(buffer)}"
            f" (iterations {int(order.iteration[x])} and {int(order.iteration[y])}), and neither happens before the other"
        )
        facts = witness(p, int(order.step[x]), iteration=int(order.iteration[x]), chunk=chunk, buffer=buffer)
        facts |= {"other_step": int(order.step[y]), "other_lane": int(order.lane[y]), "other_iteration": int(order.iteration[y])}
        found.append(Finding(check="races", message=text, witness=facts))
    return found + _after_death(p, order, where)


def _unrolled(order: Order, step: Ints) -> tuple[Ints, Ints]:
    """Every access once per turn of its step: (row of the access, node)."""
    turns = order.turns[order.lane_of_step[step]]
    rows = np.repeat(np.arange(len(step)), turns)
    turn = np.arange(len(rows)) - np.repeat(np.cumsum(turns) - turns, turns)
    return rows, order.node(step[rows], turn)


def _pairs(root: Ints, lo: Ints, hi: Ints, write: np.ndarray, when: Ints) -> tuple[Ints, Ints, Ints]:
    """Pairs of accesses that must be ordered: (earlier, later, first byte of the cell), earlier by topological order."""
    if not len(root):
        return root, root, root
    span = int(hi.max()) + 1
    # The ends of all ranges cut every buffer into cells that each access covers wholly or not at all. `span` keeps buffers apart.
    points = np.unique(np.concatenate([root * span + lo, root * span + hi]))
    start, end = np.searchsorted(points, root * span + lo), np.searchsorted(points, root * span + hi)
    width = end - start
    access = np.repeat(np.arange(len(root)), width)
    cell = np.repeat(start, width) + np.arange(len(access)) - np.repeat(np.cumsum(width) - width, width)
    # Within a cell by topological order; a node's reads before its own write. Then it suffices that each read follows the last write before
    # it and precedes the next, and that each write follows the last one: happens-before is transitive, and the rest follows from those.
    by = np.lexsort((write[access], when[access], cell))
    access, cell = access[by], cell[by]
    n = np.arange(len(access))
    new_cell = np.concatenate([[True], cell[1:] != cell[:-1]])
    begin = np.maximum.accumulate(np.where(new_cell, n, 0))
    wrote = write[access]
    # Place of the last write before each access; shifted by one so that a write does not find itself.
    last = np.concatenate([[-1], np.maximum.accumulate(np.where(wrote, n, -1))[:-1]])
    has_last = last >= begin
    upto = np.concatenate([np.flatnonzero(new_cell)[1:], [len(n)]])[np.cumsum(new_cell) - 1]
    # The same from behind: the next write after each access.
    following = np.where(wrote, n, len(n))[::-1]
    following = np.concatenate([np.minimum.accumulate(following)[::-1][1:], [len(n)]])
    has_next = (following < upto) & ~wrote  # a write meets its next write as that write's `last`
    first = np.concatenate([access[last[has_last]], access[n[has_next]]])
    second = np.concatenate([access[n[has_last]], access[following[has_next]]])
    where = np.concatenate([cell[has_last], cell[has_next]])
    return first, second, points[where] % span


def _after_death(p: Program, order: Order, where: Addresses) -> list[Finding]:
    """A step that touches a buffer must be, or happen before, one of the steps in whose completion the buffer dies."""
    a, last = accesses(p), p.buffers.last
    mortal = np.flatnonzero((np.diff(last.ptr) > 0) & (p.buffers.persistent == 0))
    found: list[Finding] = []
    if not len(mortal):
        return found
    dies = np.zeros(len(p.buffers), bool)
    dies[mortal] = True
    up = np.arange(len(p.buffers))
    rows, owner = [], []
    while np.any(up >= 0):  # a buffer must not be used, under any alias, after itself or what it lies in is dead
        hit = np.flatnonzero((up >= 0)[a.buffer] & dies[np.maximum(up, 0)][a.buffer])
        rows.append(hit)
        owner.append(up[a.buffer[hit]])
        up = np.where(up >= 0, p.buffers.alias_of[np.maximum(up, 0)], -1)
    row, buffer = np.concatenate(rows), np.concatenate(owner)
    user, first, width = a.step[row].astype(np.int64), last.ptr[buffer].astype(np.int64), np.diff(last.ptr)[buffer]
    # With several last steps the buffer dies when all are done, so one that the user precedes (or is) suffices. Messages of a buffer to many ranks
    # are all its last steps: most users are one, and most others come before the first.
    ends = np.repeat(np.arange(len(p.buffers)), np.diff(last.ptr)) * np.int64(len(p.steps)) + last.values
    covered = np.isin(buffer * np.int64(len(p.steps)) + user, ends)
    turn, left = 0, np.flatnonzero(~covered & (width > 0))
    while len(left):
        end = last.values[first[left] + turn].astype(np.int64)
        covered[left] = order.before(order.node(user[left], 0), order.node(end, 0))
        turn += 1
        left = left[~covered[left] & (width[left] > turn)]
    for k in np.flatnonzero(~covered)[:MAX_FINDINGS_OF_A_KIND].tolist():
        step, b = int(a.step[row[k]]), int(buffer[k])
        chunk = int(a.chunk[row[k]])
        text = f"{p.describe(step)} may use {p.buffer_name(b)} after the last step of its life, {p.describe(int(last[b][-1]))}"
        found.append(Finding(check="races", message=text, witness=witness(p, step, chunk=chunk, buffer=b, last_step=int(last[b][-1]))))
    return found
