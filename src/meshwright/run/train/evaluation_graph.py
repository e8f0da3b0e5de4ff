"""What a plan's ranks compute in evaluation mode: the module traced after `eval()`, under the names and on the places of the plan's own graph.

Mode changes calls (dropout gives back what it takes, normalisation reads its running statistics) and which calls there are. Calls of both graphs are
matched in order by operator, module and form of the result. A matched call has the planned call's name, and so its segment, its split and its
messages; its arguments are those of evaluation. A call that only evaluation makes goes to the segment of the next matched one; calls that only
training makes are left out. Whatever was matched with whatever, the graph computes what evaluation computes: names say where, not what. What a plan
sends between segments and evaluation does not make is refused, as is all that the segments' own checks refuse (`segment_builder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

import msgspec

from ...errors import Unsupported
from ...plan.plan import TrainingLayout
from ..context.experts import with_copies
from ..steps.forward_graph import ForwardGraph, ForwardNode
from ..tensor.vocabulary import expand_forward

__all__ = ["evaluation_graph", "evaluation_layout"]


def evaluation_graph(planned: ForwardGraph, found: ForwardGraph) -> ForwardGraph:
    """`found`, traced in evaluation mode at the same batch size, with the names of `planned`. The loss has the planned loss's name."""
    numbers: dict[Any, int] = {}

    def kinds(graph: ForwardGraph) -> list[int]:
        return [numbers.setdefault((n.target, graph.modules.get(n.name, ""), n.outputs), len(numbers)) for n in graph.nodes]

    matcher = SequenceMatcher(None, kinds(planned), kinds(found), autojunk=False)
    names: dict[str, str] = {}
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            names[found.nodes[block.b + i].name] = planned.nodes[block.a + i].name
    loss = planned.outputs[0]
    names = {ours: theirs for ours, theirs in names.items() if theirs != loss} | {found.outputs[0]: loss}
    taken = {n.name for n in planned.nodes}
    for n in found.nodes:
        if n.name not in names:
            names[n.name] = _free(f"{n.name}_evaluated", taken)
            taken.add(names[n.name])
    nodes, whole = (tuple(_renamed(n, names) for n in calls) for calls in (found.nodes, found.whole))
    modules = {names.get(name, name): module for name, module in found.modules.items()}
    return msgspec.structs.replace(found, nodes=nodes, whole=whole, outputs=tuple(names.get(x, x) for x in found.outputs), modules=modules)


def _free(name: str, taken: set[str]) -> str:
    return name if name not in taken else _free(f"{name}_", taken)


def _renamed(n: ForwardNode, names: Mapping[str, str]) -> ForwardNode:
    def value(x: Any) -> Any:
        if isinstance(x, list):
            return [value(y) for y in x]
        if isinstance(x, dict):
            if len(x) == 1 and isinstance(x.get("value"), str):
                return {"value": names.get(x["value"], x["value"])}
            return {k: value(y) for k, y in x.items()}
        return x

    return ForwardNode(names[n.name], n.target, value(n.args), value(n.kwargs), n.outputs, n.many)


def evaluation_layout(layout: TrainingLayout, graph: ForwardGraph) -> TrainingLayout:
    """The layout with the calls of `graph` (of `evaluation_graph`, on a rank's positions where it has not all) in its segments; nothing runs again,
    nothing runs as a planned step.

    Raises: Unsupported naming module and operator of a value that the plan sends on and evaluation does not make.
    """
    of: dict[str, list[str]] = {}  # segments by call: cheap calls may run in several
    for s in layout.segments:
        for name in s.nodes:
            of.setdefault(name, []).append(s.key)
    nodes: dict[str, list[str]] = {s.key: [] for s in layout.segments}
    waiting: list[str] = []
    last = [layout.segments[-1].key]
    for n in expand_forward(with_copies(graph, layout), layout).nodes:
        waiting.append(n.name)
        if n.name in of:
            last = of[n.name]
            for key in last:
                nodes[key] += waiting
            waiting.clear()
    nodes[last[0]] += waiting
    for s in layout.segments:
        missing = sorted(set(s.writes) - set(nodes[s.key]))
        if missing:
            raise Unsupported(
                f"in evaluation mode the model does not compute {missing[0]!r}, which segment {s.key!r} of the plan hands on",
                where="--evaluate-every",
                hint="plan with --pp 1 and --tp 1, or let both modes run the same calls: torch.nn.functional.dropout(x, p, self.training)",
                data={"value": missing[0], "segment": s.key},
            )  # fmt: skip
    segments = tuple(msgspec.structs.replace(s, nodes=tuple(nodes[s.key]), recompute=(), step=None) for s in layout.segments)
    return msgspec.structs.replace(layout, segments=segments)
