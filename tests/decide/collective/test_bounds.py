"""Bounds against brute force over all cuts, and their certificates against the fabric alone."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from collective_oracle import all_cuts, balanced_fabric, full_mesh, line, two_islands
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.bound import Bound, fraction_of
from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.collective import OPERATIONS, CollectiveProblem, collective_bound
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.errors import Disconnected, Unsupported
from meshwright.fabric.edit import burst_s
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.testing.fabrics import fabrics

SIZE = 4 * 3 * 5 * 7 * 8 * 9


def brute_force(problem: CollectiveProblem) -> Fraction:
    """max over all cuts of bytes that must cross / rate that leaves."""
    n, ranks, root = len(problem.ranks), set(problem.ranks), problem.ranks[problem.root]
    best = Fraction(0)
    for inside, leaving in all_cuts(problem.fabric):
        here = len(ranks & inside)
        if here in (0, n):
            continue
        crossing = {
            "all-gather": Fraction(SIZE * here, n),
            "reduce-scatter": Fraction(SIZE * (n - here), n),
            "all-reduce": Fraction(SIZE),
            "broadcast": Fraction(SIZE if root in inside else 0),
            "reduce": Fraction(0 if root in inside else SIZE),
            "scatter": Fraction(SIZE * (n - here), n) if root in inside else Fraction(0),
            "gather": Fraction(0) if root in inside else Fraction(SIZE * here, n),
            "all-to-all": Fraction(SIZE * here * (n - here), n),
            "permute": Fraction(SIZE * sum(problem.ranks[p] in inside and problem.ranks[r] not in inside for r, p in enumerate(problem.peers))),
        }[problem.op]
        if crossing:
            best = max(best, crossing / leaving)
    return best


def certified(bound: Bound, fabric: Fabric) -> Fraction:
    """The bound's value worked out again from the certificate's sets and the fabric's links only."""
    data = bound.certificate.data
    if bound.certificate.kind in ("metric", "latency"):
        assert not check_bound(bound, fabric)
        return bound.exact
    if bound.certificate.kind == "partition":
        where = {name: i for i, part in enumerate(data["parts"]) for name in part}
        assert sum(len(part) for part in data["parts"]) == len(where), "parts overlap"
        assert set(data["devices"]) <= set(where) and all(set(part) & set(data["devices"]) for part in data["parts"])
        assert all(s.name in where for s in fabric.switches if s.multicast or s.aggregate)
        entering = sum(x.rate_Bps for x in fabric.links if x.dst in where and where.get(x.src) != where[x.dst])
        assert str(entering) == data["entering_Bps"]
        return Fraction(2 * (len(data["parts"]) - 1) * data["size_bytes"], entering)
    inside = set(data["inside"])
    leaving = sum(x.rate_Bps for x in fabric.links if x.src in inside and x.dst not in inside)
    here = len(inside & set(data["devices"]))
    assert str(leaving) == data["leaving_Bps"] and here == data["devices_inside"] and 0 < here < data["ranks"] == len(data["devices"])
    if data["root"]:
        assert (data["root"] in inside) == (data["demand"] in ("broadcast", "scatter"))
    within = Fraction(here, data["ranks"])
    pairs = [(peer, rank) for rank, peer in zip(data["devices"], data.get("peers", ()), strict=False)]
    share = {
        "all-gather": within, "gather": within, "reduce-scatter": 1 - within, "scatter": 1 - within, "all-to-all": within * (data["ranks"] - here),
        "permute": Fraction(sum(s in inside and r not in inside for s, r in pairs)),
    }.get(data["demand"], Fraction(1))  # fmt: skip
    assert fraction_of(data["crossing_bytes"]) == data["size_bytes"] * share
    return data["size_bytes"] * share / leaving


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 4), st.sampled_from(OPERATIONS), st.booleans())
def test_bound_equals_brute_force_over_all_cuts(seed: int, devices: int, switches: int, op: str, partial: bool) -> None:
    rng = np.random.default_rng(seed)
    fabric = balanced_fabric(rng, devices, switches)
    ranks = tuple(d.name for d in fabric.devices)[: max(2, devices - 1) if partial else devices]
    problem = CollectiveProblem(fabric=fabric, op=op, ranks=ranks, size_bytes=SIZE, root=int(rng.integers(len(ranks))))
    bound = collective_bound(problem)
    assert bound.unit == "s" and bound.exact == certified(bound, fabric)
    if op in ("all-to-all", "permute"):  # the lengths come from a solver's floats, rounded
        assert bound.exact >= brute_force(problem) * (1 - Fraction(1, 10**5))
    elif op == "all-reduce":
        assert bound.exact >= brute_force(problem)
    else:
        assert bound.exact == brute_force(problem)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 3))
