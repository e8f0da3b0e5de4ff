"""Breadth-first broadcasts: divisions against exhaustion, published figures of graphs, plans that deliver, what is refused."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import floor

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.bfb.loads import distances, divide
from meshwright.decide.collective.bfb.strategy import AHEAD, BFB, ways
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.program.program import Part

RNG = np.random.default_rng(0)


def fabric_of(graph: nx.Graph, *, rate_Bps: int = 10**9, latency_s: float = 0.0) -> Fabric:
    numbers = {node: i for i, node in enumerate(graph)}
    arcs = sorted({(numbers[a], numbers[b]) for a, b in graph.to_directed().edges if a != b})
    rows = tuple(Device(name=f"n{i}") for i in range(len(numbers)))
    links = tuple(Link(src=f"n{a}", dst=f"n{b}", rate_Bps=rate_Bps, latency_s=latency_s) for a, b in arcs)
    return Fabric(name="graph", devices=rows, links=links)


def kautz(m: int, d: int) -> nx.DiGraph:
    return nx.DiGraph((x, (-d * x - a) % m) for x in range(m) for a in range(1, d + 1))


def lines(graph: nx.Graph) -> nx.DiGraph:
    return nx.line_graph(graph.to_directed())


# steps and T_B in M/B as computed and published (NSDI 2025); K and Petersen: closed forms
GRAPHS = {
    "K4,4": (nx.complete_bipartite_graph(4, 4), 2, "7/8"), "Petersen": (nx.petersen_graph(), 2, "9/10"),
    "circulant 16": (nx.circulant_graph(16, [3, 4]), 3, "15/16"), "torus 4x4": (nx.grid_2d_graph(4, 4, periodic=True), 4, "15/16"),
    "ring 6": (nx.cycle_graph(6), 3, "5/6"), "one-way ring": (nx.DiGraph((i, (i + 1) % 5) for i in range(5)), 4, "4/5"),
    # networkx's graphs, some of no symmetry; as an LP (HiGHS) of every rank and step divides them
    "Heawood": (nx.heawood_graph(), 3, "13/14"), "Chvátal": (nx.chvatal_graph(), 2, "11/12"), "Frucht": (nx.frucht_graph(), 4, "4/3"),
    "Tutte": (nx.tutte_graph(), 8, "211/92"), "icosahedron": (nx.icosahedral_graph(), 3, "11/12"),
    "line of K4,4": (lines(nx.complete_bipartite_graph(4, 4)), 3, "1"), "complete": (nx.complete_graph(5), 1, "4/5"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_published_figures_of_graphs(name: str) -> None:
    graph, steps, factor = GRAPHS[name]
    plan = BFB().plan(CollectiveProblem.on(fabric_of(graph), "all-gather", 1 << 20), rng=RNG)
    assert plan.notes["steps"] == steps and plan.notes["bandwidth_factor_least"] == factor
    assert check_program(plan.program).ok


def test_a_loop_and_parallel_arcs_are_wasted_ports() -> None:
    """Generalized Kautz of 16 nodes and 4 ports: 5/4 where loops count as ports; without them fewer ports carry the same."""
    fabric = fabric_of(kautz(16, 4))
    plan = BFB().plan(CollectiveProblem.on(fabric, "all-gather", 1 << 20), rng=RNG)
    assert plan.notes["steps"] == 2 and Fraction(plan.notes["bandwidth_factor_least"]) == Fraction(5, 4)


def cases(ports: int) -> st.SearchStrategy[tuple[dict[int, int], list[int]]]:
    classes = st.dictionaries(st.integers(1, 2**ports - 1), st.integers(1, 4), min_size=1, max_size=4)
    return st.tuples(classes, st.lists(st.integers(1, 5), min_size=ports, max_size=ports))


@settings(max_examples=150, deadline=None)
@given(case=st.integers(1, 4).flatmap(cases), pieces=st.integers(0, 3))
def test_divisions_are_the_quickest(case: tuple[dict[int, int], list[int]], pieces: int) -> None:
    """Hall's condition over all sets of ports, tried one by one."""
    counts, rates = case
    ports = dict(enumerate(rates))
    found = divide(counts, ports, pieces)

    def enough(time: Fraction) -> bool:
        room = [floor(time * r) if pieces else time * r for r in rates]
        return all(
            sum(x for mask, x in counts.items() if not mask & ~some) * (pieces or 1) <= sum(room[k] for k in range(len(rates)) if some >> k & 1)
            for some in range(1, 1 << len(rates))
        )

    assert enough(found.time)
    if not pieces:
        subsets = range(1, 1 << len(rates))
        confined = {s: sum(x for mask, x in counts.items() if not mask & ~s) for s in subsets}
        assert found.time == max(Fraction(confined[s], sum(r for k, r in enumerate(rates) if s >> k & 1)) for s in subsets)
        assert Fraction(found.shards, sum(rates[k] for k in found.ports)) == found.time
        return
    shorter = max((Fraction(k, r) for r in rates for k in range(200) if Fraction(k, r) < found.time), default=Fraction(0))
    assert not enough(shorter)
    for mask, count in counts.items():
        assert sum(x for (own, _), x in found.sent.items() if own == mask) == count * pieces
    for k, rate in ports.items():
        assert sum(x for (_, port), x in found.sent.items() if port == k) <= floor(found.time * rate)
    assert all(mask >> port & 1 for mask, port in found.sent)


