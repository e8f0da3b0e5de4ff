"""The search graph: vertices with choices (operators, parameters, inputs, hubs), edges with redistribution costs.

A value that several operators read gets a hub, a vertex that does nothing: the value is brought to the hub's state once and every reader
takes it from there. So the cost of a plan is a sum over vertices and edges, and what readers share is paid once.
Deviation from the paper: hubs; exact node and edge elimination becomes possible with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....graph.graph import OpGraph, OpNode, operator_name
from ....plan.sharding import item_bytes
from .problem import ShardingProblem
from .rules import Call, Shape, Signature, Spec, expand, replicated
from .rules_matrix import MATRIX
from .rules_pointwise import POINTWISE
from .rules_reduce import REDUCE
from .rules_shape import MAX_BLOCKS, SHAPE

__all__ = ["Network", "Operand", "Value", "Vertex", "build_network", "spec_of"]

RULES = {**POINTWISE, **REDUCE, **SHAPE, **MATRIX}


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor (or a tuple of tensors that are split alike). `gradient`: whether one flows through it."""

    name: str
    shape: Shape
    item: int
    gradient: bool
    many: bool = False


@dataclass(frozen=True)
class Operand:
    """An edge: `reader` takes `value` as its operand number `slot` from vertex `source`. `fixed`: it must take it as it is."""

    source: int
    reader: int
    slot: int
    value: Value
    fixed: bool = False


@dataclass
class Vertex:
    """`kind`: param, buffer, input, op or hub. `signatures`: per-axis candidates (operators); sources and hubs have `types` instead."""

    kind: str
    value: Value
    node: OpNode | None = None
    call: Call | None = None
    signatures: list[Signature] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    ins: list[int] = field(default_factory=list)  # edges, in slot order
    outs: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def key(self) -> str:
        """The name in plans: a hub is told from the value it carries."""
        return f"hub:{self.name}" if self.kind == "hub" else self.name


@dataclass
class Network:
    graph: OpGraph
    vertices: list[Vertex]
    edges: list[Operand]
    whole: tuple[str, ...]

    def vertex_of(self, name: str, kind: str | None = None) -> int:
        for i, v in enumerate(self.vertices):
            if v.name == name and (kind is None or v.kind == kind):
                return i
        raise KeyError(name)


def spec_of(call: Call) -> Spec | None:
    """What is known of a call; None for an unknown operator, or for arguments of a known one that rule out every split."""
    rule = RULES.get(operator_name(call.node.target))
    if rule is None or (call.node.random and operator_name(call.node.target) != "dropout"):
        return None
    try:
        spec = rule(call)
    except (IndexError, KeyError, TypeError, ValueError):  # arguments of a shape that the rule does not foresee
        return None
    return spec if spec is not None and len(spec.operands) == len(call.shapes) else None


def build_network(problem: ShardingProblem) -> Network:
    """Raises: UsageError for a dtype that cannot be split."""
    builder = _Builder(problem)
    builder.sources()
    for node in problem.graph.nodes:
        builder.operator(node)
    builder.block_counts()
    builder.fill_signatures()
    builder.hubs()
    return Network(problem.graph, builder.vertices, builder.edges, tuple(builder.whole))


