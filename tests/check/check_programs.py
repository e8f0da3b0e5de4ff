"""Correct programs, built by hand, that the checker must accept and whose mutants it must refuse."""

from __future__ import annotations

from meshwright.plan.plan import Segment, Stage, TrainingLayout, ValueInfo
from meshwright.program.builder import LaneBuilder, ProgramBuilder, StepRef
from meshwright.program.program import Contract, Program, Role, Unit


def ring_all_reduce(n: int, *, repeat: int = 1, depth: int = 2, chunk_bytes: int = 4) -> Program:
    """In place: one send and one receive lane per rank, chunk k of rank r starts at rank k."""
    b = ProgramBuilder(ranks=n, name=f"ring-all-reduce-{n}")
    data = [b.buffer(r, chunks=n, chunk_bytes=chunk_bytes, role="input", name=f"data{r}") for r in range(n)]
    right = [b.channel(r, (r + 1) % n, depth=depth) for r in range(n)]
    for r in range(n):
        send, recv = b.lane(r, repeat=repeat), b.lane(r, repeat=repeat)
        received: list[StepRef] = []
        for k in range(2 * (n - 1)):
            op = recv.recv_add if k < n - 1 else recv.recv
            received.append(op(right[r - 1], data[r], (r - 1 - k) % n))
        for k in range(2 * (n - 1)):
            send.send(right[r], data[r], (r - k) % n, after=[received[k - 1]] if k else [])
    whole = tuple((data[r], 0, n) for r in range(n))
    b.contract = Contract(op="all-reduce", inputs=whole, outputs=whole)
    return b.build()


def ring_all_gather(n: int) -> Program:
    """The input is an alias inside the output; one fused lane (receive, store, send on) per rank after a first send."""
    b = ProgramBuilder(ranks=n, name=f"ring-all-gather-{n}")
    out = [b.buffer(r, chunks=n, chunk_bytes=8, role="output", name=f"out{r}") for r in range(n)]
    mine = [b.buffer(r, chunks=1, chunk_bytes=8, role="input", alias_of=out[r], alias_offset_bytes=8 * r, name=f"in{r}") for r in range(n)]
    right = [b.channel(r, (r + 1) % n) for r in range(n)]
    for r in range(n):
        lane = b.lane(r)
        lane.send(right[r], mine[r], 0)
        for k in range(n - 2):
            lane.recv_send(right[r - 1], right[r], out[r], (r - 1 - k) % n)
        lane.recv(right[r - 1], out[r], (r + 1) % n)
    b.contract = Contract(op="all-gather", inputs=tuple((m, 0, 1) for m in mine), outputs=tuple((o, 0, n) for o in out))
    return b.build()


def ring_reduce_scatter(n: int) -> Program:
    """Partial sums travel in fused steps that keep nothing; the last one is stored."""
    b = ProgramBuilder(ranks=n, name=f"ring-reduce-scatter-{n}")
    data = [b.buffer(r, chunks=n, chunk_bytes=4, role="input", name=f"in{r}") for r in range(n)]
    out = [b.buffer(r, chunks=1, chunk_bytes=4, role="output", name=f"out{r}") for r in range(n)]
    right = [b.channel(r, (r + 1) % n) for r in range(n)]
    for r in range(n):
        lane = b.lane(r)
        lane.send(right[r], data[r], (r - 1) % n)
        for k in range(n - 2):
            lane.recv_add_send(right[r - 1], right[r], data[r], (r - 2 - k) % n)
        lane.transfer(recv=right[r - 1], src=(data[r], r), dst=(out[r], 0), add=True, store=True)
    b.contract = Contract(op="reduce-scatter", inputs=tuple((d, 0, n) for d in data), outputs=tuple((o, 0, 1) for o in out))
    return b.build()


