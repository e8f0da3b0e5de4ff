"""Blink: packings near the exact optimum on every allocation of a DGX-1, allocation classes, phases, channels, chunks, refusals."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import networkx as nx
import numpy as np
import pytest
from collective_oracle import assert_delivers, bandwidth_time_s, full_mesh, two_islands
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.blink.chunks import fastest_count, tuned_chunk_bytes
from meshwright.decide.collective.blink.graph import canonical, canonical_order
from meshwright.decide.collective.blink.pack import best_rate, pack, two_way
from meshwright.decide.collective.blink.strategy import Blink
from meshwright.decide.collective.blink.three_phase import port_shares
from meshwright.decide.collective.classic.hierarchical import servers_of
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.errors import Disconnected, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.strength import strength

RNG = np.random.default_rng
V100 = ("02112000", "20120100", "11020020", "12200001", "20000211", "01002012", "00201102", "00011220")
P100 = "01 02 03 12 13 23 45 46 47 56 57 67 04 15 26 37"
GB = 10**9


def v100_arcs() -> dict[tuple[int, int], int]:
    return {(u, v): int(w) for u, row in enumerate(V100) for v, w in enumerate(row) if w != "0"}


def p100_arcs() -> dict[tuple[int, int], int]:
    pairs = [(int(x[0]), int(x[1])) for x in P100.split()]
    return {arc: 1 for a, b in pairs for arc in ((a, b), (b, a))}


def part(arcs: dict[tuple[int, int], int], gpus: tuple[int, ...]) -> RateGraph:
    number = {g: i for i, g in enumerate(gpus)}
    kept = {(number[u], number[v]): w for (u, v), w in arcs.items() if u in number and v in number}
    return RateGraph(tuple(f"g{g}" for g in gpus), len(gpus), (0,) * len(gpus), kept, 1)


def connected(graph: RateGraph) -> bool:
    g = nx.Graph(list(graph.arcs))
    g.add_nodes_from(range(graph.ranks))
    return nx.is_connected(g)


def subsets(smallest: int) -> list[tuple[int, ...]]:
    return [s for k in range(smallest, 9) for s in combinations(range(8), k)]


def cables(fabric_name: str, devices: list[tuple[str, str]], switches: list[str], pairs: list[tuple[str, str, int, str]]) -> Fabric:
    return Fabric(
        name=fabric_name,
        devices=tuple(Device(name=n, group=g) for n, g in devices),
        switches=tuple(Switch(name=s, group=s.split("/")[0]) for s in switches),
        links=tuple(Link(src=a, dst=b, rate_Bps=r, kind=k) for u, v, r, k in pairs for a, b in ((u, v), (v, u))),
    )


# ---- every allocation of a DGX-1 -----------------------------------------------------------------------------------------
def test_every_allocation_of_a_dgx1_is_packed_within_five_percent_of_the_exact_optimum() -> None:
    """All 247 subsets: the integer program's trees against minimum cut and strength; those without a path are Disconnected."""
    seen = 0
    for turn, gpus in enumerate(subsets(2)):
        graph, root = part(v100_arcs(), gpus), turn % len(gpus)
        if not connected(graph):
            with pytest.raises(Disconnected):
                pack(canonical(graph)[0], "all-reduce", epsilon=0.1, theta=0.05)
            continue
        seen += 1
        optimum = 1 / worst_cut(graph, [int(r == root) for r in range(graph.ranks)]).ratio
        down = pack(canonical(graph, root)[0], "broadcast", epsilon=0.1, theta=0.05, optimum=optimum)
        assert Fraction(95, 100) * optimum <= down.rate <= optimum
        allocation = canonical(graph)[0]
        exact = strength(graph.ranks, two_way(allocation)).ratio
        both = pack(allocation, "all-reduce", epsilon=0.1, theta=0.05)
        assert Fraction(95, 100) * exact <= both.rate <= exact
        assert sum(down.units) <= 24 and len(down.trees) <= down.distinct
    assert seen == 197