class _Builder:
    def __init__(self, problem: ShardingProblem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.vertices: list[Vertex] = []
        self.edges: list[Operand] = []
        self.at: dict[str, int] = {}
        self.shapes: dict[str, list[Shape]] = {}
        self.specs: dict[int, Spec] = {}
        self.blocks: dict[str, dict[int, set[int]]] = {}
        self.whole: list[str] = []

    def _item(self, dtype: str) -> int:
        size = item_bytes(dtype)
        return self.problem.item_bytes if self.problem.item_bytes and dtype.startswith(("float", "bfloat")) else size

    def _add(self, vertex: Vertex) -> int:
        self.vertices.append(vertex)
        self.at[vertex.name] = len(self.vertices) - 1
        return len(self.vertices) - 1

    def sources(self) -> None:
        for p in self.graph.parameters:
            value = Value(name=f"param:{p.name}", shape=p.shape, item=self._item(p.dtype), gradient=p.trainable)
            self._add(Vertex("param", value, types=["R", *(f"S{d}" for d in range(len(p.shape)))]))
        for b in self.graph.buffers:
            value = Value(name=f"buffer:{b.name}", shape=b.shape, item=self._item(b.dtype), gradient=False)
            self._add(Vertex("buffer", value, types=["R", *(["S0"] if len(b.shape) == 1 else [])]))
        for i, x in enumerate(self.graph.inputs):
            value = Value(name=f"input:{i}", shape=x.shape, item=self._item(x.dtype), gradient=False)
            self._add(Vertex("input", value, types=["R", *(["S0"] if x.shape else [])]))

    def operator(self, node: OpNode) -> None:
        operands = [self.vertices[self.at[name]].value for name in node.inputs]
        shapes = tuple(self._operand_shape(node, v) for v in operands)
        outputs = tuple(o.shape for o in node.outputs)
        floating = node.passes_gradient
        call = Call(
            node=node, shapes=shapes, outputs=outputs or ((),), items=tuple(v.item for v in operands),
            differentiable=tuple(v.gradient and floating for v in operands),
        )  # fmt: skip
        value = Value(
            name=node.name, shape=call.outputs[0], item=self._item(node.outputs[0].dtype) if node.outputs else 4, gradient=call.has_gradient,
            many=len(outputs) > 1,
        )  # fmt: skip
        vertex = self._add(Vertex("op", value, node=node, call=call))
        self.shapes[node.name] = list(outputs)
        spec = spec_of(call)
        if spec is not None:
            self.specs[vertex] = spec
        elif node.inputs and node.name not in self.problem.signatures:
            self.whole.append(f"{node.name} ({node.target})")
        for slot, name in enumerate(node.inputs):
            source = self.vertices[self.at[name]]
            fixed = source.value.many or (node.mutates_buffers and source.kind == "buffer")
            self._edge(self.at[name], vertex, slot, source.value, fixed)

    def _operand_shape(self, node: OpNode, value: Value) -> Shape:
        if value.many and node.target == "operator.getitem":
            return self.shapes[value.name][int(node.args[1])]
        return value.shape

    def _edge(self, source: int, reader: int, slot: int, value: Value, fixed: bool) -> None:
        self.edges.append(Operand(source, reader, slot, value, fixed))
        self.vertices[source].outs.append(len(self.edges) - 1)
        self.vertices[reader].ins.append(len(self.edges) - 1)

    # ---- dimensions that consist of blocks ---------------------------------------------------------------------------
    def block_counts(self) -> None:
        """Block counts per value and dimension: from views and splits, carried along letters in both directions until nothing changes."""
        for vertex, spec in self.specs.items():
            for signature in spec.extra:
                node = self.vertices[vertex].node
                assert node is not None
                for name, kind in zip(node.inputs, signature.inputs, strict=True):
                    self._note(name, kind)
                self._note(node.name, signature.output)
        changed = True
        while changed:
            changed = False
            for vertex, spec in self.specs.items():
                node = self.vertices[vertex].node
                assert node is not None
                words = [*zip(node.inputs, spec.operands, strict=True), (node.name, spec.result)]
                for letter, counts in self._letter_blocks(words).items():
                    for name, word in words:
                        if letter in word:
                            have = self.blocks.setdefault(name, {}).setdefault(word.index(letter), set())
                            changed |= not counts <= have
                            have |= counts

    def _note(self, name: str, kind: str) -> None:
        dim, _, blocks = kind[1:].partition("/")
        if blocks and int(blocks) <= MAX_BLOCKS:
            self.blocks.setdefault(name, {}).setdefault(int(dim), set()).add(int(blocks))

    def _letter_blocks(self, words: Sequence[tuple[str, str]]) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for name, word in words:
            for dim, counts in self.blocks.get(name, {}).items():
                if dim < len(word) and word[dim] != ".":
                    found.setdefault(word[dim], set()).update(counts)
        return found

    def fill_signatures(self) -> None:
        for index, vertex in enumerate(self.vertices):
            for dim, counts in self.blocks.get(vertex.name, {}).items():
                if vertex.kind in ("param", "buffer"):
                    vertex.types += [f"S{dim}/{b}" for b in sorted(counts)]
            if vertex.kind != "op":
                continue
            assert vertex.call is not None and vertex.node is not None
            spec = self.specs.get(index)
            if spec is None:
                vertex.signatures = [*self.problem.signatures.get(vertex.name, ()), *replicated(vertex.call)]
            else:
                words = [*zip(vertex.node.inputs, spec.operands, strict=True), (vertex.name, spec.result)]
                blocks = {c: {b for b in counts if b > 1} for c, counts in self._letter_blocks(words).items()}
                known = expand(spec, vertex.call, blocks)
                vertex.signatures = [*known, *(s for s in self.problem.signatures.get(vertex.name, ()) if s not in known)]

    # ---- values with several readers ---------------------------------------------------------------------------------
    def hubs(self) -> None:
        for index in range(len(self.vertices)):
            vertex = self.vertices[index]
            readers = [e for e in vertex.outs if not self.edges[e].fixed]
            if len(readers) < 2 or vertex.value.many:
                continue
            hub = len(self.vertices)
            self.vertices.append(Vertex("hub", vertex.value))
            vertex.outs = [e for e in vertex.outs if self.edges[e].fixed]
            for e in readers:
                old = self.edges[e]
                self.edges[e] = Operand(hub, old.reader, old.slot, old.value, old.fixed)
                self.vertices[hub].outs.append(e)
            self._edge(index, hub, 0, vertex.value, False)
