"""Memory: the peak over every order a program allows, exactly.

A buffer is alive from the start of the first step that writes it (a receive: from when it may be posted) to the end of the last
step of `last`; without `last`, or persistent, to the end; never written, from the beginning. Workspaces live with their step. Aliases
share the bytes of their root; a repeated lane's slices are allocated together and live until the program ends. Only device memory counts.

Worst order: a moment of an execution is a set of step starts and ends closed under happens-before. Its memory is a sum of +bytes
for starts and -bytes for ends, so the worst moment is a maximum-weight closure: the sum of the positive weights less a maximum flow
(Picard 1976). It equals the max-weight antichain of the lifetime order, and its witness are the buffers alive in it. Exact when every
buffer has one first writer and one last step under happens-before; otherwise, and beyond MAX_FLOW_NODES, an upper bound, and said so: the lesser of
that and of `sweep`'s. Programs of MIN_SWEPT_BUFFERS buffers and more get the bound of `sweep` alone, those whose order is too large for clocks that
of all buffers at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...fabric.fabric import Fabric
from ...program.program import Kind, Program, Space
from ..verdict import Finding
from .flow_kernel import maximum_flow
from .order import Addresses, Bools, Ints, Order, accesses, messages
from .staging import staging_bytes
from .sweep import posted_ahead, swept_peaks

__all__ = ["WorstMemory", "check_memory", "worst_order_memory", "worst_order_peaks"]

MAX_FLOW_NODES = 60_000  # nodes of one actor's closure, for which an exact maximum flow is computed; beyond it an upper bound is given
UNCUT_BYTES = 1 << 62  # room of an arc that no smallest cut contains; programs of so many bytes get an upper bound
MIN_SWEPT_BUFFERS = 40_000  # buffers of a program from which on all actors get the bound of `memory_sweep` instead of a closure each


@dataclass(frozen=True, kw_only=True)
class WorstMemory:
    """Per actor. `staging_bytes`: depth x message bytes of channels whose data cannot go straight into its buffer (see `staging`)."""

    peak_bytes: tuple[int, ...]
    staging_bytes: tuple[int, ...]
    exact: tuple[bool, ...]
    alive: tuple[tuple[int, ...], ...]  # buffers alive at the worst moment, the certificate
    steps: tuple[tuple[int, ...], ...]  # steps whose workspace counts at that moment

    @property
    def needed_bytes(self) -> list[int]:
        return [peak + staging for peak, staging in zip(self.peak_bytes, self.staging_bytes, strict=True)]


@dataclass
class _Lifetimes:
    """Elements (root buffers and workspaces): bytes, first writers and last steps as nodes; -1 = before all, after all."""

    actor: list[int]
    size: list[int]
    what: list[int]  # buffer, or -1 - step for a workspace
    begins: list[list[int]]
    ends: list[list[int]]


def _lifetimes(p: Program, order: Order) -> _Lifetimes:
    a, where = accesses(p), Addresses(p)
    n = len(p.buffers)
    # Slices of a repeated lane are allocated together, as many as the lane has turns or the buffer's window allows.
    turns = np.ones(p.ranks + p.switches, np.int64)
    np.maximum.at(turns, p.lanes.actor, p.lanes.repeat)
    slices = np.where(where.window > 0, np.minimum(where.window, turns[p.buffers.actor]), turns[p.buffers.actor]) if n else where.window
    repeated = p.lanes.repeat[p.lane_of_step()] > 1
    touched = where.root[a.buffer]
    bound = np.bincount(touched, repeated[a.step], n) > 0  # touched by a repeated lane: dies only at the end
    node = order.node(np.arange(len(p.steps)), 0)  # of every step its first
    # What holds something from the beginning has no start event; what is kept, or used by a repeated lane, has no end event.
    counted = (where.root == np.arange(n)) & (p.buffers.space == Space.DEVICE)
    starts, stops = counted & (p.buffers.persistent == 0), counted & (p.buffers.persistent == 0) & ~bound
    starts[list(_read_before_written(p, order, where))] = False
    writes = a.write & starts[touched]
    begins = _extremes(order, touched[writes], node[a.step[writes]], n, first=True)
    owner = np.repeat(np.arange(n), np.diff(p.buffers.last.ptr))
    ends = _extremes(order, owner[stops[owner]], node[p.buffers.last.values[stops[owner]]], n, first=False)
    life = _Lifetimes([], [], [], [], [])
    for b in np.flatnonzero(counted).tolist():
        # Empty buffers got one byte per chunk so that their users are ordered (`Addresses`); they take no memory.
        real = 0 if not int(p.buffers.chunk_bytes[b]) and p.buffers.size[b] < 0 else int(where.size[b] * slices[b])
        life.actor.append(int(p.buffers.actor[b]))
        life.size.append(real)
        life.what.append(b)
        life.begins.append(begins[b])
        life.ends.append(ends[b])
    for step in np.flatnonzero(p.steps.kind == Kind.COMPUTE).tolist():
        temp = int(p.ops.workspace_bytes[p.steps.op[step]])
        if temp:
            life.actor.append(int(p.lanes.actor[order.lane_of_step[step]]))
            life.size.append(temp)
            life.what.append(-1 - step)
            life.begins.append([int(node[step])])
            life.ends.append([int(node[step])])
    return life


def _read_before_written(p: Program, order: Order, where: Addresses) -> set[int]:
    """Roots whose first access in one topological order reads: they hold something from the beginning (inputs, in-place buffers)."""
    a = accesses(p)
    # Free of races, all orders agree on what comes first in a buffer, so one of them may be asked.
    by = np.lexsort((a.write, order.rank_in_order[order.node(a.step, 0)]))
    roots = where.root[a.buffer[by]]
    firsts, at = np.unique(roots, return_index=True)
    accumulates = p.steps.kind[a.step] == Kind.COMPUTE
    reads = a.read[by][at] & ~(a.write[by][at] & accumulates[by][at])  # accumulating into a fresh buffer starts at zero
    return {int(r) for r, x in zip(firsts, reads, strict=True) if x and p.buffers.role[r] not in (3, 5)}


def _extremes(order: Order, owner: Ints, node: Ints, owners: int, *, first: bool) -> list[list[int]]:
    """Of every owner's nodes the one that precedes (or follows) all others; where none does, two of which neither does. Row k: a node of an owner."""
    place = order.rank_in_order[node] if first else -order.rank_in_order[node]
    by = np.lexsort((place, order.lane[node], owner))
    owner, node, place = owner[by], node[by], place[by]
    # In a lane the earliest (latest) beats the rest. What precedes all others comes first in every order, so one candidate of an owner is compared
    # with the others, not every pair.
    leads = _first_of_each(owner, order.lane[node])
    owner, node, place = owner[leads], node[leads], place[leads]
    by = np.lexsort((place, owner))
    owner, node = owner[by], node[by]
    leads = _first_of_each(owner)
    lead, others = np.repeat(node[leads], np.diff(np.append(np.flatnonzero(leads), len(node))))[~leads], node[~leads]
    beaten = order.before(lead, others) if first else order.before(others, lead)
    found: list[list[int]] = [[] for _ in range(owners)]
    for k, v in zip(owner[leads].tolist(), node[leads].tolist(), strict=True):
        found[k].append(v)
    for k, v in zip(owner[~leads][~beaten].tolist(), others[~beaten].tolist(), strict=True):
        found[k][1:] = [v]
    return found


