"""Joint all-reduce packing: the program against two oracles, whole trees on random graphs, presets exactly at their optimum."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import highspy
import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.check.program.links import link_time
from meshwright.decide.collective import CollectiveProblem, ForestColl, collective_bound
from meshwright.decide.collective.joint.exact import ExactDemand, exact_demand, packing_time
from meshwright.decide.collective.joint.strategy import Joint, packing_problem
from meshwright.decide.collective.joint.trees import parts_of, trees_of
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.decide.collective.trees.lp import Demand, PackingProblem, solve_packing
from meshwright.errors import CheckFailed, Disconnected, Infeasible, TimeLimit, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import Deadline
from meshwright.kernels.highs import require_optimal, solver

GIB = 1 << 30
EIGHT_AND_EIGHT = [*range(8), *range(16, 24)]  # dies 0-7 of two boxes


def random_graph(seed: int, *, ranks: int, switches: int = 0, mirrored: bool) -> PackingProblem:
    """A connected random graph; every switch gives out what it takes in."""
    rng = np.random.default_rng(seed)
    n = ranks + switches
    rate: dict[tuple[int, int], int] = {}

    def cable(u: int, v: int) -> None:
        a = int(rng.integers(1, 7))
        one_way_free = u < ranks and v < ranks and not mirrored
        rate[u, v] = rate.get((u, v), 0) + a
        rate[v, u] = rate.get((v, u), 0) + (int(rng.integers(1, 7)) if one_way_free else a)

    order = rng.permutation(n)
    for i in range(1, n):
        cable(int(order[rng.integers(0, i)]), int(order[i]))
    for _ in range(n):
        u, v = (int(x) for x in rng.choice(n, 2, replace=False))
        cable(u, v)
    return PackingProblem(n, rate, (Demand(tuple(range(ranks)), collect=True),), all(rate.get((v, u)) == b for (u, v), b in rate.items()))


def compact_optimum(problem: PackingProblem) -> float:
    """The same optimum by a flow per rank and direction: no cuts, no mirror."""
    demand, n = problem.demands[0], problem.nodes
    arcs, ranks = list(problem.rate), list(demand.members)
    columns = 1 + len(ranks)
    lp = solver()

    def block(size: int) -> int:
        nonlocal columns
        columns += size
        return columns - size

    load = [block(len(arcs)), block(len(arcs))]
    flow = {(way, v): (block(len(arcs)), block(len(ranks))) for way in (0, 1) for v in ranks}
    lp.addVars(columns, np.zeros(columns), np.full(columns, highspy.kHighsInf))
    lp.changeColCost(0, 1.0)

    def row(low: float, high: float, terms: dict[int, float]) -> None:
        lp.addRow(low, high, len(terms), np.fromiter(terms, np.int32), np.fromiter(terms.values(), float))

    row(1, 1, {1 + i: 1.0 for i in range(len(ranks))})
    for k, arc in enumerate(arcs):
        row(-highspy.kHighsInf, 0, {load[0] + k: 1.0, load[1] + k: 1.0, 0: -float(problem.rate[arc])})
    for way in (0, 1):
        heads = [(u, v) if way == 0 else (v, u) for u, v in arcs]
        for w in range(len(ranks), n):
            row(0, 0, {load[way] + k: 1.0 if v == w else -1.0 for k, (u, v) in enumerate(heads) if w in (u, v)})
        for v in ranks:
            first, feed = flow[way, v]
            for k in range(len(arcs)):
                row(-highspy.kHighsInf, 0, {first + k: 1.0, load[way] + k: -1.0})
            for i in range(len(ranks)):
                row(-highspy.kHighsInf, 0, {feed + i: 1.0, 1 + i: -1.0})
            for node in range(n):
                terms = {first + k: 1.0 if b == node else -1.0 for k, (a, b) in enumerate(heads) if node in (a, b)}
                if node < len(ranks):
                    terms[feed + node] = 1.0
                need = 1.0 if node == v else 0.0
                if terms:
                    row(need, need, terms)
    require_optimal(lp, what="compact")
    return float(lp.getInfo().objective_function_value)


@pytest.mark.parametrize("seed", range(24))
def test_cuts_give_the_optimum_of_the_compact_flow_program(seed: int) -> None:
    problem = random_graph(seed, ranks=3 + seed % 3, switches=seed % 3, mirrored=bool(seed & 4))
    want = compact_optimum(problem)
    assert solve_packing(problem, what="t").time == pytest.approx(want, rel=1e-6)
    assert solve_packing(problem, what="t", even=False).time == pytest.approx(want, rel=1e-6)
    if problem.mirrored:  # the mirror image of half the columns loses nothing
        assert solve_packing(replace(problem, mirrored=False), what="t").time == pytest.approx(want, rel=1e-6)


def partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    out = []
    for smaller in partitions(rest):
        out.append([[first], *smaller])
        out += [[*smaller[:i], [first, *part], *smaller[i + 1 :]] for i, part in enumerate(smaller)]
    return out


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(20))
def test_direct_symmetric_graphs_reach_the_nash_williams_tutte_strength(seed: int) -> None:
    problem = random_graph(100 + seed, ranks=3 + seed % 4, mirrored=True)
    best = Fraction(0)
    for parts in partitions(list(range(problem.nodes))):
        if len(parts) > 1:
            where = {v: i for i, part in enumerate(parts) for v in part}
            best = max(best, Fraction(len(parts) - 1, sum(b for (u, v), b in problem.rate.items() if u < v and where[u] != where[v])))
    packing = solve_packing(problem, what="t")
    exact = next(exact_demand(problem, packing, 0, most_units=1 << 40))
    assert packing_time(problem, [exact]) == best


@pytest.mark.parametrize("switches", [0, 1, 2, 3])
@pytest.mark.parametrize("mirrored", [True, False])
def test_whole_trees_reach_the_optimum_exactly(switches: int, mirrored: bool) -> None:
    """Summed loads equal the program's optimum; a splitting that sticks would raise with its graph."""
    for seed in range(25):
        problem = random_graph(1000 * switches + seed, ranks=2 + seed % 5, switches=switches, mirrored=mirrored)
        packing = solve_packing(problem, what="t")
        exact = next(exact_demand(problem, packing, 0, most_units=1 << 40))
        assert float(packing_time(problem, [exact])) == pytest.approx(packing.time, rel=1e-9)
        trees = trees_of(problem, exact, group=[0] * problem.nodes)
        assert max(Fraction(x, exact.units) / problem.rate[arc] for arc, x in trees.load.items()) <= packing_time(problem, [exact])
        parts = parts_of(trees)
        assert [p.first for p in parts] == [0, *np.cumsum([p.units for p in parts])[:-1]] and sum(p.units for p in parts) == exact.units
        for part in parts:
            assert part.up is not None and part.down is not None and part.up.root == part.down.root
            for tree in (part.up, part.down):
                assert sorted(tree.order) == list(range(len(problem.demands[0].members)))
                assert all(a in problem_ends(problem) and b in problem_ends(problem) for path in tree.paths for a, b in pairwise(path))