def direct_exchange(op: str, n: int, *, root: int = 0, counts: tuple[int, ...] = (), peers: tuple[int, ...] = ()) -> Program:
    """Every block goes straight from the rank that has it to the rank that must get it; own blocks are copied."""
    counts = counts or (1,) * n
    first = [sum(counts[:r]) for r in range(n)]
    total = sum(counts)
    b = ProgramBuilder(ranks=n, name=f"direct-{op}-{n}")
    many_in, many_out = op in ("scatter", "all-to-all"), op in ("gather", "all-to-all")
    x = [b.buffer(r, chunks=total if many_in else max(1, counts[r]), chunk_bytes=4, role="input", name=f"in{r}") for r in range(n)]
    y = [b.buffer(r, chunks=total if many_out else max(1, counts[r]), chunk_bytes=4, role="output", name=f"out{r}") for r in range(n)]
    moves = {
        "scatter": [(root, r) for r in range(n)],
        "gather": [(r, root) for r in range(n)],
        "all-to-all": [(s, d) for s in range(n) for d in range(n)],
        "permute": [(p, r) for r, p in enumerate(peers) if p >= 0],
    }[op]
    for s, d in moves:
        source, target = (x[s], first[d] if many_in else 0), (y[d], first[s] if many_out else 0)
        count = counts[d] if op == "scatter" else counts[s]
        if not count:
            continue
        if s == d:
            b.lane(s).copy(source, target, count)
            continue
        c = b.channel(s, d)
        b.lane(s).send(c, *source, count)
        b.lane(d).recv(c, *target, count)
    inputs = tuple((v, 0, (total if many_in else counts[r]) if op != "scatter" or r == root else 0) for r, v in enumerate(x))
    outputs = tuple((v, 0, total if many_out else counts[r]) for r, v in enumerate(y))
    b.contract = Contract(op=op, inputs=inputs, outputs=outputs, root=root if op in ("scatter", "gather") else -1, peers=peers)
    return b.build()


def two_groups() -> Program:
    """Ranks 0, 1 and 2, 3 reduce among themselves while 0, 2 and 1, 3 gather: four contracts in one program."""
    b = ProgramBuilder(ranks=4, name="two-groups")
    x = [b.buffer(r, chunks=1, chunk_bytes=8, role="input", name=f"sum{r}") for r in range(4)]
    y = [b.buffer(r, chunks=2, chunk_bytes=8, role="output", name=f"gathered{r}") for r in range(4)]
    contracts = []
    for group in ((0, 1), (3, 2)):
        for me, other in (group, group[::-1]):
            if me == group[0]:
                up, down = b.channel(me, other), b.channel(other, me)
                sent = b.lane(me).send(up, x[me], 0)
                b.lane(me).recv(down, x[me], 0, after=[sent])
                lane = b.lane(other)
                lane.recv_add(up, x[other], 0)
                lane.send(down, x[other], 0)
        ranges = tuple((x[r], 0, 1) for r in group)
        contracts.append(Contract(op="all-reduce", inputs=ranges, outputs=ranges, ranks=group))
    for group in ((0, 2), (1, 3)):
        for place, (me, other) in enumerate((group, group[::-1])):
            c = b.channel(me, other)
            b.lane(me).send(c, y[me], place)
            b.lane(other).recv(c, y[other], place)
        own = tuple((y[r], place, 1) for place, r in enumerate(group))
        contracts.append(Contract(op="all-gather", inputs=own, outputs=tuple((y[r], 0, 2) for r in group), ranks=group))
    b.contracts = tuple(contracts)
    return b.build()