def _first_of_each(*keys: Ints) -> Bools:
    """Rows that differ from the row before in one of the sorted keys."""
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return new


def worst_order_memory(p: Program, order: Order | None = None) -> WorstMemory:
    """Peak bytes of every actor over all orders of the program (call-free, well-formed, live)."""
    order = order or Order(p)
    actors = p.ranks + p.switches
    if not order.clocked:
        return _all_at_once(p)
    if len(p.buffers) >= MIN_SWEPT_BUFFERS and not np.any(p.lanes.repeat > 1):
        nothing: tuple[tuple[int, ...], ...] = ((),) * actors
        staged = tuple(staging_bytes(p, order).tolist())
        return WorstMemory(peak_bytes=tuple(swept_peaks(p, order)), staging_bytes=staged, exact=(False,) * actors, alive=nothing, steps=nothing)
    life = _lifetimes(p, order)
    peaks, exact = [0] * actors, [True] * actors
    alive: list[tuple[int, ...]] = [()] * actors
    steps: list[tuple[int, ...]] = [()] * actors
    of: list[list[int]] = [[] for _ in range(actors)]
    for e, actor in enumerate(life.actor):
        of[actor].append(e)
    ahead = posted_ahead(order)  # once for all actors: it looks at every step
    for actor in range(actors):
        peaks[actor], exact[actor], held = _worst(order, life, of[actor], ahead)
        alive[actor] = tuple(life.what[e] for e in held if life.what[e] >= 0)
        steps[actor] = tuple(-1 - life.what[e] for e in held if life.what[e] < 0)
    # A closure lets what has several last steps (a buffer sent over several lanes) live on; the sweep knows when all of them are over.
    if not all(exact) and not np.any(p.lanes.repeat > 1):
        for actor, swept in enumerate(swept_peaks(p, order)):
            if not exact[actor] and swept < peaks[actor]:
                peaks[actor], alive[actor], steps[actor] = swept, (), ()
    staging = staging_bytes(p, order)
    return WorstMemory(peak_bytes=tuple(peaks), staging_bytes=tuple(staging.tolist()), exact=tuple(exact), alive=tuple(alive), steps=tuple(steps))