def problem_ends(problem: PackingProblem) -> set[int]:
    return {v for arc in problem.rate for v in arc}


# algbw of all-reduce in GB/s: the card's own runs (with an independent solver), and half the published all-gather optima where they meet
KNOWN = {"dgx1-v100": Fraction(600, 7), "mi250:1": Fraction(1200, 7), "dgx-h100:1": Fraction(1800, 7), "dgx-h100:2": Fraction(800, 3)}


@pytest.mark.parametrize("name", KNOWN)
def test_presets_are_exactly_at_the_optimum(name: str) -> None:
    fabric = load_fabric(name)
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    problem = packing_problem(graph)
    plan = Joint(pieces=1).plan(CollectiveProblem.on(fabric, "all-reduce", GIB), rng=np.random.default_rng(0))
    assert plan.notes["exact"] and plan.notes["of_optimum"] == 1.0 and "fallback" not in plan.notes
    assert Fraction(plan.notes["bandwidth_time_s"]) == GIB / (KNOWN[name] * 10**9)
    assert solve_packing(problem, what="t").time * 1e9 / graph.unit_Bps == pytest.approx(float(1 / KNOWN[name]), rel=1e-9)


@pytest.mark.parametrize(("devices", "gain"), [([0, 1, 2, 3, 4], Fraction(8, 5)), ([0, 1, 3], Fraction(10, 9))])
def test_allocations_where_both_directions_together_win(devices: list[int], gain: Fraction) -> None:
    """GPUs 0-4 of a DGX-1: 0.5 instead of 0.8 time units; a triangle of 1, 2 and 2 links: 2/5 (strength) instead of 4/9 (halves)."""
    fabric = load_fabric("dgx1-v100").subset(devices)
    problem = CollectiveProblem.on(fabric, "all-reduce", 1 << 20)
    joint = Joint().plan(problem, rng=np.random.default_rng(0))
    halves = ForestColl().plan(problem, rng=np.random.default_rng(0))
    assert Fraction(halves.notes["halves_optimum_s"]) / Fraction(joint.notes["bandwidth_time_s"]) == gain
    assert joint.bound is not None and Fraction(joint.notes["bandwidth_time_s"]) == joint.bound.exact  # nothing is left


