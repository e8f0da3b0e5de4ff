"""HammingMesh and its rivals: published prices, shares by linear program and closed form, pairs of rings, places by exhaustion, replays, refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import networkx as nx
import numpy as np
import pytest

from effort import few
from meshwright.check import check_program
from meshwright.check.boards import check_boards
from meshwright.decide.collective import CollectiveProblem, Ring
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.topology import Dragonfly, FatTree, HammingMesh, HyperX, TopologyProblem, Torus
from meshwright.decide.topology.hammingmesh.allocate import Boards, Submesh, allocate, defragment, find, greedy
from meshwright.decide.topology.hammingmesh.bandwidth import global_share, mesh_share
from meshwright.decide.topology.hammingmesh.network import Builder, grid_sides
from meshwright.decide.topology.hammingmesh.replay import POLICIES, BoardJob, best_replay, replay
from meshwright.decide.topology.hammingmesh.strategy import Mesh
from meshwright.drive.boards import place_jobs, replay_jobs
from meshwright.drive.network import compare_networks
from meshwright.errors import Infeasible, TimeLimit, Unsupported, UsageError
from meshwright.fabric.prices import Prices, shipped_prices
from meshwright.kernels.torus_rings import ring_pair

RNG = np.random.default_rng(0)

# USD, from the paper's formulas by hand; printed there (million USD): 25.3, 10.8, 5.4, 2.7, 2.5 and, tapered, 17.53, 13.03, 418.99, 270.7
PRICES = {
    (1024, "fat-tree"): [25_303_040, 17_531_168, 13_030_832], (1024, "hyperx"): [10_823_680], (1024, "hammingmesh"): [5_411_840, 2_705_920],
    (1024, "torus"): [2_469_888], (16384, "fat-tree"): [679_903_232, 418_986_848, 270_715_232],
}  # fmt: skip
KINDS = {kind.name: kind for kind in (FatTree, HyperX, HammingMesh, Torus, Dragonfly)}


@pytest.mark.parametrize(("nodes", "name"), PRICES)
def test_published_prices_to_all_digits(nodes: int, name: str) -> None:
    problem = TopologyProblem(nodes=nodes)
    designs = KINDS[name]().plan(problem, rng=RNG)
    assert [shipped_prices().of(d.parts) for d in designs] == PRICES[nodes, name]
    assert all(d.nodes == nodes and d.ports == 16 for d in designs)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("nodes", [6, 16, 40, 150])
def test_a_fabric_has_the_ports_and_no_more_hops_than_stated(name: str, nodes: int) -> None:
    problem = TopologyProblem(nodes=nodes, rate_Bps=10)
    for design in KINDS[name]().plan(problem, rng=RNG):
        fabric = design.fabric(problem)
        out = dict.fromkeys(fabric.actor_names, 0)
        for link in fabric.links:
            out[link.src] += link.rate_Bps
        assert all(out[d.name] == design.ports * 10 for d in fabric.devices) or (name == "torus" and design.nodes == 4)
        graph = nx.DiGraph([(x.src, x.dst) for x in fabric.links])
        names = [d.name for d in fabric.devices]
        assert max(max(row[x] for x in names) for a, row in nx.all_pairs_shortest_path_length(graph) if a in names) <= design.diameter


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2, 2), Mesh(2, 2, 3, 2), Mesh(2, 1, 2, 3), Mesh(1, 1, 4, 4), Mesh(2, 2, 4, 4)], ids=lambda m: m.name)
def test_the_share_of_all_to_all_traffic_is_the_closed_form(mesh: Mesh) -> None:
    assert mesh_share(mesh) == pytest.approx(float(mesh.global_bound()), rel=1e-7)


def test_folding_changes_nothing_and_cuts_bound_all() -> None:
    mesh = Mesh(2, 2, 2, 2)
    builder = Builder(1, 0.0)
    mesh.build(builder)
    assert global_share(builder.fabric("x", "x"), links=4) == pytest.approx(mesh_share(mesh))
    problem = TopologyProblem(nodes=16, rate_Bps=1)
    for name in ("torus", "hyperx", "dragonfly"):
        design = KINDS[name]().plan(problem, rng=RNG)[0]
        if len(design.fabric(problem).links) * design.nodes < 4000:
            assert global_share(design.fabric(problem), links=design.ports) <= float(design.global_bound) + 1e-9
    with pytest.raises(Unsupported, match="too large"):
        mesh_share(Mesh(4, 4, 16, 16))


@pytest.mark.parametrize("rows", range(3, 12))
def test_two_rings_that_share_no_cable(rows: int) -> None:
    for columns in range(3, 12):
        graph = nx.cartesian_product(nx.cycle_graph(rows), nx.cycle_graph(columns))
        edges = []
        for ring in ring_pair(rows, columns):
            assert sorted(ring) == list(range(rows * columns))
            places = [divmod(x, columns) for x in (*ring, ring[0])]
            edges += [frozenset(pair) for pair in pairwise(places)]
            assert all(graph.has_edge(*pair) for pair in pairwise(places))
        assert len(set(edges)) == len(edges) == graph.number_of_edges()


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2, 2), Mesh(3, 1, 1, 3)], ids=lambda m: m.name)
def test_a_pair_of_rings_keeps_all_four_links_busy(mesh: Mesh) -> None:
    """In the simulator the all-reduce takes the bound's time, and half of what one ring takes; the checker adds it up."""
    builder = Builder(10**7, 0.0)
    mesh.build(builder)
    problem = CollectiveProblem.on(builder.fabric("mesh", "test"), "all-reduce", 36 * 10**4)
    sides = mesh.a * mesh.rows, mesh.b * mesh.columns
    plan = Ring(torus=sides, bidirectional=True).plan(problem, rng=RNG)
    assert check_program(plan.program).ok and plan.notes["rings"] == 4
    one = Ring(order=ring_pair(*sides)[0], bidirectional=True).plan(problem, rng=RNG)
    pair_s, one_s = (simulated_time_s(p.program, problem.fabric, problem.ranks, None) for p in (plan, one))
    assert plan.bound is not None and pair_s == pytest.approx(float(plan.bound.exact), rel=0.01) and one_s == pytest.approx(2 * pair_s, rel=0.01)
    again = Ring(**plan.options).plan(problem, rng=RNG)
    assert again.options == plan.options and one.options["torus"] is None
    for options in ({"torus": (3, 5)}, {"torus": sides, "rings": 2}, {"torus": sides, "folded": True}, {"torus": (2.5,)}):
        with pytest.raises(UsageError):
            Ring(**options).plan(problem, rng=RNG)


