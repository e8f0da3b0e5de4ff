"""Forests that leave slow ways time: sound on the fabric itself, in time as promised, and faster where a network's latency counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from collective_oracle import balanced_fabric
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forest import assert_sound
from test_forest_arrival import with_latencies

from meshwright.check import check_program
from meshwright.cost import Transport
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.forestcoll import cut_and_pace, strategy
from meshwright.decide.collective.forestcoll.arrival import HopTimes, arrival_s
from meshwright.decide.collective.forestcoll.finish_time import finish_s
from meshwright.decide.collective.forestcoll.forest import Forest, build_forest
from meshwright.decide.collective.forestcoll.latency_relief import at_home, promising_counts, relieved
from meshwright.decide.collective.forestcoll.prepared import lowering_of
from meshwright.decide.collective.program_time import simulated, simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.errors import Unsupported, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import NEVER

RNG = np.random.default_rng(0)


def brute_force_s(forest: Forest, seconds: HopTimes, size_bytes: float) -> float:
    """Every set of trees over every link: earliest data, all bytes, shortest way on."""
    uses: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for tree in forest.trees:
        arrives = {tree.root: 0.0}
        for v in tree.order[1:]:
            arrives[v] = arrives[tree.parent[v]] + seconds(tree.paths[v])
        for v in tree.order[1:]:
            below = {v}
            for w in tree.order[1:]:
                below |= {w} if tree.parent[w] in below else set()
            start = arrives[tree.parent[v]]
            for arc in pairwise(tree.paths[v]):
                size = tree.units * size_bytes / forest.k / sum(forest.weight)
                uses.setdefault(arc, []).append((start, max(arrives[w] for w in below) - start, size))
    worst = 0.0
    for arc, rows in uses.items():
        rate = forest.graph.arcs[arc] * forest.graph.unit_Bps
        for count in range(1, len(rows) + 1):
            for chosen in combinations(rows, count):
                heads, tails, sizes = zip(*chosen, strict=True)
                worst = max(worst, min(heads) + sum(sizes) / rate + min(tails))
    return worst


def small_forest(seed: int, devices: int, switches: int, broadcast: bool, trees: int) -> tuple[Fabric, Forest, HopTimes]:
    rng = np.random.default_rng(seed)
    fabric = with_latencies(balanced_fabric(rng, devices, switches), rng)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    weight = [int(r == 0 or not broadcast) for r in range(devices)]
    return fabric, build_forest(graph, weight, max_trees=trees), HopTimes(fabric, graph, turned=False)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(0, 2), st.booleans(), st.integers(0, 40))
def test_finish_is_the_worst_set_of_trees_on_any_link(seed: int, devices: int, switches: int, broadcast: bool, log_bytes: int) -> None:
    _, forest, seconds = small_forest(seed, devices, switches, broadcast, 3)
    if max(len(forest.trees) * (devices - 1), 0) > 12:
        return
    size = 2.0**log_bytes
    assert finish_s(forest, seconds, size) == pytest.approx(brute_force_s(forest, seconds, size), rel=1e-9)
    bytes_s = float(size * forest.stretch / forest.k / forest.graph.unit_Bps / sum(forest.weight))
    assert finish_s(forest, seconds, size) <= bytes_s + arrival_s(forest, seconds) + 1e-12


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 2), st.booleans())
def test_no_simulated_plan_ends_before_its_forest_can(seed: int, devices: int, switches: int, broadcast: bool) -> None:
    fabric, forest, seconds = small_forest(seed, devices, switches, broadcast, 4)
    problem = CollectiveProblem.on(fabric, "broadcast" if broadcast else "all-gather", 1 << 12)
    plan = ForestColl(trees=forest.k, pieces=8, structure=False, max_trees=4).plan(problem, rng=RNG)
    ready = ForestColl(trees=forest.k, pieces=8, structure=False, max_trees=4)._prepared(problem, float("inf"))
    at_s = simulated_time_s(plan.program, fabric, problem.ranks, None)
    assert at_s >= finish_s(ready.forests[0], seconds, problem.size_bytes) * (1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 7), st.integers(0, 3), st.integers(1, 4))
def test_relieved_forests_are_forests_of_the_fabric(seed: int, devices: int, switches: int, trees: int) -> None:
    rng = np.random.default_rng(seed)
    fabric = with_latencies(balanced_fabric(rng, devices, switches), rng)
    fabric = replace(fabric, links=tuple(replace(x, rate_Bps=x.rate_Bps * 10**6) for x in fabric.links))
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    seconds, weight = HopTimes(fabric, graph, turned=False), [1] * devices
    try:
        less = relieved(graph, weight, seconds, 4)
    except Unsupported:
        assert len({seconds.wire[a] + seconds.library[a] for a in graph.arcs}) == 1 or switches
        return
    share = {arc: less.arcs[arc] / graph.arcs[arc] for arc in graph.arcs}
    for w in range(devices, graph.nodes):  # switches take in what they give out, as before
        assert sum(r if v == w else -r if u == w else 0 for (u, v), r in less.arcs.items()) == 0
        assert len({round(s, 6) for arc, s in share.items() if w in arc}) == 1
    try:
        forest = at_home(build_forest(less, weight, trees=trees), graph, 4)
    except Unsupported:  # whole trees leave a switch unbalanced
        return
    assert_sound(forest, graph)
    assert forest.optimum == build_forest(graph, weight, max_trees=1).optimum and forest.ratio <= 1
    assert max(load / graph.arcs[arc] for arc, load in forest.load.items()) == pytest.approx(float(forest.stretch))


def test_most_promising_counts_come_first() -> None:
    fabric = load_fabric("dgx-h100:2")
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    assert promising_counts(graph, [1] * 16, 4)[0] == 2  # as many as the optimum needs
    assert sorted(promising_counts(graph, [1] * 16, 4)) == [1, 2, 3, 4]


def test_the_network_of_two_boxes_is_left_time_and_all_ends_earlier() -> None:
    fabric = load_fabric("dgx-h100:2")
    problem = CollectiveProblem.on(fabric, "all-gather", 1 << 30)
    options = {"trees": 15, "quantum": 1, "pieces": 256, "pace": 0}
    plan, full = (ForestColl(**options | more).plan(problem, rng=RNG) for more in ({"relief": 2}, {"relief": 0, "trees": 2}))
    assert plan.options["relief"] == 2 and plan.notes["ratio"] != "1" and full.notes["ratio"] == "1"
    times = [simulated_time_s(p.program, fabric, problem.ranks, None) for p in (plan, full)]
    assert float(bandwidth_bound(problem)) / times[0] >= 0.99 and times[0] < 0.997 * times[1]
    few = ForestColl(relief=2, **options | {"pieces": 4}).plan(problem, rng=RNG)  # the same lanes, fewer iterations to check
    assert check_program(few.program).ok
    again = ForestColl(**plan.options).plan(problem, rng=RNG)
    assert again.program.steps.chan_out.tolist() == plan.program.steps.chan_out.tolist() and again.options == plan.options


def test_relief_is_refused_where_no_way_is_slower_and_below_zero() -> None:
    problem = CollectiveProblem.on(load_fabric("dgx-a100:1"), "all-gather", 1 << 20)
    with pytest.raises(Unsupported, match="no link has more latency"):
        ForestColl(relief=2).plan(problem, rng=RNG)
    with pytest.raises(Unsupported, match="there is no relief for broadcast"):
        ForestColl(relief=2).plan(replace(problem, op="broadcast"), rng=RNG)
    with pytest.raises(UsageError, match="relief must be >= 0"):
        ForestColl(relief=-1).plan(problem, rng=RNG)


def test_a_program_of_one_forest_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = load_fabric("dgx-a100:1")
    problem = CollectiveProblem.on(fabric, "all-gather", 1 << 20)
    ready = ForestColl()._prepared(problem, NEVER)
    how = lowering_of(problem, ready.forests[0], ready.units, 4, False, ready.servers, 2)
    expected = simulated(ready.program(how, 1), fabric, problem.ranks, None)
    runs = []
    monkeypatch.setattr(cut_and_pace, "simulated", lambda *asked: runs.append(asked) or simulated(*asked))
    assert cut_and_pace.timed(problem, ready, 1, how) == cut_and_pace.timed(problem, ready, 1, how) == expected
    assert len(runs) == 1
    deeper, larger = replace(how, depth=4), replace(how, chunk_bytes=2 * how.chunk_bytes)
    slow = replace(problem, transport=Transport(per_message_s=1e-3))
    times = [cut_and_pace.timed(of, ready, 1, lowering)[0] for of, lowering in ((problem, deeper), (problem, larger), (slow, how))]
    assert len(runs) == 4 and times[0] <= expected[0] < times[1] < times[2]


def test_forests_as_they_are_are_not_tried_where_a_relieved_one_beats_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CollectiveProblem.on(load_fabric("dgx-h100:2"), "all-gather", 1 << 30)
    tried = []
    monkeypatch.setattr(strategy, "best_way", lambda problem, ready, ways, lowering: tried.append(ready.forests[0].ratio) or ways[0])
    plan = ForestColl().plan(problem, rng=RNG)
    assert plan.options["relief"] == 2 and tried and max(tried) < 1  # the exact optimum is that of the forest as it is
