"""Execution traces of PyTorch (`torch.profiler.ExecutionTraceObserver`): which operators one process called, in which other ones, on which tensors.

They hold no times. Nodes are in the order in which they began; bytes are those of a node's tensor operands and results, views at their own size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BACKWARD", "ExecutionNode", "ExecutionTrace", "OperatorUse", "operator_uses"]

BACKWARD = "autograd::engine::evaluate_function"  # what a node of the autograd graph is run in
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionNode:
    """`parent` is the index of the node that called it, -1 for the process. `schema` is empty for what is no operator: threads, annotations,
    nodes of the autograd graph. `shapes`: of its tensor operands."""

    name: str
    parent: int
    schema: str
    thread: int
    shapes: Shapes
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExecutionTrace:
    """`version` is the file's. A node's parent comes before it."""

    version: str
    pid: int
    nodes: tuple[ExecutionNode, ...]


@dataclass(frozen=True, kw_only=True)
class OperatorUse:
    """All calls of one operator: how many, of them those that no other operator made, and those inside backward. Bytes are over all calls;
    `shapes` are the operands' that occur most often, `same_shapes` times."""

    name: str
    calls: int
    outermost: int
    backward: int
    input_bytes: int
    output_bytes: int
    shapes: Shapes
    same_shapes: int


def operator_uses(trace: ExecutionTrace) -> tuple[OperatorUse, ...]:
    """One entry per operator: those that are called by no other first, then by bytes. Cost: O(nodes)."""
    inside_operator, inside_backward = [False] * len(trace.nodes), [False] * len(trace.nodes)
    calls: dict[str, list[int]] = {}
    for i, node in enumerate(trace.nodes):
        above = node.parent
        inside_operator[i] = above >= 0 and (inside_operator[above] or bool(trace.nodes[above].schema))
        inside_backward[i] = node.name.startswith(BACKWARD) or (above >= 0 and inside_backward[above])
        if node.schema:
            calls.setdefault(node.name, []).append(i)
    uses = [_use(trace, name, found, inside_operator, inside_backward) for name, found in calls.items()]
    return tuple(sorted(uses, key=lambda u: (not u.outermost, -u.input_bytes - u.output_bytes, u.name)))


def _use(trace: ExecutionTrace, name: str, calls: Sequence[int], inside_operator: Sequence[bool], inside_backward: Sequence[bool]) -> OperatorUse:
    counted = Counter(trace.nodes[i].shapes for i in calls)
    shapes, same = max(counted.items(), key=lambda item: (item[1], item[0]))
    return OperatorUse(
        name=name, calls=len(calls), outermost=sum(not inside_operator[i] for i in calls), backward=sum(inside_backward[i] for i in calls),
        input_bytes=sum(trace.nodes[i].input_bytes for i in calls), output_bytes=sum(trace.nodes[i].output_bytes for i in calls),
        shapes=shapes, same_shapes=same,
    )  # fmt: skip