@pytest.mark.parametrize(("arcs", "classes"), [(v100_arcs(), 46), (p100_arcs(), 14)])
def test_allocation_classes_are_those_of_networkx(arcs: dict[tuple[int, int], int], classes: int) -> None:
    """Exactly 46 connected classes of at least three GPUs on a V100 box and 14 on a P100 box."""
    found: dict[object, nx.Graph] = {}
    for gpus in subsets(3):
        graph = part(arcs, gpus)
        if not connected(graph):
            continue
        g = nx.Graph()
        g.add_weighted_edges_from((u, v, w) for (u, v), w in graph.arcs.items() if u < v)
        key = canonical(graph)[0]
        other = found.setdefault(key, g)
        assert nx.is_isomorphic(g, other, edge_match=lambda a, b: a["weight"] == b["weight"])
    assert len(found) == classes


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_canonical_numbers_do_not_depend_on_the_numbering(seed: int, nodes: int) -> None:
    rng = RNG(seed)
    arcs = {(u, v): int(rng.integers(1, 3)) for u in range(nodes) for v in range(nodes) if u != v and rng.random() < 0.5}
    colour = [int(x) for x in rng.integers(0, 2, nodes)]
    move = [int(x) for x in rng.permutation(nodes)]
    moved = {(move[u], move[v]): w for (u, v), w in arcs.items()}
    colours = [0] * nodes
    for v in range(nodes):
        colours[move[v]] = colour[v]

    def form(a: dict[tuple[int, int], int], c: list[int]) -> object:
        number = {v: i for i, v in enumerate(canonical_order(nodes, a, c))}
        return sorted((number[u], number[v], w) for (u, v), w in a.items())

    assert form(arcs, colour) == form(moved, colours)


def test_symmetric_and_large_graphs_are_numbered_within_the_budget() -> None:
    star = {arc: 1 for i in range(40) for arc in ((i, 40), (40, i))}
    assert sorted(canonical_order(41, star, [1] * 40 + [0])) == list(range(41))
    assert canonical_order(70, {}, [0] * 70) == tuple(range(70))
    # two cliques of seven: without the symmetries that are found, 7! * 7! orders would be looked at, and the numbering would decide
    cliques, forms = {(u, v): 1 + u % 2 for u in range(14) for v in range(14) if u != v and u % 2 == v % 2}, []
    for move in (range(14), RNG(1).permutation(14).tolist(), RNG(2).permutation(14).tolist()):
        arcs = {(move[u], move[v]): w for (u, v), w in cliques.items()}
        number = {v: i for i, v in enumerate(canonical_order(14, arcs, [0] * 14))}
        forms.append(sorted((number[u], number[v], w) for (u, v), w in arcs.items()))
    assert forms[0] == forms[1] == forms[2]


CARD = [((0, 1, 3), 3), ((0, 1, 4), 2), ((0, 1, 2, 3, 4), 2), ((0, 1, 3, 4, 5), 3), (tuple(range(7)), 4), (tuple(range(8)), 6)]


@pytest.mark.parametrize(("gpus", "rate"), CARD)
def test_broadcast_rates_of_the_methods_card_come_out_exactly_in_whole_links(gpus: tuple[int, ...], rate: int) -> None:
    found = pack(canonical(part(v100_arcs(), gpus), 0)[0], "broadcast", epsilon=0.1, theta=0.05, optimum=Fraction(rate))
    assert found.rate == rate and rate % sum(found.units) == 0 and "one unit per link" in found.method


def test_eight_gpus_need_six_unit_trees_and_an_all_reduce_24_sevenths() -> None:
    whole = canonical(part(v100_arcs(), tuple(range(8))))[0]
    assert best_rate(whole, "all-reduce") == pytest.approx(24 / 7)
    assert best_rate(canonical(part(v100_arcs(), tuple(range(8))), 0)[0], "broadcast") == pytest.approx(6)
    found = pack(canonical(part(v100_arcs(), tuple(range(8))), 0)[0], "broadcast", epsilon=0.05, theta=0.05, optimum=Fraction(6))
    assert found.rate == 6 and len(found.trees) <= 6 < found.distinct