def test_distances_are_networkxs() -> None:
    graph = nx.gnp_random_graph(9, 0.3, seed=3, directed=True)
    senders = [dict.fromkeys(graph.predecessors(u), 1) for u in range(9)]
    theirs = dict(nx.all_pairs_shortest_path_length(graph))
    hops = distances(senders)
    assert all(hops[v, u] == theirs[v].get(u, -1) for v, u in product(range(9), range(9)))


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
def test_one_way_graphs_reduce_on_the_reversed_ways(op: str) -> None:
    """Kautz graphs are not their own reverse; links of two rates; packed and not."""
    fabric = fabric_of(kautz(7, 2))
    links = tuple(Link(src=x.src, dst=x.dst, rate_Bps=x.rate_Bps * (1 + i % 2)) for i, x in enumerate(fabric.links))
    fabric = Fabric(name="unlike", devices=fabric.devices, links=links)
    for pack in (False, True):
        plan = BFB(pack=pack, pieces=3).plan(CollectiveProblem.on(fabric, op, 84 * 100), rng=RNG)
        assert check_program(plan.program).ok and plan.program.contract.op == op
        assert set(zip(plan.program.channels.src.tolist(), plan.program.channels.dst.tolist(), strict=True)) <= {
            (int(x.src[1:]), int(x.dst[1:])) for x in links
        }


def test_small_messages_take_few_steps_and_large_ones_the_bound() -> None:
    fabric = fabric_of(nx.complete_bipartite_graph(4, 4), latency_s=1e-3)
    times = {}
    for size in (1 << 12, 1 << 26):
        problem = CollectiveProblem.on(fabric, "all-gather", size)
        plan = BFB().plan(problem, rng=RNG)
        times[size] = simulated_time_s(plan.program, fabric, problem.ranks, None)
        assert float(plan.bound) <= times[size] * (1 + 1e-9)
    assert 2e-3 <= times[1 << 12] < 2.1e-3
    assert times[1 << 26] == pytest.approx(2e-3 + 7 / 8 * (1 << 26) / 4e9, rel=0.02)


@pytest.mark.parametrize("name", ["Petersen", "Heawood", "Chvátal", "icosahedron", "circulant 16", "K4,4"])
def test_sums_take_as_long_as_copies(name: str) -> None:
    """These graphs are their own reverse. On Chvátal's every link has something to send all the time, so one add behind a later one costs a piece."""
    fabric = fabric_of(GRAPHS[name][0])
    times = {}
    for op in ("all-gather", "reduce-scatter"):
        problem = CollectiveProblem.on(fabric, op, len(fabric.devices) * 120_000)
        times[op] = simulated_time_s(BFB().plan(problem, rng=RNG).program, fabric, problem.ranks, None)
    assert times["reduce-scatter"] <= times["all-gather"] * 1.01


