"""Rates as they are measured: no two directions alike, so that rounded capacities leave switches with units that nothing can use."""

from __future__ import annotations

import random
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll.balance import _paths, balanced_capacities, surpluses
from meshwright.decide.collective.forestcoll.forest import _receive_all, _without_surplus, smallest_stretch
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import RateGraph
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import NEVER
from meshwright.kernels.maxflow import FlowNetwork


@settings(max_examples=15)
@given(name=st.sampled_from(["star:4", "two-islands:3", "two-islands", "dgx-a100:1"]), seed=st.integers(0, 999), spread=st.sampled_from([1e-3, 0.02]))
def test_measured_rates_are_packed(name: str, seed: int, spread: float) -> None:
    """The plan is checked, and comes near the bound though no rate divides another."""
    rng, fabric = random.Random(seed), load_fabric(name)
    links = tuple(replace(x, rate_Bps=int(x.rate_Bps * (1 - spread * rng.random()))) for x in fabric.links)
    problem = CollectiveProblem.on(replace(fabric, links=links), "all-gather", 1 << 26)
    plan = ForestColl().plan(problem, rng=np.random.default_rng(0))
    assert not check_program(plan.program).findings and plan.bound is not None
    assert simulated_time_s(plan.program, problem.fabric, problem.ranks, None) <= 1.25 * float(plan.bound)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_balanced_capacities_against_max_flow(seed: int) -> None:
    """Nothing grows, switches are balanced, and everybody still receives, by another implementation of max-flow."""
    rng = random.Random(seed)
    ranks, switches = rng.randint(2, 4), rng.randint(1, 3)
    nodes = ranks + switches
    arcs = {(r, w): rng.randint(0, 9) for r in range(ranks) for w in range(ranks, nodes)}
    arcs |= {(w, r): rng.randint(0, 9) for r in range(ranks) for w in range(ranks, nodes)}
    arcs |= {(a, b): rng.randint(0, 4) for a in range(ranks, nodes) for b in range(ranks, nodes) if a != b}
    arcs = {a: c for a, c in arcs.items() if c}

    def enough(found: dict[tuple[int, int], int]) -> bool:
        graph = nx.DiGraph()
        graph.add_nodes_from(range(nodes + 1))
        graph.add_edges_from((u, v, {"capacity": c}) for (u, v), c in found.items())
        graph.add_edges_from((nodes, r, {"capacity": 1}) for r in range(ranks))
        return all(nx.maximum_flow_value(graph, nodes, r) == ranks for r in range(ranks))

    if not enough(arcs):
        return
    found = balanced_capacities(nodes, ranks, arcs, enough)
    if found is None:
        return
    assert not surpluses(nodes, ranks, found) and enough(found)
    assert all(0 < c <= arcs[a] for a, c in found.items())


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_what_ranks_receive_after_changes_is_what_a_new_network_says(seed: int) -> None:
    """Arcs lose units, vanish and come back: the answer depends on nothing that was asked before."""
    rng = random.Random(seed)
    ranks, nodes = 3, 5
    arcs = {(a, b): rng.randint(1, 6) for a in range(nodes) for b in range(nodes) if a != b and rng.random() < 0.6}
    graph, demand = RateGraph(("a", "b", "c", "s", "t"), ranks, (-1,) * nodes, arcs, 1), [rng.randint(0, 2) for _ in range(ranks)]
    enough = _receive_all(graph, arcs, demand)
    for _ in range(5):
        left = {arc: c for arc, units in arcs.items() if (c := rng.randint(0, units))}
        plain = nx.DiGraph()
        plain.add_nodes_from(range(nodes + 1))
        plain.add_edges_from((u, v, {"capacity": c}) for (u, v), c in left.items())
        plain.add_edges_from((nodes, r, {"capacity": d}) for r, d in enumerate(demand))
        assert enough(left) == all(nx.maximum_flow_value(plain, nodes, r) == sum(demand) for r in range(ranks))
    assert enough(arcs) == enough(dict(reversed(arcs.items())))


def test_the_network_is_laid_out_once_however_many_paths_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates without a common unit leave every switch with a surplus, which is cut off along one path after another."""
    rng = random.Random(3)
    arcs = {(a, b): rng.randint(5, 60) for a in range(9) for b in range(9) if a != b and max(a, b) >= 5}
    graph, weight = RateGraph(tuple("abcdefghi"), 5, (-1,) * 9, arcs, 1), [1] * 5
    stretch = smallest_stretch(graph, weight, 8, worst_cut(graph, weight).ratio)
    built, asked, of, sweep = [], [], FlowNetwork.of, FlowNetwork.sweep
    monkeypatch.setattr(FlowNetwork, "of", staticmethod(lambda *given: built.append(given) or of(*given)))
    monkeypatch.setattr(FlowNetwork, "sweep", lambda *given: asked.append(given) or sweep(*given))
    found, capacities = _without_surplus(graph, weight, 8, stretch, NEVER)
    assert found == stretch and not surpluses(graph.nodes, graph.ranks, capacities)
    assert len(asked) > 100 and len(built) == 1


def test_a_surplus_that_is_needed_is_not_cut_off() -> None:
    """Switch 2 gives out less than it takes in, and giving up either way in would leave a rank without its unit."""
    arcs = {(0, 2): 1, (1, 2): 1, (2, 0): 1}
    assert surpluses(3, 2, arcs) == {2: 1}
    assert balanced_capacities(3, 2, arcs, lambda found: found == arcs) is None
    assert balanced_capacities(3, 2, arcs, lambda found: (0, 2) in found) == {(0, 2): 1, (2, 0): 1}


def test_paths_end_at_ranks_and_at_switches_that_lack_the_side() -> None:
    arcs = {(0, 3): 2, (3, 2): 2, (2, 1): 1, (4, 2): 1, (1, 4): 1}  # 0 and 1 are ranks; 2, 3 and 4 are switches
    assert [*_paths(arcs, 2, {2: 2}, 2, inward=True)] == [((3, 2), (0, 3)), ((4, 2), (1, 4))]
    assert [*_paths(arcs, 2, {2: 2, 4: -1}, 2, inward=True)] == [((4, 2),), ((3, 2), (0, 3))]
    assert [*_paths(arcs, 2, {2: -2}, 2, inward=False)] == [((2, 1),)]
