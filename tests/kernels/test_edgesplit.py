"""Switch removal keeps every terminal's rooted flow, on random balanced graphs."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import CheckFailed, TimeLimit, Unsupported
from meshwright.kernels.edgesplit import _Splitting, remove_switches
from meshwright.kernels.effort import NEVER, Deadline
from meshwright.kernels.maxflow import FlowNetwork

Arcs = dict[tuple[int, int], int]


def balanced_graph(rng: np.random.Generator, terminals: int, switches: int) -> Arcs:
    """A sum of random closed walks through all nodes: every node takes in what it gives out, links may be one-way."""
    nodes = terminals + switches
    arcs: Arcs = {}
    for number in range(int(rng.integers(1, 5))):
        walk = list(rng.permutation(nodes))[: nodes if number == 0 else int(rng.integers(2, nodes + 1))]
        amount = int(rng.integers(1, 6))
        for u, v in zip(walk, walk[1:] + walk[:1], strict=True):
            arcs[int(u), int(v)] = arcs.get((int(u), int(v)), 0) + amount
    return arcs


def rooted_flow(nodes: int, arcs: Arcs, demand: dict[int, int], sink: int) -> int:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes + 1))
    graph.add_edges_from((u, v, {"capacity": c}) for (u, v), c in arcs.items())
    graph.add_edges_from((nodes, r, {"capacity": d}) for r, d in demand.items())
    return int(nx.maximum_flow_value(graph, nodes, sink))


def largest_demand(nodes: int, terminals: int, arcs: Arcs) -> int:
    k = 0
    while all(rooted_flow(nodes, arcs, dict.fromkeys(range(terminals), k + 1), v) == terminals * (k + 1) for v in range(terminals)):
        k += 1
    return k


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 4))
def test_every_terminal_still_receives_all_trees(seed: int, terminals: int, switches: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = terminals + switches
    arcs = balanced_graph(rng, terminals, switches)
    k = largest_demand(nodes, terminals, arcs)
    demand = dict.fromkeys(range(terminals), k)
    group = [int(g) for g in rng.integers(0, 2, nodes)]
    result = remove_switches(nodes, arcs, list(range(terminals)), demand, group)
    assert all(u < terminals and v < terminals and c > 0 for (u, v), c in result.arcs.items())
    for v in range(terminals):
        assert rooted_flow(nodes, result.arcs, demand, v) == terminals * k
    replayed = dict(arcs)
    for split in result.splits:
        replayed[split.src, split.switch] -= split.amount
        replayed[split.switch, split.dst] -= split.amount
        assert replayed[split.src, split.switch] >= 0 and replayed[split.switch, split.dst] >= 0
        if split.src != split.dst:
            replayed[split.src, split.dst] = replayed.get((split.src, split.dst), 0) + split.amount
    assert {arc: c for arc, c in replayed.items() if c} == result.arcs


def test_a_switch_that_gives_out_more_than_it_takes_is_refused() -> None:
    with pytest.raises(Unsupported, match="switch hub receives 2 units but sends 3") as caught:
        remove_switches(3, {(0, 2): 1, (1, 2): 1, (2, 0): 1, (2, 1): 2}, [0, 1], {0: 1}, [0, 0, 0], names=["a", "b", "hub"])
    assert caught.value.data == {"switch": "hub", "in": 2, "out": 3}


def test_a_demand_the_graph_cannot_carry_is_an_error_not_a_wrong_answer() -> None:
    star = {(v, 3): 1 for v in range(3)} | {(3, v): 1 for v in range(3)}
    with pytest.raises(CheckFailed, match="only"):
        remove_switches(4, star, [0, 1, 2], {0: 2, 1: 2, 2: 2}, [0, 0, 0, 0])


def test_a_switch_that_cannot_be_split_is_refused() -> None:
    """No real fabric is known to get stuck (thousands of unbalanced ones were tried), so every split is refused by force here."""

    class Refusing(_Splitting):
        def _accept(self, network: FlowNetwork, w: int, part: list[tuple[int, int, int]]) -> int:
            return 1 << 40

    star = {(v, 3): 1 for v in range(3)} | {(3, v): 1 for v in range(3)}
    with pytest.raises(Unsupported, match="no admissible split is left at switch hub"):
        Refusing(4, star, [0, 1, 2], {0: 1}, [0] * 4, ["a", "b", "c", "hub"], NEVER).run()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 2))
def test_unbalanced_devices_keep_their_flow_too(seed: int, terminals: int, switches: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = terminals + switches
    arcs = balanced_graph(rng, terminals, switches)
    for u in range(terminals):
        v = int(rng.integers(terminals))
        if u != v and rng.random() < 0.7:
            arcs[u, v] = arcs.get((u, v), 0) + int(rng.integers(1, 4))
    k = largest_demand(nodes, terminals, arcs)
    demand = dict.fromkeys(range(terminals), k)
    result = remove_switches(nodes, arcs, list(range(terminals)), demand, [0] * nodes)
    for v in range(terminals):
        assert rooted_flow(nodes, result.arcs, demand, v) == terminals * k


def test_a_deadline_that_passed_is_a_typed_error() -> None:
    star = {(v, 3): 1 for v in range(3)} | {(3, v): 1 for v in range(3)}
    with pytest.raises(TimeLimit, match="the time limit was reached") as caught:
        remove_switches(4, star, [0, 1, 2], {0: 1}, [0] * 4, deadline=Deadline(clock_s=0.0))
    assert caught.value.exit_code == 5
