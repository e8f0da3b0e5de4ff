"""The traced calls as a rank runs them that divides experts with its neighbours: they read what came of others. See `plan.experts` for the names."""

from __future__ import annotations

from typing import Any

import msgspec

from ...plan.context import layout_exchanges
from ...plan.experts import BACK
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import ForwardGraph, ForwardNode
from ..tensor.cuts import with_operand

__all__ = ["with_exchanges"]


def with_exchanges(graph: ForwardGraph, layout: TrainingLayout) -> ForwardGraph:
    """`graph` with the targets of the layout's exchanges in the place of their sources, where experts read them, and readers of experts."""
    if layout.expert == 1:
        return graph
    before: dict[str, list[tuple[str, str]]] = {}
    after: dict[str, str] = {}
    for x in layout_exchanges(layout):
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
