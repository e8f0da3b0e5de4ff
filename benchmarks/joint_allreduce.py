"""Joint all-reduce packing: exactness on presets, allocations and random graphs; gain over reduce-scatter + all-gather; switches that add and copy.

Run: `python benchmarks/joint_allreduce.py` (prints one JSON document; raw output goes to benchmarks/results/joint_allreduce.json).
Times of planners are processor seconds of this process; all other times are simulated or exact.
"""

from __future__ import annotations

import json
import time
from fractions import Fraction
from itertools import combinations
from typing import Any

import machine
import networkx as nx
import numpy as np

from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.collective import CollectiveProblem, ForestColl, collective_bound
from meshwright.decide.collective.bounds.allreduce import all_reduce_dual_bound
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.joint.exact import exact_demand, packing_time
from meshwright.decide.collective.joint.strategy import Joint
from meshwright.decide.collective.joint.trees import trees_of
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.decide.collective.trees.lp import Demand, PackingProblem, solve_packing
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric

GIB = 1 << 30
EIGHT_AND_EIGHT = [*range(8), *range(16, 24)]
RANDOM_GRAPHS = 1000


def preset_row(name: str, devices: list[int] | None = None) -> dict[str, Any]:
    """The plan's exact time, the program's optimum (its bound, certified), and both schedules simulated at 1 GiB."""
    fabric = load_fabric(name)
    fabric = fabric if devices is None else fabric.subset(devices)
    problem = CollectiveProblem.on(fabric, "all-reduce", GIB)
    start = time.process_time()
    joint = Joint().plan(problem, rng=np.random.default_rng(0))
    cpu_s = time.process_time() - start
    halves = ForestColl().plan(problem, rng=np.random.default_rng(0))
    bound = all_reduce_dual_bound(problem)
    assert bound is not None and not check_bound(bound, fabric)
    times = [simulated_time_s(p.program, fabric, problem.ranks, None) for p in (joint, halves)]
    exact = Fraction(joint.notes["bandwidth_time_s"])
    return {
        "what": "preset", "fabric": name, "devices": devices or "all", "trees": joint.notes.get("trees"), "height": joint.notes["height"],
        "exact_time_s": str(exact), "bound_s": str(bound.exact), "equals_bound": exact == bound.exact, "of_optimum": joint.notes.get("of_optimum"),
        "fallback": joint.notes.get("fallback"), "plan_cpu_s": cpu_s, "joint_sim_s": times[0], "halves_sim_s": times[1],
        "halves_over_joint": times[1] / times[0], "joint_sim_over_bound": times[0] / float(max(bound.exact, collective_bound(problem).exact)),
    }  # fmt: skip


def allocations_row() -> dict[str, Any]:
    """All connected allocations of 3 GPUs and more of a DGX-1 (V100), up to isomorphism: joint time against twice the exact half."""
    fabric = load_fabric("dgx1-v100")
    classes: list[nx.Graph] = []
    gains: list[Fraction] = []
    equal = 0
    for size in range(3, 9):
        for subset in combinations(range(8), size):
            part = fabric.subset(list(subset))
            graph = _direct(part)
            unit = rate_graph(part, [d.name for d in part.devices], relay=False).unit_Bps
            shape = nx.Graph()
            shape.add_nodes_from(range(graph.nodes))
            shape.add_weighted_edges_from((u, v, b * unit) for (u, v), b in graph.rate.items() if u < v)
            if not nx.is_connected(shape) or any(nx.is_isomorphic(shape, c, edge_match=lambda a, b: a["weight"] == b["weight"]) for c in classes):
                continue
            classes.append(shape)
            packing = solve_packing(graph, what="allocation")
            exact = next(exact_demand(graph, packing, 0, most_units=1 << 40))
            trees = trees_of(graph, exact, group=[0] * graph.nodes)
            load = max(Fraction(x, exact.units) / graph.rate[arc] for arc, x in trees.load.items())
            equal += load == packing_time(graph, [exact]) and abs(float(load) - packing.time) < 1e-9 * packing.time
            half = worst_cut(rate_graph(part, [d.name for d in part.devices], relay=False), [1] * size).ratio / size
            gains.append(2 * half / load)
    return {
        "what": "allocations of DGX-1 V100, 3 GPUs and more, up to isomorphism", "classes": len(classes), "trees_at_the_optimum": equal,
        "joint_strictly_faster": sum(g > 1 for g in gains), "largest_gain": str(max(gains)),
    }  # fmt: skip


def _direct(fabric: Fabric) -> PackingProblem:
    """The graph of the devices alone, in units of its rates."""
    graph = rate_graph(fabric, [d.name for d in fabric.devices])
    n = graph.ranks
    arcs = {(u, v): b for (u, v), b in graph.arcs.items() if u < n and v < n}
    return PackingProblem(n, arcs, (Demand(tuple(range(n)), collect=True),), graph.mirrored)