def test_unbalanced_rates_do_not_matter_to_the_bound(seed: int, devices: int, switches: int) -> None:
    rng = np.random.default_rng(seed)
    fabric = balanced_fabric(rng, devices, switches)
    fabric = replace(fabric, links=tuple(replace(x, rate_Bps=int(rng.integers(1, 10**7))) for x in fabric.links))
    for op in OPERATIONS[1:]:
        problem = CollectiveProblem.on(fabric, op, SIZE)
        bound, cut = collective_bound(problem).exact, brute_force(problem)
        assert bound >= cut * (1 - Fraction(1, 10**5)) if op in ("all-to-all", "permute") else bound == cut


def test_all_reduce_of_a_mesh_needs_two_passes_and_of_a_line_one() -> None:
    """8 devices, all joined: every device takes in 7 links, 2 · 7 messages of every element enter devices."""
    mesh = collective_bound(CollectiveProblem.on(full_mesh(8, 1000), "all-reduce", SIZE))
    assert mesh.certificate.kind == "partition" and mesh.exact == Fraction(2 * 7 * SIZE, 8 * 7 * 1000)
    chain = collective_bound(CollectiveProblem.on(line(4, 1000), "all-reduce", SIZE))
    assert chain.certificate.kind == "cut" and chain.exact == Fraction(SIZE, 1000)


def test_switches_that_add_make_the_partition_bound_void_outside_the_parts() -> None:
    devices = tuple(Device(name=f"d{i}", group="box") for i in range(4))
    links = tuple(Link(src=a, dst=b, rate_Bps=1000) for i in range(4) for a, b in ((f"d{i}", "s"), ("s", f"d{i}")))
    plain = Fabric(name="star", devices=devices, switches=(Switch(name="s"),), links=links)
    assert collective_bound(CollectiveProblem.on(plain, "all-reduce", SIZE)).exact == Fraction(2 * 3 * SIZE, 4 * 1000)
    able = replace(plain, switches=(Switch(name="s", aggregate=True, multicast=True),))
    assert collective_bound(CollectiveProblem.on(able, "all-reduce", SIZE)).exact == Fraction(SIZE, 1000)


def test_two_islands_are_bounded_by_their_trunk() -> None:
    bound = collective_bound(CollectiveProblem.on(two_islands(), "all-reduce", 25_000_000))
    assert bound.exact == 1
    assert {"d0", "d1"} == {x for x in bound.certificate.data["inside"] if x.startswith("d")} or {"d2", "d3"} == {
        x for x in bound.certificate.data["inside"] if x.startswith("d")
    }


@pytest.mark.parametrize("op", OPERATIONS)
def test_disconnected_devices_are_named(op: str) -> None:
    fabric = Fabric(name="apart", devices=(Device(name="a"), Device(name="b"), Device(name="c")), links=(Link(src="a", dst="b", rate_Bps=5),))
    with pytest.raises(Disconnected, match="no path") as caught:
        collective_bound(CollectiveProblem.on(fabric, op, SIZE))
    assert caught.value.data["to"]


def test_rates_that_need_more_than_63_bits_are_refused() -> None:
    huge = 1 << 61
    fabric = line(3)
    fabric = replace(fabric, links=tuple(replace(x, rate_Bps=huge + 2 * i + 1) for i, x in enumerate(fabric.links)))
    with pytest.raises(Unsupported, match="64-bit"):
        collective_bound(CollectiveProblem.on(fabric, "all-gather", SIZE))


