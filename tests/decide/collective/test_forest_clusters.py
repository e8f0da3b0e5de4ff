"""Trees over servers: optimal, spanning, low; symmetries verified; what does not fit goes to the general method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll import forest, windows
from meshwright.decide.collective.forestcoll.boxes import stars
from meshwright.decide.collective.forestcoll.forest import Forest, build_forest
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.decide.collective.trees.symmetry import Boxes, Shift, require_automorphism, sinks_of_each_kind
from meshwright.errors import TimeLimit, Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import Deadline
from meshwright.program.fold import expand
from meshwright.program.hash import program_hash


def cluster(boxes: int, gpus: int, inside: int, nic: int, *, rails: bool = False, missing: Mapping[int, int] | None = None) -> Fabric:
    """Servers of GPUs on a switch, a NIC each, one network switch or one per rail; `missing[box]` NICs are left out from the top."""
    devices, switches, links = [], [], []

    def cable(a: str, b: str, rate: int) -> None:
        links.extend([Link(src=a, dst=b, rate_Bps=rate), Link(src=b, dst=a, rate_Bps=rate)])

    for x in range(boxes):
        switches.append(Switch(name=f"b{x}/sw", group=f"b{x}"))
        for i in range(gpus):
            devices.append(Device(name=f"b{x}/g{i}", group=f"b{x}"))
            cable(f"b{x}/g{i}", f"b{x}/sw", inside)
            if i < gpus - (missing or {}).get(x, 0):
                switches.append(Switch(name=f"b{x}/n{i}", group=f"b{x}"))
                cable(f"b{x}/g{i}", f"b{x}/n{i}", nic)
                cable(f"b{x}/n{i}", f"rail{i}" if rails else "net", nic)
    switches += [Switch(name=f"rail{i}") for i in range(gpus)] if rails else [Switch(name="net")]
    return Fabric(name="cluster", devices=tuple(devices), switches=tuple(switches), links=tuple(links))


def graph_of(fabric: Fabric) -> RateGraph:
    return rate_graph(fabric, [d.name for d in fabric.devices])


def assert_sound(forest: Forest) -> None:
    """All trees, images written out: spanning, over real links, k per weight, no link over stretch · rate."""
    graph, load = forest.graph, dict[tuple[int, int], int]()
    per_root = dict.fromkeys(range(graph.ranks), 0)
    count = 0
    for tree in forest.every_tree():
        count += 1
        per_root[tree.root] += tree.units
        reached = {tree.root}
        for v in tree.order[1:]:
            path = tree.paths[v]
            assert path[0] == tree.parent[v] and path[0] in reached and path[-1] == v and v not in reached
            assert all(node >= graph.ranks for node in path[1:-1])
            reached.add(v)
            for hop in pairwise(path):
                load[hop] = load.get(hop, 0) + tree.units
        assert reached == set(range(graph.ranks))
    assert count == forest.distinct
    assert per_root == {r: forest.k * w for r, w in enumerate(forest.weight)}
    assert load == forest.load
    assert all(used <= forest.stretch * graph.arcs[hop] for hop, used in load.items())


def exhaustive(graph: RateGraph, weight: list[int]) -> Fraction:
    """The optimum asked of every rank, without symmetry."""
    return worst_cut(graph, weight, sinks=list(range(graph.ranks))).ratio


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 40), st.integers(1, 6), st.booleans(), st.integers(0, 1))
def test_clusters_reach_the_optimum_whatever_is_missing(boxes: int, gpus: int, inside: int, nic: int, rails: bool, gone: int) -> None:
    missing = {boxes - 1: gone} if gpus > 1 else {}
    graph = graph_of(cluster(boxes, gpus, inside, nic, rails=rails, missing=missing))
    forest = build_forest(graph, [1] * graph.ranks, max_trees=10**6)
    assert forest.optimum == exhaustive(graph, [1] * graph.ranks)
    assert forest.ratio == 1
    assert_sound(forest)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 30), st.integers(1, 5), st.lists(st.integers(0, 3), min_size=15, max_size=15))
def test_clusters_with_unlike_weights_reach_the_optimum(boxes: int, gpus: int, inside: int, nic: int, weights: list[int]) -> None:
    graph = graph_of(cluster(boxes, gpus, inside, nic))
    weight = [*weights[: graph.ranks - 1], 1]
    forest = build_forest(graph, weight, max_trees=10**6)
    assert forest.ratio == 1 and forest.optimum == exhaustive(graph, weight)
    assert_sound(forest)


@pytest.mark.parametrize("name", ["dgx-h100:16", "dgx-h100:13", "dgx-a100:16", "dgx-h100:6?net=rails", "dgx-h100:8?net=spine"])
def test_alike_servers_get_low_trees_of_one_server_and_their_images(name: str) -> None:
    graph = graph_of(load_fabric(name))
    forest = build_forest(graph, [1] * graph.ranks)
    boxes = graph.ranks // 8
    assert forest.method == "alike boxes" and len(forest.trees) * boxes == forest.distinct
    assert forest.ratio == 1 and forest.height <= 2 * ceil(log2(boxes)) + 2
    assert_sound(forest)
    written_out = build_forest(graph, [1] * graph.ranks, symmetric=False)
    assert written_out.symmetry is None and written_out.stretch == forest.stretch
    assert_sound(written_out)


def test_a_cluster_with_a_port_and_a_device_missing_is_optimal_and_low() -> None:
    whole = load_fabric("dgx-h100:16")
    gone = {"box3/nic5", "box7/gpu1", "box7/nic1"}
    fabric = replace(
        whole, devices=tuple(d for d in whole.devices if d.name not in gone), switches=tuple(s for s in whole.switches if s.name not in gone),
        links=tuple(x for x in whole.links if x.src not in gone and x.dst not in gone),
    )  # fmt: skip
    graph = graph_of(fabric)
    forest = build_forest(graph, [1] * graph.ranks)
    assert forest.method == "unlike boxes" and forest.ratio == 1 and forest.height <= 10
    assert_sound(forest)


def test_ranks_numbered_across_servers_are_still_found_alike() -> None:
    fabric = load_fabric("dgx-h100:4")
    names = [d.name for d in fabric.devices]
    graph = rate_graph(fabric, [names[(i * 8) % 32 + i // 4] for i in range(32)])
    forest = build_forest(graph, [1] * 32)
    assert forest.symmetry is not None and forest.symmetry.stride() == 0  # alike, but no equal runs of rank numbers
    assert_sound(forest)


@pytest.mark.parametrize("name", ["mi250:2", "dgx1-v100", "two-islands"])
def test_what_does_not_decompose_takes_the_general_method(name: str) -> None:
    graph = graph_of(load_fabric(name))
    forest = build_forest(graph, [1] * graph.ranks, max_trees=100)
    assert forest.method == "general" and forest.symmetry is None and forest.ratio == 1
    assert_sound(forest)
    direct = build_forest(graph_of(load_fabric("dgx-h100:4")), [1] * 32, trees=1, structure=False)
    assert direct.method == "general"
    assert_sound(direct)


def test_one_server_of_each_kind_is_enough_for_the_cut() -> None:
    fabric = cluster(40, 4, 9, 2, missing={7: 1, 30: 2})
    graph = graph_of(fabric)
    weight = [1] * graph.ranks
    weight[20] = 3
    assert len(sinks_of_each_kind(graph, weight)) == 4 * 4  # plain, one port less, two ports less, the heavy one
    assert worst_cut(graph, weight).ratio == exhaustive(graph, weight)


def test_symmetries_are_verified_link_by_link() -> None:
    graph = graph_of(load_fabric("dgx-h100:3"))
    shift = Shift(Boxes.of(graph))
    require_automorphism(graph, shift.generator)
    assert [shift.image(v, 3) for v in range(graph.nodes)] == list(range(graph.nodes))

    def named(moves: dict[str, str]) -> tuple[int, ...]:
        return tuple(graph.names.index(moves.get(name, name)) for name in graph.names)

    swap = named({"box0/gpu0": "box0/gpu1", "box0/gpu1": "box0/gpu0"})
    with pytest.raises(Unsupported, match=r"link box0/gpu. -> box0/nic. has 50000000000 B/s, its image"):
        require_automorphism(graph, swap)
    with pytest.raises(Unsupported, match="exactly one node"):
        require_automorphism(graph, named({"box0/gpu0": "box0/gpu1"}))
    with pytest.raises(Unsupported, match="which is none"):
        require_automorphism(graph, named({"box0/gpu0": "box0/nic0", "box0/nic0": "box0/gpu0"}))


def test_servers_joined_directly_or_alone_are_no_boxes() -> None:
    with pytest.raises(Unsupported, match="only one server"):
        Boxes.of(graph_of(load_fabric("dgx-h100")))
    with pytest.raises(Unsupported, match="joined directly"):
        Boxes.of(graph_of(load_fabric("two-islands")))


def test_a_deadline_ends_structured_trees_too() -> None:
    graph = graph_of(load_fabric("dgx-h100:4"))
    with pytest.raises(TimeLimit):
        build_forest(graph, [1] * 32, trees=1, deadline=Deadline(clock_s=0.0))


def test_scales_of_a_thousand_devices() -> None:
    """Trees of 128 servers, spanning and loads as the module itself requires; a tree taken at random is looked at here."""
    graph = graph_of(load_fabric("dgx-h100:128"))
    forest = build_forest(graph, [1] * 1024)
    assert forest.stretch * 10**9 / graph.unit_Bps == Fraction(127, 50) and forest.height == 2
    tree = forest.trees[int(np.random.default_rng(0).integers(len(forest.trees)))]
    assert sorted(tree.order) == list(range(1024)) and sum(p < 0 for p in tree.parent) == 1


def test_stars_inside_servers_use_several_switches_and_no_more_than_there_is() -> None:
    """Two planes of one tree each: what the first cannot carry takes the second; with less, no stars."""
    arcs = {(u, w): 2 for u in range(3) for w in (3, 4)} | {(w, v): 2 for v in range(3) for w in (3, 4)}
    found = stars(3, arcs, {0: 2, 1: 1, 2: 1})
    assert found is not None and sum(tree.units for tree in found) == 4 and all(tree.height == 1 for tree in found)
    load: dict[tuple[int, int], int] = {}
    for tree in found:
        for hop in (hop for path in tree.paths for hop in pairwise(path)):
            load[hop] = load.get(hop, 0) + tree.units
    assert all(load[hop] <= arcs[hop] for hop in load) and {hop[1] for hop in load if hop[1] > 2} == {3, 4}
    assert stars(3, arcs, {0: 3, 1: 1}) is None


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
def test_many_alike_servers_come_near_the_bound(op: str) -> None:
    """One hop between servers and enough pieces: 13 servers reached 0.9865, 0.9793 and 0.988 with hops doubling the servers."""
    problem = CollectiveProblem.on(load_fabric("dgx-h100:13"), op, 1 << 30)
    plan = ForestColl().plan(problem, rng=np.random.default_rng(0))
    assert plan.program.fold is not None and plan.notes["height"] == 2
    assert float(plan.bound or 0) / simulated_time_s(plan.program, problem.fabric, problem.ranks, None) > 0.985


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
def test_windows_of_servers_leave_less_for_the_end_of_a_piece(op: str) -> None:
    """Few pieces: what servers pass on inside after the last one is a part in pieces times windows. Folded and written out, proved and simulated."""
    problem = CollectiveProblem.on(cluster(37, 2, 2 * 10**9, 10**9), op, 74 << 20)
    plans = [ForestColl(fold=True, pieces=4, window=window).plan(problem, rng=np.random.default_rng(0)) for window in (0, 6)]
    assert len(plans[1].program.lanes) < len(plans[0].program.lanes) / 4
    times = []
    for plan in plans:
        times.append(simulated_time_s(plan.program, problem.fabric, problem.ranks, None))
        whole = expand(plan.program)
        assert check_program(plan.program).ok and check_program(whole).ok
        assert simulated_time_s(whole, problem.fabric, problem.ranks, None) == pytest.approx(times[-1], rel=1e-9)
        again = ForestColl(**plan.options).plan(problem, rng=np.random.default_rng(1))
        assert program_hash(again.program) == program_hash(plan.program)
    assert float(plans[1].bound or 0) <= times[1] < 0.97 * times[0]


def test_windows_are_taken_where_servers_leave_few_pieces_and_refused_where_trees_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CollectiveProblem.on(cluster(37, 2, 2 * 10**9, 10**9), "all-gather", 74 << 16)
    monkeypatch.setattr(windows, "WINDOW_SERVERS", 6)
    plan = ForestColl(fold=True).plan(problem, rng=np.random.default_rng(0))
    assert plan.options["window"] == 6
    few = CollectiveProblem.on(cluster(4, 2, 2 * 10**9, 10**9), "all-gather", 8 << 16)
    for fold in (True, False):
        with pytest.raises(Unsupported, match="window"):
            ForestColl(fold=fold, window=2, structure=fold).plan(few, rng=np.random.default_rng(0))


def test_rates_that_are_a_little_off_cost_little() -> None:
    """Programs in which every link has one message at a time are as fast only in perfect step; all trees at once do not depend on it."""
    problem = CollectiveProblem.on(cluster(37, 2, 9 * 10**9, 10**9), "all-gather", 74 << 16)
    plan = ForestColl(fold=False, pieces=16).plan(problem, rng=np.random.default_rng(0))
    rng = np.random.default_rng(1)
    links = tuple(replace(x, rate_Bps=int(x.rate_Bps * (1 - 1e-3 * rng.random()))) for x in problem.fabric.links)
    times = [simulated_time_s(plan.program, fabric, problem.ranks, None) for fabric in (problem.fabric, replace(problem.fabric, links=links))]
    assert plan.notes["height"] == 2 and times[0] <= times[1] < 1.01 * times[0]


def test_trees_of_one_root_among_many_servers_have_one_hop_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = cluster(10, 8, 9, 1)
    graph = rate_graph(fabric, tuple(d.name for d in fabric.devices))
    weight = [1] + [0] * (graph.ranks - 1)
    low = build_forest(graph, weight, trees=8)
    monkeypatch.setattr(forest, "MAX_FEW_RANKS", graph.ranks)
    high = build_forest(graph, weight, trees=8)
    # One hop to the rank at the exit; then per server on the way one to enter it and one inside.
    assert low.method == high.method == "unlike boxes" and low.ratio == high.ratio == 1
    assert low.height <= 6 < high.height