def test_eight_and_eight_dies_beat_reduce_scatter_plus_all_gather() -> None:
    fabric = load_fabric("mi250:2").subset(EIGHT_AND_EIGHT)
    problem = CollectiveProblem.on(fabric, "all-reduce", GIB)
    joint = Joint().plan(problem, rng=np.random.default_rng(0))
    halves = ForestColl().plan(problem, rng=np.random.default_rng(0))
    times = [simulated_time_s(p.program, fabric, problem.ranks, None) for p in (joint, halves)]
    assert times[1] >= 1.2 * times[0]
    assert joint.notes["exact"] and Fraction(joint.notes["bandwidth_time_s"]) == Fraction(GIB, 128 * 10**9)
    busiest = max(link_time(joint.program, fabric, problem.ranks)[0].values())
    assert busiest <= Fraction(joint.notes["bandwidth_time_s"]) * Fraction(1001, 1000)  # padding to whole elements only


def test_one_way_links_get_different_trees_up_and_down() -> None:
    """A ring in one direction: nothing can be turned round, and the program is still valid."""
    n = 5
    links = tuple(Link(src=f"d{i}", dst=f"d{(i + 1) % n}", rate_Bps=10**6 * (1 + i % 2)) for i in range(n))
    fabric = Fabric(name="one-way", devices=tuple(Device(name=f"d{i}") for i in range(n)), links=links)
    problem = CollectiveProblem.on(fabric, "all-reduce", 40_000)
    plan = Joint(pieces=2).plan(problem, rng=np.random.default_rng(0))
    assert check_program(plan.program).ok and plan.notes["exact"]
    assert plan.program.contract is not None and plan.program.contract.op == "all-reduce"


def test_a_relay_is_used_only_where_it_is_needed() -> None:
    links = [Link(src=a, dst=b, rate_Bps=10**6) for a, b in (("a", "r"), ("r", "a"), ("b", "r"), ("r", "b"))]
    fabric = Fabric(name="line", devices=tuple(Device(name=x) for x in "abr"), links=tuple(links))
    problem = CollectiveProblem(fabric=fabric, op="all-reduce", ranks=("a", "b"), size_bytes=400)
    plan = Joint().plan(problem, rng=np.random.default_rng(0))
    assert plan.options["relay"] is True and check_program(plan.program).ok
    with pytest.raises(Disconnected):
        Joint(relay=False).plan(problem, rng=np.random.default_rng(0))