def test_parallel_links_add_up() -> None:
    fabric = line(2, 100)
    doubled = replace(fabric, links=fabric.links + fabric.links)
    assert worst_cut(rate_graph(doubled, ("d0", "d1")), [1, 1]).ratio * 1 == worst_cut(rate_graph(fabric, ("d0", "d1")), [1, 1]).ratio
    assert rate_graph(doubled, ("d0", "d1")).unit_Bps == 200


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 3))
def test_one_pair_is_bounded_by_the_maximum_flow(seed: int, devices: int, switches: int) -> None:
    rng = np.random.default_rng(seed)
    fabric = balanced_fabric(rng, devices, switches)
    names = tuple(d.name for d in fabric.devices)
    s, t = (int(x) for x in rng.choice(devices, 2, replace=False))
    graph: nx.DiGraph = nx.DiGraph()
    for x in fabric.links:
        before = graph.get_edge_data(x.src, x.dst, {"capacity": 0})["capacity"]
        graph.add_edge(x.src, x.dst, capacity=before + x.rate_Bps)
    peers = tuple(s if r == t else -1 for r in range(devices))
    bound = collective_bound(CollectiveProblem(fabric=fabric, op="permute", ranks=names, size_bytes=SIZE, peers=peers))
    flow = nx.maximum_flow_value(graph, names[s], names[t])
    assert float(bound) == pytest.approx(SIZE / flow, rel=1e-4) and bound.exact <= Fraction(SIZE, flow)


def test_all_to_all_needs_more_than_its_cuts_where_paths_are_long() -> None:
    """A cycle of five: every cut allows less time than the links that all pairs' shortest paths use together."""
    links = tuple(Link(src=f"d{i}", dst=f"d{(i + 1) % 5}", rate_Bps=100) for i in range(5))
    fabric = Fabric(name="cycle", devices=tuple(Device(name=f"d{i}") for i in range(5)), links=links)
    bound = collective_bound(CollectiveProblem.on(fabric, "all-to-all", 500))
    assert bound.certificate.kind == "metric" and bound.exact == 10  # 5 · (1 + 2 + 3 + 4) hops of 100 bytes over 5 links of 100 B/s


def test_latency_bounds_small_messages() -> None:
    plain = line(4)
    fabric = replace(plain, links=tuple(replace(x, latency_s=0.001, library_latency_s=0.002) for x in plain.links))
    small = collective_bound(CollectiveProblem.on(fabric, "all-reduce", 4))
    assert small.certificate.kind == "latency" and small.exact == Fraction(5, 1000)  # three links, the library once
    assert collective_bound(CollectiveProblem.on(fabric, "broadcast", 4, root=1)).exact == Fraction(4, 1000)
    assert collective_bound(CollectiveProblem.on(fabric, "all-reduce", 1 << 30)).certificate.kind != "latency"


def test_scatter_and_gather_with_uneven_shards() -> None:
    fabric = line(3, rate_Bps=100)
    shards = (300, 0, 700)
    scatter = CollectiveProblem.on(fabric, "scatter", 1000, root=0, shard_bytes=shards, element_bytes=1)
    assert collective_bound(scatter).exact == 7
    assert collective_bound(replace(scatter, op="gather", root=1)).exact == 7
    assert collective_bound(replace(scatter, op="all-gather")).exact == 7
    assert collective_bound(replace(scatter, op="reduce-scatter")).exact == 7


@settings(max_examples=20, deadline=None)
@given(fabric=fabrics(min_devices=2, max_devices=5), bursts=st.lists(st.sampled_from([0, 1 << 12, 1 << 16, 1 << 20]), min_size=1, max_size=5))
def test_no_call_is_earlier_than_full_token_buckets_allow(fabric: Fabric, bursts: list[int]) -> None:
    links = tuple(replace(x, burst_bytes=bursts[i % len(bursts)]) for i, x in enumerate(fabric.links))
    bursty = replace(fabric, links=links)
    for op in ("all-gather", "all-reduce"):
        problem = CollectiveProblem.on(bursty, op, 1 << 18)
        plan = Direct().plan(problem, rng=np.random.default_rng(0))
        assert simulated_time_s(plan.program, bursty, problem.ranks, None) >= float(collective_bound(problem).exact - burst_s(bursty)) * (1 - 1e-9)


def test_full_token_buckets_beat_the_sustained_bound() -> None:
    bursty = replace(full_mesh(4), links=tuple(replace(x, burst_bytes=1 << 14) for x in full_mesh(4).links))
    problem = CollectiveProblem.on(bursty, "all-gather", 1 << 18)
    time_s = simulated_time_s(Direct().plan(problem, rng=np.random.default_rng(0)).program, bursty, problem.ranks, None)
    bound = collective_bound(problem).exact
    assert time_s == pytest.approx(float(bound - burst_s(bursty))) and time_s < bound  # and what is proved is reached
