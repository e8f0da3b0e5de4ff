"""Trees two hops high from rotations: sound, as full as the count of an orbit says, and refused where nothing can be rotated."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forest import assert_sound

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.forestcoll import forest as forests
from meshwright.decide.collective.forestcoll.forest import build_forest
from meshwright.decide.collective.forestcoll.rotation import rotated_trees
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.decide.collective.trees.symmetry import Boxes
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric


def cluster(servers: int, local: int, inner: int, outer: int) -> Fabric:
    """Ranks of a server on one switch, each with a port of its own to the network."""
    devices, switches, links = [], [Switch(name="net")], []
    for x in range(servers):
        switches += [Switch(name=f"s{x}/hub", group=f"s{x}"), *(Switch(name=f"s{x}/nic{i}", group=f"s{x}") for i in range(local))]
        for i in range(local):
            devices.append(Device(name=f"s{x}/d{i}", group=f"s{x}"))
            ways = [(f"s{x}/d{i}", f"s{x}/hub", inner), (f"s{x}/d{i}", f"s{x}/nic{i}", outer), (f"s{x}/nic{i}", "net", outer)]
            links += [Link(src=a, dst=b, rate_Bps=rate) for u, v, rate in ways for a, b in ((u, v), (v, u))]
    return Fabric(name="cluster", devices=tuple(devices), switches=tuple(switches), links=tuple(links))


def graph_of(fabric: Fabric) -> RateGraph:
    return rate_graph(fabric, [d.name for d in fabric.devices])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 6), st.integers(1, 3), st.integers(0, 40), st.integers(0, 40))
def test_trees_span_in_two_hops_and_fit_exactly_when_an_orbit_does(servers: int, local: int, k: int, inner: int, outer: int) -> None:
    graph = graph_of(cluster(servers, local, 7, 3))
    roomy = {(u, v): inner if 7 // graph.unit_Bps == rate else outer for (u, v), rate in graph.arcs.items()}
    # m entries into every other server, of k trees together: what a rank then sends over its server's switch and over its port
    fits = [m for m in range(k, k * local + 1) if k * (local - 1) + (servers - 1) * (k * local - m) <= inner and (servers - 1) * m <= outer]
    if not fits:
        with pytest.raises(Unsupported, match="do not fit"):
            rotated_trees(graph, Boxes.of(graph), k, roomy)
        return
    trees = rotated_trees(graph, Boxes.of(graph), k, roomy)
    assert max(tree.height for tree in trees) <= 2
    load: dict[tuple[int, int], int] = {}
    for tree in trees:
        for path in tree.paths:
            for arc in pairwise(path):
                load[arc] = load.get(arc, 0) + tree.units
    assert all(used <= roomy[arc] for arc, used in load.items())
    assert {load[arc] for arc in graph.arcs if roomy[arc] == outer and inner != outer} <= {(servers - 1) * fits[0]}


def test_two_racks_get_the_low_forest_and_nearly_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = load_fabric("gb200-nvl72:2")
    problem = CollectiveProblem.on(fabric, "all-gather", 1 << 30)
    graph = graph_of(fabric)
    forest = build_forest(graph, [1] * 144, trees=1)
    assert_sound(forest, graph)
    assert (forest.height, forest.method) == (2, "rotated ranks")
    plan = ForestColl(trees=1, structure=True, quantum=1, pieces=8).plan(problem, rng=np.random.default_rng(0))
    assert float(bandwidth_bound(problem)) / simulated_time_s(plan.program, fabric, problem.ranks, None) >= 0.99
    small = cluster(2, 4, 20, 8)
    monkeypatch.setattr(forests, "MAX_FEW_RANKS", 4)
    asked = CollectiveProblem.on(small, "reduce-scatter", 1 << 16)
    found = ForestColl(trees=1, structure=True, pieces=4).plan(asked, rng=np.random.default_rng(0))
    assert found.notes["method"] == "rotated ranks" and check_program(found.program).ok


def test_what_cannot_be_rotated_is_refused() -> None:
    fabric = cluster(2, 3, 7, 3)
    capacities = dict.fromkeys(graph_of(fabric).arcs, 100)
    slower = replace(fabric, links=tuple(replace(x, rate_Bps=2) if "s0/nic1" in (x.src, x.dst) else x for x in fabric.links))
    graph = graph_of(slower)
    with pytest.raises(Unsupported, match="leaves no place for switch s0/nic"):
        rotated_trees(graph, Boxes.of(graph), 1, capacities)
    twins = [Switch(name=f"s{x}/spare{i}", group=f"s{x}") for x in range(2) for i in range(2)]
    both = [Link(src=a, dst=b, rate_Bps=1) for s in twins for d in range(3) for a, b in ((s.name, f"{s.group}/d{d}"), (f"{s.group}/d{d}", s.name))]
    graph = graph_of(replace(fabric, switches=(*fabric.switches, *twins), links=(*fabric.links, *both)))
    with pytest.raises(Unsupported, match="cannot be told apart"):
        rotated_trees(graph, Boxes.of(graph), 1, capacities)
    near = tuple(x for x in fabric.links if "hub" not in x.src + x.dst and "net" not in (x.src, x.dst))
    pair = tuple(Link(src=f"s{x}/d{i}", dst=f"s{x}/d{(i + 1) % 3}", rate_Bps=1) for x in range(2) for i in range(3))
    graph = graph_of(replace(fabric, links=(*near, *pair)))
    with pytest.raises(Unsupported, match="no way through switches"):
        rotated_trees(graph, Boxes.of(graph), 1, capacities)