def test_rates_without_a_common_unit_lose_a_stated_share() -> None:
    rates = [999_983, 1_299_709, 15_485_863, 2_750_159, 1_000_003, 5_000_011]
    cables = [(i % 4, (i + 1 + i // 4) % 4, r) for i, r in enumerate(rates)]
    links = [Link(src=f"d{x}", dst=f"d{y}", rate_Bps=r) for a, b, r in cables for x, y in ((a, b), (b, a))]
    fabric = Fabric(name="odd", devices=tuple(Device(name=f"d{i}") for i in range(4)), links=tuple(links))
    problem = CollectiveProblem.on(fabric, "all-reduce", 1 << 20)
    plan = Joint(max_trees=64).plan(problem, rng=np.random.default_rng(0))
    assert plan.notes["trees"] <= 64 and 0.9 < plan.notes["of_optimum"] <= 1
    assert plan.bound is not None and Fraction(plan.notes["bandwidth_time_s"]) >= plan.bound.exact


def test_too_few_trees_fall_back_and_say_so() -> None:
    fabric = load_fabric("mi250:1")
    problem = CollectiveProblem.on(fabric, "all-reduce", 1 << 20)
    plan = Joint(max_trees=1).plan(problem, rng=np.random.default_rng(0))
    if "fallback" in plan.notes:
        assert "needs more than 1 trees" in plan.notes["fallback"] and plan.strategy == "joint"
    else:
        assert plan.notes["trees"] == 1 and plan.notes["of_optimum"] < 1
    assert check_program(plan.program).ok


def test_a_splitting_that_sticks_is_reported_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is known that sticks; so the kernel is made to refuse, and the report must hold the whole graph."""
    from meshwright.decide.collective.joint import trees as joint_trees

    def refuse(*_: object, **__: object) -> None:
        raise Unsupported("no admissible split is left at switch s", hint="h", data={"switch": "s"})

    monkeypatch.setattr(joint_trees, "pack_capacities", refuse)
    problem = CollectiveProblem.on(load_fabric("two-islands"), "all-reduce", 1 << 20)
    plan = Joint().plan(problem, rng=np.random.default_rng(0))
    assert "switches could not be removed" in plan.notes["fallback"] and check_program(plan.program).ok
    stuck = plan.notes["stuck"][0]
    assert stuck["graph"] and stuck["roots"] and stuck["switch"] == "s" and set(stuck["members"]) == set(problem.ranks)


def test_broken_trees_are_defects_not_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.decide.collective.joint import trees as joint_trees

    problem = random_graph(3, ranks=4, mirrored=True)
    exact = next(exact_demand(problem, solve_packing(problem, what="t"), 0, most_units=1 << 40))
    good = trees_of(problem, exact, group=[0] * 4).down
    joined, short = good[0], replace(good[0], units=good[0].units + 1)
    lost = replace(joined, order=joined.order[:-1])
    torn = replace(joined, paths=((0, 1),) * 4)
    for first, words in ((short, "trees per root"), (lost, "spans 3 of 4"), (torn, "is broken")):
        trees = (first, *good[1:])
        monkeypatch.setattr(joint_trees, "pack_capacities", lambda *a, trees=trees, **k: trees)
        with pytest.raises(CheckFailed, match=words):
            trees_of(problem, exact, group=[0] * 4)
    monkeypatch.setattr(joint_trees, "pack_capacities", lambda *a, **k: good)
    thin = ExactDemand(exact.demand, exact.units, exact.weight, dict.fromkeys(exact.spread, 0), dict.fromkeys(exact.collect, 0))
    with pytest.raises(CheckFailed, match="both ways"):
        trees_of(problem, thin, group=[0] * 4)


def test_refusals() -> None:
    fabric = load_fabric("two-islands")
    problem = CollectiveProblem.on(fabric, "all-reduce", 1 << 20)
    rng = np.random.default_rng(0)
    for option in ("max_trees", "pieces", "max_pieces", "quantum", "depth"):
        with pytest.raises(UsageError, match=option):
            Joint(**{option: 0}).plan(problem, rng=rng)
    with pytest.raises(Unsupported, match="not broadcast"):
        Joint().plan(replace(problem, op="broadcast"), rng=rng)
    with pytest.raises(TimeLimit):
        solve_packing(random_graph(1, ranks=4, mirrored=True), what="t", deadline=Deadline(clock_s=0.0))
    with pytest.raises(Infeasible, match="no link leaves"):
        solve_packing(PackingProblem(3, {(0, 1): 1, (1, 0): 1}, (Demand((0, 1, 2), collect=True, weight=(Fraction(1, 3),) * 3),), True), what="t")


def test_a_program_that_never_closes_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.decide.collective.trees import lp as joint_lp

    monkeypatch.setattr(joint_lp, "MAX_ROUNDS", 1)
    graph = rate_graph(load_fabric("dgx-h100:2"), [d.name for d in load_fabric("dgx-h100:2").devices])
    with pytest.raises(TimeLimit, match="did not end after"):
        solve_packing(packing_problem(graph), what="t")


def test_floats_that_are_no_simple_fractions_give_nothing() -> None:
    problem = random_graph(5, ranks=4, mirrored=True)
    packing = solve_packing(problem, what="t")
    noisy = replace(packing, weight=(tuple(w + 3e-7 * (i + 1) for i, w in enumerate(packing.weight[0])),))
    assert not list(exact_demand(problem, noisy, 0, most_units=1 << 10))


def test_rates_that_the_solver_cannot_take_are_refused_not_called_disconnected() -> None:
    devices = tuple(Device(name=name, kind="gpu", group=name, memory_bytes=1, memory_bandwidth_Bps=0, flops={}) for name in "abc")
    pairs = (("a", "b", 1, 10.0), ("b", "c", 10**13, 0.0))
    links = tuple(Link(src=x, dst=y, rate_Bps=rate, latency_s=s, kind="NET") for u, v, rate, s in pairs for x, y in ((u, v), (v, u)))
    problem = CollectiveProblem.on(Fabric(name="line", devices=devices, switches=(), links=links), "all-reduce", 1 << 20)
    assert float(collective_bound(problem)) >= 1 << 20
    try:
        plan = Joint().plan(problem, rng=np.random.default_rng(0))
    except Unsupported as refusal:
        assert "factor of 1e+13" in refusal.message and refusal.hint
    else:
        check_program(plan.program).raise_if_wrong()