def grid(rnd: random.Random, most: int) -> tuple[list[int], int]:
    rows, columns = rnd.randint(1, most), rnd.randint(1, most)
    alive = rnd.choice([0.4, 0.6, 0.8])
    return [sum((rnd.random() < alive) << c for c in range(columns)) for _ in range(rows)], columns


def fits(free: list[int], columns: int, u: int, v: int) -> bool:
    """By trying all choices of columns."""
    return any(sum(all(row >> c & 1 for c in some) for row in free) >= u for some in combinations(range(columns), v))


@pytest.mark.parametrize("seed", range(few(10)))
def test_places_are_found_where_exhaustion_finds_them(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(20):
        free, columns = grid(rnd, 6)
        boards = Boards(len(free), columns, list(free))
        for u in range(1, len(free) + 1):
            for v in range(1, columns + 1):
                found = find(free, columns, u, v)
                assert (found is not None) == fits(free, columns, u, v) >= (greedy(free, columns, u, v) is not None)
                assert found is None or (found.shape == (u, v) and all(free[r] >> c & 1 for r, c in found.boards))
        u, v = rnd.randint(1, 6), rnd.randint(1, 6)
        try:
            assert allocate(boards, u, v).shape in ((u, v), (v, u))
        except Infeasible as refused:
            near = refused.data["nearest"]
            assert near is None or fits(free, columns, *near)
            least = near[0] * near[1] if near else 0
            shapes = [(a, b) for a in range(1, len(free) + 1) for b in range(1, columns + 1) if least < a * b <= u * v]
            assert not any(fits(free, columns, *shape) for shape in shapes)


def test_half_of_a_large_grid_dead() -> None:
    rnd = random.Random(0)
    free = [sum((rnd.random() < 0.5) << c for c in range(64)) for _ in range(64)]
    assert find(free, 64, 5, 12) is not None and find(free, 64, 12, 12) is None


def test_large_searches_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without work left: rows that grow greedily still find places; what is not found is not known, and the nearest shape is said to be uncertain."""
    rng = random.Random(5)
    failed = [(r, c) for r in range(12) for c in range(12) if rng.random() < 0.3]
    exact = {shape: find(Boards.of(12, 12, failed).free, 12, *shape) for shape in ((2, 2), (3, 4), (5, 5), (9, 9))}
    for name in ("QUICK_WORK_S", "MAX_WORK_S"):
        monkeypatch.setattr(f"meshwright.decide.topology.hammingmesh.allocate.{name}", -1.0)
    boards = Boards.of(12, 12, failed)
    found = find(boards.free, 12, 3, 4)
    assert exact[3, 4] is not None and found is not None and all(boards.free[r] >> c & 1 for r, c in found.boards)
    assert exact[9, 9] is None
    for search in (lambda: find(boards.free, 12, 9, 9), lambda: allocate(boards, 9, 9)):
        with pytest.raises(TimeLimit, match="not every choice of rows was tried"):
            search()
    jobs = [BoardJob(name=f"{k}", rows=k, columns=k, arrival_s=0.0, duration_s=1.0) for k in (2, 9)]
    with pytest.raises(TimeLimit):
        best_replay(12, 12, failed, jobs)
    monkeypatch.setattr("meshwright.decide.topology.hammingmesh.allocate.MAX_WORK_S", 1.3e-5)  # few ways suffice to refuse 12 x 12, not those below
    with pytest.raises(Infeasible) as refused:
        allocate(boards, 12, 12)
    near = refused.value.data["nearest"]
    assert not refused.value.data["nearest_is_certain"] and "as far as was tried" in refused.value.hint and find(boards.free, 12, *near)


def test_jobs_move_to_make_room() -> None:
    boards = Boards.of(3, 3)
    boards.take("a", Submesh((0,), (0,)))
    boards.take("b", Submesh((1,), (1,)))
    with pytest.raises(Infeasible, match="do not fit") as refused:
        allocate(boards, 2, 3)
    assert refused.value.data["nearest"] == [1, 3] or refused.value.data["nearest"] == [2, 2]
    made = defragment(boards, 2, 3)
    assert made is not None and len(made[0]) == 1 and made[1].shape in ((2, 3), (3, 2))
    assert defragment(boards, 3, 3) is None
    placed = place_jobs(3, 3, [(2, 2)], [(1, 2), (2, 2)], move=True)
    assert [one.job for one in placed] == ["job1", "job2"]


def mix(rnd: random.Random, count: int, side: int) -> list[BoardJob]:
    return [
        BoardJob(
            name=f"j{i}",
            rows=min(side, 2 ** rnd.randint(0, 2)),
            columns=min(side, 2 ** rnd.randint(0, 2)),
            arrival_s=rnd.randint(0, 50),
            duration_s=rnd.randint(1, 30),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(few(5)))
def test_a_replay_places_all_jobs_and_the_best_is_never_below_greedy(seed: int) -> None:
    rnd = random.Random(seed)
    failed, jobs = [(rnd.randrange(6), rnd.randrange(6)) for _ in range(3)], mix(rnd, 25, 4)
    found = replay_jobs(6, 6, failed, jobs)
    assert {r.policy for r in found} <= set(POLICIES) and len(found) >= 2
    assert all(len(r.placed) == 25 and r.utilisation <= found[0].utilisation <= 1 for r in found)
    assert found == best_replay(6, 6, failed, jobs)
    with pytest.raises(Infeasible, match="never fit"):
        replay(6, 6, failed, [*jobs, BoardJob(name="large", rows=6, columns=6, arrival_s=0, duration_s=1)], "exact")


def test_the_checker_of_boards_refuses_what_is_not_so() -> None:
    right = ("a", (1, 2), (0,), (0, 1), 0.0, 2.0)
    assert check_boards(2, 2, [], [right, ("b", (2, 1), (0,), (0, 1), 2.0, 3.0)]).ok
    assert not check_boards(2, 2, [(0, 1)], [right]).ok
    assert not check_boards(2, 2, [], [right, ("b", (1, 1), (0,), (1,), 1.0, 3.0)]).ok
    assert not check_boards(2, 2, [], [("a", (2, 2), (0,), (0, 1), 0.0, 2.0)]).ok
    assert not check_boards(1, 1, [], [right]).ok


def test_networks_beside_each_other() -> None:
    problem = TopologyProblem(nodes=64, ports=1)
    rows = compare_networks(problem)
    assert {row.design.strategy for row in rows} == set(KINDS)
    assert [row.usd_seconds for row in rows] == sorted(row.usd_seconds for row in rows)
    cheapest = min(row.usd for row in rows)
    assert [row.usd for row in compare_networks(problem, budget_usd=cheapest)] == [cheapest]
    with pytest.raises(Infeasible, match="costs 1 USD or less"):
        compare_networks(problem, budget_usd=1)


def test_what_cannot_be_is_refused() -> None:
    problem = TopologyProblem(nodes=64, ports=1)
    for kind, options in ((HammingMesh, {"board": 99}), (FatTree, {"taper": 10}), (Dragonfly, {"accelerators": 99})):
        with pytest.raises(UsageError):
            kind(**options).plan(problem, rng=RNG)
    with pytest.raises(UsageError, match="no cable to each other"):
        Dragonfly(accelerators=1).plan(problem, rng=RNG)
    with pytest.raises(UsageError, match="double cables"):
        ring_pair(2, 5)
    small = replace(problem, nodes=8193, prices=replace(problem.prices, switch_ports=32))  # 32 x 16 x 16: one more than three levels reach
    with pytest.raises(Unsupported, match="are more than 8192"):
        FatTree(taper=0).plan(small, rng=RNG)
    assert FatTree().plan(small, rng=RNG) and FatTree(taper=0).plan(replace(small, nodes=8192), rng=RNG)
    for make in (lambda: Boards.of(0, 3), lambda: Boards.of(3, 3, [(3, 0)]), lambda: allocate(Boards.of(2, 2), 0, 1)):
        with pytest.raises(UsageError):
            make()
    boards = Boards.of(2, 2)
    boards.take("a", Submesh((0,), (0,)))
    with pytest.raises(UsageError, match="taken"):
        boards.take("b", Submesh((0,), (0, 1)))
    with pytest.raises(UsageError, match="no price for 'laser'"):
        Prices(switch_ports=64, switch_usd=1, optical_cable_usd=1, copper_cable_usd=1).of({"laser": 1})
    assert grid_sides(7) == (2, 4) or grid_sides(7) == (3, 3)
