"""Integer maximum flow: Dinic's algorithm on CSR arrays, compiled by numba.

What the planners need and general libraries lack: a value limit ("is the flow at least x?"), one network swept over many
sinks, capacities edited in place between flows, and 64-bit integers without silent wrap-around.

Source: Y. Dinitz, "Algorithm for solution of a problem of maximum flow in a network with power estimation", 1970.
Deviations: the level search starts at the sink and stops when it meets the source; the bottleneck of a path is computed
anew at every augmentation (carrying it on the stack goes stale once capacities exceed 1).
Cost: O(V²·E) per flow; in practice close to O(E · levels).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported, UsageError
from .compile import allocating
from .effort import count_work

__all__ = ["MAX_CAPACITY", "FlowNetwork", "Sweep", "checked_capacities", "dinic"]

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

FLOW_WORK_S = 2e-8  # work of a flow per slot of the network: about the seconds of a quiet core

MAX_CAPACITY = (1 << 62) - 1  # sums of two quantities up to this stay below 2^63


def checked_capacities(values: Iterable[int], *, what: str = "capacities") -> I64:
    """Non-negative Python integers as int64, their sum below 2^62 so that no flow or cut can overflow.

    Raises: Unsupported when the sum is too large, UsageError on a negative value.
    """
    listed = list(values)
    total = sum(listed)
    if total > MAX_CAPACITY:
        raise Unsupported(
            f"{what} add up to {total}, more than {MAX_CAPACITY}: exact 64-bit max-flow is not possible",
            hint="round link rates to a coarser common unit (for instance whole MB/s)",
            data={"total": str(total)},
        )
    if listed and min(listed) < 0:
        raise UsageError(f"{what} must be >= 0, got {min(listed)}", hint="check the link rates")
    return np.array(listed, np.int64)


@allocating
def dinic(  # type: ignore[no-untyped-def]
    ptr, head, rev, residual, source, sink, limit, level, cursor, queue, path
):
    """Flow from source to sink, at most `limit`. Uses up `residual`. Below the limit, `level >= 0` marks a min cut's sink side."""
    nodes = len(ptr) - 1
    flow = np.int64(0)
    while flow < limit:
        for v in range(nodes):
            level[v] = -1
        # Levels count hops to the sink over arcs with room. Searching from the sink leaves its side of the cut marked when the source is not
        # met.
        level[sink] = 0
        queue[0] = sink
        done, found = 0, 1
        while done < found and level[source] < 0:
            v, done = queue[done], done + 1
            for a in range(ptr[v], ptr[v + 1]):
                u = head[a]
                if level[u] < 0 and residual[rev[a]] > 0:
                    level[u] = level[v] + 1
                    queue[found] = u
                    found += 1
        if level[source] < 0:
            return flow
        for v in range(nodes):
            cursor[v] = ptr[v]
        depth, u = 0, source
        while True:
            # A path is complete: what fits through its narrowest arc goes along it.
            if u == sink:
                amount = limit - flow
                for i in range(depth):
                    amount = min(amount, residual[path[i]])
                first = depth
                for i in range(depth - 1, -1, -1):
                    a = path[i]
                    residual[a] -= amount
                    residual[rev[a]] += amount
                    if residual[a] == 0:
                        # Ends up at the full arc nearest to the source: the search goes on from its tail, the path before it is still open.
                        first = i
                flow += amount
                if flow >= limit:
                    return flow
                depth = first
                u = head[rev[path[depth]]]
                continue
            advanced = False
            while cursor[u] < ptr[u + 1]:
                a = cursor[u]
                # Only arcs one level nearer to the sink: every path found is a shortest one, so the levels rise from phase to phase.
                if residual[a] > 0 and level[head[a]] >= 0 and level[head[a]] == level[u] - 1:
                    path[depth] = a
                    depth += 1
                    u = head[a]
                    advanced = True
                    break
                # An arc that fails once fails for the rest of the phase: along these levels room only shrinks.
                cursor[u] += 1
            if not advanced:
                if u == source:
                    break
                depth -= 1
                u = head[rev[path[depth]]]
                cursor[u] += 1
    return flow


@allocating
def _sweep(  # type: ignore[no-untyped-def]
    ptr, head, rev, capacity, residual, source, sinks, need, level, cursor, queue, path
):
    """First index in `sinks` that cannot receive `need` from the source, and its flow; (-1, need) when all can."""
    for i in range(len(sinks)):
        for a in range(len(head)):
            residual[a] = capacity[a]
        flow = dinic(ptr, head, rev, residual, source, np.int64(sinks[i]), need, level, cursor, queue, path)
        # The residual network begins anew for each sink: their flows are separate questions, not one flow.
        if flow < need:
            return i, flow
    return -1, need


@dataclass(frozen=True)
class Sweep:
    """Outcome of testing many sinks. `failed` is a node or -1; `flow` is its maximum flow (less than what was asked)."""

    failed: int
    flow: int


