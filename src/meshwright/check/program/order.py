"""What every check reads a program as: messages, accesses, addresses, and the happens-before order of its (step, iteration) nodes.

Happens-before = lane order + `after` + channel matching (the j-th send with the j-th receive). Credits are not in it.
`Order` unrolls the first `iterations` turns of every lane. It is exact for questions about turns i and i+d, d < iterations:
every edge leads to the same or a later turn and is the same at every turn, so a path between turns i and i+d exists
exactly if the one between turns 0 and d does. `Order.before` answers by vector clocks: per node the position of the last ancestor in each
lane. Only nodes with an edge from another lane ("joins") carry a clock row, with columns for the lanes of their connected component.
Where that would be too much, it walks back from every node asked about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import TimeLimit
from ...program.program import Kind, Part, Program
from .clock_kernel import first_come, merge_clocks

__all__ = ["Accesses", "Addresses", "Messages", "Order", "accesses", "messages", "topological", "wait_once"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
BLOCK_LANES = 64  # lanes that share one table of vector clocks; lanes of other components have no column in it
MAX_CLOCK_ENTRIES = 4_000_000_000  # clock entries of a program that are computed, about a nanosecond each; beyond it `before` searches
MAX_TABLE_ENTRIES = 250_000_000  # of one block: 4 bytes each
MAX_KEPT_CLOCK_ENTRIES = 60_000_000  # of a program whose tables are all kept
KEPT_TABLES = 2  # of a larger one, those used last
MAX_SEARCHED_JOINS = 30_000_000  # joins that searches may visit in one program before order counts as undecided


@dataclass(frozen=True)
class Messages:
    """Matched messages of one iteration: `send[k]` and `recv[k]` are steps, `ordinal[k]` counts within `channel[k]`."""

    channel: Ints
    ordinal: Ints
    send: Ints
    recv: Ints
    per_channel: Ints


def ports(p: Program, part: Part, in_set: Part, column: str) -> tuple[Ints, Ints]:
    """(step, channel) of every send or receive, channel sets expanded, in step order."""
    s = p.steps
    chan = getattr(s, column).astype(np.int64)
    has = (s.kind == Kind.TRANSFER) & ((s.parts & part) != 0)
    single = np.flatnonzero(has & ((s.parts & in_set) == 0))
    multi = np.flatnonzero(has & ((s.parts & in_set) != 0))
    if not len(multi):
        return single.astype(np.int64), chan[single]
    sets = p.channels.sets
    width = np.diff(sets.ptr)[chan[multi]]
    step = np.concatenate([single, np.repeat(multi, width)])
    channel = np.concatenate([chan[single], *[sets[int(c)] for c in chan[multi]]])
    order = np.argsort(step, kind="stable")
    return step[order], channel[order].astype(np.int64)


def messages(p: Program) -> Messages:
    """Match sends and receives; the caller has checked that their counts agree."""
    # Channels are first in, first out, with one lane at each end: sorted by channel, the j-th send and the j-th receive are one message.
    send_step, send_chan = ports(p, Part.SEND, Part.OUT_SET, "chan_out")
    recv_step, recv_chan = ports(p, Part.RECV, Part.IN_SET, "chan_in")
    # Stable sorts keep step order within a channel, which is lane order.
    by_send, by_recv = np.argsort(send_chan, kind="stable"), np.argsort(recv_chan, kind="stable")
    per_channel = np.bincount(send_chan, minlength=len(p.channels)).astype(np.int64)
    channel = send_chan[by_send]
    first = np.cumsum(per_channel) - per_channel
    return Messages(channel, np.arange(len(channel)) - first[channel], send_step[by_send], recv_step[by_recv], per_channel)


@dataclass(frozen=True)
class Accesses:
    """Which chunks a step touches: ranges (buffer, chunk, count); `read` and `write` may both hold."""

    step: Ints
    buffer: Ints
    chunk: Ints
    count: Ints
    read: Bools
    write: Bools


def accesses(p: Program) -> Accesses:
    s, o = p.steps, p.ops
    transfer = s.kind == Kind.TRANSFER
    reads = transfer & ((s.parts & Part.READ) != 0)
    into = transfer & ((s.parts & Part.STORE) != 0)
    # With RECV, ADD means message + src -> dst; without it, src + dst -> dst: only then is `dst` read.
    adds_present = into & ((s.parts & Part.ADD) != 0) & ((s.parts & Part.RECV) == 0)
    found: list[list[Ints]] = []

    def put(step: Any, buffer: Any, chunk: Any, count: Any, read: Any, write: Any) -> None:
        found.append([np.asarray(x, dtype=np.int64) for x in (step, buffer, chunk, count, read, write)])

    at = np.flatnonzero(reads)
    put(at, s.src_buffer[at], s.src_chunk[at], s.count[at], np.ones(len(at)), np.zeros(len(at)))
    at = np.flatnonzero(into)
    put(at, s.dst_buffer[at], s.dst_chunk[at], s.count[at], adds_present[at], np.ones(len(at)))
    work = np.flatnonzero(s.kind == Kind.COMPUTE)
    for csr, writes in ((o.reads, False), (o.writes, True)):
        if not len(work) or not len(csr.values):
            continue
        # Ranges of an op are triples (buffer, chunk, count) in one flat list.
        ptr = csr.ptr.astype(np.int64) // 3
        width = (ptr[1:] - ptr[:-1])[s.op[work]]
        step = np.repeat(work, width)
        # Number of each row within its own step's list: the usual arange over runs of unequal length.
        inner = np.arange(len(step)) - np.repeat(np.cumsum(width) - width, width)
        row = csr.values.reshape(-1, 3)[np.repeat(ptr[s.op[work]], width) + inner]
        accumulate = o.accumulate[s.op[step]] != 0 if writes else np.ones(len(step))
        put(step, row[:, 0], row[:, 1], row[:, 2], accumulate, np.full(len(step), writes))
    step, buffer, chunk, count, read, write = (np.concatenate([f[k] for f in found]) for k in range(6))
    keep = (buffer >= 0) & (count > 0)
    return Accesses(step[keep], buffer[keep], chunk[keep], count[keep], read[keep] != 0, write[keep] != 0)


class Addresses:
    """Where chunks lie: root buffer (aliases followed), byte offset in it, and one slice per resident iteration.

    A slice of an alias lies in the same slice of its root. Sizes by symbol count with their upper bound.
    """

    def __init__(self, p: Program) -> None:
        b = p.buffers
        self.program = p
        self.unit: Ints = np.where(b.size >= 0, p.sizes.upper[np.maximum(b.size, 0)] if len(p.sizes) else 0, b.chunk_bytes).astype(np.int64)
        self.unit = np.where((self.unit == 0) & (b.alias_of < 0), 1, self.unit)  # empty buffers still order their users
        self.size: Ints = self.unit * b.chunks
        self.root: Ints = np.arange(len(b), dtype=np.int64)
        self.offset: Ints = np.zeros(len(b), np.int64)
        up, step = b.alias_of.astype(np.int64), b.alias_offset_bytes.astype(np.int64)
        while np.any(live := up >= 0):  # alias chains are short and acyclic (wellformed)
            self.offset = np.where(live, self.offset + step, self.offset)
            self.root = np.where(live, up, self.root)
            step, up = np.where(live, b.alias_offset_bytes[np.maximum(up, 0)], 0), np.where(live, b.alias_of[np.maximum(up, 0)], -1)
        self.window: Ints = b.window.astype(np.int64)

    def slot(self, buffer: Ints, iteration: Ints) -> Ints:
        w = self.window[buffer]
        return np.where(w > 0, iteration % np.maximum(w, 1), iteration)

    def span(self, buffer: Ints, chunk: Ints, count: Ints, iteration: Ints) -> tuple[Ints, Ints, Ints]:
        """(root, first byte, end byte) of chunk ranges at an iteration."""
        root = self.root[buffer]
        lo = self.slot(buffer, iteration) * self.size[root] + self.offset[buffer] + chunk * self.unit[buffer]
        return root, lo, lo + count * self.unit[buffer]

    def chunk_at(self, buffer: int, byte: int) -> int:
        """Chunk of `buffer` that holds a byte of its root (within a slice)."""
        inside = byte % max(1, int(self.size[self.root[buffer]])) - int(self.offset[buffer])
        return max(0, inside) // max(1, int(self.unit[buffer]))


def wait_once(p: Program, lane_of: Ints) -> Bools:
    """Which `after` edges lead from a lane of repeat 1 into a repeated lane."""
    s = p.steps
    owner = np.repeat(np.arange(len(s)), np.diff(s.after_ptr))
    out: Bools = (p.lanes.repeat[lane_of[s.after_step]] == 1) & (p.lanes.repeat[lane_of[owner]] > 1)
    return out


def topological(n: int, src: Ints, dst: Ints) -> Ints:
    """Nodes in an order that respects the edges; shorter than `n` if there is a cycle (then cycle nodes and all after them lack)."""
    start = np.concatenate([[0], np.cumsum(np.bincount(src, minlength=n))])
    left = np.bincount(dst, minlength=n)
    free = np.flatnonzero(left == 0)
    order = np.zeros(n, np.int64)
    order[: len(free)] = free
    return order[: first_come(dst[np.argsort(src, kind="stable")], start, left, order, len(free))]


class Order:
    """Nodes (step, iteration) of the first `iterations` turns, cross edges, a topological order, and `before`."""

    def __init__(self, p: Program, *, iterations: int = 1) -> None:
        self.program = p
        la, s = p.lanes, p.steps
        self.lane_of_step = p.lane_of_step().astype(np.int64)
        self.turns: Ints = np.minimum(la.repeat, iterations).astype(np.int64)
        self.length: Ints = (la.end - la.start).astype(np.int64)
        self.base: Ints = np.concatenate([[0], np.cumsum(self.turns * self.length)]).astype(np.int64)
        self.n = int(self.base[-1])
        self.lane: Ints = np.repeat(np.arange(len(la)), self.turns * self.length)
        # Nodes of a lane are consecutive: all steps of turn 0, then of turn 1; so `position` is the place in the lane's whole run.
        self.position: Ints = np.arange(self.n) - self.base[self.lane]
        width = np.maximum(self.length, 1)[self.lane]
        self.iteration: Ints = self.position // width
        self.step: Ints = la.start[self.lane] + self.position % width
        owner = np.repeat(np.arange(len(s)), np.diff(s.after_ptr))
        once = wait_once(p, self.lane_of_step)
        m = messages(p)
        edges: list[tuple[Ints, Ints]] = []
        for i in range(iterations):
            lag = s.after_lag.astype(np.int64)
            # An edge of lag L into turn i comes from turn i - L; of an edge out of a lane that runs once only turn 0 waits.
            use = np.where(once, i == 0, (lag <= i) & (self.turns[self.lane_of_step[owner]] > i))
            edges.append((self.node(s.after_step[use], np.where(once[use], 0, i - lag[use])), self.node(owner[use], i)))
            use = self.turns[self.lane_of_step[m.send]] > i
            edges.append((self.node(m.send[use], i), self.node(m.recv[use], i)))
        self.cross_src: Ints = np.concatenate([e[0] for e in edges])
        self.cross_dst: Ints = np.concatenate([e[1] for e in edges])
        self.edge_keys: Ints = np.append(np.sort(self.cross_src * self.n + self.cross_dst), np.iinfo(np.int64).max)  # ascending, with an end
        # Edges were appended in turns, `after` then matching, so odd entries are messages.
        self.cross_match: Bools = np.concatenate([np.full(len(e[0]), k % 2 == 1) for k, e in enumerate(edges)])
        local = np.flatnonzero(~self.cross_match)
        self.local_edges: Ints = local[np.argsort(self.cross_dst[local], kind="stable")]  # those that are no messages, by target
        # Lane order as edges from each node's predecessor in its lane; with them the order is one of all constraints.
        inner = np.flatnonzero(self.position > 0)
        self.order = topological(self.n, np.concatenate([inner - 1, self.cross_src]), np.concatenate([inner, self.cross_dst]))
        self.rank_in_order: Ints = np.zeros(self.n, np.int64)
        self.rank_in_order[self.order] = np.arange(len(self.order))
        self._joins()
        self._components()
        self._cache: dict[int, NDArray[np.int32]] = {}

    def node(self, step: Any, iteration: Any) -> Ints:
        lane = self.lane_of_step[step]
        out: Ints = self.base[lane] + iteration * self.length[lane] + step - self.program.lanes.start[lane]
        return out

    def _joins(self) -> None:
        """Join rows: node -> last join at or before it in its lane (0 = none; rows start at 1)."""
        is_join = np.zeros(self.n, bool)
        is_join[self.cross_dst] = True
        joins = np.flatnonzero(is_join)
        row = np.zeros(self.n, np.int64)
        row[joins] = np.arange(1, len(joins) + 1)
        # The running maximum finds the last join among all nodes so far; it counts only if it lies in this lane, at or after its start.
        last = np.maximum.accumulate(np.where(is_join, row, 0)) if self.n else row
        first_of_lane = np.where(self.position == 0, np.arange(self.n), 0)
        start = np.maximum.accumulate(first_of_lane) if self.n else first_of_lane
        owner = np.concatenate([[-1], joins])
        self.row: Ints = np.where(owner[last] >= start, last, 0)
        self.row_before: Ints = np.where(self.position > 0, np.concatenate([[0], self.row[:-1]]), 0) if self.n else self.row
        self.rows = len(joins) + 1
        self.join_nodes: Ints = joins

    def _components(self) -> None:
        """Lanes that can influence each other, and blocks of BLOCK_LANES of them: a clock has no columns for other components."""
        lanes = len(self.program.lanes)
        label = list(range(lanes))

        def find(x: int) -> int:
            while label[x] != x:
                label[x] = label[label[x]]
                x = label[x]
            return x

        # Union-find over lanes: what no chain of edges joins cannot be ordered, and needs no clocks against each other.
        pairs = np.unique(self.lane[self.cross_src] * lanes + self.lane[self.cross_dst])
        for pair in pairs.tolist():
            label[find(pair // lanes)] = find(pair % lanes)
        component = np.array([find(x) for x in range(lanes)], dtype=np.int64)
        by = np.argsort(component, kind="stable")
        # Lanes of a component are numbered from 0, and cut into blocks of BLOCK_LANES: a block's clocks are computed only when asked for.
        first = np.searchsorted(component[by], component[by])
        place = np.arange(lanes) - first
        self.component, self.block_of_lane, self.column = component, np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        new_block = (place % BLOCK_LANES == 0).astype(np.int64)
        self.block_of_lane[by] = np.cumsum(new_block) - 1
        self.column[by] = place % BLOCK_LANES
        self.lanes_of_block = np.split(by, np.flatnonzero(new_block)[1:]) if lanes else []
        owner = self.component[self.lane[self.join_nodes]] if len(self.join_nodes) else self.join_nodes
        self.component_of_row: Ints = np.concatenate([[-1], owner])
        by_row = np.argsort(owner, kind="stable")
        self.local_row = np.zeros(self.rows, np.int64)  # row within its component, 0 = none
        if len(owner):
            self.local_row[1 + by_row] = 1 + np.arange(len(owner)) - np.searchsorted(owner[by_row], owner[by_row])
        self.rows_of = np.bincount(owner, minlength=lanes) + 1 if lanes else self.local_row
        joined = self.component[self.lane[self.cross_dst]]
        self.edges: Ints = np.lexsort((self.rank_in_order[self.cross_dst], joined))
        self.edges_of: Ints = np.searchsorted(joined[self.edges], np.arange(lanes + 1))
        width = np.array([len(x) for x in self.lanes_of_block], dtype=np.int64)
        lead = np.array([int(x[0]) for x in self.lanes_of_block], dtype=np.int64)
        entries = self.rows_of[self.component[lead]] * width if len(lead) else width
        self.clock_cost, self.largest_table = int(entries.sum()), int(entries.max(initial=0))

    @property
    def clocked(self) -> bool:
        """Whether clocks are computed; where they would be too many, `before` searches."""
        return self.clock_cost <= MAX_CLOCK_ENTRIES and self.largest_table <= MAX_TABLE_ENTRIES

    def clocks(self, block: int) -> NDArray[np.int32]:
        """Per join row (`local_row`) of the block's component the last ancestor position in the lanes of the block (-1: none)."""
        if block in self._cache:
            self._cache[block] = self._cache.pop(block)  # used last
            return self._cache[block]
        here = int(self.component[(lanes := self.lanes_of_block[block])[0]])
        clock = np.full((int(self.rows_of[here]), len(lanes)), -1, np.int32)
        # In topological order every source's clock is final before it is merged.
        mine = self.edges[self.edges_of[here] : self.edges_of[here + 1]]
        target, source = self.cross_dst[mine], self.cross_src[mine]
        column = np.where(self.block_of_lane[self.lane[source]] == block, self.column[self.lane[source]], -1)
        merge_clocks(
            self.local_row[self.row[target]], self.local_row[self.row_before[target]], self.local_row[self.row[source]], self.position[source],
            column, clock,
        )  # fmt: skip
        if self.clock_cost > MAX_KEPT_CLOCK_ENTRIES:
            for oldest in [*self._cache][: -(KEPT_TABLES - 1)]:  # questions come block by block, or of one lane against each of the others
                del self._cache[oldest]
        self._cache[block] = clock
        return clock

    def before(self, a: Ints, b: Ints) -> Bools:
        """Whether node a[k] happens before node b[k] (strictly), for every k. Raises TimeLimit where that takes too long."""
        # In one lane position decides. Across lanes only nodes of one component can be ordered, and only along the topological order.
        out: Bools = (self.lane[a] == self.lane[b]) & (self.position[a] < self.position[b])
        across = (self.lane[a] != self.lane[b]) & (self.component[self.lane[a]] == self.component[self.lane[b]])
        across = np.flatnonzero(across & (self.rank_in_order[a] < self.rank_in_order[b]))
        pair = a[across] * self.n + b[across]
        out[across] = self.edge_keys[np.searchsorted(self.edge_keys, pair)] == pair
        across = across[~out[across]]  # most pairs are the ends of one edge: those need no clocks, whose tables are lanes times joins
        if not self.clocked:
            out[across] = self._search(a[across], b[across])
            return out
        block = self.block_of_lane[self.lane[a[across]]]
        by = np.argsort(block, kind="stable")
        for at in np.split(across[by], np.flatnonzero(np.diff(block[by])) + 1) if len(by) else []:
            clock = self.clocks(int(self.block_of_lane[self.lane[a[at[0]]]]))
            # a precedes b when the last join at or before b has seen a's lane at least as far as a.
            out[at] = clock[self.local_row[self.row[b[at]]], self.column[self.lane[a[at]]]] >= self.position[a[at]]
        return out

    def _search(self, a: Ints, b: Ints) -> Bools:
        """`before` by walking back from every b over joins no earlier (in the topological order) than what is sought."""
        by = np.argsort(self.cross_dst, kind="stable")
        ptr = np.searchsorted(self.row[self.cross_dst[by]], np.arange(self.rows + 1)).tolist()
        source = self.cross_src[by].tolist()
        lane, position, row, rank = self.lane.tolist(), self.position.tolist(), self.row.tolist(), self.rank_in_order.tolist()
        join = [-1, *self.join_nodes.tolist()]
        row_before = self.row_before.tolist()
        sought: dict[int, list[int]] = {}
        for k, target in enumerate(b.tolist()):
            sought.setdefault(target, []).append(k)
        out: Bools = np.zeros(len(a), bool)
        start, steps = a.tolist(), 0
        for target, queries in sought.items():
            # A join before the earliest sought node in the topological order cannot have it as an ancestor: the walk ends there.
            floor = min(rank[start[k]] for k in queries)
            last, seen = dict[int, int](), set[int]()
            todo = [row[target]]
            while todo and queries:
                r = todo.pop()
                # Back along the lane, join by join. `last` is how far each other lane is seen; a lane is walked again only where it is seen
                # farther.
                while r and r not in seen and rank[join[r]] >= floor:
                    seen.add(r)
                    for v in source[ptr[r] : ptr[r + 1]]:
                        if last.get(lane[v], -1) < position[v]:
                            last[lane[v]] = position[v]
                            todo.append(row[v])
                    r = row_before[join[r]]
                found = [k for k in queries if last.get(lane[start[k]], -1) >= position[start[k]]]
                if found:
                    out[found] = True
                    queries = [k for k in queries if not out[k]]
            steps += len(seen)
            if steps > MAX_SEARCHED_JOINS:
                raise TimeLimit(f"the program is too large to decide the order of its steps ({self.rows} joins in {len(self.program.lanes)} lanes)")
        return out

    def last_ancestor(self, nodes: Ints, lane: int) -> Ints:
        """Position of the last node of `lane` that happens before each node (-1: none)."""
        # A node's clock says what its last join saw of other lanes; of its own lane all before it precede it.
        own = np.where(self.lane[nodes] == lane, self.position[nodes] - 1, -1)
        return np.maximum(self._column(lane, self.row[nodes]), own)

    def _column(self, lane: int, rows: Ints) -> Ints:
        """Per row (global, 0: none) the last ancestor position in one lane."""
        if not self.clocked:
            raise TimeLimit(f"the program is too large for exact clocks ({self.rows} joins in {len(self.program.lanes)} lanes)")
        out = np.full(len(rows), -1, np.int64)
        near = np.flatnonzero(self.component_of_row[rows] == self.component[lane])
        out[near] = self.clocks(int(self.block_of_lane[lane]))[self.local_row[rows[near]], int(self.column[lane])]
        return out

    def last_before_post(self, nodes: Ints, ahead: Ints, lane: int) -> Ints:
        """The same for the moment a receive may be posted: its own message does not count, nor do those of the `ahead` receives
        before it in its lane, which are posted in order but need not have arrived."""
        # Posting waits for lane order up to the first receive still open and for every `after` edge since, not for messages.
        first, targets, sources = nodes - ahead, self.cross_dst[self.local_edges], self.cross_src[self.local_edges]
        seen: Ints = np.maximum(self._column(lane, self.row_before[first]), np.where(self.lane[nodes] == lane, self.position[first] - 1, -1))
        begin, end = np.searchsorted(targets, first), np.searchsorted(targets, nodes, side="right")
        owner = np.repeat(np.arange(len(nodes)), end - begin)
        source = sources[np.arange(len(owner)) - np.repeat(np.cumsum(end - begin) - end, end - begin)]
        own = np.where(self.lane[source] == lane, self.position[source], -1)
        np.maximum.at(seen, owner, np.maximum(self._column(lane, self.row[source]), own))
        return seen
