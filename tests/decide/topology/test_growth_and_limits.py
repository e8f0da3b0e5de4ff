"""Wirings that grow, that keep to few neighbours, and the share of all-to-all traffic: against counting, brute force and shortest ways."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import few
from meshwright.check.wiring import check_wiring
from meshwright.decide.topology import DirectConnect, TopologyProblem
from meshwright.decide.topology.directconnect.families import complete_bipartite, ring, torus
from meshwright.decide.topology.directconnect.growth import grow, least_unplugged, wiring_of
from meshwright.decide.topology.directconnect.loads import gather_cost
from meshwright.decide.topology.directconnect.strategy import WiringDesign
from meshwright.decide.topology.directconnect.wiring import Wiring, copies, line_graph, product, widened
from meshwright.decide.topology.hammingmesh.bandwidth import global_share
from meshwright.drive.wiring import _all_to_all, design_wiring, grow_wiring
from meshwright.errors import Infeasible, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch


def arcs_of(wiring: Wiring) -> Counter[tuple[int, int]]:
    return Counter((int(a), int(b)) for a, b in wiring.arcs)


def listed(wiring: Wiring) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in wiring.arcs]


@given(seed=st.integers(0, 10**6), ports=st.integers(1, 4), nodes=st.integers(5, 9), wide=st.integers(1, 9))
@settings(max_examples=60)
def test_wider_links_keep_neighbours_and_fill_every_port(seed: int, ports: int, nodes: int, wide: int) -> None:
    rng = np.random.default_rng(seed)
    arcs = [(a, int(b)) for _ in range(ports) for a, b in enumerate(rng.permutation(nodes))]
    base = Wiring.of("random", nodes, arcs)
    made = widened(base, wide)
    assert made.ports == wide and set(arcs_of(made)) <= set(arcs_of(base))
    if wide >= ports:
        assert set(arcs_of(made)) == set(arcs_of(base))


BASES = [(torus((4, 4)), 18), (ring(5, paired=True), 8), (ring(5, paired=False), 6), (line_graph(ring(4, paired=True)), 10)]


@pytest.mark.parametrize("base, nodes", BASES)
def test_growth_cuts_a_cable_for_every_port_and_touches_no_other(base: Wiring, nodes: int) -> None:
    added = nodes - base.nodes
    for found in grow(base, nodes, evaluations=few(24), rng=np.random.default_rng(1)):
        before, after = arcs_of(base), arcs_of(found.wiring)
        assert before - after == Counter(found.unplugged) and after - before == Counter(found.plugged)
        assert least_unplugged(added, base.ports) <= len(found.unplugged) <= added * base.ports
        assert all(max(arc) >= base.nodes for arc in found.plugged) and found.wiring.paired == base.paired
        cost = gather_cost(found.wiring)
        verdict = check_wiring(nodes, base.ports, listed(found.wiring), steps=cost.steps, load=cost.load, paired=base.paired)
        assert verdict.ok and found.steps >= cost.steps and found.load >= cost.load


def test_growth_by_one_is_the_best_there_is() -> None:
    """Every pair of cables that one new node can enter, tried one by one."""
    arcs = [(a, (a + step) % 6) for a in range(6) for step in (1, 2)]
    tried = []
    for cut in combinations(range(len(arcs)), 2):
        new = [arc for k, arc in enumerate(arcs) if k not in cut] + [link for k in cut for link in ((arcs[k][0], 6), (6, arcs[k][1]))]
        wiring = Wiring.of("tried", 7, new)
        both = gather_cost(wiring), gather_cost(wiring.transposed())
        tried.append((max(c.load for c in both), max(c.steps for c in both)))
    found = grow(Wiring.of("circulant", 6, arcs), 7, evaluations=400, rng=np.random.default_rng(0))
    assert min((g.load, g.steps) for g in found) == min(tried) and min(g.steps for g in found) == min(steps for _, steps in tried)


def test_what_cannot_grow() -> None:
    with pytest.raises(UsageError, match="6 are no more"):
        grow(complete_bipartite(3), 6, evaluations=1, rng=np.random.default_rng(0))
    with pytest.raises(Infeasible, match="each cable it enters takes two"):
        grow(complete_bipartite(3), 7, evaluations=1, rng=np.random.default_rng(0))
    around = [(a + i, (a + 1) % 3 + i) for i in (0, 3) for a in range(3)]
    rings = Wiring.of("rings", 6, around + [(b, a) for a, b in around])
    with pytest.raises(Infeasible, match="no growth to 7 accelerators joins all") as apart:  # one new node of two ports enters one cable
        grow(rings, 7, evaluations=4, rng=np.random.default_rng(0))
    assert apart.value.hint == "rings: no way from node 3 to node 0 before it grows: join its parts first, with --rewire"
    assert grow(rings, 8, evaluations=40, rng=np.random.default_rng(0))  # two new ones can join both
    devices = tuple(Device(name=f"a{k}", kind="gpu") for k in range(3))
    links = tuple(Link(src=f"a{a}", dst=f"a{b}", rate_Bps=10, latency_s=0.0) for a, b in ((0, 1), (1, 2), (2, 0), (0, 2)))
    with pytest.raises(UsageError, match="unlike numbers of ports"):
        wiring_of(Fabric(name="uneven", devices=devices, links=links))
    with pytest.raises(UsageError, match="has switches"):
        wiring_of(Fabric(name="switched", devices=devices, switches=(Switch(name="s"),), links=links))
    even = Fabric(name="even", devices=devices, links=links[:3])
    with pytest.raises(UsageError, match="give --ports 1"):
        grow_wiring(even, TopologyProblem(nodes=4, ports=2))
    (row,) = grow_wiring(even, TopologyProblem(nodes=4, ports=1), evaluations=2)
    assert row.design.names == ("a0", "a1", "a2", "d0") and row.grown is not None and len(row.grown.unplugged) == 1


@pytest.mark.parametrize("peers, parallel", [(2, 0), (3, 0), (0, 1), (2, 2), (3, 2)])
def test_limits_are_kept_and_bounds_hold(peers: int, parallel: int) -> None:
    problem = TopologyProblem(nodes=12, ports=4, most_peers=peers, most_parallel=parallel)
    for row in design_wiring(problem, options={"evaluations": 60}):
        links = row.design.wiring.links()
        for side in (0, 1):
            assert max(Counter(link[side] for link in links).values()) <= (peers or 4)
        assert max(links.values()) <= (parallel or 4)
        assert row.design.steps >= row.design.steps_bound and row.design.factor >= row.design.factor_bound


def test_limits_that_leave_ports_over_are_refused_by_counting() -> None:
    with pytest.raises(Infeasible, match="of 4 ports only 2 can be used"):
        TopologyProblem(nodes=8, ports=4, most_peers=2, most_parallel=1)
    with pytest.raises(UsageError, match="0 for no limit"):
        TopologyProblem(nodes=8, ports=4, most_peers=-1)
    with pytest.raises(Infeasible, match="within these limits"):
        DirectConnect(evaluations=0).plan(TopologyProblem(nodes=9, ports=3, bidirectional=True, most_peers=2), rng=np.random.default_rng(0))


def test_the_checker_sees_limits_that_were_not_kept() -> None:
    cost = gather_cost(copies(ring(3, paired=True), 2))
    arcs = listed(copies(ring(3, paired=True), 2))
    assert check_wiring(6, 4, arcs, steps=cost.steps, load=cost.load, most_peers=4, most_parallel=1).ok
    assert not check_wiring(6, 4, arcs, steps=cost.steps, load=cost.load, most_peers=3).ok
    doubled = widened(ring(3, paired=True), 4)
    assert not check_wiring(3, 4, listed(doubled), steps=1, load=gather_cost(doubled).load, most_parallel=1).ok


@pytest.mark.parametrize("wiring", [ring(5, paired=True), torus((3, 3)), product(ring(3, paired=True), ring(3, paired=True)), complete_bipartite(3)])
def test_all_to_all_share_reaches_the_bound_where_all_links_are_alike(wiring: Wiring) -> None:
    """Shortest ways load the links of these graphs alike, so the mean number of hops is reached."""
    cost = gather_cost(wiring)
    problem = TopologyProblem(nodes=wiring.nodes, ports=wiring.ports)
    design = WiringDesign(
        wiring=wiring, gather=cost, scatter=cost, steps=cost.steps, factor=cost.load, steps_bound=1, factor_bound=cost.load,
    )  # fmt: skip
    assert _all_to_all(design, problem) == pytest.approx(float(1 / cost.hops), rel=1e-6)


def test_a_bridge_halves_all_to_all_traffic() -> None:
    """Two rings that share little: the linear program finds the cut, which the mean number of hops does not see."""
    arcs = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (3, 0), (1, 0), (2, 1), (4, 3), (5, 4), (1, 2), (2, 1), (4, 5), (5, 4)]
    degree = Counter(a for a, _ in arcs)
    fabric = Fabric(
        name="bridge", devices=tuple(Device(name=f"d{k}", kind="gpu") for k in range(6)),
        links=tuple(Link(src=f"d{a}", dst=f"d{b}", rate_Bps=count, latency_s=0.0) for (a, b), count in Counter(arcs).items()),
    )  # fmt: skip
    # 9 pairs cross the bridge each way, over one link of rate 1: everyone sends 1/9 to each of 5 others
    assert global_share(fabric, links=max(degree.values())) == pytest.approx(5 / 9 / max(degree.values()), rel=1e-6)
