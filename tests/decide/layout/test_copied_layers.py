"""Layers that copies of experts cannot be of are named."""

from __future__ import annotations

import pytest

from meshwright.decide.layout.copied import copied_layers, with_copies
from meshwright.errors import Unsupported
from meshwright.graph.graph import GraphValue, OpGraph, OpNode
from meshwright.plan.experts import MLP


def test_experts_whose_rows_are_made_otherwise_are_named_and_no_copies_change_nothing():
    rows = GraphValue(shape=(4, 8, 2), dtype="float32", storage=-1)
    experts = OpNode(name="e", target=MLP, module="blocks.0.experts", inputs=("a", "b", "param:up", "param:down"), outputs=(rows,))
    graph = OpGraph(model="m", method="export", batch_size=1, loss="sum", inputs=(), parameters=(), nodes=(experts,))
    with pytest.raises(Unsupported, match=r"no copies of experts of 'blocks.0.experts': it is not rows, experts and sums") as refused:
        copied_layers(graph)
    assert refused.value.where == "--spare" and "--spare 0" in refused.value.hint
    assert with_copies(graph, {}) is graph