def _all_at_once(p: Program) -> WorstMemory:
    """Every device buffer, as many slices as its actor's lanes have turns, in each lane its largest workspace, every channel full."""
    actors, where, lane_of = p.ranks + p.switches, Addresses(p), p.lane_of_step()
    turns = np.ones(actors, np.int64)
    np.maximum.at(turns, p.lanes.actor, p.lanes.repeat)
    peaks, mine = np.zeros(actors, np.int64), (where.root == np.arange(len(p.buffers))) & (p.buffers.space == Space.DEVICE)
    np.add.at(peaks, p.buffers.actor[mine], (where.size * turns[p.buffers.actor])[mine])
    work, temporary = np.flatnonzero(p.steps.kind == Kind.COMPUTE), np.zeros(len(p.lanes), np.int64)
    np.maximum.at(temporary, lane_of[work], p.ops.workspace_bytes[p.steps.op[work]])
    np.add.at(peaks, p.lanes.actor, temporary)
    staged, largest, step = np.zeros(actors, np.int64), np.zeros(len(p.channels), np.int64), messages(p)
    np.maximum.at(largest, step.channel, p.message_bytes()[step.recv])
    np.add.at(staged, p.channels.dst, largest * p.channels.depth)
    nothing: tuple[tuple[int, ...], ...] = ((),) * actors
    return WorstMemory(
        peak_bytes=tuple(peaks.tolist()), staging_bytes=tuple(staged.tolist()), exact=(False,) * actors, alive=nothing, steps=nothing,
    )  # fmt: skip


def _worst(order: Order, life: _Lifetimes, elements: list[int], ahead: Ints) -> tuple[int, bool, list[int]]:
    """Worst moment of one actor: bytes, whether exact, elements alive."""
    exact = True
    weight: dict[int, int] = {}  # event 2·node = start, 2·node + 1 = end
    fixed, single = 0, []
    for e in elements:
        if not life.size[e]:
            continue
        begins, ends = life.begins[e], life.ends[e]
        # With one start and one end, alive means: the start is in the closed set, the end is not. Then the flow is exact.
        exact &= len(begins) <= 1 and len(ends) <= 1
        if len(ends) > 1:  # dies when all are done; letting it live on is a bound from above
            ends = []
        if len(begins) != 1:  # any of several may be first: from the beginning is a bound from above
            begins = []
        if not begins and not ends:
            fixed += life.size[e]
        else:
            single.append((e, begins, ends))
        if not begins and ends:
            fixed += life.size[e]
        # Starting adds the bytes, ending takes them back; events of one node add up.
        for node in begins:
            weight[2 * node] = weight.get(2 * node, 0) + life.size[e]
        for node in ends:
            weight[2 * node + 1] = weight.get(2 * node + 1, 0) - life.size[e]
    events, most = sorted(weight), sum(w for w in weight.values() if w > 0)
    if len(events) > MAX_FLOW_NODES or most >= UNCUT_BYTES:
        return fixed + most, False, []
    closed, gain = _closure(order, events, weight, ahead)
    held = [e for e in elements if life.size[e] and not life.begins[e] and not life.ends[e]]
    for e, begins, ends in single:
        if all(2 * v in closed for v in begins) and not any(2 * v + 1 in closed for v in ends):
            held.append(e)
    return fixed + gain, exact, held


