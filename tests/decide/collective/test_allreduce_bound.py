"""Bounds from lengths: equal to joint packing's optimum, accepted and never beaten; the proof's heart tried exhaustively on small cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings

from meshwright.bound import Bound
from meshwright.check.bounds.certificate import check_bound
from meshwright.check.bounds.packing import _arborescence, _spanning
from meshwright.decide.collective import CollectiveProblem, collective_bound
from meshwright.decide.collective.bounds.allreduce import all_reduce_dual_bound, hosts_of, packing_bound, whole_lengths
from meshwright.decide.collective.joint.exact import exact_demand, packing_time
from meshwright.decide.collective.joint.strategy import packing_problem
from meshwright.decide.collective.rates import rate_graph
from meshwright.decide.collective.trees.lp import solve_packing
from meshwright.errors import Disconnected, Infeasible, Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import Deadline
from meshwright.testing.fabrics import fabrics

OPS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "scatter", "gather", "permute")


@settings(max_examples=60, deadline=None)
@given(fabric=fabrics(min_devices=2, max_devices=6, symmetric=True))
def test_the_bound_is_the_optimum_of_joint_packing_where_links_have_twins(fabric: Fabric) -> None:
    problem = CollectiveProblem.on(fabric, "all-reduce", 5040 * 16)
    bound = all_reduce_dual_bound(problem)
    assert bound is not None and not check_bound(bound, fabric)
    graph = rate_graph(fabric, problem.ranks)
    packed = packing_problem(graph)
    packing = solve_packing(packed, what="t")
    assert float(bound) == pytest.approx(packing.time * problem.size_bytes / graph.unit_Bps, rel=1e-6)
    for exact in exact_demand(packed, packing, 0, most_units=1 << 40):
        optimum = packing_time(packed, [exact]) * problem.size_bytes / graph.unit_Bps
        assert bound.exact <= optimum


@settings(max_examples=40, deadline=None)
@given(fabric=fabrics(min_devices=2, max_devices=6))
def test_on_any_fabric_it_is_accepted_and_not_above_the_optimum(fabric: Fabric) -> None:
    problem = CollectiveProblem.on(fabric, "all-reduce", 5040 * 16)
    bound = all_reduce_dual_bound(problem)
    assert bound is not None and not check_bound(bound, fabric)
    graph = rate_graph(fabric, problem.ranks)
    best = solve_packing(packing_problem(graph), what="t").time * problem.size_bytes / graph.unit_Bps
    assert float(bound) <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", ["dgx1-v100", "mi250:1", "dgx-h100:1", "dgx-h100:2", "dgx-a100:2", "ndv2:2", "mi250:2"])
def test_on_presets_it_is_at_least_the_best_other_bound(name: str) -> None:
    problem = CollectiveProblem.on(load_fabric(name), "all-reduce", 1 << 30)
    bound = all_reduce_dual_bound(problem)
    assert bound is not None and bound.exact >= collective_bound(problem).exact
    assert not check_bound(bound, problem.fabric)


def schemes(n: int, most: int) -> set[tuple[tuple[int, int], ...]]:
    """Multisets of one-way messages that in some order let all of n nodes know everything, none of them useless when sent."""
    arcs = [(u, v) for u in range(n) for v in range(n) if u != v]
    level: dict[tuple[tuple[int, int], ...], set[tuple[int, ...]]] = {(): {tuple(1 << v for v in range(n))}}
    done = set()
    for _ in range(most):
        following: dict[tuple[tuple[int, int], ...], set[tuple[int, ...]]] = {}
        for sent, states in level.items():
            for u, v in arcs:
                for state in states:
                    if state[u] | state[v] != state[v]:
                        after = (*state[:v], state[u] | state[v], *state[v + 1 :])
                        following.setdefault(tuple(sorted((*sent, (u, v)))), set()).add(after)
        full = tuple([(1 << n) - 1] * n)
        done |= {sent for sent, states in following.items() if full in states}
        level = {sent: states for sent, states in following.items() if full not in states}
    return done


@pytest.mark.parametrize(("n", "most"), [(2, 4), (3, 7)])
def test_all_exchanges_of_few_nodes_hold_two_spanning_trees_and_pay_for_them(n: int, most: int) -> None:
    """What the proof says of every algorithm, on every scheme there is: cost >= 2 · cheapest spanning tree, for many symmetric lengths."""
    rng = np.random.default_rng(0)
    found = schemes(n, most)
    assert found and min(map(len, found)) == 2 * (n - 1)
    for _ in range(20):
        cost = np.triu(rng.integers(0, 9, (n, n)), 1)
        metric = nx.floyd_warshall_numpy(nx.from_numpy_array(cost + cost.T + 1))
        tree = _spanning(metric.astype(int).tolist())
        assert all(sum(metric[u, v] for u, v in sent) >= 2 * tree for sent in found)


@pytest.mark.parametrize("seed", range(30))
def test_cheapest_arborescences_and_trees_equal_networkx(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    cost = rng.integers(0, 9, (n, n))
    root = int(rng.integers(0, n))
    graph = nx.DiGraph()
    graph.add_edges_from((u, v, {"weight": int(cost[u, v]) + 1}) for u in range(n) for v in range(n) if u != v and v != root)
    tree = nx.minimum_spanning_arborescence(graph)
    assert _arborescence(cost.tolist(), root) == sum(d["weight"] for *_, d in tree.edges(data=True)) - (n - 1)
    low = np.minimum(cost, cost.T)
    flat = nx.Graph()
    flat.add_edges_from((u, v, {"weight": int(low[u, v]) + 1}) for u in range(n) for v in range(u))
    assert _spanning(low.tolist()) == sum(d["weight"] for *_, d in nx.minimum_spanning_edges(flat)) - (n - 1)


@settings(max_examples=25, deadline=None)
@given(fabric=fabrics(min_devices=2, max_devices=5))
def test_planner_and_checker_count_the_same_at_random_lengths(fabric: Fabric) -> None:
    rng = np.random.default_rng(len(fabric.links))
    lengths = {(x.src, x.dst): int(rng.integers(0, 6)) for x in fabric.links} | {(fabric.links[0].src, fabric.links[0].dst): 3}
    n = len(fabric.devices)
    problems = [CollectiveProblem.on(fabric, op, 240 * n, root=n - 1) for op in OPS]
    shards = (480, *[240] * (n - 2), 0)
    problems.append(CollectiveProblem.on(fabric, "all-gather", sum(shards), shard_bytes=shards))
    for some in (*[[p] for p in problems], problems):
        bound = packing_bound(some, lengths, [{} for _ in some])
        assert not check_bound(bound, fabric)
        if len(some) == 1 and some[0].op in ("all-gather", "reduce-scatter", "broadcast", "reduce"):  # their other bound is the exact optimum
            assert bound.exact <= collective_bound(some[0]).exact


def box(**abilities: bool) -> Fabric:
    links = tuple(Link(src=a, dst=b, rate_Bps=100) for i in range(4) for a, b in ((f"d{i}", "s"), ("s", f"d{i}")))
    return Fabric(name="box", devices=tuple(Device(name=f"d{i}") for i in range(4)), switches=(Switch(name="s", **abilities),), links=links)


def test_a_switch_that_adds_is_merged_with_a_rank() -> None:
    plain = all_reduce_dual_bound(CollectiveProblem.on(box(), "all-reduce", 400))
    capable = CollectiveProblem.on(box(aggregate=True, multicast=True), "all-reduce", 400)
    able = all_reduce_dual_bound(capable)
    assert plain is not None and plain.exact == 6  # 2 (n - 1) / n messages of 4 s
    assert able is not None and able.exact == 4 and hosts_of(capable) == {"s": "d0"}
    assert not check_bound(able, capable.fabric)
    data = dict(able.certificate.data)
    data["groups"] = [{k: v for k, v in data["groups"][0].items() if k != "hosts"}]
    assert "merged with no rank" in complaint(able, capable.fabric, data)


def complaint(bound: Bound, fabric: Fabric, data: dict[str, Any]) -> str:
    changed = msgspec.structs.replace(bound, certificate=msgspec.structs.replace(bound.certificate, data=data))
    findings = check_bound(changed, fabric)
    assert len(findings) == 1 and findings[0].status == "wrong"
    return findings[0].message


@pytest.mark.parametrize(
    ("changes", "group", "words"),
    [
        ({"lengths": [["d0", "s", -1]]}, {}, "no whole number"),
        ({"lengths": [["d0", "s", 1.5]]}, {}, "no whole number"),
        ({"lengths": [["d0", "s", 1], ["d0", "s", 1]]}, {}, "stated twice"),
        ({"lengths": [["d0", "d1", 1]]}, {}, "has no link d0 -> d1"),
        ({"lengths": []}, {}, "no link has a length"),
        ({"groups": []}, {}, "no collective"),
        ({}, {"demand": "all-to-none"}, "no rule"),
        ({}, {"devices": ["d0"]}, "two or more different devices"),
        ({}, {"devices": ["d0", "d0", "d1"]}, "two or more different devices"),
        ({}, {"devices": ["d0", "s"]}, "two or more different devices"),
        ({}, {"size_bytes": -4}, "negative size"),
        ({}, {"shard_bytes": [400, 0, 0]}, "do not add up"),
        ({}, {"shard_bytes": [500, -100, 0, 0]}, "do not add up"),
        ({}, {"demand": "broadcast"}, "root"),
        ({}, {"demand": "permute", "peers": ["d1"]}, "peer for every rank"),
        ({}, {"hosts": {"d1": "d0"}}, "merge switches with ranks"),
        ({}, {"hosts": {"s": "d9"}}, "merge switches with ranks"),
        ({}, {"size_bytes": 800}, "claimed is 6"),
    ],
)
def test_a_lie_is_named(changes: dict[str, Any], group: dict[str, Any], words: str) -> None:
    bound = all_reduce_dual_bound(CollectiveProblem.on(box(), "all-reduce", 400))
    assert bound is not None and not check_bound(bound, box())
    data = {**bound.certificate.data, **changes}
    if group:
        data["groups"] = [{**data["groups"][0], **group}]
    assert words in complaint(bound, box(), data)


def test_a_path_that_does_not_exist_is_named() -> None:
    bound = all_reduce_dual_bound(CollectiveProblem.on(box(), "all-reduce", 400))
    assert bound is not None
    cut = replace(box(), links=box().links[:-1])
    data = {**bound.certificate.data, "lengths": [x for x in bound.certificate.data["lengths"] if x[:2] != ["s", "d3"]]}
    assert "no path from" in complaint(bound, cut, data)


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="bounds all-reduce"):
        all_reduce_dual_bound(CollectiveProblem.on(box(), "broadcast", 400))
    apart = replace(box(), links=box().links[:4])
    with pytest.raises(Disconnected):
        collective_bound(CollectiveProblem.on(apart, "all-reduce", 400))
    assert all_reduce_dual_bound(CollectiveProblem.on(apart, "all-reduce", 400)) is None  # a help only: the cut above says more
    with pytest.raises(Infeasible, match="no path"):
        packing_bound([CollectiveProblem.on(apart, "all-reduce", 400)], {("d0", "s"): 1}, [{}])
    assert all_reduce_dual_bound(CollectiveProblem.on(box(), "all-reduce", 400), deadline=Deadline(clock_s=0.0)) is None
    assert whole_lengths({("a", "b"): 0.0}) == []


def test_a_fabric_that_is_too_large_has_no_dual_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.decide.collective.bounds import allreduce as allreduce_bound

    monkeypatch.setattr(allreduce_bound, "MAX_ARCS", 3)
    assert all_reduce_dual_bound(CollectiveProblem.on(box(), "all-reduce", 400)) is None


def test_lengths_are_brought_to_simple_whole_numbers() -> None:
    assert whole_lengths({("a", "b"): 0.5, ("b", "c"): 0.33333333333, ("c", "d"): 0.0})[0] == {("a", "b"): 3, ("b", "c"): 2}
