"""Values of a pipeline step: what every action reads is what its name says, what it makes is used by those it is for, and gradients are whole.

By induction over one order of the written-out program, as for a collective's chunks: a cell holds a quantity (the output of stage 2 for
micro-batch 3 on replica 0, byte range 1) or garbage. An action whose operands all hold what `work` says makes what `work` says; messages and
collectives move cells. At the end of the step every gradient of a stage holds each micro-batch of each replica and copy once, on every
rank that answers for it. The compute lane of a rank runs the device's stated order. The program must be well-formed, live and free of races.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from ...program.program import BUFFER_ROLES, Kind, Program, Role, Space
from ..program.order import Order
from ..program.values import QUANTITY_MASK, Machine
from ..program.wellformed import witness
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .filled import FillWork
from .work import Act, PipelineWork

MOVES = {"O": "copy out", "R": "copy back"}

__all__ = ["check_pipeline", "runs_once", "solid"]


def solid(p: Program) -> Program:
    """`p` with a byte in every buffer that has none, so that messages without bytes are followed, and ordered, like others."""
    b = p.buffers
    aliased = (b.alias_of >= 0) | np.isin(np.arange(len(b)), b.alias_of)
    return replace(p, buffers=replace(b, chunk_bytes=np.where((b.chunk_bytes == 0) & (b.size < 0) & ~aliased, 1, b.chunk_bytes)))


def runs_once(p: Program) -> list[Finding]:
    """A step's actions are all written out: no lane repeats."""
    for k in np.flatnonzero(p.lanes.repeat > 1)[:1].tolist():
        rank = int(p.lanes.actor[k])
        text = f"lane {k} of rank {rank} runs {int(p.lanes.repeat[k])} times, a pipeline's step has none that does"
        return [Finding(check="values", message=text, witness={"rank": rank, "lane": k, "step": int(p.lanes.start[k])})]
    return []


def check_pipeline(p: Program, work: PipelineWork, order: Order, fill: FillWork | None = None) -> list[Finding]:
    """`p` is a call-free pipeline step (`solid`), `order` of it; `fill`: the other work that this step of the cycle does."""
    if p.ranks != work.ranks:
        text = f"the schedule is for {work.ranks} ranks, the program has {p.ranks}"
        return [Finding(check="values", message=text, witness={"ranks": p.ranks})]
    step = _Step(p, work, order, fill)
    step.buffers()
    step.lanes()
    if not step.found:
        step.run()
        step.end()
    if not step.found and fill is not None:
        step.found += fill.ordered(p, order, step.nodes, step.pieces)
    return step.found[:MAX_FINDINGS_OF_A_KIND]