def test_the_exact_packing_equals_the_strength_and_the_bound() -> None:
    fabric = load_fabric("dgx1-v100")
    problem = CollectiveProblem.on(fabric, "all-reduce", 24 * 4 * 1_000_000)
    plan = Blink(exact=True, parts=1).plan(problem, rng=RNG(0))
    assert_delivers(plan.program, RNG(1))
    assert plan.bound is not None and not check_bound(plan.bound, fabric)
    assert bandwidth_time_s(plan.program, fabric, problem.ranks) == plan.bound.exact == Fraction(7 * problem.size_bytes, 24 * 25 * GB)
    assert plan.notes["units"] == 24


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from(["broadcast", "all-gather", "all-reduce"]))
def test_linear_optimum_is_the_exact_one_on_random_graphs(seed: int, nodes: int, shape: str) -> None:
    rng = RNG(seed)
    arcs = {(u, v): int(rng.integers(1, 9)) for u in range(nodes) for v in range(u + 1, nodes) if rng.random() < 0.6}
    for v in range(1, nodes):
        arcs.setdefault((v - 1, v), int(rng.integers(1, 9)))
    both = {**arcs, **{(v, u): w if shape == "all-reduce" else int(rng.integers(1, 9)) for (u, v), w in arcs.items()}}
    graph = RateGraph(tuple(map(str, range(nodes))), nodes, (0,) * nodes, dict(sorted(both.items())), 1)
    root = int(rng.integers(nodes))
    if shape == "all-reduce":
        exact = strength(nodes, arcs).ratio
    else:
        exact = 1 / worst_cut(graph, [1] * nodes if shape == "all-gather" else [int(r == root) for r in range(nodes)]).ratio
    allocation, _ = canonical(graph, root if shape == "broadcast" else -1)
    assert best_rate(allocation, shape) == pytest.approx(float(exact), rel=1e-5)
    found = pack(allocation, shape, epsilon=0.1, theta=0.05, optimum=exact)
    assert Fraction(9, 10) * exact <= found.rate <= exact


# ---- programs ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["all-reduce", "broadcast", "reduce", "all-gather", "reduce-scatter", "scatter", "gather"])
@pytest.mark.parametrize("form", ["trees", "one-tree", "one-hop"])
@pytest.mark.parametrize("unroll", [True, False])
def test_every_form_delivers_and_its_links_carry_what_it_says(op: str, form: str, unroll: bool) -> None:
    fabric = two_islands(3, trunk_Bps=100_000_000, latency_s=0.0)
    problem = CollectiveProblem(fabric=fabric, op=op, ranks=("d4", "d1", "d3", "d0", "d2"), size_bytes=4 * 5 * 8 * 3 * 7 * 4, root=2)
    plan = Blink(form=form, parts=2, unroll=unroll).plan(problem, rng=RNG(0))
    assert check_program(plan.program).ok
    held = int(plan.program.buffers.chunks[0]) * int(plan.program.buffers.chunk_bytes[0]) * (1 if unroll else 2)
    took = bandwidth_time_s(plan.program, fabric, problem.ranks)
    assert float(took * plan.notes["rate_Bps"]) == pytest.approx(held)
    assert plan.bound is not None and took >= plan.bound.exact


def test_explicit_and_repeated_pieces_take_the_same_time() -> None:
    problem = CollectiveProblem.on(load_fabric("dgx1-v100"), "all-reduce", 4 << 20)
    times = []
    for unroll in (True, False):
        plan = Blink(form="trees", parts=4, unroll=unroll).plan(problem, rng=RNG(0))
        times.append(simulated_time_s(plan.program, problem.fabric, problem.ranks, None))
    assert times[0] == pytest.approx(times[1], rel=1e-12)


