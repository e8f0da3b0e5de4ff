"""Forests reach the brute-force optimum exactly, on hundreds of random balanced fabrics."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from collective_oracle import all_cuts, balanced_fabric, two_islands
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll.forest import Forest, build_forest, choose_trees, rounded_capacities, smallest_stretch
from meshwright.decide.collective.forestcoll.paths import gather_forest
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.decide.collective.trees.pack import Tree, lowered, pack_capacities
from meshwright.errors import TimeLimit
from meshwright.fabric.edit import without
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import NEVER, Deadline


def brute_force_ratio(fabric: Fabric, weight: dict[str, int]) -> Fraction:
    ratios = []
    for inside, leaving in all_cuts(fabric):
        if any(d.name not in inside for d in fabric.devices) and (here := sum(w for name, w in weight.items() if name in inside)):
            ratios.append(Fraction(here, leaving))
    return max(ratios)


def assert_sound(forest: Forest, graph: RateGraph) -> None:
    """Spanning trees over real links, k per weight, no link over U · rate. Written apart from the planner's own test."""
    load: dict[tuple[int, int], int] = {}
    per_root = dict.fromkeys(range(graph.ranks), 0)
    for tree in forest.every_tree():
        per_root[tree.root] += tree.units
        reached = {tree.root}
        for v in tree.order[1:]:
            path = tree.paths[v]
            assert path[0] in reached and path[-1] == v and v not in reached
            assert len(set(path)) == len(path) and all(node >= graph.ranks for node in path[1:-1])
            reached.add(v)
            for hop in pairwise(path):
                load[hop] = load.get(hop, 0) + tree.units
        assert reached == set(range(graph.ranks))
    assert per_root == {r: forest.k * w for r, w in enumerate(forest.weight)}
    assert all(used <= forest.stretch * graph.arcs[hop] for hop, used in load.items())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 4))
def test_exact_forests_reach_the_optimum(seed: int, devices: int, switches: int) -> None:
    fabric = balanced_fabric(np.random.default_rng(seed), devices, switches)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    forest = build_forest(graph, [1] * devices, max_trees=10**9)
    assert forest.optimum / graph.unit_Bps == brute_force_ratio(fabric, {d.name: 1 for d in fabric.devices})
    assert forest.stretch / forest.k == forest.optimum
    assert_sound(forest, graph)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 3))
def test_broadcast_forests_reach_the_smallest_cut_from_the_root(seed: int, devices: int, switches: int) -> None:
    rng = np.random.default_rng(seed)
    fabric = balanced_fabric(rng, devices, switches)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    weight = [int(w) for w in rng.integers(0, 3, devices)]
    weight[int(rng.integers(devices))] = 1
    forest = build_forest(graph, weight, max_trees=10**9)
    assert forest.optimum / graph.unit_Bps == brute_force_ratio(fabric, {f"d{i}": w for i, w in enumerate(weight) if w})
    assert_sound(forest, graph)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 3), st.integers(1, 4))