class _Step(Machine):
    def __init__(self, p: Program, work: PipelineWork, order: Order, fill: FillWork | None) -> None:
        super().__init__(p, order, nothing_is_zero=True)
        self.work, self.fill, self.found = work, fill, list[Finding]()
        self.number: dict[tuple[object, ...], int] = {}
        self.names, self.chunks = list(p.buffers.name), p.buffers.chunks.tolist()
        self.ops: list[int] = p.steps.op.tolist()
        self.actor = p.lanes.actor[p.lane_of_step()].tolist()
        self.at: dict[tuple[int, str], int] = {}
        self.nodes: dict[tuple[int, str], int] = {}  # (rank, action such as 3F0) -> step
        self.moves: dict[int, tuple[str, int, int]] = {}  # step -> (O or R, stage, micro-batch)
        self.pieces: dict[tuple[int, str], int] = {}  # (rank, key of other work) -> step
        self.act: dict[int, Act] = {}
        self.pairs: list[tuple[int, int]] = []  # steps of the gradient of an input, and of the weights of the same
        self.meaning: dict[tuple[int, str], tuple[object, ...]] = {}
        garbage = 1 << 32 | self.quantity("garbage")
        for b, cells in self.memory.items():
            # What steps add to starts at zero: gradients, and those of inputs, since an op's `accumulate` is for all that it writes.
            added = BUFFER_ROLES[int(p.buffers.role[b])] == "gradient" or (p.buffers.name and p.buffers.name[b].startswith("gradout:"))
            if not added:  # weights are filled in by name
                cells[:] = [garbage] * len(cells)
        self.garbage = garbage

    def quantity(self, *name: object) -> int:
        return self.number.setdefault(name, len(self.number) + 1)

    def one(self, *name: object) -> int:
        return 1 << 32 | self.quantity(*name)

    def wrong(self, step: int, text: str, **more: Any) -> None:
        self.found.append(Finding(check="values", message=f"{self.p.describe(step)} {text}", witness=witness(self.p, step, **more)))

    # ---- form: buffers and lanes ------------------------------------------------------------------------------
    def buffers(self) -> None:
        """Names are unique on a rank, and buffers are as large as the problem says."""
        p, b = self.p, self.p.buffers
        for k, name in enumerate(b.name):
            if not name:
                continue
            key = (int(b.actor[k]), name)
            if key in self.at:
                self.found.append(Finding(check="values", message=f"rank {key[0]} has two buffers {name!r}", witness={"rank": key[0], "buffer": k}))
            self.at[key] = k
        for rank in range(p.ranks):
            for name, size, exactly in self.work.bytes_of(rank // self.work.data):
                found = self.at.get((rank, name), -1)
                if found < 0:
                    text = f"rank {rank} has no buffer {name!r}"
                    self.found.append(Finding(check="values", message=text, witness={"rank": rank, "buffer": -1}))
                    return
                if name.startswith("kept:") != (int(b.space[found]) == Space.HOST):
                    text = f"{p.buffer_name(found)} lies in space {int(b.space[found])}"
                    self.found.append(Finding(check="values", message=text, witness={"rank": rank, "buffer": found}))
                    return
                has = int(b.chunks[found]) * int(b.chunk_bytes[found])
                if has < size or (exactly and has != max(1, size)):
                    text = f"{p.buffer_name(found)} has {has} bytes, the problem says {size}"
                    self.found.append(Finding(check="values", message=text, witness={"rank": rank, "buffer": found}))
                    return
        for rank in range(p.ranks):
            for copy, stage in self.work.hosted(rank // self.work.data):
                self._weights(rank, copy, stage)

    def _weights(self, rank: int, copy: int, stage: int) -> None:
        """Whole where nothing gathers them; else each holder begins with its part."""
        b = self.at.get((rank, self.work.held("weights", stage, copy)), -1)
        if b < 0:
            return
        root, lo, hi = self.locate(b, 0, self.chunks[b], 0)
        first, last = self._own(rank, stage, hi - lo) if stage in self.work.gathered else (0, hi - lo)
        self.memory[root][lo + first : lo + last] = [self.one("weight", stage, i) for i in range(first, last)]

    def _own(self, rank: int, stage: int, cells: int) -> tuple[int, int]:
        """The part of a stage's state that a rank answers for where holders divide it."""
        holders = self.work.holders(stage)
        i = holders.index(rank)
        return i * cells // len(holders), (i + 1) * cells // len(holders)

    def lanes(self) -> None:
        """A rank's compute lane runs its device's order, each op called as its action is; other lanes compute nothing but other work."""
        p, o = self.p, self.p.ops
        compute = p.steps.kind == Kind.COMPUTE
        for rank in range(p.ranks):
            mine = [x for x in range(len(p.lanes)) if int(p.lanes.actor[x]) == rank]
            lanes = [x for x in mine if int(p.lanes.role[x]) == Role.COMPUTE]
            order = self.work.orders[rank // self.work.data]
            steps = [s for x in lanes for s in range(int(p.lanes.start[x]), int(p.lanes.end[x])) if compute[s]]
            for step, a in zip(steps, order, strict=False):
                op, want = int(p.steps.op[step]), self.work.op(a)
                for column, value in want.items():
                    has = getattr(o, column)[op]
                    has = has if isinstance(has, str) else int(has)
                    if has != value:
                        self.wrong(step, f"has {column} {has!r}, its action {_text(a)} says {value!r}")
                self.act[step] = a
                self.nodes |= {(rank, f"{a.stage}{a.phase}{m}"): step for m in a.microbatches}
            if len(lanes) > 1 or len(steps) != len(order):
                text = f"rank {rank} runs {len(steps)} actions in {len(lanes)} lanes, the schedule says {len(order)} in one"
                self.found.append(Finding(check="values", message=text, witness={"rank": rank, "lane": lanes[0] if lanes else -1, "step": -1}))
            others = [s for x in mine if x not in lanes for s in range(int(p.lanes.start[x]), int(p.lanes.end[x])) if compute[s]]
            away = self.work.away[rank // self.work.data] if self.work.away else frozenset()
            missing = {(kind, *x) for x in away for kind in "OR"}
            for step in others:
                op = int(p.steps.op[step])
                move = (o.name[op], int(o.stage[op]), int(o.microbatch[op]))
                if move in missing:
                    missing.remove(move)
                    self.moves[step] = move
                    continue
                key = (rank, o.graph[int(p.steps.op[step])])
                if self.fill is None or not self.fill.has(rank, o.graph[int(p.steps.op[step])], o.name[int(p.steps.op[step])]) or key in self.pieces:
                    self.wrong(step, f"runs {o.name[int(p.steps.op[step])]!r}, which this step is not to do")
                self.pieces[key] = step
            for kind, stage, m in sorted(missing)[:1]:
                text = f"rank {rank} does not {MOVES[kind]} what stage {stage} saves of micro-batch {m}"
                self.found.append(Finding(check="values", message=text, witness={"rank": rank, "stage": stage, "microbatch": m}))
        if self.fill is not None:
            lacks = sorted(set(self.fill.item_of) - set(self.pieces))
            if lacks:
                text = f"rank {lacks[0][0]} does not do {lacks[0][1]!r}, which the plan puts into this step"
                self.found.append(Finding(check="values", message=text, witness={"rank": lacks[0][0], "item": lacks[0][1]}))

    # ---- the induction ---------------------------------------------------------------------------------------
    def compute(self, step: int, turn: int) -> None:
        if len(self.found) >= MAX_FINDINGS_OF_A_KIND:
            return
        rank, op = self.actor[step], self.ops[step]
        if step in self.moves:
            self.moving(step, rank, op)
            return
        if step not in self.act:
            assert self.fill is not None
            self.fill.compute(self, step, rank, op)
            return
        a = self.act[step]
        reads, makes = self.work.reads(a), self.work.makes(a)
        for lists, want, verb in ((self.p.ops.reads, reads, "read"), (self.p.ops.writes, makes, "write")):
            rows = lists[op].reshape(-1, 3).tolist()
            whole = all(not first and count == self.chunks[b] and self.names[b] in want for b, first, count in rows)
            if whole and len({b for b, _, _ in rows}) == len(rows) == len(want):
                continue
            got = Counter[str]()
            for b, first, count in rows:
                name = self.names[b]
                got[name] += 1
                if first or count != self.chunks[b]:
                    self.wrong(step, f"{verb}s chunks {first}..{first + count - 1} of {name}, not the whole", buffer=b)
            for name in sorted({*want, *got}):
                if name not in want or not got[name]:
                    self.wrong(step, f"{'does not ' if name in want else ''}{verb}{'s' if name not in want else ''} {name}; {_text(a)} does"
                               f"{'' if name in want else ' not'}")  # fmt: skip
                    return
        if a.phase == "W":
            self.pairs += [(self.nodes.get((rank, f"{a.stage}I{m}"), -1), step) for m in a.microbatches]
        if a.phase != "F" and a.beside >= 0:  # the pair's time is its forward's, so that one waits for the gradient too
            self._pair(step, rank, a)
        for name in sorted(reads):
            self.reading(step, rank, name)
        for name in sorted(makes):
            self.making(step, rank, a, name)

    def moving(self, step: int, rank: int, op: int) -> None:
        """A copy to the host's memory or back: the other buffer holds the same."""
        kind, stage, m = self.moves[step]
        source, target = (f"{name}:{stage}:{m}" for name in (("saved", "kept") if kind == "O" else ("kept", "again")))
        for lists, name, verb in ((self.p.ops.reads, source, "read"), (self.p.ops.writes, target, "write")):
            if lists[op].tolist() != [self.at[rank, name], 0, self.chunks[self.at[rank, name]]]:
                self.wrong(step, f"does not {verb} {name}, which it is to {MOVES[kind]}")
                return
        self.reading(step, rank, source)
        b = self.at[rank, target]
        root, lo, hi = self.locate(b, 0, self.chunks[b], 0)
        self.store(root, lo, hi, [self.held(rank, target, i) for i in range(hi - lo)], step)

    def _pair(self, step: int, rank: int, a: Act) -> None:
        forward = step - (2 if a.phase == "W" else 1)
        for m in a.microbatches:
            name = self.work.returned(a.stage, m)
            root, lo, _ = self.locate(self.at[rank, name], 0, 1, 0) if name else (0, 0, 0)
            if name and (writer := self.writer[root][lo]) != forward:
                self.pairs.append((writer, forward))

    def _weights_last(self) -> None:
        """The gradient of weights comes after the one of the input: all pairs at once, a call for each would cost more than the rest."""
        if not self.pairs:
            return
        one, two = np.array(self.pairs).T
        after = (one >= 0) & self.order.before(self.order.node(np.maximum(one, 0), 0), self.order.node(two, 0))
        for step in two[~after].tolist():
            a = self.act[step]
            self.wrong(step, f"may run before {a.stage}I{a.first}" if a.phase == "W" else "may begin before the other half of its pair can")

    def held(self, rank: int, name: str, cell: int) -> int:
        """The cell of what a buffer's name says: act and grad are quantities of a border, wherever they lie."""
        if (rank, name) not in self.meaning:
            self.meaning[rank, name] = self._means(rank, name)
        return self.one(*self.meaning[rank, name], cell)

    def _means(self, rank: int, name: str) -> tuple[object, ...]:
        kind, _, rest = name.partition(":")
        if kind in ("weights", "gradients"):
            return "weight" if kind == "weights" else "gradient", int(rest.partition(":")[0])
        stage, m = (int(x) for x in rest.split(":"))
        if kind in ("saved", "kept", "again"):
            return "saved", stage, m, rank
        border = stage - 1 if kind in ("in", "gradout") else stage  # the border below it for these, the one above for out and gradin
        return "act" if kind in ("in", "out") else "grad", border, m, rank % self.work.data

    def reading(self, step: int, rank: int, name: str) -> None:
        b = self.at[rank, name]
        root, lo, hi = self.locate(b, 0, self.chunks[b], 0)
        for i, have in enumerate(self.memory[root][lo:hi]):
            if have != self.held(rank, name, i):
                writer = self.writer[root][lo + i]
                said = "is spoilt" if have < 0 else "nothing was written to" if have in (0, self.garbage) else "holds something else"
                last = f"; last written by {self.p.describe(writer)}" if writer >= 0 else ""
                self.wrong(step, f"reads {name}, which {said}{last}", buffer=b, writer=writer)
                return

    def making(self, step: int, rank: int, a: Act, name: str) -> None:
        b = self.at[rank, name]
        root, lo, hi = self.locate(b, 0, self.chunks[b], 0)
        bits = sum(self.bit(m, rank % self.work.data) for m in a.microbatches)
        gradient = name.startswith("gradients:")
        fresh = [bits << 32 | self.quantity("gradient", a.stage, i) if gradient else self.held(rank, name, i) for i in range(hi - lo)]
        if a.phase in "BW":
            fresh = [self.add(x, y, step) for x, y in zip(self.memory[root][lo:hi], fresh, strict=True)]
        self.store(root, lo, hi, fresh, step)

    def bit(self, m: int, replica: int) -> int:
        return 1 << (m * self.work.data + replica)

    # ---- the end of the step -----------------------------------------------------------------------------------
    def end(self) -> None:
        """Gradients are whole on whoever answers for them, and every rank still has its weights."""
        self._weights_last()
        w = self.work
        for rank in range(self.p.ranks):
            for copy, stage in w.hosted(rank // w.data):
                how = w.reduced.get((copy, stage), "")
                together = len(w.holders(stage)) > 1 and any(w.sizes["gradient_bytes"])
                many = [m for m, on in enumerate(w.copy_of) if together or on == copy]
                bits = sum(self.bit(m, r) for m in many for r in (range(w.data) if together else [rank % w.data]))
                b = self.at[rank, w.held("gradients", stage, copy)]
                root, lo, hi = self.locate(b, 0, self.chunks[b], 0)
                own = self._own(rank, stage, hi - lo) if how == "reduce" and together else (0, hi - lo)
                want = {i: bits << 32 | self.quantity("gradient", stage, i) if bits else 0 for i in range(*own)}
                self._final(rank, b, {lo + i: x for i, x in want.items()}, root, "lacks gradients or holds some twice")
                b = self.at.get((rank, w.held("weights", stage, copy)), -1)
                if b >= 0:
                    root, lo, hi = self.locate(b, 0, self.chunks[b], 0)
                    own = self._own(rank, stage, hi - lo) if stage in w.gathered else (0, hi - lo)
                    self._final(rank, b, {lo + i: self.one("weight", stage, i) for i in range(*own)}, root, "no longer holds them")

    def _final(self, rank: int, b: int, want: dict[int, int], root: int, text: str) -> None:
        for cell, value in want.items():
            have = self.memory[root][cell]
            if have != value and len(self.found) < MAX_FINDINGS_OF_A_KIND:
                writer = self.writer[root][cell]
                missing = ""
                if have >= 0 and value and not (have ^ value) & QUANTITY_MASK:
                    missing = f" ({((value & ~have) >> 32).bit_count()} of {(value >> 32).bit_count()} contributions lack)"
                last = f"; last written by {self.p.describe(writer)}" if writer >= 0 else ""
                message = f"{self.p.buffer_name(b)} {text} at the end of the step{missing}{last}"
                self.found.append(Finding(check="values", message=message, witness={"rank": rank, "buffer": b, "step": writer, "chunk": 0}))
                return


def _text(a: Act) -> str:
    return f"{a.stage}{a.phase}{a.first}" + (f"-{a.last}" if a.last > a.first else "")