def test_the_fastest_form_is_chosen_and_small_messages_take_few_hops() -> None:
    fabric = load_fabric("dgx-a100:1")
    small = Blink().plan(CollectiveProblem.on(fabric, "all-reduce", 64), rng=RNG(0))
    large = Blink().plan(CollectiveProblem.on(fabric, "all-reduce", 1 << 26), rng=RNG(0))
    assert small.notes["depth"] <= 2 and large.notes["rate_Bps"] >= 0.95 * 300 * GB * 8 / 14
    for plan in (small, large):
        judged = [t for t in plan.notes["forms_s"].values() if t is not None]
        assert plan.notes["forms_s"][plan.notes["form"]] == min(judged)


def test_one_hop_stars_share_a_switch_evenly() -> None:
    """Every GPU is the root of 1/n: each port sends and takes 2 (n - 1) / n of the message."""
    fabric = load_fabric("dgx-a100:1")
    problem = CollectiveProblem.on(fabric, "all-reduce", 8 * 4 * 1000)
    plan = Blink(form="one-hop", parts=1).plan(problem, rng=RNG(0))
    assert plan.notes["depth"] == 1 and plan.notes["trees"] == 8
    assert bandwidth_time_s(plan.program, fabric, problem.ranks) == Fraction(2 * 7, 8) * problem.size_bytes / (300 * GB)
    assert_delivers(plan.program, RNG(0))


# ---- several servers ---------------------------------------------------------------------------------------------------------
def two_servers(a: int, b: int, nic_Bps: int = GB) -> Fabric:
    """Servers of a and b GPUs, each pair joined directly at 10 GB/s; every GPU has its own port to one switch."""
    devices = [(f"a/{i}", "a") for i in range(a)] + [(f"b/{i}", "b") for i in range(b)]
    inside = [(u, v, 10 * GB, "NV1") for (u, g), (v, h) in combinations(devices, 2) if g == h]
    return cables("3+5", devices, ["net/0"], inside + [(name, "net/0", nic_Bps, "NET") for name, _ in devices])


@pytest.mark.parametrize(("a", "b"), [(3, 5), (1, 4), (4, 4)])
def test_three_phases_over_unlike_servers_use_all_ports(a: int, b: int) -> None:
    fabric = two_servers(a, b)
    problem = CollectiveProblem.on(fabric, "all-reduce", 4 * 15 * 16 * 100)
    plan = Blink(form="three-phase", parts=2).plan(problem, rng=RNG(0))
    assert_delivers(plan.program, RNG(0))
    assert check_program(plan.program).ok
    servers = [set(s) for s in servers_of(problem)]
    steps, channels = plan.program.steps, plan.program.channels
    ends = [(int(channels.src[c]), int(channels.dst[c])) for c in steps.chan_out[steps.chan_out >= 0]]
    across = [(u, v) for u, v in ends if (u in servers[0]) != (v in servers[0])]
    moved = int(plan.program.buffers.chunk_bytes[0])
    held = moved * int(plan.program.buffers.chunks[0])
    for server in servers:  # two servers: 2 (H - 1) / H of the message leaves each
        assert sum(moved for u, _ in across if u in server) == held
    smaller = min(a, b)
    assert len({u for u, _ in across if u in servers[0 if a <= b else 1]}) == smaller
    assert plan.notes["rate_Bps"] >= 0.9 * smaller * GB


def test_ports_shared_by_ranks_count_once() -> None:
    devices = [(f"{s}/{i}", s) for s in "ab" for i in range(3)]
    pairs = [(u, v, 10 * GB, "NV1") for (u, g), (v, h) in combinations(devices, 2) if g == h]
    pairs += [(f"{s}/{i}", f"{s}/nic{i // 2}", GB, "PIX") for s in "ab" for i in range(3)]
    pairs += [(f"{s}/nic{j}", "net/0", GB, "NET") for s in "ab" for j in range(2)]
    fabric = cables("shared", devices, ["a/nic0", "a/nic1", "b/nic0", "b/nic1", "net/0"], pairs)
    problem = CollectiveProblem.on(fabric, "all-reduce", 4096)
    shares = port_shares(problem, rate_graph(fabric, problem.ranks), servers_of(problem))
    assert shares[0] == [(0, Fraction(1, 4)), (1, Fraction(1, 4)), (2, Fraction(1, 2))]


