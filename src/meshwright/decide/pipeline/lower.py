"""Lowers any schedule to a `Program`: compute lanes, one send and one receive lane per connection, direction and copy, buffers with lifetimes.

Rank = device · data + replica. A device's compute lane runs its order; a collective lane its gathers and reductions, as calls. Both ends of a
connection follow the producer's order, so messages always match. A receive waits until the message `receives_ahead` places before it
has been used (more, where the consumer's order demands that more be held), so a slow stage never piles up activations.

Names, which an executor reads: op F | B | I | W, graph `stage<k>` (`:c<copy>` behind where there are copies), `copy`, `stage`, `microbatch`, and for
Chimera's doubled forward graph `…:x2` and module `<first>-<last>`, the micro-batches it runs together. In a pair of a forward and a backward graph
ends with `&<stage of the other half>`, and F takes the time of both. Buffers of stage k and micro-batch m:
`in:k:m` input received (kept for the backward), `saved:k:m` the rest of what F keeps, `out:k:m` output, `gradin:k:m` gradient of the output
received, `gradout:k:m` gradient of the input; `weights:k`, `gradients:k` (persistent; `:c<copy>` behind when there are copies).
What waits in the host's memory (`Schedule.offloads`): op O copies `saved:k:m` to `kept:k:m` (space host) and R copies that to `again:k:m`, which the
backward reads instead, in two lanes on the device's copy unit.
Bytes: in = message, in + saved = activation (saved alone where the input comes from the same device or is data).

Not `lower.training`: that one lowers a graph's segments, every value with buffers and messages of its own, on data and tensor ranks, with an
optimizer. A problem here is figures per stage without a graph, one message per border, and its forward may be doubled. What both need, who sends
what to whom in which order and how far ahead, is `lower.connections`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...cost import Cost, Priced
from ...errors import UsageError
from ...fabric.fabric import Device, Fabric, Link
from ...kernels.effort import look
from ...lower.connections import Connection, connections, window
from ...program.builder import LaneBuilder, ProgramBuilder, StepRef
from ...program.calls import Callee
from ...program.program import Program, Role, Space, Unit
from .orders import action_s, connection, message_bytes, saved_bytes, stage_share
from .problem import Action, Collective, PipelineProblem, Schedule

__all__ = ["Fill", "PlanCollective", "fabric_of", "lower_schedule", "price_table"]


# (kind, ranks, size in bytes) -> the collective to call
PlanCollective = Callable[[str, tuple[int, ...], int], Callee]
# (builder, compute lane of every rank)
Fill = Callable[[ProgramBuilder, list[LaneBuilder]], None]


def fabric_of(problem: PipelineProblem) -> Fabric:
    """The problem's devices, all pairs connected by links of their own (see PipelineProblem for their figures)."""
    names = [f"d{r // problem.data}" + (f".{r % problem.data}" if problem.data > 1 else "") for r in range(problem.devices * problem.data)]
    caps = problem.memory_cap_bytes or (0,) * problem.devices
    devices = tuple(Device(name=n, memory_bytes=caps[i // problem.data]) for i, n in enumerate(names))
    links = []
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if i != j:
                latency_s, rate_Bps = connection(problem, i // problem.data, j // problem.data)
                links.append(Link(src=a, dst=b, rate_Bps=rate_Bps, latency_s=latency_s))
    return Fabric(name="pipeline", devices=devices, links=tuple(links))


def lower_schedule(
    problem: PipelineProblem, schedule: Schedule, plan_collective: PlanCollective | None = None, *, fill: Fill | None = None
) -> tuple[Program, dict[str, Program]]:
    """The program of one step, and the programs that it calls by content hash. `fill` adds lanes of other work (see `fill_program`).

    Without `plan_collective` collectives are left out, which is right when there is nothing to reduce. Raises: UsageError otherwise.
    """
    moved = any(problem.gradient_bytes) and any(schedule.collectives)
    if moved and plan_collective is None:
        raise UsageError("gradients are to be reduced, but nothing plans the collectives", where="plan_collective")
    return _Lowering(problem, schedule, plan_collective if moved else None).run(fill)


def price_table(problem: PipelineProblem, schedule: Schedule) -> Cost:
    """Prices of the compute steps of a schedule's program; transfers take the links' time only."""
    table = {}
    for order in schedule.orders:
        for a in order:
            table[f"{_graph(schedule, a)}|{a.kind}"] = Priced(action_s(problem, schedule, a))
    for row in schedule.offloads:
        for x in row:
            copy = schedule.copy_of[x.microbatch]
            for kind, rate_Bps in (("O", problem.host_out_Bps), ("R", problem.host_in_Bps)):
                table[f"{_graph(schedule, Action('F', x.stage, 0, copy))}|{kind}"] = Priced(saved_bytes(problem, schedule, copy, x.stage) / rate_Bps)
    return Cost(name="pipeline", table=table, source="times per stage as given")


def _graph(schedule: Schedule, a: Action) -> str:
    """Names what an action runs: a copy of a stage is on one device, so its price has one key."""
    return f"stage{a.stage}" + (f":c{a.copy}" if schedule.copies > 1 else "") + (f":x{a.count}" if a.count > 1 else "") + (
        f"&{a.beside}" if a.beside >= 0 else ""
    )


@dataclass
class _Rank:
    number: int
    device: int
    replica: int
    compute: LaneBuilder
    comm: LaneBuilder | None
    step: dict[tuple[str, int, int], StepRef] = field(default_factory=dict)  # (kind, stage, micro-batch); I counts as B
    place: dict[tuple[str, int, int], int] = field(default_factory=dict)
    received: dict[tuple[str, int, int], StepRef] = field(default_factory=dict)  # ("F" | "B", stage, micro-batch)
    buffer: dict[str, int] = field(default_factory=dict)


class _Lowering:
    def __init__(self, problem: PipelineProblem, schedule: Schedule, plan_collective: PlanCollective | None) -> None:
        self.problem, self.schedule, self.plan_collective = problem, schedule, plan_collective
        self.b = ProgramBuilder(ranks=schedule.devices * problem.data, name=f"{schedule.name} pipeline step")
        self.callees: dict[str, Program] = {}
        self.comms: dict[tuple[int, ...], int] = {}
        self.top = schedule.stages - 1
        self.end = "W" if schedule.split else "B"
        self.away = {row[:2] for rows in schedule.offloads for row in rows}  # (stage, micro-batch)

    def run(self, fill: Fill | None = None) -> tuple[Program, dict[str, Program]]:
        s, data = self.schedule, self.problem.data
        ranks = []
        for number in range(s.devices * data):
            compute = self.b.lane(number, unit=Unit.COMPUTE, role=Role.COMPUTE)
            comm = self.b.lane(number) if self.plan_collective else None
            ranks.append(_Rank(number, number // data, number % data, compute, comm))
        for r in ranks:
            look()
            self.persistent(r)
            self.make_buffers(r)
            for place, a in enumerate(s.orders[r.device]):
                done = "B" if a.kind == "I" else a.kind
                for m in range(a.microbatch, a.microbatch + a.count):
                    r.step[done, a.stage, m] = StepRef(r.compute.number, place)
                    r.place[done, a.stage, m] = place
        self.exchanges(ranks)
        for r in ranks:
            look()
            for place, a in enumerate(s.orders[r.device]):
                self.compute(r, a, s.orders[r.device][place + 1] if a.beside >= 0 and a.kind == "F" else None)
            if r.comm is not None and s.collectives:
                self.collect(r, r.comm, s.collectives[r.device])
            self.deaths(r)
            if r.device < len(s.offloads) and s.offloads[r.device]:
                self.offload(r)
        if fill is not None:
            fill(self.b, [r.compute for r in ranks])
        return self.b.build(), self.callees

    # ---- connections -------------------------------------------------------------------------------------------
    def exchanges(self, ranks: list[_Rank]) -> None:
        """All messages. Every replica has the connections of its devices. Kind F carries activations, B gradients."""
        s, data = self.schedule, self.problem.data
        orders = [[(a.kind, a.stage, m) for a in order for m in range(a.microbatch, a.microbatch + a.count)] for order in s.orders]
        lines = []
        for c in connections(orders, s.stages, s.copy_of.__getitem__, lambda copy, stage: s.placement[copy][stage]).values():
            ahead = window(c, ranks[c.target * data].place, s.receives_ahead)
            for replica in range(data):
                src, dst = ranks[c.source * data + replica], ranks[c.target * data + replica]
                channel = self.b.channel(src.number, dst.number, depth=ahead)
                lines.append((c, ahead, channel, src, self.b.lane(src.number), dst, self.b.lane(dst.number)))
        for line in lines:
            self.exchange(*line)

    def exchange(self, c: Connection, ahead: int, channel: int, src: _Rank, send: LaneBuilder, dst: _Rank, receive: LaneBuilder) -> None:
        out, into, step = ("out", "in", 1) if c.kind == "F" else ("gradout", "gradin", -1)
        for j, (stage, m) in enumerate(c.groups):
            source, target = src.buffer[f"{out}:{stage - step}:{m}"], dst.buffer[f"{into}:{stage}:{m}"]
            self.b.dies_after(source, send.send(channel, source, 0, after=[src.step[c.kind, stage - step, m]]))
            freed = [dst.step[(c.kind, *c.groups[j - ahead])]] if j >= ahead else []
            dst.received[c.kind, stage, m] = receive.recv(channel, target, 0, after=freed)

    # ---- buffers -----------------------------------------------------------------------------------------------
    def key(self, name: str, stage: int, copy: int) -> str:
        return f"{name}:{stage}" + (f":c{copy}" if self.schedule.copies > 1 else "")

    def persistent(self, r: _Rank) -> None:
        s, p = self.schedule, self.problem
        for copy, stage in s.hosted(r.device):
            share = stage_share(s, stage)
            weights, gradients = -(-p.weight_bytes[share] // s.chunks), -(-p.gradient_bytes[share] // s.chunks)
            chunks = 1
            if self.plan_collective and s.collectives:
                calls = [c for c in s.collectives[r.device] if (c.stage, c.copy) == (stage, copy)]
                for c in calls:
                    chunks = max(chunks, self.callee(r, c).chunks)
            each = -(-gradients // (4 * chunks)) * 4 if chunks > 1 else gradients
            for name, size in (("weights", each * chunks if self.sharded else max(0, weights - gradients)), ("gradients", gradients)):
                count = chunks if name == "gradients" or self.sharded else 1
                bytes_ = each if count > 1 or name == "gradients" else size
                role = "weight" if name == "weights" else "gradient"
                r.buffer[self.key(name, stage, copy)] = self.b.buffer(
                    r.number, chunks=count, chunk_bytes=bytes_, role=role, persistent=True, name=self.key(name, stage, copy)
                )

    @property
    def sharded(self) -> bool:
        return any(c.kind == "gather" for row in self.schedule.collectives for c in row)

    def make_buffers(self, r: _Rank) -> None:
        s, p = self.schedule, self.problem
        for a in s.orders[r.device]:
            if a.kind != "F":
                continue
            where, k = s.placement[a.copy], a.stage
            sizes = {"saved": saved_bytes(p, s, a.copy, k)}
            if k and where[k - 1] != r.device:
                sizes["in"] = message_bytes(p, s, k - 1)
            if k < self.top:
                sizes["out"] = message_bytes(p, s, k)
                if where[k + 1] != r.device:
                    sizes["gradin"] = message_bytes(p, s, k)
            if k:
                sizes["gradout"] = message_bytes(p, s, k - 1)
            for m in range(a.microbatch, a.microbatch + a.count):
                more = {"kept": sizes["saved"], "again": sizes["saved"]} if (k, m) in self.away else {}
                for name, size in (sizes | more).items():
                    full, space = f"{name}:{k}:{m}", Space.HOST if name == "kept" else Space.DEVICE
                    r.buffer[full] = self.b.buffer(r.number, chunks=1, chunk_bytes=size, role="activation", space=space, name=full)

    def inputs(self, r: _Rank, kind: str, stage: int, m: int) -> str | None:
        """The buffer that F (or the backward) of a stage reads from its neighbour; None at the end of the model."""
        if kind == "F":
            return None if not stage else f"in:{stage}:{m}" if f"in:{stage}:{m}" in r.buffer else f"out:{stage - 1}:{m}"
        if stage == self.top:
            return None
        return f"gradin:{stage}:{m}" if f"gradin:{stage}:{m}" in r.buffer else f"gradout:{stage + 1}:{m}"

    # ---- compute -----------------------------------------------------------------------------------------------
    def compute(self, r: _Rank, a: Action, beside: Action | None) -> None:
        """`beside`: the backward that runs at once with a forward, which then waits for the gradient too."""
        def whole(name: str) -> tuple[int, int, int]:
            return r.buffer[name], 0, self.b.chunks_of(r.buffer[name])

        weights, gradients = self.key("weights", a.stage, a.copy), self.key("gradients", a.stage, a.copy)
        reads, writes, waits = [whole(weights)], [], []
        if beside is not None and (ref := r.received.get(("B", beside.stage, beside.microbatch))) is not None:
            waits.append(ref)
        for m in range(a.microbatch, a.microbatch + a.count):
            kind = "F" if a.kind == "F" else "B"
            source = self.inputs(r, kind, a.stage, m)
            forward = self.inputs(r, "F", a.stage, m)
            if source is not None:
                reads.append(whole(source))
            if (kind, a.stage, m) in r.received and a.kind != "W":
                waits.append(r.received[kind, a.stage, m])
            if a.kind == "F":
                writes.append(whole(f"saved:{a.stage}:{m}"))
                writes += [whole(f"out:{a.stage}:{m}")] if a.stage < self.top else []
                continue
            reads.append(whole(f"{'again' if (a.stage, m) in self.away else 'saved'}:{a.stage}:{m}"))
            reads += [whole(forward)] if forward is not None else []
            writes += [whole(f"gradout:{a.stage}:{m}")] if a.stage and a.kind != "W" else []
            writes += [whole(gradients)] if a.kind != "I" else []
        module = f"{a.microbatch}-{a.microbatch + a.count - 1}" if a.count > 1 else ""
        op = self.b.op(
            a.kind, graph=_graph(self.schedule, a), module=module, copy=a.copy, stage=a.stage, microbatch=a.microbatch, accumulate=a.kind in "BW",
            reads=reads, writes=writes,
        )  # fmt: skip
        r.compute.compute(op, after=waits)

    def deaths(self, r: _Rank) -> None:
        """Last uses by compute steps; sends were added where they were made."""
        for name, buffer in r.buffer.items():
            kind, _, rest = name.partition(":")
            if kind in ("weights", "gradients"):
                continue
            k, m = map(int, rest.split(":"))
            last = r.step[self.end, k, m]
            if kind == "kept" or (kind == "saved" and (k, m) in self.away):
                continue
            if kind in ("saved", "in", "gradin", "again"):
                self.b.dies_after(buffer, last)
            elif kind == "out":
                if (self.end, k + 1, m) in r.step:  # the next stage is here and keeps it as its input
                    self.b.dies_after(buffer, r.step[self.end, k + 1, m])
            elif (self.end, k - 1, m) in r.step:
                self.b.dies_after(buffer, r.step[self.end, k - 1, m])

    def offload(self, r: _Rank) -> None:
        """What waits in the host's memory: out as its forwards are made, back as its backwards ask for it."""
        out, back = (self.b.lane(r.number, unit=Unit.COPY) for _ in range(2))
        left = {}
        rows = self.schedule.offloads[r.device]

        def move(lane: LaneBuilder, kind: str, stage: int, m: int, source: str, target: str, after: list[StepRef]) -> StepRef:
            a = Action("F", stage, m, self.schedule.copy_of[m])
            ranges = [(r.buffer[f"{name}:{stage}:{m}"], 0, 1) for name in (source, target)]
            graph = _graph(self.schedule, a)
            op = self.b.op(kind, graph=graph, copy=a.copy, stage=stage, microbatch=m, reads=ranges[:1], writes=ranges[1:])
            ref = lane.compute(op, after=after)
            self.b.dies_after(ranges[0][0], ref)
            return ref

        for x in sorted(rows, key=lambda x: (r.place["F", x.stage, x.microbatch], x.microbatch)):
            left[x] = move(out, "O", x.stage, x.microbatch, "saved", "kept", [r.step["F", x.stage, x.microbatch]])
            r.compute.wait(x.free, left[x])
        for x in sorted(rows, key=lambda x: r.place["B", x.stage, x.microbatch]):
            ref = move(back, "R", x.stage, x.microbatch, "kept", "again", [left[x], StepRef(r.compute.number, x.fetch)])
            r.compute.wait(r.place["B", x.stage, x.microbatch], ref)

    # ---- collectives -------------------------------------------------------------------------------------------
    def members(self, r: _Rank, c: Collective) -> tuple[int, ...]:
        """Ranks that hold the stage: its copies, each with its replicas."""
        devices = sorted({where[c.stage] for where in self.schedule.placement})
        return tuple(d * self.problem.data + i for d in devices for i in range(self.problem.data))

    def callee(self, r: _Rank, c: Collective) -> Callee:
        assert self.plan_collective is not None
        size = -(-self.problem.gradient_bytes[stage_share(self.schedule, c.stage)] // self.schedule.chunks)
        return self.plan_collective(c.kind, self.members(r, c), size)

    def collect(self, r: _Rank, lane: LaneBuilder, rows: tuple[Collective, ...]) -> None:
        for c in rows:
            ranks = self.members(r, c)
            if len(ranks) < 2:
                continue
            chosen = self.callee(r, c)
            self.callees[chosen.name] = chosen.program
            key = (c.stage, *ranks)
            if key not in self.comms:
                self.comms[key] = self.b.comm(f"stage{c.stage}", ranks)
            name = self.key("weights" if c.kind == "gather" else "gradients", c.stage, c.copy)
            call = self.b.call(self.comms[key], chosen.name, [(chosen.local[ranks.index(r.number)], r.buffer[name], 0)])
            ref = lane.call(call, after=[StepRef(r.compute.number, c.after)] if c.after >= 0 else [])
            if c.before >= 0:
                r.compute.wait(c.before, ref)
