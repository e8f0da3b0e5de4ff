"""The search graph: hubs, blocks, gradients that flow, buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sharding_problems import COST, problem, star

from captured import captured
from meshwright.decide.layout.autoddl import AutoDDL, ShardingProblem
from meshwright.decide.layout.autoddl.mesh import make_mesh
from meshwright.decide.layout.autoddl.model import Model, is_bucketed, reduced_axes
from meshwright.decide.layout.autoddl.network import build_network, operator_name
from meshwright.decide.layout.autoddl.rules import Signature
from meshwright.decide.layout.autoddl.rules_shape import dimension_groups

EXAMPLES = Path(__file__).parents[4] / "examples"


def gpt() -> ShardingProblem:
    return ShardingProblem(graph=captured(f"{EXAMPLES / 'gpt.py'}:tiny", scalable=False), fabric=star(4), cost=COST)


def test_operator_names() -> None:
    assert [operator_name(t) for t in ("aten.linear.default", "aten.relu_.default", "operator.getitem", "aten._softmax.default", "model")] == [
        "linear", "relu", "getitem", "_softmax", "model",
    ]  # fmt: skip


def test_values_with_several_readers_get_one_hub() -> None:
    network = build_network(problem("branches"))
    hubs = [v for v in network.vertices if v.kind == "hub"]
    assert [v.name for v in hubs] == ["relu"]
    assert len(hubs[0].outs) == 3 and len(hubs[0].ins) == 1 and hubs[0].key == "hub:relu"
    assert network.vertices[network.vertex_of("relu", "op")].outs == hubs[0].ins
    with pytest.raises(KeyError):
        network.vertex_of("nothing")


def test_packed_projections_are_split_by_heads_without_communication() -> None:
    """q, k, v in one linear layer: its columns are three blocks of heads; attention by heads needs every block divided."""
    plan = AutoDDL(search="megatron").plan(gpt())
    assert plan.whole == ()
    assert plan.sources["param:blocks.0.attention.qkv.weight"] in (("S0/3",), ("R",))
    model = Model.of(gpt(), make_mesh(star(4), COST, (4,)))
    index = model.network.vertex_of("linear")
    blocked = [c for c in model.choices[index] if c.output == ("S2/3",)]
    assert len(blocked) == 1 and blocked[0].inputs == (("B",), ("S0/3",), ("S0/3",))
    # view -> permute -> unbind -> attention follow with no redistribution
    view = model.network.vertex_of("view")
    assert any(c.inputs == (("S2/3",),) and c.output == ("S3",) for c in model.choices[view])


def test_groups_of_dimensions() -> None:
    assert dimension_groups((4, 32, 64), (128, 64)) == [([0, 1], [0]), ([2], [1])]
    assert dimension_groups((4, 24), (4, 3, 4, 2)) == [([0], [0]), ([1], [1, 2, 3])]
    assert dimension_groups((1, 6), (6, 1)) == [([1], [0])]
    assert dimension_groups((6, 4), (3, 8)) == [([0, 1], [0, 1])]


def test_gradients_that_are_only_to_be_summed_wait_for_one_bucket() -> None:
    assert is_bucketed(("R", "S0"), ("B", "S0")) and reduced_axes(("R", "S0"), ("B", "S0")) == (0,)
    assert not is_bucketed(("S0", "R"), ("B", "R")) and not is_bucketed(("R",), ("R",))
    plan = AutoDDL(search="data").plan(problem("fc"))
    assert len(plan.buckets) == 1 and sum(bool(m.bucket) for m in plan.moves) == 4
    words = sum(int(np.prod(p.shape)) for p in problem("fc").graph.parameters)
    assert sum(b.gradients for b in plan.bytes_sent) == 2 * 3 * words * 4


def test_a_gathered_parameter_is_charged_both_ways() -> None:
    """ZeRO: kept in pieces, gathered before use, the gradient scattered: (p-1) n either way in all."""
    given = problem("fc")
    model = Model.of(given, make_mesh(given.fabric, COST, (4,)))
    edge = next(i for i, e in enumerate(model.network.edges) if e.value.name == "param:0.weight")
    source, reader = model.network.edges[edge].source, model.network.edges[edge].reader
    i = [c.output for c in model.choices[source]].index(("S0",))
    j = next(k for k, c in enumerate(model.choices[reader]) if c.inputs[1] == ("B",) and c.names == ("data",))
    seconds, kept = model.edge_costs(edge)
    link = model.mesh.axes[0]
    words = 256 * 128
    assert seconds[i, j] == pytest.approx(2 * (3 * link.per_message_s + words * 4 * 3 / 4 * link.s_per_byte))
    assert kept[i, j] == words * 4


def test_signatures_from_elsewhere_are_used_for_unknown_operators() -> None:
    given = problem("branches")
    rows = {"sort": [Signature("rows", ("S0",), "S0", True)]}
    from dataclasses import replace

    network = build_network(replace(given, signatures=rows))
    assert network.whole == ()
    assert network.vertices[network.vertex_of("sort")].signatures[0].name == "rows"