def test_three_phases_need_several_servers_and_links_inside() -> None:
    with pytest.raises(Unsupported, match="three-phase"):
        Blink(form="three-phase").plan(CollectiveProblem.on(full_mesh(4), "all-reduce", 4096), rng=RNG(0))
    devices = [(f"{s}/{i}", s) for s in "ab" for i in range(2)]
    loose = cables("loose", devices, ["net/0"], [(name, "net/0", GB, "NET") for name, _ in devices])
    with pytest.raises(Unsupported, match="three-phase"):
        Blink(form="three-phase").plan(CollectiveProblem.on(loose, "all-reduce", 4096), rng=RNG(0))


# ---- channels ------------------------------------------------------------------------------------------------------------------
def with_pcie(pcie_Bps: int = 10 * GB) -> Fabric:
    """Four GPUs in a ring of NVLinks at 20 GB/s and under one PCIe switch."""
    devices = [(f"g{i}", "box") for i in range(4)]
    pairs = [(f"g{i}", f"g{(i + 1) % 4}", 20 * GB, "NV1") for i in range(4)]
    return cables("hybrid", devices, ["box/pcie"], pairs + [(f"g{i}", "box/pcie", pcie_Bps, "PIX") for i in range(4)])


def test_channels_share_the_message_by_the_formula() -> None:
    fabric = with_pcie()
    extra_s = 1e-4
    problem = CollectiveProblem.on(fabric, "all-reduce", 64 << 20)
    plan = Blink(form="channels", switch_channel_s=extra_s).plan(problem, rng=RNG(0))
    assert_delivers(plan.program, RNG(0))
    fast, slow = plan.notes["fast_Bps"], plan.notes["slow_Bps"]
    size = problem.size_bytes
    wanted = (size * slow - extra_s * slow * fast) / (slow + fast) / size
    assert plan.notes["slow_share"] == pytest.approx(wanted, abs=0.03)
    links, channels = fabric.links, plan.program.channels
    for c in range(len(channels)):  # no tree mixes the kinds
        names = channels.routes[channels.route[c]] if channels.route[c] >= 0 else None
        if names is None:
            route = fabric.route(int(channels.src[c]), int(channels.dst[c]))
            assert len({links[x].kind for x in route}) == 1


def test_a_channel_that_would_start_too_late_is_left_out() -> None:
    problem = CollectiveProblem.on(with_pcie(), "all-reduce", 1 << 20)
    with pytest.raises(Unsupported, match="channels"):
        Blink(form="channels", switch_channel_s=1.0).plan(problem, rng=RNG(0))
    plan = Blink(switch_channel_s=1.0, form="trees").plan(problem, rng=RNG(0))
    used = {name for route in plan.program.channels.routes for name in route[1:-1]}
    assert "box/pcie" not in used  # with a cost to change channels, trees stay on the fast links
    both = Blink(form="channels").plan(problem, rng=RNG(0))
    alone = Blink(form="trees", switch_channel_s=1.0).plan(problem, rng=RNG(0))
    assert both.notes["rate_Bps"] > alone.notes["rate_Bps"]


# ---- chunks ----------------------------------------------------------------------------------------------------------------------
def test_pieces_are_searched_beside_the_best_power_of_two() -> None:
    def time_of(count: int) -> float:
        return 24 / count + count

    assert fastest_count(time_of, 1000) == (4, 10.0)
    assert fastest_count(lambda c: 100 / c + c, 1000) == (12, 100 / 12 + 12)
    assert fastest_count(time_of, 3)[0] == 3
    assert fastest_count(lambda c: float(c), 64)[0] == 1


