"""A schedule's orders as arrays, asked for times and memory with many different numbers: what a search over layouts prices schedules with.

The clock is that of `orders.times` (messages never queue), with seconds of every piece given instead of a problem's; the tests compare both.
Activations of a piece are kept from its forward to the end of its backward (of W when split); what I leaves for W from I to W.
Cost: O(actions) once in Python, then O(actions) compiled per question; memory by the few states of a device that no other one exceeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import Deadlock
from ...kernels.order_clock import ends_of
from .problem import Schedule

__all__ = ["ClockedOrders"]

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
ROW = {"F": 0, "B": 1, "I": 1, "W": 2}  # of the seconds: forward, backward or the input's gradient, the weights' gradient
# States of one device up to which those that another one exceeds are sorted out.
MAX_SORTED_STATES = 2_000


@dataclass(frozen=True)
class ClockedOrders:
    """One copy of every piece. `last`: the last action of every device; `states[device]`: (counts kept of each of its pieces, counts left for W)."""

    placement: tuple[int, ...]
    orders: tuple[tuple[tuple[str, int, int], ...], ...]
    split: bool
    before: I32
    needs: I32
    late: I32
    work: I32
    last: I32
    states: tuple[NDArray[np.int64], ...]

    @staticmethod
    def of(schedule: Schedule) -> ClockedOrders:
        """Of a schedule with one copy of every stage, run by whole micro-batches. Raises: Deadlock."""
        assert schedule.copies == schedule.parts == 1
        orders = tuple(tuple((a.kind, a.stage, m) for a in o for m in range(a.microbatch, a.microbatch + a.count)) for o in schedule.orders)
        pieces, placement = schedule.stages, schedule.placement[0]
        columns: tuple[list[int], ...] = ([], [], [], [])
        number: dict[tuple[int, int, int], int] = {}  # (row, piece, micro-batch) of what has its turn already
        at, last = [0] * schedule.devices, [-1] * schedule.devices
        moved = True
        while moved:
            moved = False
            for d, order in enumerate(orders):
                while at[d] < len(order):
                    kind, piece, m = order[at[d]]
                    row, needed, late = ROW[kind], -1, -1
                    if kind == "F" and piece:
                        needed, late = number.get((0, piece - 1, m), -2), piece - 1
                    elif row == 1 and piece < pieces - 1:
                        needed, late = number.get((1, piece + 1, m), -2), pieces - 1 + piece
                    if needed == -2:
                        break
                    if late >= 0 and placement[piece] == placement[piece + (1 if row else -1)]:
                        late = -1  # the device has it
                    for column, value in zip(columns, (last[d], needed, late, row * pieces + piece), strict=True):
                        column.append(value)
                    last[d] = number[row, piece, m] = len(columns[0]) - 1
                    at[d] += 1
                    moved = True
        if any(a < len(o) for a, o in zip(at, orders, strict=True)):
            raise Deadlock("devices wait for each other", where=schedule.name)
        before, needs, late_, work = (np.array(c, np.int32) for c in columns)
        states = tuple(_states(order, [s for _, s in schedule.hosted(d)]) for d, order in enumerate(orders))
        return ClockedOrders(placement, orders, schedule.split, before, needs, late_, work, np.array(last, np.int32), states)

    def ends_s(self, forward_s: F64, backward_s: F64, weights_s: F64, delays_s: F64) -> F64:
        """When every device has done its last action. Of every piece: forward, whole backward, the weights' part of it. `delays_s`: of a message
        from every piece but the last to the next one, then of the messages back."""
        seconds = np.concatenate((forward_s, backward_s - weights_s if self.split else backward_s, weights_s))
        return ends_of(self.before, self.needs, self.late, self.work, seconds, delays_s)[self.last]

    def held_bytes(self, kept: F64, left: F64) -> F64:
        """Most bytes that every device keeps at once, of `kept` and `left` by every piece for a micro-batch."""
        found = []
        for d, states in enumerate(self.states):
            mine = np.array([k for k, host in enumerate(self.placement) if host == d])
            found.append(float((states @ np.concatenate((kept[mine], left[mine]))).max(initial=0.0)))
        return np.array(found)


def _states(order: tuple[tuple[str, int, int], ...], held: list[int]) -> NDArray[np.int64]:
    """What a device keeps while it computes, without states that another one exceeds everywhere."""
    place, n = {piece: i for i, piece in enumerate(held)}, len(held)
    now, found = [0] * (2 * n), set[tuple[int, ...]]()
    for kind, piece, _ in order:
        i = place[piece]
        if kind == "F":
            now[i] += 1
        elif kind == "I":
            now[n + i] += 1
        if kind in "FI":
            found.add(tuple(now))
        elif kind == "B":
            now[i] -= 1
        else:
            now[i] -= 1
            now[n + i] -= 1
    states = np.array(sorted(found), dtype=np.int64)
    if 1 < len(states) <= MAX_SORTED_STATES:
        least = [not np.any(np.all(states >= s, axis=1) & np.any(states > s, axis=1)) for s in states]
        states = states[np.array(least)]
    return states
