"""The critical path of a simulated run, and how much later each step could have ended.

The run's own order is kept (who got a unit, which message went when) and each message keeps its time in flight. Then the run is
a graph of nodes, in the order in which the engine recorded them: of every step its end (COMPLETE), of a step that sends the moment
its messages leave (SENDING), of a step that receives and then sends also the moment its local part is done (TAKEN). Edges are lane
order, `after`, unit, processor, message, credit and the parts of a step. slack(node) = min over its successors of (how long what it gave
lay unused + slack(successor)); an end without successors may be as late as the makespan. The critical path goes back from the
last end along edges whose gift was used at once; on a tie it takes the message, then the edge, then the unit, then the lane.
Cost: O(instances + edges), compiled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..kernels.compile import allocating, helper
from .tables import COMPLETE, SENDING, TAKEN, ProgramTables, State

__all__ = ["critical_path"]


@helper
def _offer(slack, best, before, node, unused):  # type: ignore[no-untyped-def]
    """Node `before` gave something that lay `unused` seconds until `node` took it."""
    slack[before] = min(slack[before], unused + slack[node])
    if unused <= 0.0:
        best[node] = before


@helper
def _local_end(t, step, instance):  # type: ignore[no-untyped-def]
    """The node at which an instance's local part is over, or the next one after that."""
    if t.out_ptr[step] == t.out_ptr[step + 1]:
        return 3 * instance + COMPLETE
    return 3 * instance + (TAKEN if t.in_ptr[step] < t.in_ptr[step + 1] else SENDING)


@helper
def _offer_entry(t, s, slack, best, node, step, instance, lane, unit_before, wait, step_of):  # type: ignore[no-untyped-def]
    """Everything a step needs before its local part: lane, unit, processor, `after`. `wait`: pause between that and this node."""
    begun = s.instance[instance].middle
    turn = instance - t.record_at[step]
    before = -1
    if step > t.lane_start[lane]:
        before = t.record_at[step - 1] + turn
    elif turn > 0:
        before = t.record_at[t.lane_end[lane] - 1] + turn - 1
    if before >= 0:
        _offer(slack, best, 3 * before + COMPLETE, node, begun - s.instance[before].end + wait)
    if unit_before >= 0:
        _offer(slack, best, 3 * unit_before + COMPLETE, node, begun - s.instance[unit_before].end + wait)
    behind = s.instance[instance].behind
    if behind >= 0:
        _offer(slack, best, _local_end(t, step_of[behind], behind), node, begun - s.instance[behind].local_end + wait)
    for e in range(t.after_ptr[step], t.after_ptr[step + 1]):
        other = t.after_step[e]
        needed = min(turn - t.after_lag[e] + 1, t.repeat[other])
        if needed > 0:
            before = t.record_at[other] + needed - 1
            _offer(slack, best, 3 * before + COMPLETE, node, begun - s.instance[before].end + wait)


@allocating
def _backward(t, s, step_of, lane_of, receives, sends, unit_before, makespan):  # type: ignore[no-untyped-def]
    """slack of every node, and a node before it whose gift was used at once (-1 none)."""
    slack = np.full(3 * len(step_of), np.inf)
    best = np.full(3 * len(step_of), -1, np.int64)
    taken, credited = s.channel.consumed.copy(), s.channel.sent.copy()
    # backwards in the order of events: when a node comes up, everything that it gave something to has its slack
    for n in range(s.number[4] - 1, -1, -1):
        node = s.order[n]
        instance, what = node // 3, node % 3
        step = step_of[instance]
        has_in, has_out = t.in_ptr[step] < t.in_ptr[step + 1], t.out_ptr[step] < t.out_ptr[step + 1]
        wait = 0.0
        if what == COMPLETE:
            slack[node] = min(slack[node], makespan - s.instance[instance].end)
            if has_out:
                _offer(slack, best, node - COMPLETE + SENDING, node, 0.0)
                continue
        elif what == SENDING:
            begun = s.instance[instance].send
            wait = begun - s.instance[instance].local_end
            if has_in:
                _offer(slack, best, node - SENDING + TAKEN, node, wait)
            else:
                _offer_entry(t, s, slack, best, node, step, instance, lane_of[step], unit_before[instance], wait, step_of)
            for e in range(t.out_ptr[step], t.out_ptr[step + 1]):
                c = t.out_channel[e]
                credited[c] -= 1
                # its credit came from the message `depth` places before it, from the step that took that one
                j = credited[c] - t.depth[c]
                if j >= 0:
                    giver = receives[s.channel[c].message_at + j]
                    _offer(slack, best, giver, node, begun - s.instance[giver // 3].local_end)
            continue
        _offer_entry(t, s, slack, best, node, step, instance, lane_of[step], unit_before[instance], wait, step_of)
        for e in range(t.in_ptr[step], t.in_ptr[step + 1]):
            c = t.in_channel[e]
            taken[c] -= 1
            m = s.channel[c].message_at + taken[c]
            _offer(slack, best, sends[m], node, s.instance[instance].middle - s.arrival[m])
    return slack, best


@allocating
def _partners(t, s, step_of, lane_of):  # type: ignore[no-untyped-def]
    """Node that sent and node that took every message; instance that held the unit before every compute instance."""
    sends, receives = np.full(len(s.arrival), -1, np.int64), np.full(len(s.arrival), -1, np.int64)
    sent, taken = np.zeros(len(t.depth), np.int64), np.zeros(len(t.depth), np.int64)
    unit_before, holder = np.full(len(step_of), -1, np.int64), np.full(t.units, -1, np.int64)
    for n in range(s.number[4]):
        node = s.order[n]
        instance, what = node // 3, node % 3
        step = step_of[instance]
        has_out = t.out_ptr[step] < t.out_ptr[step + 1]
        if what == SENDING:
            for e in range(t.out_ptr[step], t.out_ptr[step + 1]):
                sends[s.channel[t.out_channel[e]].message_at + sent[t.out_channel[e]]] = node
                sent[t.out_channel[e]] += 1
        elif what == TAKEN or not has_out:
            for e in range(t.in_ptr[step], t.in_ptr[step + 1]):
                receives[s.channel[t.in_channel[e]].message_at + taken[t.in_channel[e]]] = node
                taken[t.in_channel[e]] += 1
        unit = t.lane_unit[lane_of[step]]
        if t.kind[step] == 0 and unit >= 0:
            unit_before[instance] = holder[unit]
            holder[unit] = instance
    return sends, receives, unit_before


def critical_path(t: ProgramTables, s: State, lane_of: NDArray[np.int32], makespan_s: float) -> tuple[list[tuple[int, int]], NDArray[np.float64]]:
    """The path as (step, iteration) from first to last, and the slack of every step: the least over its parts and iterations."""
    steps = len(t.kind)
    if not steps:
        return [], np.zeros(0)
    step_of = np.repeat(np.arange(steps, dtype=np.int32), t.repeat)
    sends, receives, unit_before = _partners(t, s, step_of, lane_of)
    slack, best = _backward(t, s, step_of, lane_of, receives, sends, unit_before, makespan_s)
    node = int(s.order[s.number[4] - 1])
    path: list[tuple[int, int]] = []
    while node >= 0:
        instance = node // 3
        item = (int(step_of[instance]), instance - int(t.record_at[step_of[instance]]))
        if not path or path[-1] != item:
            path.append(item)
        node = int(best[node])
    path.reverse()
    by_instance: NDArray[np.float64] = slack.reshape(-1, 3).min(axis=1)
    return path, np.minimum.reduceat(by_instance, t.record_at[:-1])