def test_chunk_sizes_for_real_runs_rise_fast_and_fall_slowly() -> None:
    asked: list[int] = []

    def throughput(size: int) -> float:
        asked.append(size)
        return 1.0 / (1 + abs(size - 5_500_000) / 1e6)

    best, tried = tuned_chunk_bytes(throughput, start_bytes=1 << 20, step_bytes=1 << 19)
    assert asked[:4] == [1 << 20, 1 << 21, 1 << 22, 1 << 23]
    assert all(a - b == 1 << 19 for a, b in pairwise(asked[3:]))
    assert abs(best - 5_500_000) <= 1 << 19 and tried == [(s, throughput(s)) for s in asked[: len(tried)]]
    assert tuned_chunk_bytes(lambda s: float(s), largest_bytes=1 << 24)[0] == 1 << 24
    with pytest.raises(UsageError, match="chunk sizes"):
        tuned_chunk_bytes(throughput, start_bytes=1, smallest_bytes=2)


# ---- refusals --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [{"parts": 0}, {"max_parts": 0}, {"epsilon": 0.0}, {"theta": 1.0}, {"form": "bush"}, {"switch_channel_s": -1.0}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Blink(**options).plan(CollectiveProblem.on(full_mesh(3), "all-reduce", 64), rng=RNG(0))


def test_refusals_say_what_to_do() -> None:
    links = tuple(Link(src=f"d{i}", dst=f"d{(i + 1) % 3}", rate_Bps=GB) for i in range(3))
    one_way = Fabric(name="ring", devices=tuple(Device(name=f"d{i}") for i in range(3)), links=links)
    cases = [
        (Blink(), CollectiveProblem.on(one_way, "all-reduce", 4096), "both ways"),
        (Blink(), CollectiveProblem.on(full_mesh(3), "all-to-all", 4096), "does not do all-to-all"),
        (Blink(), CollectiveProblem.on(full_mesh(65), "broadcast", 4096), "at most 64"),
        (Blink(exact=True), CollectiveProblem.on(full_mesh(3), "broadcast", 4096), "exact packing"),
        (Blink(exact=True), CollectiveProblem.on(two_islands(), "all-reduce", 4096), "exact packing"),
        (Blink(form="one-hop"), CollectiveProblem.on(load_fabric("ndv2:2"), "all-reduce", 4096), "one-hop"),
        (Blink(), CollectiveProblem.on(full_mesh(2), "all-gather", 4096, shard_bytes=(4000, 96)), "equal shards"),
    ]  # fmt: skip
    for strategy, problem, text in cases:
        with pytest.raises(Unsupported, match=text) as refusal:
            strategy.plan(problem, rng=RNG(0))
        assert refusal.value.hint


def test_an_exact_packing_of_too_many_trees_is_refused() -> None:
    primes = (999_983, 1_299_709, 15_485_863)
    links = [(f"d{i}", f"d{(i + 1) % 3}", r, "NET") for i, r in enumerate(primes)]
    fabric = cables("primes", [(f"d{i}", "box") for i in range(3)], [], links)
    with pytest.raises(Unsupported, match="exact packing needs"):
        Blink(exact=True).plan(CollectiveProblem.on(fabric, "all-reduce", 4096), rng=RNG(0))
    assert check_program(Blink().plan(CollectiveProblem.on(fabric, "all-reduce", 4096), rng=RNG(0)).program).ok


def test_devices_outside_relay_only_where_there_is_no_other_way() -> None:
    fabric = load_fabric("dgx1-v100")
    apart = CollectiveProblem(fabric=fabric, op="broadcast", ranks=("box0/gpu0", "box0/gpu5"), size_bytes=4096)
    near = CollectiveProblem(fabric=fabric, op="broadcast", ranks=("box0/gpu0", "box0/gpu1"), size_bytes=4096)
    assert Blink().plan(apart, rng=RNG(0)).options["relay"] is True
    assert Blink().plan(near, rng=RNG(0)).options["relay"] is False