def _confined(graph: nx.DiGraph) -> Fraction:
    """By exhaustion over sets of in-neighbours: the most shards per arc that only such a set can hand on to its node along shortest ways."""
    hops, most = dict(nx.all_pairs_shortest_path_length(graph)), Fraction(0)
    for u in graph:
        ports = list(graph.predecessors(u))
        for picked in product((False, True), repeat=len(ports)):
            some = {w for w, own in zip(ports, picked, strict=True) if own}
            only = [v for v in graph if v != u and all(w in some for w in ports if hops[v][w] == hops[v][u] - 1)]
            most = max(most, Fraction(len(only), max(1, len(some))))
    return most


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("graph", [nx.frucht_graph(), nx.truncated_tetrahedron_graph(), kautz(9, 2), nx.complete_bipartite_graph(4, 4)])
def test_the_gap_is_what_shortest_ways_must_leave(graph: nx.Graph, op: str) -> None:
    fabric, arcs = fabric_of(graph), nx.DiGraph((a, b) for a, b in graph.to_directed().edges if a != b)
    problem = CollectiveProblem.on(fabric, op, len(fabric.devices) * 120_000)
    plan = BFB().plan(problem, rng=RNG)
    least_s = float(_confined(arcs if op == "all-gather" else arcs.reverse()) * Fraction(120_000, 10**9))
    assert simulated_time_s(plan.program, fabric, problem.ranks, None) >= least_s * (1 - 1e-9)
    assert ("shortest_ways" in plan.notes) == (least_s > 1.01 * float(plan.bound))
    if "shortest_ways" in plan.notes:
        found = plan.notes["shortest_ways"]
        assert found["least_s"] == pytest.approx(least_s) and found["shards"] * 120_000 / 1e9 / len(found["ports"]) == pytest.approx(least_s)


def test_refusals() -> None:
    line = fabric_of(nx.path_graph(3))
    problem = CollectiveProblem(fabric=line, op="all-gather", ranks=("n0", "n2"), size_bytes=64)
    with pytest.raises(Unsupported, match="does not reach n2 over ranks"):
        BFB().plan(problem, rng=RNG)
    with pytest.raises(Unsupported, match="does not do broadcast"):
        BFB().plan(CollectiveProblem.on(line, "broadcast", 64), rng=RNG)
    with pytest.raises(Unsupported, match="equal shards"):
        BFB().plan(CollectiveProblem.on(line, "all-gather", 96, shard_bytes=(64, 32, 0)), rng=RNG)
    with pytest.raises(UsageError, match="pieces must be"):
        BFB(pieces=0).plan(CollectiveProblem.on(line, "all-gather", 96), rng=RNG)
    many = fabric_of(nx.cycle_graph(513))
    with pytest.raises(Unsupported, match="at most 512"):
        BFB().plan(CollectiveProblem.on(many, "all-gather", 513 * 4), rng=RNG)
    alone = [BFB.variants(CollectiveProblem.on(fabric, "all-gather", 4 * len(fabric.devices))) for fabric in (many, line)]
    assert [len(v) for v in alone] == [0, 2]
    assert ways(line, ("n0", "n1", "n2"))[0].keys() == {1}


@pytest.mark.parametrize("name", ["K4,4", "circulant 16"])
def test_receives_are_posted_before_their_messages_are_due(name: str) -> None:
    """Nothing of an all-gather needs staging, so all of a way's messages may come; what is added is staged, two messages at a time."""
    fabric = fabric_of(GRAPHS[name][0])
    gather, scatter = (BFB().plan(CollectiveProblem.on(fabric, op, 1 << 20), rng=RNG).program for op in ("all-gather", "reduce-scatter"))
    sends = (gather.steps.parts & Part.SEND) != 0
    messages = np.bincount(gather.steps.chan_out[sends], minlength=len(gather.channels))
    assert messages.max() > 2 and (gather.channels.depth == np.minimum(messages, AHEAD)).all()
    assert scatter.channels.depth.max() == 2