def test_fixed_tree_counts_keep_the_published_guarantee(seed: int, devices: int, switches: int, k: int) -> None:
    """U/k <= 1/x* + 1/(k · min b); no smaller U works; and the trees exist. Cables only: rounding down keeps switches balanced."""
    rng = np.random.default_rng(seed)
    fabric = cables(balanced_fabric(rng, devices, switches))
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    forest = build_forest(graph, [1] * devices, trees=k)
    assert forest.k == k
    assert forest.optimum <= forest.stretch / k <= forest.optimum + Fraction(1, k * min(graph.arcs.values()))
    assert_sound(forest, graph)
    below = max(Fraction(-(-forest.stretch.numerator * b // forest.stretch.denominator) - 1, b) for b in set(graph.arcs.values()))
    rounded = {arc: rate * below.numerator // below.denominator for arc, rate in graph.arcs.items()}
    kept = {arc: rate for arc, rate in rounded.items() if rate}
    reaches = bool(kept) and all(any(a[1] == v for a in kept) for v in range(devices))
    if reaches:
        try:
            ratio = worst_cut(RateGraph(graph.names, devices, graph.group, kept, 1), [1] * devices).ratio
        except Exception as error:
            assert "no path" in str(error)
        else:
            assert ratio > Fraction(1, k)


def cables(fabric: Fabric) -> Fabric:
    """Every link gets a twin of equal rate the other way."""
    from dataclasses import replace

    rates: dict[tuple[str, str], int] = {}
    for x in fabric.links:
        for pair in ((x.src, x.dst), (x.dst, x.src)):
            rates[pair] = rates.get(pair, 0) + x.rate_Bps
    first = fabric.links[0]
    return replace(fabric, links=tuple(replace(first, src=u, dst=v, rate_Bps=r) for (u, v), r in sorted(rates.items())))


def test_the_two_islands_optimum_is_the_trunk() -> None:
    graph = rate_graph(two_islands(), ["d0", "d1", "d2", "d3"])
    forest = build_forest(graph, [1] * 4)
    assert forest.k == 1 and forest.stretch / graph.unit_Bps == Fraction(2, 25_000_000)
    assert smallest_stretch(graph, [1] * 4, 1, forest.optimum) == forest.stretch


def test_a_dead_line_that_passed_ends_with_a_typed_error() -> None:
    graph = rate_graph(two_islands(), ["d0", "d1", "d2", "d3"])
    with pytest.raises(TimeLimit, match="the time limit was reached"):
        build_forest(graph, [1] * 4, deadline=Deadline(clock_s=0.0))


def test_one_way_rounding_that_unbalances_a_switch_is_trimmed() -> None:
    """With two trees per root, rounding leaves switch s1 (node 4) 12 units in and 11 out: one of them is of no use."""
    arcs = {(0, 1): 5, (0, 2): 3, (1, 3): 3, (1, 4): 6, (2, 1): 3, (3, 4): 3, (4, 0): 8, (4, 1): 1}
    graph = RateGraph(("a", "b", "c", "s0", "s1"), 3, (0,) * 5, arcs, 1)
    forest = build_forest(graph, [1, 1, 1], trees=2)
    assert forest.k == 2
    assert_sound(forest, graph)
    assert_sound(build_forest(graph, [1, 1, 1], max_trees=10**9), graph)


def arcs_of(trees: tuple[Tree, ...]) -> Counter[tuple[int, ...]]:
    """How often every physical path is used, over all trees."""
    return Counter({path: sum(t.units for t in trees if path in t.paths) for tree in trees for path in tree.paths if path})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 8), st.integers(0, 3), st.booleans())
def test_exchanging_parents_keeps_roots_and_paths_and_lowers(seed: int, devices: int, switches: int, broadcast: bool) -> None:
    graph = rate_graph(fabric := balanced_fabric(np.random.default_rng(seed), devices, switches), [d.name for d in fabric.devices])
    weight = [int(r == 1 or not broadcast) for r in range(devices)]
    k, stretch = choose_trees(graph, weight, worst_cut(graph, weight).ratio, trees=None, max_trees=10**9, deadline=NEVER)
    demand = {r: k for r, w in enumerate(weight) if w}
    packed = pack_capacities(graph.nodes, rounded_capacities(graph, stretch), devices, demand, graph.group)
    low = lowered(packed)
    assert arcs_of(low) == arcs_of(packed)
    assert max(t.height for t in low) <= max(t.height for t in packed)
    assert Counter({r: sum(t.units for t in low if t.root == r) for r in demand}) == Counter(demand)
    for tree in low:
        assert sorted(tree.order) == list(range(devices)) and tree.parent[tree.root] == -1
        place = {v: i for i, v in enumerate(tree.order)}
        assert all(place[tree.parent[v]] < place[v] and (tree.paths[v][0], tree.paths[v][-1]) == (tree.parent[v], v) for v in tree.order[1:])


def test_exchanges_make_trees_of_two_racks_low() -> None:
    fabric = load_fabric("gb200-nvl72:2")
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    weight = [1] * graph.ranks
    k, stretch = choose_trees(graph, weight, worst_cut(graph, weight).ratio, trees=1, max_trees=1, deadline=NEVER)
    packed = pack_capacities(graph.nodes, rounded_capacities(graph, stretch), graph.ranks, dict.fromkeys(range(graph.ranks), k), graph.group)
    assert max(t.height for t in packed) > max(t.height for t in lowered(packed)) <= 3


def test_paths_of_a_gather_keep_nothing_of_the_ranks_beside_them() -> None:
    """Entries for all ranks in the path of each: 8,192 ranks had 134 million of them."""
    fabric = load_fabric("dgx-h100:4")
    graph = rate_graph(fabric, tuple(d.name for d in fabric.devices))
    forest = gather_forest(graph, 0, [1] * graph.ranks, trees=None, max_trees=8, deadline=NEVER, turned=False)
    assert len(forest.trees) >= graph.ranks - 1
    for tree in forest.trees:
        assert set(tree.parent) == set(tree.paths) == set(tree.order)
        assert len(tree.order) <= 3


@pytest.mark.parametrize("op", ["scatter", "gather"])
def test_paths_are_not_cut_where_a_server_has_lost_a_device(op: str) -> None:
    """Seven devices behind eight ports take eight units per share; cut at each unit, the messages would be an eighth, and pieces as many fewer."""
    fabric = without(load_fabric("dgx-h100:16"), ["box3/gpu5"])
    problem = CollectiveProblem.on(fabric, op, 1 << 30)
    plan = ForestColl().plan(problem, rng=np.random.default_rng(0))
    assert plan.options["quantum"] == plan.options["trees"] == 8
    time_s = simulated_time_s(plan.program, fabric, problem.ranks, None)
    assert plan.bound is not None and time_s <= 1.02 * float(plan.bound)