def random_graph(rng: np.random.Generator, switches: int) -> PackingProblem:
    """Connected; rates of the two directions of a cable between ranks are drawn apart, so hubs send more than they receive."""
    ranks = int(rng.integers(2, 8))
    n = ranks + switches
    rate: dict[tuple[int, int], int] = {}
    order = rng.permutation(n)
    cables = [(int(order[rng.integers(0, i)]), int(order[i])) for i in range(1, n)]
    cables += [tuple(int(x) for x in rng.choice(n, 2, replace=False)) for _ in range(n)]  # type: ignore[misc]
    for u, v in cables:
        there = int(rng.integers(1, 9))
        back = int(rng.integers(1, 9)) if u < ranks and v < ranks else there
        rate[u, v], rate[v, u] = rate.get((u, v), 0) + there, rate.get((v, u), 0) + back
    return PackingProblem(n, rate, (Demand(tuple(range(ranks)), collect=True),))


def random_row(switches: int, count: int) -> dict[str, Any]:
    rng = np.random.default_rng(switches)
    exactly = stuck = surplus = 0
    largest = 0
    start = time.process_time()
    for _ in range(count):
        problem = random_graph(rng, switches)
        packing = solve_packing(problem, what="random")
        exact = next(exact_demand(problem, packing, 0, most_units=1 << 40))
        try:
            trees = trees_of(problem, exact, group=[0] * problem.nodes)
        except Unsupported as refusal:
            stuck += 1
            print(json.dumps(refusal.data))
            continue
        load = max(Fraction(x, exact.units) / problem.rate[arc] for arc, x in trees.load.items())
        exactly += abs(float(load) - packing.time) <= 1e-9 * packing.time
        largest = max(largest, exact.units)
        net = [0] * problem.nodes
        for (u, v), x in exact.spread.items():
            net[u], net[v] = net[u] + x, net[v] - x
        surplus += max(net[r] for r in problem.demands[0].members) > 0
    return {
        "what": "random graphs", "switches": switches, "graphs": count, "at_the_optimum": exactly, "splittings_stuck": stuck,
        "with_a_rank_that_sends_more_than_it_gets": surplus, "largest_denominator": largest, "cpu_s": time.process_time() - start,
    }  # fmt: skip


def bound_row(name: str) -> dict[str, Any]:
    problem = CollectiveProblem.on(load_fabric(name), "all-reduce", GIB)
    start = time.process_time()
    bound = all_reduce_dual_bound(problem)
    cpu_s = time.process_time() - start
    start = time.process_time()
    accepted = bound is not None and not check_bound(bound, problem.fabric)
    value = None if bound is None else bound.value
    row = {"what": "bound", "fabric": name, "bound_s": value, "cpu_s": cpu_s, "accepted": accepted}
    return row | {"check_cpu_s": time.process_time() - start}


def in_network_row(name: str) -> dict[str, Any]:
    fabric = load_fabric(name)
    problem = CollectiveProblem.on(fabric, "all-reduce", GIB)
    able = Joint(in_network=True).plan(problem, rng=np.random.default_rng(0))
    alone = Joint().plan(problem, rng=np.random.default_rng(0))
    times = [simulated_time_s(p.program, fabric, (*problem.ranks, *p.switches), None) for p in (able, alone)]
    assert able.bound is not None
    return {
        "what": "in-network", "fabric": name, "algbw_GBps": GIB / 1e9 / times[0], "algbw_without_GBps": GIB / 1e9 / times[1],
        "exact_algbw_GBps": float(Fraction(GIB, 10**9) / Fraction(able.notes["bandwidth_time_s"])),
        "limit_is_reached": able.notes["limit_is_reached"],
        "all_switches_capable": able.notes["all_switches_capable"], "sim_over_bound": times[0] / float(able.bound), "gain": times[1] / times[0],
    }  # fmt: skip


def main() -> None:
    preset_row("two-islands")  # compiles
    rows = [preset_row(name) for name in ("dgx1-v100", "mi250:1", "dgx-h100:1", "dgx-h100:2", "dgx-a100:2", "ndv2:2", "dgx2:2", "mi250:2")]
    rows += [preset_row("dgx1-v100", [0, 1, 2, 3, 4]), preset_row("mi250:2", EIGHT_AND_EIGHT)]
    rows += [allocations_row()]
    rows += [random_row(switches, RANDOM_GRAPHS // 4) for switches in (0, 1, 2, 3)]
    rows += [bound_row(name) for name in ("dgx1-v100", "mi250:2", "dgx-h100:4", "dgx-h100:16")]
    rows += [in_network_row(name) for name in ("dgx-h100:1", "dgx-h100:2", "dgx-h100:4")]
    print(json.dumps(machine.record("joint_allreduce", rows), indent=1))


if __name__ == "__main__":
    main()