def tree_all_reduce(n: int, *, chunks: int = 2) -> Program:
    """Binary tree through scratch: children send up, the root's sum goes down."""
    b = ProgramBuilder(ranks=n, name=f"tree-all-reduce-{n}")
    data = [b.buffer(r, chunks=chunks, chunk_bytes=4, role="input", name=f"data{r}") for r in range(n)]
    up = {c: b.channel(c, (c - 1) // 2) for c in range(1, n)}
    down = {c: b.channel((c - 1) // 2, c) for c in range(1, n)}
    for r in range(n):
        lane = b.lane(r)
        children = [c for c in (2 * r + 1, 2 * r + 2) if c < n]
        for c in children:
            temp = b.buffer(r, chunks=chunks, chunk_bytes=4, role="scratch", name=f"temp{r}.{c}")
            got = lane.recv(up[c], temp, 0, chunks)
            b.dies_after(temp, lane.copy((temp, 0), (data[r], 0), chunks, add=True, after=[got]))
        if r:
            lane.send(up[r], data[r], 0, chunks)
            lane.recv(down[r], data[r], 0, chunks)
        for c in children:
            lane.send(down[c], data[r], 0, chunks)
    whole = tuple((d, 0, chunks) for d in data)
    b.contract = Contract(op="all-reduce", inputs=whole, outputs=whole)
    return b.build()


def chain_broadcast(n: int, *, repeat: int = 3, depth: int = 1) -> Program:
    """Pipelined: iteration i carries slice i down the chain."""
    b = ProgramBuilder(ranks=n, name=f"chain-broadcast-{n}")
    data = [b.buffer(r, chunks=1, chunk_bytes=4, role="output", name=f"data{r}") for r in range(n)]
    ch = [b.channel(r, r + 1, depth=depth) for r in range(n - 1)]
    for r in range(n):
        lane = b.lane(r, repeat=repeat)
        if r == 0:
            lane.send(ch[0], data[0], 0)
        elif r < n - 1:
            lane.recv_send(ch[r - 1], ch[r], data[r], 0)
        else:
            lane.recv(ch[r - 1], data[r], 0)
    whole = tuple((d, 0, 1) for d in data)
    b.contract = Contract(op="broadcast", inputs=whole, outputs=whole, root=0)
    return b.build()


def windowed_reduce(n: int, *, repeat: int = 4, window: int = 2) -> Program:
    """Every rank sends its slices to rank 0, which adds them through a ring of `window` slots per peer; edges with a lag free the slots."""
    b = ProgramBuilder(ranks=n, name=f"windowed-reduce-{n}")
    data = [b.buffer(r, chunks=1, chunk_bytes=4, role="input", name=f"data{r}") for r in range(n)]
    adder = b.lane(0, repeat=repeat)
    for r in range(1, n):
        ch = b.channel(r, 0, depth=window)
        b.lane(r, repeat=repeat).send(ch, data[r], 0)
        slot = b.buffer(0, chunks=1, chunk_bytes=4, role="scratch", window=window, name=f"slot{r}")
        freed = StepRef(adder.number, r - 1)
        got = b.lane(0, repeat=repeat).recv(ch, slot, 0, after=[(freed, window)])
        adder.copy((slot, 0), (data[0], 0), add=True, after=[got])
    whole = tuple((d, 0, 1) for d in data)
    b.contract = Contract(op="reduce", inputs=whole, outputs=whole, root=0)
    return b.build()


# ---- training ----------------------------------------------------------------------------------------------------------
def training_layout(*, data: int, tensor: int = 1, microbatches: int = 3) -> TrainingLayout:
    """Two stages. With tensor > 1 each has a split segment between two whole ones."""
    segments, stages = [], []
    for p in range(2):
        names = [f"s{p}.{i}" for i in range(3 if tensor > 1 else 1)]
        into = "x" if p else ""
        for i, key in enumerate(names):
            reads = (into,) if into else ()
            out = "x" if (p == 0 and i == len(names) - 1) else "loss" if (p == 1 and i == len(names) - 1) else f"v{p}{i}"
            split = tensor > 1 and i == 1
            segments.append(
                Segment(
                    key=key, stage=p, nodes=(f"n{p}{i}",), reads=reads, writes=(out,), params=(f"w{p}{i}",), split=split,
                    sum_writes=(out,) if split else (), sum_grads=reads if split else (), saved_bytes=12,
                )
            )  # fmt: skip
            into = out
        params = tuple(f"w{p}{i}" for i in range(len(names)))
        stages.append(Stage(index=p, segments=tuple(names), receives=("x",) if p else (), sends=() if p else ("x",), params=params))
    values = sorted({v for s in segments for v in (*s.reads, *s.writes)})
    infos = tuple(ValueInfo(name=v, shape=(2,), dtype="float32", size_bytes=8) for v in values)
    return TrainingLayout(
        data=data, tensor=tensor, pipeline=2, microbatch_size=1, microbatches=microbatches, global_batch=data * microbatches,
        stages=tuple(stages), segments=tuple(segments), values=infos,
    )  # fmt: skip


def one_f_one_b(stages: int, microbatches: int, stage: int) -> list[tuple[str, int]]:
    warm = min(stages - 1 - stage, microbatches)
    order = [("F", m) for m in range(warm)]
    for m in range(microbatches - warm):
        order += [("F", m + warm), ("B", m)]
    return order + [("B", m) for m in range(microbatches - warm, microbatches)]


class Training:
    """1F1B with data (and tensor) parallelism over `training_layout`, by calls of a ring all-reduce. `untrained`: segments that write no gradient."""

    def __init__(self, layout: TrainingLayout, untrained: tuple[str, ...] = ()) -> None:
        self.untrained = untrained
        self.layout, self.b = layout, ProgramBuilder(ranks=layout.ranks, name="training")
        self.segment = {s.key: s for s in layout.segments}
        self.programs: dict[str, Program] = {}
        self.buffers: dict[tuple[int, str], int] = {}
        self.comms: dict[tuple[int, ...], int] = {}
        self.channel = {}
        for r in range(layout.ranks):
            p, d, t = layout.coordinates(r)
            if p == 0:
                self.channel[r, layout.rank(1, d, t)] = self.b.channel(r, layout.rank(1, d, t), depth=2)
                self.channel[layout.rank(1, d, t), r] = self.b.channel(layout.rank(1, d, t), r, depth=2)
        for r in range(layout.ranks):
            self.rank(r)
        self.program = self.b.build()

    def buffer(
        self, r: int, name: str, *, chunks: int = 1, chunk_bytes: int = 4, role: str = "activation", persistent: bool = False
    ) -> tuple[int, int, int]:
        if (r, name) not in self.buffers:
            self.buffers[r, name] = self.b.buffer(r, chunks=chunks, chunk_bytes=chunk_bytes, role=role, persistent=persistent, name=name)
        return (self.buffers[r, name], 0, chunks)

    def value(self, r: int, name: str) -> tuple[int, int, int]:
        chunks = self.layout.tensor
        return self.buffer(r, name, chunks=chunks, chunk_bytes=8 // chunks)

    def all_reduce(self, lane: LaneBuilder, name: str, group: tuple[int, ...], buffer: int, after: list[StepRef]) -> StepRef:
        key = f"ring{len(group)}"
        self.programs.setdefault(key, ring_all_reduce(len(group)))
        if group not in self.comms:
            self.comms[group] = self.b.comm(f"{name}{group}", group)
        return lane.call(self.b.call(self.comms[group], key, [(0, buffer, 0)]), after=after)

    def rank(self, r: int) -> None:
        lay, b = self.layout, self.b
        p, d, t = lay.coordinates(r)
        keys = lay.stages[p].segments
        work, arrive, leave = b.lane(r, unit=Unit.COMPUTE, role=Role.COMPUTE), b.lane(r), b.lane(r)
        peer = lay.rank(1 - p, d, t)
        group = tuple(lay.rank(p, d, i) for i in range(lay.tensor))
        weights = self.buffer(r, "weights", role="weight", persistent=True)
        grads = self.buffer(r, "gradients", chunks=lay.data, role="gradient", persistent=True)
        done: dict[tuple[str, int], StepRef] = {}
        for phase, m in one_f_one_b(2, lay.microbatches, p):
            waits = [StepRef(arrive.number, m)] if (phase == "F") == (p == 1) else []
            ref = None
            for key in keys if phase == "F" else reversed(keys):
                s = self.segment[key]
                saved = self.buffer(r, f"saved:{key}:{m}", chunk_bytes=12)
                if phase == "F":
                    reads = [weights, *(self.value(r, f"act:{v}:{m}") for v in s.reads)]
                    writes = [saved, *(self.value(r, f"act:{v}:{m}") for v in s.writes)]
                else:
                    reads = [weights, saved, *(self.value(r, f"grad:{v}:{m}") for v in s.writes if v != "loss")]
                    writes = [*([] if key in self.untrained else [grads]), *(self.value(r, f"grad:{v}:{m}") for v in s.reads)]
                op = b.op(
                    phase, graph=key, stage=p, microbatch=m, part=t if s.split else 0, parts=lay.tensor if s.split else 1, accumulate=phase == "B",
                    workspace_bytes=2, reads=reads, writes=writes,
                )  # fmt: skip
                ref = work.compute(op, after=waits)
                waits = []
                if phase == "B":
                    b.dies_after(saved[0], ref)
                for v in s.sum_writes if phase == "F" else s.sum_grads:
                    ref = self.all_reduce(work, "tp", group, self.buffers[r, f"{'act' if phase == 'F' else 'grad'}:{v}:{m}"], [])
            assert ref is not None
            done[phase, m] = ref
        kind_out, kind_in = ("act", "grad") if p == 0 else ("grad", "act")
        for m in range(lay.microbatches):
            buffer, _, count = self.value(r, f"{kind_in}:x:{m}")
            freed = [done["B" if p == 0 else "F", m - 2]] if m >= 2 else []
            arrive.recv(self.channel[peer, r], buffer, 0, count, after=freed)
            b.dies_after(buffer, done["B", m] if p == 0 else done["F", m])
            buffer, _, count = self.value(r, f"{kind_out}:x:{m}")
            b.dies_after(buffer, leave.send(self.channel[r, peer], buffer, 0, count, after=[done["F" if p == 0 else "B", m]]))
        last = done["B", lay.microbatches - 1]
        if lay.data > 1:
            sync = b.lane(r)
            last = self.all_reduce(sync, "dp", tuple(lay.rank(p, i, t) for i in range(lay.data)), grads[0], [last])
        work.compute(b.op("optimizer", graph=f"opt{p}", stage=p, reads=[grads, weights], writes=[weights]), after=[last])
