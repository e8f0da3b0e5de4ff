"""The traced calls as a rank runs them that divides experts with its neighbours: they read what came of others. See `plan.experts` for the names.

On a rank that divides positions too, buffers have room for its own tokens. On a tensor rank that divides its replica's experts, they are of those.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...plan.context import among_experts, layout_exchanges
from ...plan.experts import BACK, COUNTS, EXPERTS, MLP, ROWS, TOKENS
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import ForwardGraph, ForwardNode
from ..tensor.cuts import with_operand
from ..tensor.state import Call, Shard

__all__ = ["OPERATORS", "experts_rule", "with_exchanges"]

OPERATORS = (*EXPERTS, TOKENS)


def experts_rule(call: Call, parts: int) -> Shard | None:
    """What the result of an operator of an expert layer is on one of `parts` ranks that divide positions. Raises: Unsupported."""
    target = call.node.target
    state = call.state(1 if target == TOKENS else 0)
    if not isinstance(state, Shard):
        raise call.fail("its tokens are not divided by positions")
    if target in (ROWS, COUNTS):
        if call.args[-1] != call.shape(0)[0] or state.dim:
            raise call.fail("its buffers drop tokens")
        call.args[-1] //= parts
        return Shard(1) if target == ROWS else None
    if target == MLP:
        call.args[-1] //= parts
    return state


def _with_parts(graph: ForwardGraph, layout: TrainingLayout) -> ForwardGraph:
    """`graph` with what of their experts' buffers tensor ranks have, in calls of segments that these divide (`tensor.experts` reads it)."""
    if layout.tensor == 1:
        return graph
    inside = {n for s in layout.segments if s.split and not s.sequence for n in s.nodes}
    part = {"shard": Shard(0, layout.expert)}
    nodes = [
        msgspec.structs.replace(n, kwargs={**n.kwargs, **part}) if n.name in inside and n.target in (ROWS, COUNTS, TOKENS) else n for n in graph.nodes
    ]
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def with_exchanges(graph: ForwardGraph, layout: TrainingLayout) -> ForwardGraph:
    """`graph` with the targets of the layout's exchanges in the place of their sources, where experts read them, and readers of experts."""
    graph = _with_parts(graph, layout)
    if layout.expert == 1:
        return graph
    before: dict[str, list[tuple[str, str]]] = {}
    after: dict[str, str] = {}
    for x in (x for x in layout_exchanges(layout) if among_experts(layout, x)):
        layer, _, suffix = x.target.rpartition("/")
        if suffix == BACK:
            after[x.source] = x.target
        else:
            before.setdefault(layer, []).append((x.source, x.target))
    nodes: list[ForwardNode] = []
    for node in graph.nodes:
        pairs: list[Any] = [*before.get(node.name, ()), *((v, after[v]) for v in dict.fromkeys(node.inputs) if v in after)]
        for source, target in pairs:
            node = with_operand(node, source, target)
        nodes.append(node)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))
