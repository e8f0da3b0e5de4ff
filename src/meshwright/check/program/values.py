"""Values: what every buffer holds at the end, proved on sets of contributions instead of numbers.

A cell's value is a set of contributions to one quantity: `mask << 32 | quantity`. Adding takes the union; adding different
quantities or one contribution twice makes poison (`-1 - step`), an error only where a claim reads it. 0 is "nothing yet". The program must be
well-formed, live and free of races: then every order gives these values, and one topological order is executed. Buffers are cut into
cells by the greatest common divisor of all ranges used on the buffers that data moves between. Turns: see `races.turns_needed`.

Collectives: quantity = input chunk (and iteration), contribution = member. `Program.contracts` say what every output must be. Sums that a contract
wants as the fold of a tree are poison too where an addition is none of the tree's (`fold_tree`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import TimeLimit, Unsupported
from ...program.program import BUFFER_ROLES, CHUNKWISE, REPRODUCIBLE_SUMS, Contract, Kind, Part, Program
from ...program.tables import I32
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .fold_tree import FoldTrees
from .order import Accesses, Addresses, Ints, Order, accesses, messages
from .races import turns_needed
from .wellformed import witness

__all__ = ["QUANTITY_MASK", "Machine", "check_collective"]

MAX_CELLS = 40_000_000  # cells held and chunk moves, added up: each is followed by an interpreted loop
# Plain integers: an enum's `&` makes a member each time, and the loop over steps asks six times a step.
RECV, READ, STORE, ADD, SEND, IN_SET, OUT_SET = map(int, (Part.RECV, Part.READ, Part.STORE, Part.ADD, Part.SEND, Part.IN_SET, Part.OUT_SET))
COMPUTE, TRANSFER = int(Kind.COMPUTE), int(Kind.TRANSFER)
BESIDE = (BUFFER_ROLES.index("weight"), BUFFER_ROLES.index("gradient"))
QUANTITY_MASK = (1 << 32) - 1  # of a cell: which quantity it holds; the bits above are whose contributions


class Machine:
    """Executes transfers on sets of contributions; `compute` is left to those who know what the ops mean."""

    def __init__(
        self, p: Program, order: Order, *, nothing_is_zero: bool, grain: Ints | None = None, claimed: Sequence[tuple[int, int, int]] | None = None
    ) -> None:  # fmt: skip
        """`claimed`: ranges (buffer, first chunk, count) that are looked at from outside. With them, cells that neither they nor any step touch
        have no room: a relay of a scatter has a buffer as large as the job's data, and passes on some chunks of it."""
        self.p, self.order, self.nothing_is_zero = p, order, nothing_is_zero
        self.trees: FoldTrees | None = None  # of sums that must be folds
        self.where = Addresses(p)
        touched = accesses(p)
        self.cell = _cells(p, self.where, touched, grain)  # per buffer: bytes of a cell of its root
        # A window keeps the slices of so many turns; without one every turn has its own.
        top = np.where(self.where.window > 0, np.minimum(self.where.window, int(order.turns.max(initial=1))), int(order.turns.max(initial=1)))
        roots = np.flatnonzero(self.where.root == np.arange(len(p.buffers))).tolist()
        self.slice_cells: list[int] = (self.where.size // self.cell).tolist()  # per buffer: cells of one slice of its root that have room
        self.segments: dict[int, tuple[list[int], list[int]]] = {}
        if claimed is not None:
            self._leave_out(touched, claimed)
        cells = {b: int(top[b]) * self.slice_cells[b] for b in roots}
        if sum(cells.values()) + int(p.steps.count.astype(np.int64).sum()) > MAX_CELLS:
            raise TimeLimit("too many chunks to follow one by one")
        self.memory: dict[int, list[int]] = {b: [0] * n for b, n in cells.items()}
        self.writer: dict[int, list[int]] = {b: [-1] * n for b, n in cells.items()}
        self.queue: list[deque[list[int]]] = [deque() for _ in range(len(p.channels))]
        self.root, self.offset = self.where.root.tolist(), self.where.offset.tolist()
        self.unit: list[int] = self.where.unit.tolist()
        self.size: list[int] = self.where.size.tolist()
        self.window: list[int] = self.where.window.tolist()
        self.grain: list[int] = self.cell.tolist()

    def locate(self, buffer: int, chunk: int, count: int, turn: int) -> tuple[int, int, int]:
        """(root, first cell, end cell)."""
        root, g = self.root[buffer], self.grain[buffer]
        slot = turn % self.window[buffer] if self.window[buffer] else turn
        first, cells = (self.offset[buffer] + chunk * self.unit[buffer]) // g, count * self.unit[buffer] // g
        if cells and root in self.segments:
            starts, gaps = self.segments[root]
            first -= gaps[bisect_right(starts, first) - 1]
        first += slot * self.slice_cells[root]
        return root, first, first + cells

    def _leave_out(self, touched: Accesses, claimed: Sequence[tuple[int, int, int]]) -> None:
        """Cells that neither these accesses nor these ranges touch get no room: `segments` has, per root buffer, where each stretch that is touched
        starts, and how many cells before it have no room. All slices of a buffer are alike."""
        more = np.array(claimed, np.int64).reshape(-1, 3)
        buffer, chunk, count = (np.concatenate(x) for x in zip((touched.buffer, touched.chunk, touched.count), more.T, strict=True))
        root, unit = self.where.root[buffer], self.where.unit[buffer]
        start = (self.where.offset[buffer] + chunk * unit) // self.cell[root]
        stop = start + count * unit // self.cell[root]
        by = np.lexsort((start, root))
        self.slice_cells, end = [0] * len(self.slice_cells), [0] * len(self.slice_cells)
        for b, low, high in zip(root[by].tolist(), start[by].tolist(), stop[by].tolist(), strict=True):
            starts, gaps = self.segments.setdefault(b, ([], []))
            if not starts or low > end[b]:
                starts.append(low)
                gaps.append(low - self.slice_cells[b])
                end[b] = low
            self.slice_cells[b] += max(high - end[b], 0)
            end[b] = max(high, end[b])

    def add(self, a: int, b: int, step: int) -> int:
        # Poison stays poison and keeps the step that made it, for the witness.
        if a < 0 or b < 0:
            return a if a < 0 else b
        # Adding to nothing: a fresh gradient counts as zero; in a collective it reads memory that nobody wrote.
        if not a or not b:
            return (a or b) if self.nothing_is_zero else -1 - step
        # Different quantities do not belong together; a common contribution would be counted twice.
        if (a ^ b) & QUANTITY_MASK or (a >> 32) & (b >> 32):
            return -1 - step
        if self.trees is not None and not self.trees.allow(a & QUANTITY_MASK, a >> 32, b >> 32, step):
            return -1 - step
        return a | b

    def store(self, root: int, lo: int, hi: int, values: list[int], step: int) -> None:
        self.memory[root][lo:hi] = values
        self.writer[root][lo:hi] = [step] * (hi - lo)

    def run(self) -> None:
        s = self.p.steps
        kind, parts, count = s.kind.tolist(), s.parts.tolist(), s.count.tolist()
        src, src_chunk, dst, dst_chunk = s.src_buffer.tolist(), s.src_chunk.tolist(), s.dst_buffer.tolist(), s.dst_chunk.tolist()
        chan_in, chan_out = s.chan_in.tolist(), s.chan_out.tolist()
        sets, queue = self.p.channels.sets, self.queue
        # Any topological order will do: without races all of them leave the same values.
        nodes = zip(self.order.step[self.order.order].tolist(), self.order.iteration[self.order.order].tolist(), strict=True)
        for step, turn in nodes:
            if kind[step] == COMPUTE:
                self.compute(step, turn)
            if kind[step] != TRANSFER:
                continue
            part = parts[step]
            value: list[int] = []
            # The order of the parts within a step: receive, add what is read, store (or add into what is there), send on.
            if part & RECV:
                sources = sets[chan_in[step]].tolist() if part & IN_SET else (chan_in[step],)
                value = queue[sources[0]].popleft()
                for more in sources[1:]:
                    value = [self.add(a, b, step) for a, b in zip(value, queue[more].popleft(), strict=True)]
            if part & READ:
                root, lo, hi = self.locate(src[step], src_chunk[step], count[step], turn)
                here = self.memory[root][lo:hi]
                value = [self.add(a, b, step) for a, b in zip(value, here, strict=True)] if part & RECV else here
            if part & STORE:
                root, lo, hi = self.locate(dst[step], dst_chunk[step], count[step], turn)
                if part & ADD and not part & RECV:
                    value = [self.add(a, b, step) for a, b in zip(value, self.memory[root][lo:hi], strict=True)]
                self.store(root, lo, hi, value, step)
            if part & SEND:
                for out in sets[chan_out[step]].tolist() if part & OUT_SET else (chan_out[step],):
                    queue[out].append(value)

    def compute(self, step: int, turn: int) -> None:
        """An op that works chunk by chunk (`program.Ops`); of others it is not known what they do to a collective's data."""
        ops, op = self.p.ops, int(self.p.steps.op[step])
        if self.trees is not None:
            raise Unsupported(f"step {step} computes {ops.name[op]!r}: how it rounds a sum that must be a fold is not known")
        if ops.name[op] not in CHUNKWISE:
            raise Unsupported(f"step {step} computes {ops.name[op]!r}: what a collective's operators do to its data is not known")
        beside = ops.name[op] == "expert"
        read = self._chunks(ops.reads[op], turn, beside=beside)
        written = self._chunks(ops.writes[op], turn, beside=beside)
        if not written or len(read) % len(written) or len({hi - lo for _, lo, hi in (*read, *written)}) > 1:
            raise Unsupported(f"step {step} makes {len(written)} chunks of {len(read)}: {ops.name[op]!r} works chunk by chunk")
        # Read before anything is written: an op may write what it reads. The inputs of output i are every len(written)-th range from i on.
        values = [self.memory[root][lo:hi] for root, lo, hi in read]
        for i, (root, lo, hi) in enumerate(written):
            parts = [*([self.memory[root][lo:hi]] if ops.accumulate[op] else []), *values[i :: len(written)]]
            total = parts[0]
            for part in parts[1:]:
                total = [self.add(a, b, step) for a, b in zip(total, part, strict=True)]
            self.store(root, lo, hi, total, step)

    def _chunks(self, ranges: I32, turn: int, *, beside: bool) -> list[tuple[int, int, int]]:
        """(root, first cell, end cell) of every chunk of (buffer, first chunk, count) triples; `beside`: but of weights and gradients."""
        role = self.p.buffers.role
        rows = [x for x in ranges.reshape(-1, 3).tolist() if not (beside and role[x[0]] in BESIDE)]
        return [self.locate(buffer, chunk + i, 1, turn) for buffer, chunk, count in rows for i in range(count)]


def _cells(p: Program, where: Addresses, a: Accesses, grain: Ints | None) -> Ints:
    """Bytes of a cell, per buffer: the gcd of everything used on the buffers that data moves between.

    Where messages have sizes of their own (symbols), a chunk is one cell whatever its bytes: such buffers lie in no other and hold none.
    """
    label = where.root.tolist()

    def find(x: int) -> int:
        while label[x] != x:
            label[x] = label[label[x]]
            x = label[x]
        return x

    s = p.steps
    # Buffers between which data moves must be cut alike, so they share one cell size: union-find over local moves and messages.
    on = np.where(s.dst_buffer >= 0, s.dst_buffer, s.src_buffer)
    local = (s.src_buffer >= 0) & (s.dst_buffer >= 0)
    found = messages(p)
    ends = np.stack([on[found.send], on[found.recv]])  # message by message: a channel may serve buffers that have nothing to do with each other
    links = np.concatenate([np.stack([s.src_buffer[local], s.dst_buffer[local]]), ends[:, (ends >= 0).all(axis=0)]], axis=1)
    for link in np.unique(links[0].astype(np.int64) * len(label) + links[1]).tolist():
        x, y = divmod(link, len(label))
        label[find(x)] = find(y)
    component = np.array([find(b) for b in range(len(label))], dtype=np.int64)
    lo = where.offset[a.buffer] + a.chunk * where.unit[a.buffer]
    values = np.concatenate([lo, a.count * where.unit[a.buffer], where.size, where.unit if grain is None else grain])
    owners = np.concatenate([a.buffer, a.buffer, np.arange(len(label)), np.arange(len(label))])
    if grain is None:  # without claims on single chunks, ranges alone decide
        values, owners = values[: len(values) - len(label)], owners[: len(owners) - len(label)]
    # The gcd of all offsets and lengths cuts every range at cell boundaries.
    owners = component[owners]
    by = np.argsort(owners, kind="stable")
    first = np.flatnonzero(np.diff(owners[by], prepend=-1))
    divisor = np.zeros(len(label), np.int64)
    divisor[owners[by][first]] = np.gcd.reduceat(values[by], first) if len(first) else 0
    found_cells = np.maximum(divisor[component], 1)
    # Bytes of messages with symbols are not known, so a chunk counts as one cell there; cells of unlike size must then not overlap.
    free = np.isin(component, component[on[(s.kind == Kind.TRANSFER) & (s.size >= 0) & (on >= 0)]])
    if np.any(free & (where.root != np.arange(len(label)))) or np.any(free[where.root[where.root != np.arange(len(label))]]):
        raise Unsupported("messages with symbols for sizes between buffers that lie in each other")
    return np.where(free, np.maximum(where.unit, 1), found_cells)


def check_collective(p: Program, order: Order | None = None) -> list[Finding]:
    """Every output of every contract holds every contribution it must, once, and nothing else."""
    if not p.contracts:
        return []
    order = order or Order(p, iterations=turns_needed(p))
    grain = np.zeros(len(p.buffers), np.int64)
    for c in p.contracts:
        for buffer, _, _ in (*c.inputs, *c.outputs):
            grain[buffer] = p.buffers.chunk_bytes[buffer]
    worked = np.concatenate([p.ops.reads.values[::3], p.ops.writes.values[::3]])
    grain[worked] = p.buffers.chunk_bytes[worked]  # ops work chunk by chunk
    m = Machine(p, order, nothing_is_zero=False, grain=grain, claimed=_claimed(p))
    turns = int(order.turns.max(initial=1))
    claims: list[_Claim] = []
    for c in p.contracts:
        # Quantities of different contracts and turns get different numbers: what is left from another turn never looks right.
        claims.append(_Claim(p, m, c, first=claims[-1].first + claims[-1].quantities(turns) if claims else 1))
        claims[-1].fill(turns)
        if c.reproducible == "tree" and c.op in REPRODUCIBLE_SUMS:
            m.trees = m.trees or FoldTrees()
            m.trees.hold(claims[-1].first, claims[-1].first + claims[-1].quantities(turns), len(claims[-1].members))
    m.run()
    found: list[Finding] = []
    for claim in claims:
        for member in range(len(claim.members)):
            for turn in range(turns):
                found += claim.compare(member, turn)
                if len(found) >= MAX_FINDINGS_OF_A_KIND:
                    return found
    return found


def _claimed(p: Program) -> list[tuple[int, int, int]]:
    """Ranges that hold a contract's data, or about which it promises something: not inputs of a scatter but the root's, nor outputs of others
    than the root of a gather. These may be as large as the job: on 8,192 ranks they would be 67 million cells that nobody looks at."""
    found: list[tuple[int, int, int]] = []
    for c in p.contracts:
        found += [x for member, x in enumerate(c.inputs) if _holds_data(c, member)]
        found += [x for member, x in enumerate(c.outputs) if _is_promised(c, member)]
    return found


def _holds_data(c: Contract, member: int) -> bool:
    """Of a scatter only the root's input is data; what the others hold must not reach an output."""
    return c.op != "scatter" or member == c.root


def _is_promised(c: Contract, member: int) -> bool:
    """Whether the contract says what the member's output holds."""
    return not ((c.op in ("reduce", "gather") and member != c.root) or (c.op == "permute" and c.peers[member] < 0))


class _Claim:
    """One contract on the machine. Its quantities are `first` and up, in cells: `per` cells to a chunk of the contract's buffers."""

    def __init__(self, p: Program, m: Machine, c: Contract, first: int) -> None:
        self.p, self.m, self.c, self.first = p, m, c, first
        self.members = c.members(p.ranks)
        # Which bit of a cell stands for a member's contribution: in a tree its number in the job, which rank it is does not matter.
        self.bit = c.numbers if c.numbers and c.op in REPRODUCIBLE_SUMS else tuple(range(len(self.members)))
        self.sizes = [n for _, _, n in c.inputs]
        self.starts = [0, *accumulate(self.sizes)]
        self.parts = [0, *accumulate(n for _, _, n in c.outputs)]  # of a scatter and a reduce-scatter: one after another, member by member
        buffer = c.inputs[0][0]
        self.per: int = max(1, m.unit[buffer] // m.grain[buffer])
        # Sums are over inputs that lie over each other; where nothing is added, every member's input has quantities of its own.
        self.apart = c.op in ("all-gather", "gather", "all-to-all", "permute")
        self.total: int = self.starts[-1] if self.apart else max(self.sizes)

    def quantities(self, turns: int) -> int:
        return self.per * self.total * turns

    def of(self, member: int, turn: int) -> int:
        """First quantity of a member's input."""
        return self.first + self.per * (turn * self.total + (self.starts[member] if self.apart else 0))

    def fill(self, turns: int) -> None:
        for member, (buffer, chunk, count) in enumerate(self.c.inputs):
            if not _holds_data(self.c, member):
                continue
            for turn in range(turns):
                root, lo, hi = self.m.locate(buffer, chunk, count, turn)
                self.m.memory[root][lo:hi] = [(1 << (32 + self.bit[member])) | (self.of(member, turn) + k) for k in range(hi - lo)]

    def wanted(self, member: int, turn: int) -> list[int] | None:
        """What the member's output must hold, cell by cell; None: nothing is promised."""
        c, per, n, sizes = self.c, self.per, len(self.members), self.sizes

        def cells(source: int, first: int, count: int) -> list[int]:
            base = self.of(source, turn) + per * first
            return [(1 << (32 + source)) | (base + k) for k in range(per * count)]

        if not _is_promised(c, member):
            return None
        if c.op in ("all-gather", "gather"):
            return [cell for source in range(n) for cell in cells(source, 0, sizes[source])]
        if c.op == "broadcast":
            return cells(c.root, 0, sizes[c.root])
        if c.op == "permute":
            return cells(c.peers[member], 0, sizes[c.peers[member]])
        if c.op == "all-to-all":
            return [cell for source in range(n) for cell in cells(source, member * (sizes[source] // n), sizes[source] // n)]
        skip, own = self.parts[member], c.outputs[member][2]
        if c.op == "scatter":
            return cells(c.root, skip, own)
        everyone, base = (1 << n) - 1, self.of(0, turn)
        # What is left are sums: every member's contribution in each cell, of a part or of the whole.
        first, count = (skip, own) if c.op == "reduce-scatter" else (0, sizes[member])
        return [(everyone << 32) | (base + per * first + k) for k in range(per * count)]

    def misfit(self, member: int) -> str:
        """Why the contract's own ranges do not make a whole collective, or empty."""
        c, sizes, parts = self.c, self.sizes, self.parts[-1]
        if c.op in ("reduce-scatter", "scatter"):
            source = c.root if c.op == "scatter" else member
            return f"the parts have {parts} chunks together, the input has {sizes[source]}" if parts != sizes[source] else ""
        if c.op == "all-to-all" and sizes[member] % len(sizes):
            return f"the input of rank {self.members[member]} has {sizes[member]} chunks, which are not {len(sizes)} equal blocks"
        return ""

    def compare(self, member: int, turn: int) -> list[Finding]:
        wanted = self.wanted(member, turn)
        if wanted is None:
            return []
        rank = self.members[member]
        buffer, chunk, count = self.c.outputs[member]
        text = self.misfit(member)
        if not text and count * self.per != len(wanted):
            text = f"the contract's output of rank {rank} has {count} chunks, a whole {self.c.op} has {len(wanted) // self.per}"
        if text:
            return [Finding(check="values", message=text, witness={"rank": rank, "lane": -1, "step": -1, "iteration": turn, "chunk": chunk})]
        root, lo, hi = self.m.locate(buffer, chunk, count, turn)
        have = self.m.memory[root][lo:hi]
        wrong = [k for k, (a, b) in enumerate(zip(have, wanted, strict=True)) if a != b]
        writer = self.m.writer[root]
        return [self._wrong(member, turn, chunk + k // self.per, have[k], wanted[k], writer[lo + k]) for k in wrong[:MAX_FINDINGS_OF_A_KIND]]

    def _wrong(self, member: int, turn: int, chunk: int, have: int, want: int, writer: int) -> Finding:
        p, rank, buffer = self.p, self.members[member], self.c.outputs[member][0]
        step = -1 - have if have < 0 else writer
        place = f"chunk {chunk} of {p.buffer_name(buffer)} on rank {rank} (iteration {turn})"
        more: dict[str, Any] = {}
        if have < 0:
            why, more = self.m.trees.why(step) if self.m.trees is not None else ("", {})
            text = f"{place} is spoilt: {p.describe(step)} {why or 'adds a contribution twice, or adds what does not belong together'}"
        elif not have:
            text = f"{place} is never written"
        elif (have ^ want) & QUANTITY_MASK:
            text = f"{place} holds another chunk's data"
        else:
            missing = [r for i, r in zip(self.bit, self.members, strict=True) if (want >> 32) & ~(have >> 32) >> i & 1]
            extra = [r for i, r in zip(self.bit, self.members, strict=True) if (have >> 32) & ~(want >> 32) >> i & 1]
            text = f"{place} lacks the contribution of ranks {missing}" + (f" and has that of ranks {extra}" if extra else "")
            more = {"missing_ranks": missing, "extra_ranks": extra}
        if step >= 0 and have >= 0:
            text += f"; last written by {p.describe(step)}"
        facts = witness(p, step, iteration=turn, chunk=chunk) if step >= 0 else {"lane": -1, "step": -1, "iteration": turn, "chunk": chunk}
        return Finding(check="values", message=text, witness=facts | {"rank": rank, "buffer": buffer} | more)
