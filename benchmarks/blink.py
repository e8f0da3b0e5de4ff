"""Blink: rates on every allocation of DGX-1 boxes against exact optima, tree counts, planning time, simulated time against ring and ForestColl.

Run: `python benchmarks/blink.py` (prints one JSON document; raw output goes to benchmarks/results/blink.json).
Times called cpu_s are processor seconds of this process after one untimed run that compiles; all others are simulated seconds.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import machine
import networkx as nx
import numpy as np

from meshwright.decide.collective import CollectiveProblem, ForestColl, Ring
from meshwright.decide.collective.blink.graph import canonical, path_edges
from meshwright.decide.collective.blink.pack import pack, two_way
from meshwright.decide.collective.blink.strategy import Blink
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.errors import Disconnected, Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.strength import pack_spanning_trees, strength
from meshwright.kernels.treesearch import ARBORESCENCE, cheapest_trees, pack_by_weights

GB = 10**9


def allocation_graphs(name: str, smallest: int) -> list[RateGraph]:
    """Graphs of all connected allocations of one box."""
    fabric, found = load_fabric(name), []
    for k in range(smallest, 9):
        for gpus in combinations(range(8), k):
            graph = rate_graph(fabric, [fabric.devices[i].name for i in gpus], relay=False)
            try:
                worst_cut(graph, [1] * graph.ranks)
            except Disconnected:
                continue
            found.append(graph)
    return found


def allocations_row(name: str) -> dict[str, Any]:
    """Every allocation of at least two GPUs: packed rates over exact optima, broadcast from every root, and the exact packing."""
    graphs, worst_down, worst_both, exact, before, after, weights = allocation_graphs(name, 2), Fraction(1), Fraction(1), 0, 0, 0, Fraction(1)
    start, roots = time.process_time(), 0
    for graph in graphs:
        for root in range(graph.ranks):
            optimum = 1 / worst_cut(graph, [int(r == root) for r in range(graph.ranks)]).ratio
            found = pack(canonical(graph, root)[0], "broadcast", epsilon=0.1, theta=0.05, optimum=optimum)
            worst_down, roots = min(worst_down, found.rate / optimum), roots + 1
            weights = min(weights, Fraction(found.found) / optimum)
            before, after = max(before, found.distinct), max(after, len(found.trees))
        allocation = canonical(graph)[0]
        best = strength(graph.ranks, two_way(allocation)).ratio
        worst_both = min(worst_both, pack(allocation, "all-reduce", epsilon=0.1, theta=0.05).rate / best)
        room = {pair: c * best.denominator for pair, c in two_way(allocation).items()}
        exact += sum(c for _, c in pack_spanning_trees(graph.ranks, room, best.numerator)) == best.numerator
    return {
        "what": "all allocations", "fabric": name, "subsets": 247, "connected": len(graphs), "roots": roots,
        "worst_share_of_min_cut": float(worst_down), "worst_share_of_min_cut_by_weights_alone": float(weights),
        "worst_share_of_strength": float(worst_both), "exact_packings_equal_to_strength": exact, "most_trees_before": before,
        "most_trees_after": after, "cpu_s": time.process_time() - start,
    }  # fmt: skip


def classes_row(name: str) -> dict[str, Any]:
    """Classes of at least three GPUs; in how many one undirected packing beats reduce-scatter and all-gather one after the other."""
    graphs = allocation_graphs(name, 3)
    unit = min(g.unit_Bps for g in graphs)  # rates of all allocations in one unit, so that wider links stay another class
    graphs = [replace(g, arcs={arc: rate * g.unit_Bps // unit for arc, rate in g.arcs.items()}, unit_Bps=unit) for g in graphs]
    found = {canonical(graph)[0]: graph for graph in graphs}
    gains = []
    for allocation, graph in found.items():
        one = 1 / strength(graph.ranks, two_way(allocation)).ratio
        two = 2 * worst_cut(graph, [1] * graph.ranks).ratio / graph.ranks
        gains.append(two / one)
    return {
        "what": "allocation classes", "fabric": name, "classes": len(found), "undirected_packing_faster_in": sum(g > 1 for g in gains),
        "most": str(max(gains)),
    }  # fmt: skip


def weights_row(epsilon: float) -> dict[str, Any]:
    """Multiplicative weights alone on all eight GPUs from GPU 0, optimum 6 links."""
    edges = path_edges(canonical(allocation_graphs("dgx1-v100", 8)[0], 0)[0]).edges
    start = time.process_time()
    done = pack_by_weights(edges, ARBORESCENCE, np.array([0], np.int32), epsilon=epsilon, most=100_000)
    cpu_s = time.process_time() - start
    assert done is not None
    load = np.zeros(len(edges.capacity))
    for chosen, amount in zip(*done, strict=True):
        load[chosen[0][chosen[0] >= 0]] += amount
    return {
        "what": "weights", "epsilon": epsilon, "rounds": len(done[1]), "trees": len({c.tobytes() for c in done[0]}),
        "rate": float(done[1].sum() / (load / edges.capacity).max()), "optimum": 6, "cpu_s": cpu_s,
    }  # fmt: skip


def arborescence_row() -> dict[str, Any]:
    """One cheapest arborescence: our kernel against networkx, on the eight GPUs."""
    edges = path_edges(canonical(allocation_graphs("dgx1-v100", 8)[0], 0)[0]).edges
    length, root = np.random.default_rng(0).uniform(1, 2, len(edges.capacity)), np.array([0], np.int32)
    graph = nx.DiGraph()
    graph.add_weighted_edges_from((int(u), int(v), float(w)) for u, v, w in zip(edges.src, edges.dst, length, strict=True) if v)
    start = time.process_time()
    for _ in range(200):
        ours = cheapest_trees(edges, ARBORESCENCE, root, length)
    middle = time.process_time()
    for _ in range(20):
        theirs = nx.minimum_spanning_arborescence(graph)
    end = time.process_time()
    assert ours is not None and abs(length @ ours[1] - theirs.size(weight="weight")) < 1e-9
    ours_s, theirs_s = (middle - start) / 200, (end - middle) / 20
    return {"what": "arborescence", "ours_cpu_s": ours_s, "networkx_cpu_s": theirs_s, "ratio": theirs_s / ours_s}


def three_and_five() -> Fabric:
    """Two servers of 3 and 5 GPUs of a DGX-1V, every GPU with a 12.5 GB/s port to one switch."""
    box = load_fabric("dgx1-v100:2")
    keep = {f"box0/gpu{i}" for i in (0, 1, 2)} | {f"box1/gpu{i}" for i in (0, 1, 2, 3, 7)}
    links = [x for x in box.links if x.src in keep and x.dst in keep]
    links += [Link(src=a, dst=b, rate_Bps=12_500_000_000, latency_s=1.3e-6) for g in sorted(keep) for a, b in ((g, "net"), ("net", g))]
    devices = tuple(Device(name=d.name, group=d.group) for d in box.devices if d.name in keep)
    return Fabric(name="3+5", devices=devices, switches=(Switch(name="net"),), links=tuple(links))


def simulated_row(fabric: Fabric, gpus: tuple[int, ...] | None, op: str, size: int) -> dict[str, Any]:
    ranks = tuple(fabric.devices[i].name for i in gpus) if gpus else tuple(d.name for d in fabric.devices)
    problem = CollectiveProblem(fabric=fabric, op=op, ranks=ranks, size_bytes=size)
    row: dict[str, Any] = {"what": "simulated", "fabric": fabric.name, "gpus": list(gpus or range(len(ranks))), "op": op, "size_bytes": size}
    for name, strategy in (("blink", Blink()), ("ring", Ring()), ("forestcoll", ForestColl())):
        start = time.process_time()
        try:
            plan = strategy.plan(problem, rng=np.random.default_rng(0))
        except Unsupported as refusal:
            row[name] = refusal.message
            continue
        row[f"{name}_plan_cpu_s"] = time.process_time() - start
        row[f"{name}_s"] = simulated_time_s(plan.program, fabric, ranks, None)
        if name == "blink":
            row["form"], row["over_bound"] = plan.notes["form"], row["blink_s"] / float(plan.bound) if plan.bound else None
    for other in ("ring", "forestcoll"):
        if f"{other}_s" in row:
            row[f"{other}_over_blink"] = row[f"{other}_s"] / row["blink_s"]
    return row


def main() -> None:
    simulated_row(load_fabric("two-islands"), None, "all-reduce", 1 << 20)  # compiles
    weights_row(0.2)
    rows = [allocations_row("dgx1-v100"), allocations_row("dgx1-p100"), classes_row("dgx1-v100"), classes_row("dgx1-p100")]
    rows += [weights_row(epsilon) for epsilon in (0.2, 0.1, 0.05, 0.02)] + [arborescence_row()]
    box = load_fabric("dgx1-v100")
    for gpus in ((0, 1, 3), (0, 1, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3, 7), (0, 1, 3, 4, 5), tuple(range(7)), tuple(range(8))):
        rows += [simulated_row(box, gpus, op, size) for op in ("broadcast", "all-reduce") for size in (1 << 16, 1 << 28)]
    rows += [simulated_row(three_and_five(), None, "all-reduce", size) for size in (1 << 16, 1 << 28)]
    rows += [simulated_row(load_fabric("dgx-a100:1"), None, "all-reduce", size) for size in (1 << 10, 1 << 16, 1 << 28)]
    print(json.dumps(machine.record("blink", rows), indent=1))


if __name__ == "__main__":
    main()
