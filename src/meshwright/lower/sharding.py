"""A sharding plan as the program of one training step: local operators as compute steps, redistributions as calls of direct collectives.

Every rank walks the operators in the graph's order, then back. Compute steps: `F` and `B` of an operator, `move` and `back` of a redistribution
(keyed by its reader and operand, `hub:<value>` for a hub) and of its gradient, `sum` of a bucket of gradients, `optimizer`. Around every exchange a
compute step packs what is sent and the next one unpacks what came, in buffers `act:<name>:0` (forward) and `grad:<name>:0` (backward); the
micro-batch of an op counts the exchanges before it. An operator whose pieces talk to each other (`inside`) has a step more for each all-reduce.
Communicators are named by the reason for which their bytes are counted, then axis and group. Pieces of other tensors (`value:`, `gradient:`) are
what the steps keep between them.
Nothing overlaps: the calls stand in the compute lane. So every rank calls in one order, and what a rank sends are the bytes that the plan states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

import numpy as np

from ..errors import PlanMismatch
from ..graph.graph import OpGraph, OpNode, operator_name
from ..plan.plan import ValueInfo
from ..plan.sbp import State, chunk_of, coordinates, gradient_of, kind_of, local_shape, split_of, value_of
from ..plan.sharding import MoveRecord, ShardingPlan, item_bytes
from ..program.builder import LaneBuilder, ProgramBuilder, StepRef
from ..program.program import Program, Role, Unit
from .direct import direct

__all__ = ["Inside", "Move", "Redistribution", "ShardedProgram", "inside", "lower_sharding", "redistribution_program"]

Shape = tuple[int, ...]
At = tuple[int, ...]


@dataclass(frozen=True)
class Redistribution:
    """`steps` (axis, type) from `state` on, as values. `shapes`: of the whole tensor, by rank where what a rank holds is counted (a bucket)."""

    shapes: tuple[Shape, ...]
    state: State
    steps: tuple[tuple[int, str], ...]
    reason: str  # what its bytes are counted as

    def hops(self) -> Iterator[tuple[int, State, State]]:
        """(axis, state before, state after) of every step."""
        state = self.state
        for axis, target in self.steps:
            after = (*state[:axis], target, *state[axis + 1 :])
            yield axis, state, after
            state = after

    def stages(self, sizes: Sequence[int]) -> list[list[tuple[int, State, State]]]:
        """Steps by compute step; the last of all stages but the last is an exchange."""
        found: list[list[tuple[int, State, State]]] = [[]]
        for hop in self.hops():
            found[-1].append(hop)
            if exchanges(hop, sizes):
                found.append([])
        return found


def exchanges(hop: tuple[int, State, State], sizes: Sequence[int]) -> bool:
    axis, before, after = hop
    return sizes[axis] > 1 and kind_of(before[axis], after[axis]) != "local"


@dataclass(frozen=True)
class Move:
    """A value redistributed for a reader, and its gradient on the way back (None without one). A bucket has a way forward only."""

    source: str  # what is read: a value or hub:<value>
    dtype: str
    ahead: Redistribution
    back: Redistribution | None = None
    members: tuple[str, ...] = ()  # of a bucket: the parameters, in order


@dataclass(frozen=True)
class Inside:
    """An all-reduce over `axis` inside an operator, of the rank's `elements`; `gradient`: one of its gradient too."""

    axis: int
    elements: int
    dtype: str
    maximum: bool = False
    gradient: bool = False


@dataclass(frozen=True)
class ShardedProgram:
    """`program` calls `callees`. `values[rank]`: what the rank's buffers of exchanges hold. `operands`: what an operator reads, by its slots."""

    program: Program
    callees: dict[str, Program]
    values: tuple[dict[str, ValueInfo], ...]
    moves: dict[str, Move] = field(default_factory=dict)
    operands: dict[str, tuple[str, ...]] = field(default_factory=dict)
    insides: dict[str, tuple[tuple[Inside, ...], ...]] = field(default_factory=dict)  # by operator and rank
    gradients: frozenset[str] = frozenset()  # values, and keys of moves, that have one


def lower_sharding(plan: ShardingPlan, graph: OpGraph, *, dtype: str = "") -> ShardedProgram:
    """`graph` is the planned one. `dtype`: of floating-point tensors, where it is not that of the capture. Raises: PlanMismatch."""
    return _Lowering(plan, graph, dtype).run()


