"""The performance model: seconds and bytes of every choice of every vertex, and of every pair of choices along an edge.

T = operators (work divided by the axes that split it, forward and backward) + redistributions (forward: the value; backward: its gradient the other
way) + exchanges inside operators + optimiser + loading of inputs. What is replicated is not divided. Gradients of parameters that only
need an all-reduce go together at the end of the backward (`evaluate` prices that message; here such an edge costs its bytes).
Compute and communication are added up: the executor runs them one after the other.
Deviation from the paper: operators are priced by the project's `Cost` (roofline of flops and bytes of the local pieces), not by flops alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from ....fabric.fabric import Device
from ....graph.graph import Work
from ....plan.sbp import State, gradient_of, local_shape, split_of, valid, value_of
from ....plan.sharding import OPTIMIZERS
from .mesh import Axis, Mesh
from .network import Network, Operand, Vertex, build_network
from .problem import ShardingProblem
from .redistribute import Redistributor, Step
from .rules import Exchange, Signature

__all__ = ["Choice", "Model", "exchange_elements", "is_bucketed", "reduced_axes"]

FloatArray = NDArray[np.float64]
MAX_CHOICES = 1500  # of one vertex; beyond, choices that divide less work are left out


@dataclass(frozen=True)
class Choice:
    """One way to run a vertex on the mesh. `signatures`: one per axis, for operators."""

    inputs: tuple[State, ...]
    output: State
    signatures: tuple[Signature, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.signatures)


def is_bucketed(source: State, reader: State) -> bool:
    """Whether a parameter kept in `source` and read in `reader` needs nothing but an all-reduce of its gradient."""
    return value_of(source) == value_of(reader) and any(a == "R" and b == "B" for a, b in zip(source, reader, strict=True))


def reduced_axes(source: State, reader: State) -> tuple[int, ...]:
    """The axes of that all-reduce."""
    return tuple(i for i, (a, b) in enumerate(zip(source, reader, strict=True)) if a == "R" and b == "B")


def exchange_elements(exchange: Exchange, choice: Choice, axis: int, sizes: Sequence[int]) -> int:
    """Elements that a rank brings to an exchange on `axis`: those of its piece along the dimensions the exchange has."""
    elements = exchange.elements
    for other, signature in enumerate(choice.signatures):
        if other != axis and signature.letter and signature.letter in exchange.letters:
            elements = -(-elements // sizes[other])
    return elements


@dataclass
class Model:
    """Vertices, edges and their costs on one mesh. Arrays are made when asked for and kept."""

    problem: ShardingProblem
    mesh: Mesh
    network: Network
    redistribute: Redistributor = field(init=False)
    choices: list[list[Choice]] = field(init=False)
    times: list[FloatArray] = field(init=False)
    memory: list[FloatArray] = field(init=False)
    _edges: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.redistribute = Redistributor(self.mesh)
        quiet = Mesh(tuple(Axis(a.size, a.s_per_byte, 0.0, 0.0) for a in self.mesh.axes), self.mesh.devices)
        self._bytes_only = Redistributor(quiet)
        self.choices, self.times, self.memory = [], [], []
        for index, vertex in enumerate(self.network.vertices):
            found = self._hub(index) if vertex.kind == "hub" else self._operator(vertex) if vertex.kind == "op" else self._source(vertex)
            self.choices.append(found)
            prices = [self._price(vertex, c) for c in found]
            self.times.append(np.array([t for t, _ in prices]))
            self.memory.append(np.array([m for _, m in prices]))

    @classmethod
    def of(cls, problem: ShardingProblem, mesh: Mesh, network: Network | None = None) -> Model:
        return cls(problem, mesh, network or build_network(problem))

    @cached_property
    def device(self) -> Device:
        """The slowest device: every rank does the same share."""
        dtype = self.problem.cost.dtype
        known = [d for d in self.problem.fabric.devices if d.name in self.mesh.devices]
        return min(known, key=lambda d: (d.flops.get(dtype, self.problem.cost.default_flops) * (d.cpu_share or 1.0), d.memory_bandwidth_Bps))

    # ---- choices -----------------------------------------------------------------------------------------------------
    def _source(self, vertex: Vertex) -> list[Choice]:
        sizes = self.mesh.sizes
        states = [s for s in product(vertex.types, repeat=len(sizes)) if valid(vertex.value.shape, s, sizes)]
        return [Choice((), s) for s in states]

    def _operator(self, vertex: Vertex) -> list[Choice]:
        found: dict[tuple[tuple[State, ...], State], Choice] = {}
        for combination in product(vertex.signatures, repeat=len(self.mesh.sizes)):
            choice = self._combined(vertex, combination)
            if choice is not None:
                found.setdefault((choice.inputs, choice.output), choice)
        kept = list(found.values())
        if len(kept) > MAX_CHOICES:
            kept = sorted(kept, key=lambda c: -prod(p for p, s in zip(self.mesh.sizes, c.signatures, strict=True) if s.divided))[:MAX_CHOICES]
        return kept

    def _combined(self, vertex: Vertex, combination: tuple[Signature, ...]) -> Choice | None:
        """The signatures of all axes together, None if a piece would be empty or uneven where it must not be."""
        sizes = self.mesh.sizes
        for signature in combination:
            if signature.even:
                together = prod(p for p, s in zip(sizes, combination, strict=True) if s.letter == signature.letter)
                if signature.even % together:
                    return None
        call = vertex.call
        assert call is not None
        inputs = tuple(tuple(s.inputs[i] for s in combination) for i in range(len(call.shapes)))
        output = tuple(s.output for s in combination)
        shapes = (*call.shapes, call.outputs[0])
        if not all(valid(shape, state, sizes) for shape, state in zip(shapes, (*inputs, output), strict=True)):
            return None
        return Choice(inputs, output, combination)

    def _hub(self, index: int) -> list[Choice]:
        """All states that the producer or a reader of the value uses."""
        vertex = self.network.vertices[index]
        (incoming,) = [self.network.edges[e] for e in vertex.ins]
        states = {c.output: None for c in self.choices[incoming.source]}
        for e in vertex.outs:  # readers are operators, and hubs come after all of them
            edge = self.network.edges[e]
            states |= {c.inputs[edge.slot]: None for c in self.choices[edge.reader]}
        return [Choice((s,), s) for s in states]

    # ---- vertices ----------------------------------------------------------------------------------------------------
    def _elements(self, shape: tuple[int, ...], state: State) -> int:
        return prod(local_shape(shape, state, self.mesh.sizes, (0,) * len(state)))

    def _price(self, vertex: Vertex, choice: Choice) -> tuple[float, float]:
        value = vertex.value
        if vertex.kind == "hub":
            return 0.0, 0.0
        local = self._elements(value.shape, choice.output) * value.item
        if vertex.kind == "input":
            return local / self.problem.loader_Bps, float(local)
        if vertex.kind == "buffer" or (vertex.kind == "param" and not value.gradient):
            return 0.0, float(local)
        if vertex.kind == "param":
            copies, words = OPTIMIZERS[self.problem.optimizer]
            work = Work(flops=2 * local // value.item, bytes_read=(words - 1) * local, bytes_written=local, calls=1)
            return self.problem.cost.roofline(work, self.device).time_s, float((2 + copies) * local)
        return self._price_operator(vertex, choice)

    def _price_operator(self, vertex: Vertex, choice: Choice) -> tuple[float, float]:
        node, call = vertex.node, vertex.call
        assert node is not None and call is not None
        moved = whole = 0
        for shape, item, state in zip(call.shapes, call.items, choice.inputs, strict=True):
            moved, whole = moved + self._elements(shape, state) * item, whole + prod(shape) * item
        for shape in call.outputs:
            state = choice.output if vertex.value.shape == shape else tuple("B" for _ in choice.output)
            moved, whole = moved + self._elements(shape, state) * vertex.value.item, whole + prod(shape) * vertex.value.item
        share = moved / whole if whole else 1.0
        done = self._work_share(call.shapes, call.outputs[0], choice)
        seconds = sum(self.problem.cost.roofline(scaled(w, done, share), self.device).time_s for w in (node.forward, node.backward))
        for axis, signature in enumerate(choice.signatures):
            for exchange in signature.exchanges:
                seconds += self.exchange_time_s(exchange, choice, axis)
        saved = sum(self.problem.graph.storages[i].size_bytes for i in node.saved) * share
        return seconds, saved

    def _work_share(self, shapes: Sequence[tuple[int, ...]], result: tuple[int, ...], choice: Choice) -> float:
        """Part of the operator's arithmetic that the fullest device does."""
        share = 1.0
        for axis, signature in enumerate(choice.signatures):
            if not signature.divided:
                continue
            p = self.mesh.sizes[axis]
            for shape, kind in zip((*shapes, result), (*signature.inputs, signature.output), strict=True):
                split = split_of(kind)
                if split is not None:
                    width = shape[split[0]] // split[1]
                    share *= -(-width // p) / width
                    break
        return share

    def exchange_time_s(self, exchange: Exchange, choice: Choice, axis: int) -> float:
        elements = exchange_elements(exchange, choice, axis, self.mesh.sizes)
        plain = ["B"] * len(self.mesh.sizes)
        step = Step(axis, (*plain[:axis], "P", *plain[axis + 1 :]), tuple(plain))
        return self.redistribute.step_time_s((elements,), exchange.item, step)

    # ---- edges -------------------------------------------------------------------------------------------------------
    def edge_costs(self, index: int) -> tuple[FloatArray, FloatArray]:
        """(seconds, bytes kept for the backward) of an edge, by choices of the source (rows) and of the reader (columns)."""
        if index in self._edges:
            return self._edges[index]
        edge = self.network.edges[index]
        sources = [c.output for c in self.choices[edge.source]]
        readers = [c.inputs[edge.slot] for c in self.choices[edge.reader]]
        have, want = list(dict.fromkeys(sources)), list(dict.fromkeys(readers))
        seconds, kept = self._pair_costs(edge, have, want)
        at = {s: i for i, s in enumerate(have)}, {s: i for i, s in enumerate(want)}
        pick = np.ix_([at[0][s] for s in sources], [at[1][s] for s in readers])
        self._edges[index] = (seconds[pick], kept[pick])
        return self._edges[index]

    def _pair_costs(self, edge: Operand, have: list[State], want: list[State]) -> tuple[FloatArray, FloatArray]:
        value = edge.value
        if edge.fixed:
            same = np.array([[0.0 if a == b or (not value.gradient and value_of(a) == value_of(b)) else np.inf for b in want] for a in have])
            return same, np.zeros_like(same)
        forward = self.redistribute.table(value.shape, value.item, [value_of(s) for s in have], [value_of(s) for s in want])
        seconds = forward.copy()
        if value.gradient:
            seconds += self.redistribute.table(value.shape, value.item, [gradient_of(s) for s in want], [gradient_of(s) for s in have]).T
            if self.network.vertices[edge.source].kind == "param":
                for i, a in enumerate(have):
                    for j, b in enumerate(want):
                        if is_bucketed(a, b):
                            seconds[i, j] = self.bucket_time_s(self._elements(value.shape, a), value.item, reduced_axes(a, b), self._bytes_only)
        local = np.array([self._elements(value.shape, s) * value.item for s in want], dtype=float)
        kept = np.where([[value_of(a) != value_of(b) for b in want] for a in have], local[None, :], 0.0) if value.gradient else np.zeros_like(seconds)
        return seconds, kept

    def bucket_states(self, axes: Sequence[int]) -> tuple[State, State]:
        """States of a flat bucket of gradients before and after its all-reduce over `axes`."""
        return tuple("P" if i in axes else "B" for i in range(len(self.mesh.sizes))), ("B",) * len(self.mesh.sizes)

    def bucket_time_s(self, elements: int, item: int, axes: Sequence[int], using: Redistributor | None = None) -> float:
        before, after = self.bucket_states(axes)
        return (using or self.redistribute).cost_s((elements,), item, before, after)


def scaled(work: Work, flops: float, moved: float) -> Work:
    """That part of a work: of its arithmetic and of its bytes; every call is still made."""
    read, written = int(work.bytes_read * moved), int(work.bytes_written * moved)
    return Work(flops=int(work.flops * flops), bytes_read=read, bytes_written=written, calls=work.calls)
