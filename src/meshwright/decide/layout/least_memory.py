"""The least that the fullest device of any layout of given degrees holds: what a job cannot fit below, without building a layout.

Weights, gradients and optimizer states are there all the time, on all ranks together at least as often as the sharding level says, so the fullest
rank has at least the mean. An operator runs in forward, whatever is computed again: then what it reads and what it makes are there, of one
micro-batch, divided by all ranks that can divide them (tensor and context degree), and under level 3 its parameters whole. On one stage all ranks do
both, so both add up; with several stages each is a bound, and the larger one counts. Operators of experts, and what they exchange, count nothing.
Left out: what is kept from forward to backward, the optimizer's gathers, staging of messages.
Invariant: no layout of these degrees needs less by its own program; the tests look at all layouts of small models.
Cost: O(operators) for a micro-batch size, then O(1) for degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...graph.graph import OpGraph
from ...plan.experts import MLP
from ...plan.packing import TABLE_ROWS
from ...plan.plan import StepEnd
from ...plan.precision import MASTER_BYTES, Precision
from .problem import Degrees

__all__ = ["LeastMemory", "least_memory"]

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class LeastMemory:
    """Of one micro-batch size. Bytes of all parameters by what divides them: `optimizer` (state), `gradient`, `weight`; `experts`: the share of these
    that expert ranks divide; `operator`: the most that one operator reads and makes, `with_weights`: with its own parameters."""

    optimizer: float
    gradient: float
    weight: float
    experts: float
    operator: int
    with_weights: int

    def state_bytes(self, degrees: Degrees, level: int) -> float:
        """Of the mean rank."""
        replicas = degrees.replicas
        # The mean replica has an expert degree's part of experts and the whole of the rest; what a level divides, all replicas have once.
        whole = 1 - self.experts + self.experts / degrees.expert
        parts = (self.optimizer, self.gradient, self.weight)
        each = sum(p / replicas if at < level else p * whole for at, p in enumerate(parts))
        return each / (degrees.tensor * degrees.pipeline)

    def bytes(self, degrees: Degrees, level: int) -> int:
        """What the fullest device needs at least."""
        state = self.state_bytes(degrees, level)
        parts = degrees.tensor * degrees.context
        working = max(self.operator / parts, self.with_weights / parts if level == 3 and degrees.replicas > 1 else 0)
        return int(state + working if degrees.pipeline == 1 else max(state, working))

    def least(self, degrees: Degrees, level: int | None = None) -> int:
        """At the level that is asked for, or the one that needs least."""
        return min(self.bytes(degrees, x) for x in _levels(level))

    def least_state(self, degrees: Degrees, level: int | None = None) -> int:
        """`state_bytes`, likewise."""
        return int(min(self.state_bytes(degrees, x) for x in _levels(level)))


def _levels(asked: int | None) -> tuple[int, ...]:
    return LEVELS if asked is None else (asked,)


def least_memory(graph: OpGraph, end: StepEnd | None = None, precision: Precision | None = None) -> LeastMemory:
    """`graph`: at the micro-batch size, in the precision."""
    used = {v for n in graph.nodes for v in n.inputs}
    held = [p for p in graph.parameters if f"param:{p.name}" in used]
    size = {f"param:{p.name}": p.size_bytes for p in held}
    trained, copies = sum(p.size_bytes for p in held if p.trainable), (end or StepEnd()).state_copies
    if precision is None:
        optimizer, gradient = float(copies * trained), float(trained)
    else:
        state, more = precision.state, MASTER_BYTES * (copies - StepEnd().state_copies)
        optimizer, gradient = (x * trained / state.weight for x in (state.optimizer + more, state.gradient))
    divided = {v for n in graph.nodes if n.target in (MLP, TABLE_ROWS) for v in n.inputs if v in size}
    weight, operators = sum(size.values()), _operators(graph, {v: 0 if v in divided else x for v, x in size.items()})
    return LeastMemory(
        optimizer=optimizer, gradient=gradient, weight=float(weight), experts=sum(size[v] for v in divided) / weight if weight else 0.0,
        operator=max((made for made, _ in operators), default=0), with_weights=max((made + read for made, read in operators), default=0),
    )  # fmt: skip


def _operators(graph: OpGraph, size: dict[str, int]) -> list[tuple[int, int]]:
    """By operator, bytes of values that it reads and makes, and of parameters that it reads. Storages of parameters and inputs are not values."""
    made = {n.name for n in graph.nodes}
    storage = {n.name: tuple(o.storage for o in n.outputs if o.storage >= 0 and graph.storages[o.storage].owner in made) for n in graph.nodes}
    found = []
    for n in graph.nodes:
        if n.target not in (MLP, TABLE_ROWS) and n.forward.calls:
            there = {s for v in (n.name, *n.inputs) for s in storage.get(v, ())}
            found.append((sum(graph.storages[s].size_bytes for s in there), sum(size.get(v, 0) for v in {*n.inputs})))
    return found