def redistribution_program(sizes: tuple[int, ...], dtype: str, way: Redistribution) -> ShardedProgram:
    """One redistribution alone."""
    b = _Exchanges(sizes, "redistribution")
    b.redistribute("move", "alone", way, dtype, [], [])
    return ShardedProgram(b.build(), b.callees, tuple(b.values))


class _Exchanges:
    """Compute steps and calls on all ranks of a mesh, each in the one lane of its rank."""

    def __init__(self, sizes: Sequence[int], name: str) -> None:
        self.sizes, self.places = tuple(sizes), list(coordinates(sizes))
        self.b = ProgramBuilder(ranks=len(self.places), name=name)
        self.lanes: list[LaneBuilder] = [self.b.lane(r, unit=Unit.COMPUTE, role=Role.COMPUTE) for r in range(len(self.places))]
        self.callees: dict[str, Program] = {}
        self.values: list[dict[str, ValueInfo]] = [{} for _ in self.places]
        self.comms: dict[str, int] = {}
        self.buffers: dict[str, list[int]] = {}  # by rank
        self.last: dict[int, StepRef] = {}  # by buffer that dies: the last step so far that uses it
        self.persistent: set[int] = set()

    def build(self) -> Program:
        for buffer, last in self.last.items():
            self.b.dies_after(buffer, last)
        return self.b.build()

    def buffer(self, name: str, size_bytes: Sequence[int], role: str, *, persistent: bool = False) -> None:
        self.buffers[name] = [
            self.b.buffer(r, chunks=1, chunk_bytes=size, role=role, persistent=persistent, name=name) for r, size in enumerate(size_bytes)
        ]
        self.persistent |= set(self.buffers[name] if persistent else ())

    def compute(self, name: str, key: str, number: int, reads: Sequence[str], writes: Sequence[str]) -> None:
        for r, lane in enumerate(self.lanes):
            taken, made = ([(b, 0, self.b.chunks_of(b)) for b in (self.buffers[x][r] for x in names)] for names in (reads, writes))
            ref = lane.compute(self.b.op(name, graph=key, microbatch=number, reads=taken, writes=made))
            self.last |= dict.fromkeys({b for b, _, _ in (*taken, *made)} - self.persistent, ref)

    def redistribute(self, name: str, key: str, way: Redistribution, dtype: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        stages, prefix = way.stages(self.sizes), f"grad:{key}.back" if name == "back" else f"act:{key}"
        for i, stage in enumerate(stages[:-1]):
            axis, before, after = stage[-1]
            op = kind_of(before[axis], after[axis])
            shapes = [local_shape(s, before, self.sizes, at) for s, at in zip(way.shapes, self.places, strict=True)]
            buffers = [f"{prefix}.{i}{end}:0" for end in (("", ".got") if op in ("all-gather", "all-to-all") else ("",))]
            calls = self.open(op, axis, self.counts(op, axis, shapes, split_of(after[axis])), dtype, buffers, way.reason, before[axis] == "M")
            self.compute(name, key, i, reads, buffers[:1])
            self.call(calls, buffers)
            reads = buffers[-1:]
        self.compute(name, key, len(stages) - 1, reads, writes)

    def counts(self, op: str, axis: int, shapes: Sequence[Shape], split: tuple[int, int] | None) -> list[list[int]]:
        """Elements that every rank has for each of its group on the axis; `shapes` are those of their pieces, `split` is the new one."""
        p = self.sizes[axis]
        if op == "all-gather":
            return [[prod(shape)] * p for shape in shapes]
        if op == "all-reduce":
            return [[chunk_of(prod(shape), p, i)[1] for i in range(p)] for shape in shapes]
        assert split is not None
        dim, blocks = split
        return [[prod(s) // s[dim] * blocks * chunk_of(s[dim] // blocks, p, i)[1] if s[dim] else 0 for i in range(p)] for s in shapes]

    def open(
        self, op: str, axis: int, counts: Sequence[Sequence[int]], dtype: str, names: Sequence[str], reason: str, maximum: bool = False
    ) -> list[int]:  # fmt: skip
        """Buffers for an exchange, and the call on every rank."""
        item, calls = item_bytes(dtype), [0] * len(self.places)
        for name in names:
            self.buffers[name] = [0] * len(self.places)
        groups: dict[At, list[int]] = {}
        for r, at in enumerate(self.places):
            groups.setdefault((*at[:axis], *at[axis + 1 :]), []).append(r)
        for number, ranks in enumerate(groups.values()):
            rows = [counts[r] for r in ranks]
            unit = gcd(*(n for row in rows for n in row)) or 1
            callee, program = direct(op, tuple(tuple(n // unit for n in row) for row in rows))
            self.callees[callee] = program
            title = f"{reason}:{axis}.{number}"
            if title not in self.comms:
                self.comms[title] = self.b.comm(title, ranks)
            for r in ranks:
                own = np.flatnonzero(program.buffers.actor == ranks.index(r))
                for name, theirs in zip(names, own.tolist(), strict=True):
                    value, chunks = name[name.index(":") + 1 : -2], int(program.buffers.chunks[theirs])
                    buffer = self.b.buffer(r, chunks=chunks, chunk_bytes=unit * item, role="activation", name=name)
                    self.buffers[name][r] = buffer
                    self.values[r][value] = ValueInfo(
                        name=value, shape=(chunks * unit,), dtype=dtype, size_bytes=chunks * unit * item, reduce="max" if maximum else "sum"
                    )
                calls[r] = self.b.call(self.comms[title], callee, [(i, self.buffers[name][r], 0) for i, name in enumerate(names)])
        return calls

    def call(self, calls: Sequence[int], names: Sequence[str]) -> None:
        for r, lane in enumerate(self.lanes):
            self.last |= dict.fromkeys([self.buffers[name][r] for name in names], lane.call(calls[r]))


@dataclass
class _Lowering:
    plan: ShardingPlan
    graph: OpGraph
    dtype: str
    moves: dict[str, Move] = field(default_factory=dict)
    operands: dict[str, tuple[str, ...]] = field(default_factory=dict)
    insides: dict[str, tuple[tuple[Inside, ...], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph, plan = self.graph, self.plan
        self.x = _Exchanges(plan.mesh, f"sharded {graph.model}")
        self.sizes, self.places = self.x.sizes, self.x.places
        self.shapes: dict[str, Shape] = {f"input:{i}": v.shape for i, v in enumerate(graph.inputs)}
        self.dtypes: dict[str, str] = {f"input:{i}": self._dtype(v.dtype) for i, v in enumerate(graph.inputs)}
        for kind, tensors in (("param", graph.parameters), ("buffer", graph.buffers)):
            self.shapes |= {f"{kind}:{p.name}": p.shape for p in tensors}
            self.dtypes |= {f"{kind}:{p.name}": self._dtype(p.dtype) for p in tensors}
        self.gradients = {f"param:{p.name}" for p in graph.parameters if p.trainable}
        self.records = {(m.reader, m.slot): m for m in plan.moves if not m.bucket}
        self.outputs: dict[str, tuple[Shape, ...]] = {}

    def _dtype(self, name: str) -> str:
        return self.dtype if self.dtype and name.startswith(("float", "bfloat")) else name

    def run(self) -> ShardedProgram:
        plan, graph = self.plan, self.graph
        for name in list(self.shapes):
            self._value(name, "weight" if name.startswith("param:") else "input", persistent=True)
        for node in graph.nodes:
            self._forward(node)
        if set(plan.ops) != {n.name for n in graph.nodes}:
            odd = sorted(set(plan.ops) ^ {n.name for n in graph.nodes})
            raise PlanMismatch(f"the model is not the planned one: {len(odd)} operators differ, e.g. {odd[0]!r}", hint="make the plan again")
        first: dict[str, str] = {}  # hub -> the operator that reads it first
        for node in graph.nodes:
            for key in self.operands[node.name]:
                source = self.moves[key].source if key in self.moves and not key.startswith("hub:") else key
                first.setdefault(source, node.name)
        for node in reversed(graph.nodes):
            self._backward(node)
            for hub in [h for h, reader in first.items() if reader == node.name and h.startswith("hub:")]:
                self._back(hub)
        self._buckets()
        trained = [f"gradient:{p}" for p in self.gradients if p.startswith("param:")]
        self.x.compute("optimizer", "", 0, sorted(trained), [f"value:{p[9:]}" for p in sorted(trained)])
        found = frozenset(self.gradients | {k for k, m in self.moves.items() if m.back is not None})
        return ShardedProgram(self.x.build(), self.x.callees, tuple(self.x.values), self.moves, self.operands, self.insides, found)

    # ---- values ------------------------------------------------------------------------------------------------------
    def _state(self, name: str) -> State:
        plan = self.plan
        try:
            return plan.hubs[name[4:]] if name.startswith("hub:") else plan.sources[name] if ":" in name else plan.ops[name].output
        except KeyError:
            what = "has no operator" if ":" not in name else "says nothing about"
            raise PlanMismatch(f"the plan {what} {name!r}", hint="make the plan again for this model") from None

    def _value(self, name: str, role: str = "activation", *, state: State | None = None, persistent: bool = False) -> None:
        """Buffers for a tensor's pieces and, where it has one, their gradients'. `name`: of a value, or the key of a move."""
        value = self.moves[name].source.removeprefix("hub:") if name in self.moves else name
        state = state or self._state(name)
        item, shapes = item_bytes(self.dtypes[value]), self.outputs.get(value, (self.shapes[value],))
        sizes = [sum(prod(local_shape(s, state, self.sizes, at)) for s in shapes) * item for at in self.places]
        self.x.buffer(f"value:{name}", sizes, role, persistent=persistent)
        if value in self.gradients:
            sizes = [sum(prod(local_shape(s, gradient_of(state), self.sizes, at)) for s in shapes) * item for at in self.places]
            self.x.buffer(f"gradient:{name}", sizes, "gradient", persistent=persistent)

    def _moved(self, key: str, source: str, record: MoveRecord, target: State) -> str:
        """Bring `source` to `target` under `key`."""
        value = source.removeprefix("hub:")
        ahead = "parameters" if value.startswith("param:") else "loader" if ":" in value else "activations"
        shapes, before = (self.shapes[value],) * len(self.places), self._state(source)
        back = Redistribution(shapes, gradient_of(target), record.backward, "gradients" if ahead == "parameters" else ahead)
        way = Redistribution(shapes, value_of(before), record.forward, ahead)
        self.moves[key] = Move(source, self.dtypes[value], way, back if value in self.gradients else None)
        self._value(key, state=target)
        self.x.redistribute("move", key, way, self.dtypes[value], [f"value:{source}"], [f"value:{key}"])
        return key

    def _operand(self, node: OpNode, slot: int, value: str) -> str:
        hub = f"hub:{value}"
        source = value
        if value in self.plan.hubs and not (node.mutates_buffers and value.startswith("buffer:")) and (hub, 0) in self.records:
            source = hub
            if hub not in self.moves:
                self._moved(hub, value, self.records[hub, 0], self.plan.hubs[value])
        record = self.records.get((node.name, slot))
        return self._moved(f"{node.name}.{slot}", source, record, self.plan.ops[node.name].inputs[slot]) if record is not None else source

    # ---- operators ---------------------------------------------------------------------------------------------------
    def _forward(self, node: OpNode) -> None:
        name, x = node.name, self.x
        self._state(name)
        self.operands[name] = keys = tuple(self._operand(node, i, v) for i, v in enumerate(node.inputs))
        self.outputs[name] = tuple(v.shape for v in node.outputs) or ((),)
        self.shapes[name] = self.outputs[name][0]
        self.dtypes[name] = self._dtype(node.outputs[0].dtype) if node.outputs else "float32"
        if node.passes_gradient and any(v in self.gradients for v in node.inputs):
            self.gradients.add(name)
        self._value(name)
        dtypes = [self.dtypes[v] for v in node.inputs]
        whole = [self.shapes[v] for v in node.inputs]
        states = self.plan.ops[name].inputs
        self.insides[name] = tuple(
            inside(node, whole, states, dtypes, self.sizes, at, bool(node.inputs) and node.inputs[0] in self.gradients) for at in self.places
        )
        reads = [f"value:{k}" for k in keys]
        sums = list(zip(*self.insides[name], strict=True))
        for i, of_rank in enumerate(sums):
            buffer, calls = self._inside("act", f"{name}.{i}", of_rank)
            x.compute("F", name, i, reads, [buffer])
            x.call(calls, [buffer])
            reads = [buffer, *(f"value:{k}" for k in keys)]
        x.compute("F", name, len(sums), reads, [f"value:{name}"])

    def _inside(self, kind: str, key: str, of_rank: Sequence[Inside]) -> tuple[str, list[int]]:
        """The buffer of an all-reduce inside an operator, and its calls."""
        one, buffer = of_rank[0], f"{kind}:{key}:0"
        counts = self.x.counts("all-reduce", one.axis, [(i.elements,) for i in of_rank], None)
        return buffer, self.x.open("all-reduce", one.axis, counts, one.dtype, [buffer], "inside", one.maximum)

    def _backward(self, node: OpNode) -> None:
        name, x = node.name, self.x
        if name not in self.gradients:
            return
        keys = self.operands[name]
        reads = [f"gradient:{name}", *dict.fromkeys(f"value:{k}" for k in keys)]
        sums = [s for s in enumerate(zip(*self.insides[name], strict=True)) if s[1][0].gradient]
        for number, (i, of_rank) in enumerate(reversed(sums)):
            buffer, calls = self._inside("grad", f"{name}.back.{i}", of_rank)
            x.compute("B", name, number, reads, [buffer])
            x.call(calls, [buffer])
            reads = [buffer, *reads[1:]]
        writes = dict.fromkeys(f"gradient:{k}" for k in keys if f"gradient:{k}" in x.buffers)
        x.compute("B", name, len(sums), reads, [*writes])
        for key in keys:
            if key in self.moves and not key.startswith("hub:"):
                self._back(key)

    def _back(self, key: str) -> None:
        move = self.moves[key]
        if move.back is not None:
            self.x.redistribute("back", key, move.back, move.dtype, [f"gradient:{key}"], [f"gradient:{move.source}"])

    def _buckets(self) -> None:
        """Gradients of parameters that are summed together, in one flat tensor."""
        own = {f"param:{p.name}": item_bytes(p.dtype) for p in self.graph.parameters}
        members: dict[tuple[tuple[int, ...], int], list[str]] = {}
        for record in self.plan.moves:
            if record.bucket:
                members.setdefault((record.bucket, self.plan.item_bytes or own[record.source]), []).append(record.source)
        ways = {(b.axes, b.item): b.steps for b in self.plan.buckets}
        for i, (which, params) in enumerate(members.items()):
            flat = tuple((sum(prod(local_shape(self.shapes[p], self._state(p), self.sizes, at)) for p in params),) for at in self.places)
            state = tuple("P" if axis in which[0] else "B" for axis in range(len(self.sizes)))
            key, touched = f"bucket {i}", [f"gradient:{p}" for p in params]
            self.moves[key] = Move("", self.dtypes[params[0]], Redistribution(flat, state, ways[which], "gradients"), members=tuple(params))
            self.x.redistribute("sum", key, self.moves[key].ahead, self.dtypes[params[0]], touched, touched)


def inside(
    node: OpNode, shapes: Sequence[Shape], states: Sequence[State], dtypes: Sequence[str], sizes: Sequence[int], at: At, gradient: bool
) -> tuple[Inside, ...]:  # fmt: skip
    """The all-reduces inside an operator, in order, on the rank at `at`; its operands are whole tensors of `shapes` in `states`."""
    def argument(index: int, name: str, default: object = None) -> object:
        return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)

    def axes(dim: int) -> list[int]:
        splits = [(axis, split_of(kind)) for axis, kind in enumerate(states[0])]
        return [axis for axis, split in splits if split is not None and split[0] == dim and sizes[axis] > 1]

    operator = operator_name(node.target)
    if operator not in ("batch_norm", "cross_entropy_loss"):
        return ()
    local, dtype = local_shape(shapes[0], states[0], sizes, at), dtypes[0]
    if operator == "batch_norm":
        once = [Inside(axis, local[1], dtype, gradient=gradient) for axis in axes(0)] if argument(5, "training") else []
        return (*once, *once)
    if dtypes[1].startswith(("float", "bfloat")):
        return ()
    rows = 3 if argument(5, "label_smoothing", 0.0) else 2
    found = [Inside(axis, local[0], dtype, maximum=True) for axis in axes(1)] + [Inside(axis, rows * local[0], dtype) for axis in axes(1)]
    return (*found, *(Inside(axis, 1, "int64") for axis in axes(0) if argument(3, "reduction", 1) != 2))