def _closure(order: Order, events: list[int], weight: dict[int, int], ahead: Ints) -> tuple[set[int], int]:
    """A predecessor-closed set of events of largest weight. `ahead`: of every node (`posted_ahead`)."""
    if not events:
        return set(), 0
    node = np.array([v // 2 for v in events], dtype=np.int64)
    is_end = np.array([v % 2 for v in events], dtype=bool)
    lanes = np.unique(order.lane[node])
    index = np.arange(len(events))
    # Only the last event of each lane that precedes an event needs an arc: those before it in its lane follow along its own arcs.
    later, earlier = [index[:0]], [index[:0]]  # events, and those that must come before them
    posted = ~is_end & (ahead[node] >= 0)
    for lane in lanes.tolist():
        seen = np.where(posted, -1, order.last_ancestor(node, lane))
        if posted.any():
            seen[posted] = order.last_before_post(node[posted], ahead[node[posted]], lane)
        # Places along the lane: start of position k at 2k, its end at 2k + 1; an end has its own start before it.
        mine = index[order.lane[node] == lane]  # sorted by position, a start before its end
        place = 2 * order.position[node[mine]] + is_end[mine]
        bound = 2 * seen + 1  # everything up to the end of that ancestor
        own = order.lane[node] == lane
        bound[own & is_end] = 2 * order.position[node[own & is_end]]
        k = np.searchsorted(place, bound, side="right") - 1
        later.append(np.flatnonzero(k >= 0))
        earlier.append(mine[k[k >= 0]])
    # Picard's network: what is gained hangs on the source, what is lost on the sink, and an arc that cannot be cut says "only together with".
    # The source side of a smallest cut is the best closed set, and its weight all gains less the cut.
    source, sink = len(events), len(events) + 1
    gains = np.array([weight[event] for event in events], dtype=np.int64)
    up, down = np.flatnonzero(gains > 0), np.flatnonzero(gains < 0)
    arcs = np.unique(np.concatenate(later) * len(events) + np.concatenate(earlier))
    tail = np.concatenate([np.full(len(up), source), down, arcs // len(events)])
    head = np.concatenate([up, np.full(len(down), sink), arcs % len(events)])
    room = np.concatenate([gains[up], -gains[down], np.full(len(arcs), UNCUT_BYTES)])
    value, level = maximum_flow(len(events) + 2, tail, head, room, source, sink)
    return {events[v] for v in np.flatnonzero(level[: len(events)] >= 0).tolist()}, int(gains[up].sum()) - value


def worst_order_peaks(p: Program, order: Order | None = None) -> list[int]:
    """Worst-order peak plus staging, per rank, in bytes."""
    return worst_order_memory(p, order).needed_bytes[: p.ranks]


def _switch_memory(p: Program, fabric: Fabric, placement: list[str]) -> list[Finding]:
    """Switches that state their memory hold two turns of what they add up: ranks may be a turn apart."""
    b, found = p.buffers, list[Finding]()
    need = np.bincount(b.actor, weights=2.0 * b.chunks * b.chunk_bytes, minlength=len(placement))
    limits = {s.name: s.aggregate_bytes for s in fabric.switches}
    for actor in range(p.ranks, len(placement)):
        limit = limits.get(placement[actor], 0)
        if limit and need[actor] > limit:
            text = f"switch {placement[actor]} needs {int(need[actor])} bytes for sums, two turns of each, it has {limit}"
            facts = {"switch": placement[actor], "need_bytes": int(need[actor]), "limit_bytes": limit}
            found.append(Finding(check="memory", message=text, witness=facts))
    return found


def check_memory(p: Program, worst: WorstMemory, fabric: Fabric, placement: Iterable[str]) -> list[Finding]:
    """Worst-order peak plus staging against every device's memory; the smallest violated limit comes first."""
    over = []
    for rank, (name, need) in enumerate(zip(list(placement)[: p.ranks], worst.needed_bytes, strict=False)):
        limit = fabric.device(name).memory_bytes
        if limit and need > limit:
            over.append((limit, rank, name, need))
    found = []
    found += _switch_memory(p, fabric, list(placement))
    for limit, rank, name, need in sorted(over):
        sure = worst.exact[rank]
        text = f"rank {rank} on {name} can need {need} bytes in some order, it has {limit}"
        if not worst.exact[rank]:
            text += " (the need is an upper bound)"
        largest = sorted(worst.alive[rank], key=lambda b: (-int(p.buffers.chunk_bytes[b] * p.buffers.chunks[b]), b))[:4]
        facts = {"rank": rank, "device": name, "need_bytes": need, "limit_bytes": limit, "largest": [p.buffer_name(b) for b in largest]}
        found.append(Finding(check="memory", message=text, witness=facts, status="wrong" if sure else "unknown"))
    return found
