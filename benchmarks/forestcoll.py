"""ForestColl: time of exact bounds and of tree construction, against networkx for the same flows, and published optima.

Run: `python benchmarks/forestcoll.py` (prints one JSON document; raw output goes to benchmarks/results/forestcoll.json).
Times are processor seconds of this process, best of `REPEATS`, after one untimed run that compiles.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import machine
import networkx as nx
import numpy as np

from meshwright.decide.collective import CollectiveProblem, ForestColl, collective_bound
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll.forest import build_forest
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.maxflow import FlowNetwork

REPEATS = 3
GIB = 1 << 30


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    best, out = float("inf"), None
    for _ in range(REPEATS):
        start = time.process_time()
        out = work()
        best = min(best, time.process_time() - start)
    return best, out


def graph_of(name: str) -> RateGraph:
    fabric = load_fabric(name)
    return rate_graph(fabric, [d.name for d in fabric.devices])


def bound_row(name: str) -> dict[str, Any]:
    fabric = load_fabric(name)
    problem = CollectiveProblem.on(fabric, "all-gather", GIB)
    cpu_s, bound = timed(lambda: collective_bound(problem))
    return {"what": "all-gather bound", "fabric": name, "devices": len(problem.ranks), "cpu_s": cpu_s, "algbw_Bps": str(GIB / bound.exact)}


def trees_row(name: str, trees: int | None) -> dict[str, Any]:
    graph = graph_of(name)
    cpu_s, forest = timed(lambda: build_forest(graph, [1] * graph.ranks, trees=trees))
    algbw = graph.ranks * forest.k * graph.unit_Bps / forest.stretch
    return {
        "what": "trees", "fabric": name, "devices": graph.ranks, "k": forest.k, "trees": len(forest.trees), "height": forest.height, "cpu_s": cpu_s,
        "algbw_Bps": str(algbw), "share_of_optimum": float(forest.optimum * forest.k / forest.stretch),
    }  # fmt: skip


def program_row(name: str, op: str) -> dict[str, Any]:
    fabric = load_fabric(name)
    problem = CollectiveProblem.on(fabric, op, GIB)
    cpu_s, plan = timed(lambda: ForestColl().plan(problem, rng=np.random.default_rng(0)))
    return {"what": f"{op} program", "fabric": name, "steps": plan.program.executed_steps, "cpu_s": cpu_s}


def flows_row(name: str) -> dict[str, Any]:
    """The feasibility sweep at the optimum, one flow per device: our kernel against networkx (preflow-push, its default)."""
    graph = graph_of(name)
    cut = worst_cut(graph, [1] * graph.ranks)
    p, q = cut.ratio.numerator, cut.ratio.denominator
    arcs = {arc: rate * p for arc, rate in graph.arcs.items()} | {(graph.nodes, r): q for r in range(graph.ranks)}
    network, sinks = FlowNetwork.of(graph.nodes + 1, arcs), np.arange(graph.ranks, dtype=np.int32)
    ours, outcome = timed(lambda: network.sweep(graph.nodes, sinks, q * graph.ranks))
    full, values = timed(lambda: [network.max_flow(graph.nodes, v) for v in range(graph.ranks)])
    peer = nx.DiGraph()
    peer.add_edges_from((u, v, {"capacity": c}) for (u, v), c in arcs.items())
    start = time.process_time()
    theirs = [nx.maximum_flow_value(peer, graph.nodes, v) for v in range(graph.ranks)]
    peer_s = time.process_time() - start
    assert outcome.failed < 0 and theirs == values and min(theirs) >= q * graph.ranks
    return {
        "what": "max-flows", "fabric": name, "flows": graph.ranks, "sweep_cpu_s": ours, "values_cpu_s": full, "networkx_cpu_s": peer_s,
        "networkx_over_sweep": peer_s / ours, "networkx_over_values": peer_s / full,
    }  # fmt: skip


# All-gather optima, seconds per GB of shard: methods card, computed there with public code and independent solvers.
PUBLISHED = {
    "dgx1-v100": Fraction(7, 150), "ndv2:2": Fraction(16, 25), "dgx-a100:2": Fraction(3, 65), "dgx-a100:4": Fraction(3, 25),
    "dgx-a100:8": Fraction(7, 25), "mi250:1": Fraction(7, 150), "mi250:2": Fraction(15, 166), "dgx-h100:128": Fraction(127, 50),
}  # fmt: skip


def published_row(name: str) -> dict[str, Any]:
    graph = graph_of(name)
    found = worst_cut(graph, [1] * graph.ranks).ratio * 10**9 / graph.unit_Bps
    return {"what": "published optimum", "fabric": name, "ours": str(found), "published": str(PUBLISHED[name]), "equal": found == PUBLISHED[name]}


def main() -> None:
    bound_row("two-islands")
    trees_row("two-islands", None)  # compiles
    rows = [bound_row(name) for name in ("two-islands", "dgx-h100:16", "dgx-h100:128", "mi250:2")]
    rows += [trees_row("two-islands", None), trees_row("mi250:2", 1), trees_row("mi250:2", 5), trees_row("mi250:2", 83)]
    rows += [trees_row("dgx-a100:2", 13), trees_row("dgx-h100:16", None)]
    rows += [program_row("two-islands", "all-reduce"), program_row("mi250:2", "all-gather"), program_row("dgx-h100:16", "all-gather")]
    rows += [flows_row("dgx-h100:4"), flows_row("mi250:2")]
    rows += [published_row(name) for name in PUBLISHED]
    print(json.dumps(machine.record("forestcoll", rows), indent=1))


if __name__ == "__main__":
    main()
