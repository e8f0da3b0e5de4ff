"""Integer Dinic against a plain twin and networkx, its cuts, its limits and its refusals."""

from __future__ import annotations

from collections import deque

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import Unsupported, UsageError
from meshwright.kernels.maxflow import MAX_CAPACITY, FlowNetwork, checked_capacities

Arcs = dict[tuple[int, int], int]


def plain_max_flow(nodes: int, arcs: Arcs, source: int, sink: int) -> int:
    """Shortest augmenting paths on a dictionary: slow and obvious."""
    residual = dict(arcs)
    for u, v in arcs:
        residual.setdefault((v, u), 0)
    flow = 0
    while True:
        before = {source: source}
        queue = deque([source])
        while queue and sink not in before:
            u = queue.popleft()
            for v in range(nodes):
                if v not in before and residual.get((u, v), 0) > 0:
                    before[v] = u
                    queue.append(v)
        if sink not in before:
            return flow
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        hops = list(zip(path[1:], path, strict=False))
        amount = min(residual[hop] for hop in hops)
        for u, v in hops:
            residual[u, v] -= amount
            residual[v, u] += amount
        flow += amount


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, Arcs]:
    nodes = draw(st.integers(2, 9))
    pairs = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)).filter(lambda p: p[0] != p[1])
    capacity = st.one_of(st.integers(0, 5), st.integers(0, 10**12))
    return nodes, draw(st.dictionaries(pairs, capacity, max_size=30))


@settings(max_examples=300, deadline=None)
@given(networks())
def test_flow_and_cut_agree_with_a_plain_twin_and_networkx(case: tuple[int, Arcs]) -> None:
    nodes, arcs = case
    network = FlowNetwork.of(nodes, arcs)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((u, v, {"capacity": c}) for (u, v), c in arcs.items())
    for source, sink in ((0, nodes - 1), (nodes - 1, 0)):
        flow = network.max_flow(source, sink)
        assert flow == plain_max_flow(nodes, arcs, source, sink) == nx.maximum_flow_value(graph, source, sink)
        side = network.source_side()
        assert side[source] and not side[sink]
        assert flow == sum(c for (u, v), c in arcs.items() if side[u] and not side[v])


@settings(max_examples=100, deadline=None)
@given(networks(), st.integers(0, 12))
def test_limit_stops_at_exactly_the_limit(case: tuple[int, Arcs], limit: int) -> None:
    nodes, arcs = case
    assert FlowNetwork.of(nodes, arcs).max_flow(0, 1, limit=limit) == min(limit, plain_max_flow(nodes, arcs, 0, 1))


@settings(max_examples=100, deadline=None)
@given(networks(), st.integers(1, 8))
def test_sweep_names_a_sink_that_falls_short_and_tries_it_first_next_time(case: tuple[int, Arcs], need: int) -> None:
    nodes, arcs = case
    network = FlowNetwork.of(nodes, arcs)
    sinks = np.arange(1, nodes, dtype=np.int32)
    outcome = network.sweep(0, sinks, need)
    short = [v for v in range(1, nodes) if plain_max_flow(nodes, arcs, 0, v) < need]
    assert sorted(sinks) == list(range(1, nodes))
    if outcome.failed < 0:
        assert not short
    else:
        assert outcome.failed == short[0] == sinks[0]
        assert outcome.flow == plain_max_flow(nodes, arcs, 0, short[0])
        side = network.source_side()
        assert outcome.flow == sum(c for (u, v), c in arcs.items() if side[u] and not side[v])


@settings(max_examples=60, deadline=None)
@given(networks(), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 9)), max_size=5))
def test_capacities_can_be_edited_between_flows(case: tuple[int, Arcs], edits: list[tuple[int, int]]) -> None:
    nodes, arcs = case
    network = FlowNetwork.of(nodes, arcs)
    edited = dict(arcs)
    network.max_flow(0, 1)
    for which, value in edits:
        if which < len(arcs):
            arc = list(arcs)[which]
            edited[arc] = value
            network.capacity[network.slots([arc[0]], [arc[1]])] = value
    assert network.max_flow(0, 1) == plain_max_flow(nodes, edited, 0, 1)


def test_a_flow_of_nearly_2_to_the_62_is_exact() -> None:
    big = MAX_CAPACITY // 2
    assert FlowNetwork.of(3, {(0, 1): big, (1, 2): big - 1}).max_flow(0, 2) == big - 1


def test_capacities_that_could_overflow_are_refused() -> None:
    with pytest.raises(Unsupported, match="64-bit") as caught:
        FlowNetwork.of(3, {(0, 1): MAX_CAPACITY, (1, 2): 1})
    assert "round" in caught.value.hint


def test_negative_capacities_are_refused() -> None:
    with pytest.raises(UsageError, match=">= 0"):
        checked_capacities([3, -1])


@pytest.mark.parametrize("arc", [(0, 0), (0, 3), (-1, 1)])
def test_arcs_must_join_two_nodes_of_the_network(arc: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="arc"):
        FlowNetwork.of(3, {arc: 1})


def test_flow_to_oneself_is_refused() -> None:
    with pytest.raises(UsageError, match="itself"):
        FlowNetwork.of(2, {(0, 1): 1}).max_flow(1, 1)


def test_an_arc_without_a_slot_is_named() -> None:
    with pytest.raises(UsageError, match="from node 0 to 2"):
        FlowNetwork.of(3, {(0, 1): 1}).slots([0, 0], [1, 2])
