"""A second opinion that shares nothing with the checker: runs a call-free program step by step in a random order on integers.

Written from the definitions in `meshwright.program`: lanes in order, `after` with lag, FIFO channels of limited depth, a fused step receives
and then sends. A compute step hashes what it reads. A buffer whose last steps are complete holds garbage from then on.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable

from meshwright.program.program import Contract, Kind, Part, Program, Step

PRIME = (1 << 61) - 1


class Deadlocked(Exception):
    """No lane can move and some are not at their end."""


class Machine:
    def __init__(self, p: Program, *, seed: int, replica: Callable[[int], int] = lambda rank: 0, credits: bool = True) -> None:
        self.p, self.rng, self.replica, self.credits = p, random.Random(seed), replica, credits
        self.turn = [0] * len(p.lanes)
        self.at = [int(s) for s in p.lanes.start]
        self.received: list[list[int] | None] = [None] * len(p.lanes)  # value of a fused step between its receive and its send
        self.done = [0] * len(p.steps)  # completed iterations
        self.queue: dict[int, deque[list[int]]] = {c: deque() for c in range(len(p.channels))}
        self.repeat = [int(r) for r in p.lanes.repeat]
        self.lane_of = p.lane_of_step().tolist()
        self.steps = list(p.iter_steps())
        self.memory: dict[int, dict[int, int]] = {}
        self.dead: set[int] = set()
        self.ends = [p.buffers.last[b].tolist() for b in range(len(p.buffers))]
        self.order: list[tuple[int, int]] = []

    # ---- memory: byte-addressed in units of chunks of the root -----------------------------------------------------
    def cells(self, buffer: int, chunk: int, count: int, turn: int) -> list[tuple[int, int]]:
        b = self.p.buffers
        unit = int(b.chunk_bytes[buffer])
        offset, root = chunk * unit, buffer
        while b.alias_of[root] >= 0:
            offset += int(b.alias_offset_bytes[root])
            root = int(b.alias_of[root])
        window = int(b.window[root])
        slot = turn % window if window else turn
        offset += slot * int(b.chunks[root] * b.chunk_bytes[root])
        return [(root, offset + i * unit) for i in range(count)] if unit else []

    def load(self, buffer: int, chunk: int, count: int, turn: int) -> list[int]:
        out = []
        for root, at in self.cells(buffer, chunk, count, turn):
            value = self.memory.setdefault(root, {}).get(at)
            out.append(self.initial(root, at) if value is None else value)
        return out

    def initial(self, root: int, at: int) -> int:
        role, name = int(self.p.buffers.role[root]), self.p.buffers.name[root] if self.p.buffers.name else ""
        if role == 3 or name.startswith("grad"):  # gradients start at zero
            return 0
        if role == 5:
            return self.rng.randrange(PRIME)  # garbage, another each time
        return _hash("initial", int(self.p.buffers.actor[root]) if role != 2 else -1, root if role not in (2, 4) else role, at)

    def save(self, buffer: int, chunk: int, values: list[int], turn: int) -> None:
        for (root, at), value in zip(self.cells(buffer, chunk, len(values), turn), values, strict=False):
            self.memory.setdefault(root, {})[at] = value % PRIME

    # ---- steps -------------------------------------------------------------------------------------------------
    def may_run(self, lane: int) -> bool:
        if self.at[lane] >= self.p.lanes.end[lane]:
            return False
        st, turn = self.steps[self.at[lane]], self.turn[lane]
        if self.received[lane] is None:
            for d, lag in st.after:
                once = self.repeat[self.lane_of[d]] == 1 and self.repeat[lane] > 1
                need = 1 if once else turn - lag + 1
                if self.done[d] < need:
                    return False
            if Part.RECV in st.parts:
                return all(self.queue[c] for c in self.sources(st))
        return self.room(st)

    def sources(self, st: Step) -> list[int]:
        return self.p.channels.sets[st.chan_in].tolist() if Part.IN_SET in st.parts else [st.chan_in]

    def sinks(self, st: Step) -> list[int]:
        return self.p.channels.sets[st.chan_out].tolist() if Part.OUT_SET in st.parts else [st.chan_out]

    def room(self, st: Step) -> bool:
        return Part.SEND not in st.parts or not self.credits or all(len(self.queue[c]) < self.p.channels.depth[c] for c in self.sinks(st))

    def run_part(self, lane: int) -> None:
        st, turn = self.steps[self.at[lane]], self.turn[lane]
        if st.kind is Kind.COMPUTE:
            self.compute(st, turn)
        value = self.received[lane]
        if st.kind is Kind.TRANSFER and value is None:
            value = [0] * st.count
            if Part.RECV in st.parts:
                got = [self.queue[c].popleft() for c in self.sources(st)]
                value = [sum(row) for row in zip(*got, strict=False)]
            if Part.READ in st.parts:
                here = self.load(*st.src, st.count, turn)
                value = [a + b for a, b in zip(value, here, strict=False)] if Part.RECV in st.parts else here
            if Part.STORE in st.parts:
                if Part.ADD in st.parts and Part.RECV not in st.parts:
                    value = [a + b for a, b in zip(value, self.load(*st.dst, st.count, turn), strict=False)]
                self.save(*st.dst, value, turn)
            if Part.RECV in st.parts and Part.SEND in st.parts and not self.room(st):
                self.received[lane] = value
                return
        if Part.SEND in st.parts:
            assert value is not None
            for c in self.sinks(st):
                self.queue[c].append([v % PRIME for v in value])
        self.received[lane] = None
        self.finish(lane, st)

    def finish(self, lane: int, st: Step) -> None:
        self.order.append((st.index, self.turn[lane]))
        self.done[st.index] += 1
        self.at[lane] += 1
        if self.at[lane] == self.p.lanes.end[lane] and self.turn[lane] + 1 < self.repeat[lane]:
            self.turn[lane] += 1
            self.at[lane] = int(self.p.lanes.start[lane])
        for b, ends in enumerate(self.ends):
            free = b not in self.dead and not self.p.buffers.persistent[b] and self.p.buffers.alias_of[b] < 0
            if ends and free and all(self.done[x] >= self.repeat[self.lane_of[x]] for x in ends):
                self.dead.add(b)
                for turn in range(max(self.repeat)):
                    count = int(self.p.buffers.chunks[b])
                    self.save(b, 0, [self.rng.randrange(PRIME) for _ in range(count)], turn)

    def compute(self, st: Step, turn: int) -> None:
        o = self.p.ops
        op = st.op
        seen = [self.load(b, c, n, turn) for b, c, n in o.reads[op].reshape(-1, 3).tolist()]
        replica = self.replica(st.actor) if o.name[op] == "F" else -1
        result = []
        for k, (b, c, n) in enumerate(o.writes[op].reshape(-1, 3).tolist()):
            key = (o.name[op], o.graph[op], int(o.microbatch[op]), int(o.part[op]), replica, str(seen), k)
            result.append((b, c, [_hash(*key, i) for i in range(n)]))
        for b, c, values in result:
            if o.accumulate[op]:
                values = [a + v for a, v in zip(values, self.load(b, c, len(values), turn), strict=False)]
            self.save(b, c, values, turn)

    def run(self) -> Machine:
        lanes = list(range(len(self.p.lanes)))
        urgent = [self.rng.random() for _ in lanes]
        while True:
            ready = [x for x in lanes if self.may_run(x)]
            if not ready:
                break
            if self.rng.random() < 0.05:
                urgent[self.rng.choice(lanes)] = self.rng.random()
            lane = max(ready, key=urgent.__getitem__) if self.rng.random() < 0.8 else self.rng.choice(ready)
            self.run_part(lane)
        if any(self.done[s.index] < self.repeat[self.lane_of[s.index]] for s in self.steps):
            raise Deadlocked
        return self

    def result(self, buffer: int, chunk: int, count: int, turn: int) -> list[int]:
        return self.load(buffer, chunk, count, turn)


def _hash(*key: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")


def _block(values: list[int], number: int, n: int) -> list[int]:
    each = len(values) // n
    return values[number * each : (number + 1) * each]


def collective_is_right(p: Program, seed: int) -> bool:
    """Runs once and compares every output with the contract, computed on the integers that the inputs start with."""
    return all(_claim_is_right(p, c, seed) for c in p.contracts)


def _claim_is_right(p: Program, c: Contract, seed: int) -> bool:
    n = len(c.inputs)
    turns = int(p.lanes.repeat.max())
    fresh = Machine(p, seed=0)
    inputs = {(r, t): fresh.load(*c.inputs[r], t) for r in range(n) for t in range(turns)}
    try:
        m = Machine(p, seed=seed).run()
    except Deadlocked:
        return False
    for t in range(turns):
        total = [sum(col) % PRIME for col in zip(*(inputs[r, t] for r in range(n)), strict=False)]
        position = 0
        for r in range(n):
            out = m.result(*c.outputs[r], t)
            count = c.outputs[r][2]
            want = {
                "all-reduce": total,
                "reduce": total if r == c.root else out,
                "broadcast": inputs[c.root, t] if c.root >= 0 else [],
                "all-gather": [v for q in range(n) for v in inputs[q, t]],
                "gather": [v for q in range(n) for v in inputs[q, t]] if r == c.root else out,
                "reduce-scatter": total[position : position + count],
                "scatter": inputs[c.root, t][position : position + count] if c.root >= 0 else [],
                "all-to-all": [v for q in range(n) for v in _block(inputs[q, t], r, n)],
                "permute": inputs[c.peers[r], t] if c.peers and c.peers[r] >= 0 else out,
            }[c.op]
            position += count
            if out != want:
                return False
    return True