@dataclass
class FlowNetwork:
    """A directed network with integer capacities that may be edited between flows; buffers are reused.

    Every pair of connected nodes has one slot per direction; `rev` joins the two. Build with `FlowNetwork.of`.
    """

    nodes: int
    ptr: I32
    head: I32
    rev: I32
    capacity: I64
    _keys: I64
    _residual: I64 = field(init=False)
    _level: I32 = field(init=False)
    _work: tuple[I32, I32, I32] = field(init=False)

    def __post_init__(self) -> None:
        self._residual = np.empty_like(self.capacity)
        self._level = np.empty(self.nodes, np.int32)
        self._work = (np.empty(self.nodes, np.int32), np.empty(self.nodes, np.int32), np.empty(self.nodes + 1, np.int32))

    @staticmethod
    def of(nodes: int, arcs: Mapping[tuple[int, int], int]) -> FlowNetwork:
        """Network with `nodes` nodes and the given capacities; zero capacities keep a slot to be raised later.

        Raises: UsageError on loops and node numbers out of range; Unsupported when capacities overflow.
        """
        for u, v in arcs:
            if u == v or not (0 <= u < nodes and 0 <= v < nodes):
                raise UsageError(f"arc ({u}, {v}) of a network with {nodes} nodes", hint="arcs join two different nodes")
        pairs = np.array(list(arcs), np.int64).reshape(-1, 2)
        return FlowNetwork.of_arrays(nodes, pairs[:, 0], pairs[:, 1], checked_capacities(arcs.values()))

    @staticmethod
    def of_arrays(nodes: int, tails: I64, heads: I64, capacities: I64) -> FlowNetwork:
        """The same from columns; arcs given twice count once, with the last capacity. The caller keeps the capacities' sum below MAX_CAPACITY."""
        forward = tails * nodes + heads
        # Sorted by tail, then head: a CSR whose slots can be found by bisection; each arc brings its reverse, with capacity 0 unless given.
        keys = np.unique(np.concatenate([forward, heads * nodes + tails]))
        tail, head = keys // max(nodes, 1), keys % max(nodes, 1)
        ptr = np.zeros(nodes + 1, np.int32)
        np.cumsum(np.bincount(tail, minlength=nodes), out=ptr[1:])
        rev = np.searchsorted(keys, head * nodes + tail).astype(np.int32)
        capacity = np.zeros(len(keys), np.int64)
        capacity[np.searchsorted(keys, forward)] = capacities
        return FlowNetwork(nodes, ptr, head.astype(np.int32), rev, capacity, keys)

    def slots(self, tails: Sequence[int] | I64, heads: Sequence[int] | I64) -> I64:
        """Slot numbers of arcs that exist; raises UsageError for one that has no slot."""
        keys = np.asarray(tails, np.int64) * self.nodes + np.asarray(heads, np.int64)
        at: I64 = np.searchsorted(self._keys, keys).astype(np.int64)
        missing = (at >= len(self._keys)) | (self._keys[np.minimum(at, len(self._keys) - 1)] != keys) if len(self._keys) else np.ones(len(keys), bool)
        if np.any(missing):
            i = int(np.argmax(missing))
            raise UsageError(f"no arc from node {int(keys[i]) // self.nodes} to {int(keys[i]) % self.nodes}", hint="give it capacity 0 when building")
        return at

    def max_flow(self, source: int, sink: int, *, limit: int = MAX_CAPACITY) -> int:
        """Maximum flow, or `limit` if it is at least that. Source and sink must differ."""
        if source == sink:
            raise UsageError(f"flow from node {source} to itself", hint="choose two different nodes")
        np.copyto(self._residual, self.capacity)
        count_work(FLOW_WORK_S * len(self.head))
        return int(dinic(self.ptr, self.head, self.rev, self._residual, source, sink, limit, self._level, *self._work))

    def sink_side(self) -> NDArray[np.bool_]:
        """Nodes from which the sink can still be reached after the last `max_flow`, if that met no limit: the sink's side of a minimum cut."""
        return self._level >= 0

    def flows(self) -> dict[tuple[int, int], int]:
        """Units on every arc that carries some, of the last `max_flow`."""
        used = np.flatnonzero(self.capacity > self._residual)
        tails = np.searchsorted(self.ptr, used, side="right") - 1
        amounts = (self.capacity - self._residual)[used].tolist()
        return dict(zip(zip(tails.tolist(), self.head[used].tolist(), strict=True), amounts, strict=True))

    def sweep(self, source: int, sinks: I32, need: int) -> Sweep:
        """Can every sink receive `need` from the source? Stops at the first that cannot and moves it to the front of `sinks`."""
        at, flow = _sweep(self.ptr, self.head, self.rev, self.capacity, self._residual, source, sinks, need, self._level, *self._work)
        count_work(FLOW_WORK_S * len(self.head) * (len(sinks) if at < 0 else at + 1))
        if at < 0:
            return Sweep(-1, need)
        failed = int(sinks[at])
        # The sink that failed goes first: after a small change it most likely fails again, at the price of one flow.
        sinks[1 : at + 1] = sinks[:at].copy()
        sinks[0] = failed
        return Sweep(failed, int(flow))

    def source_side(self) -> NDArray[np.bool_]:
        """Nodes on the source's side of a minimum cut, after a flow that stayed below its limit."""
        side: NDArray[np.bool_] = self._level < 0
        return side
