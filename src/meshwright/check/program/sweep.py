"""Memory of long programs: an upper bound of the peak over every order, from where each buffer's life stands along its rank's main lane.

The main lane is the one that uses most buffers: of a training step the computing one, however many messages other lanes send. Let it have completed
x steps. A buffer can be alive then only if x is at least the number of its steps that must be over before the buffer's first write may begin, and
below the number of the first step that must follow its last use. The largest sum over x bounds every order's peak: `memory` finds the exact worst
order as a flow, which is too slow for ten thousands of buffers on a rank. For one pipeline of compute steps the two are close. A workspace counts
between the steps around its own; of workspaces in the main lane one at a time.
"""

from __future__ import annotations

import numpy as np

from ...program.program import Kind, Part, Program, Space
from .order import Addresses, Ints, Order, accesses

__all__ = ["posted_ahead", "swept_peaks"]


def swept_peaks(p: Program, order: Order) -> list[int]:
    """Bytes per actor that no order needs more than (call-free, live, no repeated lanes); staging is not in it."""
    actors = p.ranks + p.switches
    # [low, high) of a step: between which numbers of completed steps of the main lane it may be at work.
    where = Addresses(p)
    n = len(p.buffers)
    a = accesses(p)
    main = _main_lanes(p, np.unique(order.lane_of_step[a.step].astype(np.int64) * n + where.root[a.buffer]) // max(1, n), actors)
    low, high = _places(p, order, main)
    root, writes = where.root[a.buffer], a.write
    begin = np.full(n, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(begin, root[writes], low[a.step[writes]])
    read_at = np.full(n, np.iinfo(np.int64).max, np.int64)
    # As in `memory`: what is read before it is written holds something from the beginning.
    rank = order.rank_in_order[order.node(a.step, 0)]
    reads = a.read & ~(writes & (p.steps.kind[a.step] == Kind.COMPUTE))  # accumulating into a fresh buffer starts at zero
    np.minimum.at(read_at, root[reads], rank[reads])
    write_at = np.full(n, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(write_at, root[writes], rank[writes])
    # First use and last use widen to the earliest start and the latest end, so the interval contains every real life.
    held = (p.buffers.persistent != 0) | (begin == np.iinfo(np.int64).max) | ((read_at <= write_at) & ~np.isin(p.buffers.role, (3, 5)))
    first = np.where(held, 0, begin)
    owner = np.repeat(np.arange(n), np.diff(p.buffers.last.ptr))
    dies = np.full(n, -1, np.int64)
    np.maximum.at(dies, owner, high[p.buffers.last.values])
    end = np.where((p.buffers.persistent != 0) | (dies < 0), np.iinfo(np.int64).max, dies)
    size = np.where((p.buffers.chunk_bytes == 0) & (p.buffers.size < 0), 0, where.size)
    mine = (where.root == np.arange(n)) & (p.buffers.space == Space.DEVICE)
    work = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
    temporary = p.ops.workspace_bytes[p.steps.op[work]].astype(np.int64)
    work, temporary = work[temporary > 0], temporary[temporary > 0]
    work_actor = p.lanes.actor[order.lane_of_step[work]]
    out = []
    for actor in range(actors):
        b = np.flatnonzero(mine & (p.buffers.actor == actor))
        if not len(b):
            out.append(0)
            continue
        w = work_actor == actor
        start = np.concatenate([first[b], low[work[w]]])
        stop = np.concatenate([end[b], high[work[w]]])
        out.append(_largest(start, stop, np.concatenate([size[b], temporary[w]])))
    return out


def _largest(start: Ints, stop: Ints, size: Ints) -> int:
    """Largest sum of sizes over the places in [start, stop)."""
    live = stop > start
    at = np.concatenate([start[live], stop[live]])
    change = np.concatenate([size[live], -size[live]])
    # At one place what ends (negative) goes before what begins: intervals are half open.
    by = np.lexsort((change, at))
    return int(np.cumsum(change[by]).max(initial=0))


def _main_lanes(p: Program, users: Ints, actors: int) -> Ints:
    """Of every actor the lane that uses most buffers, then the longest; -1 without any. `users`: of every buffer, the lanes that use it."""
    length, uses = (p.lanes.end - p.lanes.start).astype(np.int64), np.bincount(users, minlength=len(p.lanes))
    main = np.full(actors, -1, np.int64)
    # In rising order, so the first of each actor is written last and stays.
    for lane in np.lexsort((length, uses)).tolist():
        main[int(p.lanes.actor[lane])] = lane
    return main


def _places(p: Program, order: Order, main: Ints) -> tuple[Ints, Ints]:
    """Per step: how many steps of its actor's main lane are over when it may begin, and are over at most before it has ended."""
    low, high = np.zeros(len(p.steps), np.int64), np.zeros(len(p.steps), np.int64)
    ahead, block = posted_ahead(order), order.block_of_lane
    pairs = [(lane, int(x)) for actor, lane in enumerate(main.tolist()) if lane >= 0 for x in np.flatnonzero(p.lanes.actor == actor)]
    # Clocks are tables of many lanes, and few are kept: what asks of lanes of one table comes in a row.
    for lane, other in sorted(pairs, key=lambda x: int(block[x[0]])):
        nodes = order.base[other] + np.arange(order.length[other])
        steps = order.step[nodes]
        if other == lane:
            low[steps] = order.position[nodes]
            high[steps] = order.position[nodes] + 1
            continue
        low[steps] = order.last_ancestor(nodes, lane) + 1
        early = nodes[ahead[nodes] >= 0]
        if len(early):
            low[order.step[early]] = order.last_before_post(early, ahead[early], lane) + 1
    for lane, other in sorted(pairs, key=lambda x: int(block[x[1]])):
        if other != lane:
            nodes, chief = (order.base[x] + np.arange(order.length[x]) for x in (other, lane))
            steps = order.step[nodes]
            # A step has ended before main step x when it is among x's ancestors; the first such x bounds its life from above.
            seen = order.last_ancestor(chief, other)  # rises along the main lane
            high[steps] = np.searchsorted(seen, order.position[nodes], side="left") + 1
            high[steps[high[steps] > len(chief)]] = np.iinfo(np.int64).max
    return low, high


def posted_ahead(order: Order) -> Ints:
    """Per node -1, or for a receive how many receives right before it in its lane may still be open when it is posted: depth - 1
    of its own channel, and any of others between them."""
    p = order.program
    out = np.full(order.n, -1, np.int64)
    is_recv = ((p.steps.parts & Part.RECV) != 0)[order.step].tolist()
    plain = ((p.steps.parts & (Part.RECV | Part.READ | Part.SEND | Part.IN_SET)) == Part.RECV)[order.step].tolist()
    chan, depth = p.steps.chan_in[order.step].tolist(), p.channels.depth.tolist()
    position = order.position.tolist()
    for v in np.flatnonzero(is_recv).tolist():
        back, mine = 0, 0
        if plain[v]:
            while back < position[v] and plain[v - back - 1]:
                # Its channel has `depth` places: with that many of its own before it, the oldest must have arrived.
                mine += chan[v - back - 1] == chan[v]
                if mine >= depth[chan[v]]:
                    break
                back += 1
        out[v] = back
    return out
