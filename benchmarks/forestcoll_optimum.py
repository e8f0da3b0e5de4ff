"""ForestColl: certified link loads against the exact optimum, and simulated rates against it.

Run: `python benchmarks/forestcoll_optimum.py` (raw output goes to benchmarks/results/forestcoll_optimum.json).
Presets: trees for the exact optimum; the largest load over rate of any link, in whole numbers, must equal the optimum, whose certificate the
checker proves again from the fabric. Then the default plan for 1 GiB on the simulator, with the presets' latencies (library included) and
without any: the first is what a user gets, the second shows what pipelining and shared links cost alone.
Random fabrics: 1,000 balanced ones with up to 4 switches, all four operations, against every cut by brute force.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.check.certificate import check_bound
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.bounds import bandwidth_bound
from meshwright.decide.collective.forest import Forest, build_forest
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.decide.collective.value import simulated_time_s
from meshwright.errors import MeshwrightError
from meshwright.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric_name import load_fabric
from meshwright.presets import PRESETS

RESULTS = Path(__file__).parent / "results" / "forestcoll_optimum.json"
GIB = 1 << 30
OPERATIONS = ("all-gather", "reduce-scatter", "broadcast", "reduce")


def names() -> list[str]:
    """Every preset at its default size, and with two units where the default is one."""
    out = []
    for preset in PRESETS.values():
        out += [f"{preset.name}:{n}" for n in dict.fromkeys((preset.default, 2)) if n * preset.devices_per_unit <= 144]
    return out


def forest_of(graph: RateGraph, op: str, root: int, **limits: Any) -> Forest:
    of = graph if op in ("all-gather", "broadcast") else graph.reversed()
    weight = [int(r == root) for r in range(graph.ranks)] if op in ("broadcast", "reduce") else [1] * graph.ranks
    return build_forest(of, weight, max_trees=10**9, **limits)


def largest_load(forest: Forest) -> Fraction:
    """Load over rate of the fullest link, per tree of a root: what the optimum bounds from below."""
    return max(Fraction(load, forest.k * forest.graph.arcs[arc]) for arc, load in forest.load.items())


def preset_row(name: str, op: str) -> dict[str, Any]:
    fabric = load_fabric(name)
    row: dict[str, Any] = {"what": "preset", "fabric": name, "op": op}
    if len(fabric.devices) < 2:
        return row | {"skipped": "one device"}
    problem = CollectiveProblem.on(fabric, op, GIB)
    graph = rate_graph(fabric, problem.ranks)
    try:
        forest = forest_of(graph, op, 0)
        shares = 1 if op in ("broadcast", "reduce") else graph.ranks
        bound = bandwidth_bound(problem)
        load_s = largest_load(forest) * GIB / shares / graph.unit_Bps
        row |= {"k": forest.k, "method": forest.method, "height": forest.height, "loads_equal_optimum": load_s == bound.exact}
        row["certificate_proved"] = not check_bound(bound, fabric)
        start = time.process_time()
        plan = ForestColl().plan(problem, rng=np.random.default_rng(0))
        row |= {"plan_cpu_s": time.process_time() - start, "plan_share_of_optimum": plan.notes["ratio"], "plan_height": plan.notes["height"]}
        row["pieces"] = plan.notes["pieces"]
        row["simulated_share"] = float(bound) / simulated_time_s(plan.program, fabric, problem.ranks, None)
        still = replace(fabric, links=tuple(replace(x, latency_s=0.0, library_latency_s=0.0) for x in fabric.links))
        row["simulated_share_without_latency"] = float(bound) / simulated_time_s(plan.program, still, problem.ranks, None)
    except MeshwrightError as error:
        row["refused"] = str(error)
    return row


def random_fabric(rng: np.random.Generator) -> Fabric:
    """Sums of closed walks, so every node takes in what it gives out; all devices on one of them."""
    devices, switches = int(rng.integers(2, 7)), int(rng.integers(0, 5))
    actors = [f"d{i}" for i in range(devices)] + [f"s{i}" for i in range(switches)]
    rates: dict[tuple[str, str], int] = {}
    walks = [list(rng.permutation(actors))] + [list(rng.permutation(actors)[: int(rng.integers(2, len(actors) + 1))]) for _ in range(devices)]
    for walk in walks:
        rate = int(rng.integers(1, 30))
        for a, b in zip(walk, [*walk[1:], walk[0]], strict=True):
            rates[str(a), str(b)] = rates.get((str(a), str(b)), 0) + rate
    links = tuple(Link(src=a, dst=b, rate_Bps=r) for (a, b), r in sorted(rates.items()))
    return Fabric(name="random", devices=tuple(Device(name=f"d{i}") for i in range(devices)),
                  switches=tuple(Switch(name=f"s{i}") for i in range(switches)), links=links)  # fmt: skip


def brute_force(graph: RateGraph, op: str, root: int) -> Fraction:
    """The worst cut of all, one by one."""
    best = Fraction(0)
    for inside in product((False, True), repeat=graph.nodes):
        within = [r for r in range(graph.ranks) if inside[r]]
        missing = len(within) < graph.ranks
        demand = len(within) if op == "all-gather" else graph.ranks - len(within)
        if op == "broadcast":
            demand = int(root in within)
        elif op == "reduce":
            demand, missing = int(root not in within), bool(within)
        elif op == "reduce-scatter":
            missing = bool(within)
        leaving = sum(rate for (u, v), rate in graph.arcs.items() if inside[u] and not inside[v])
        if missing and demand and leaving:
            best = max(best, Fraction(demand, leaving))
    return best


def random_row(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(2026)
    row: dict[str, Any] = {"what": "random fabrics with switches", "fabrics": count, "cases": 0, "equal": 0, "refused": 0, "unequal": []}
    start = time.process_time()
    for number in range(count):
        fabric = random_fabric(rng)
        graph = rate_graph(fabric, [d.name for d in fabric.devices])
        root = int(rng.integers(graph.ranks))
        for op in OPERATIONS:
            row["cases"] += 1
            try:
                found = largest_load(forest_of(graph, op, root))
            except MeshwrightError as error:
                row["refused"] += 1
                row.setdefault("refusals", []).append({"fabric": number, "op": op, "why": str(error)})
                continue
            if found == brute_force(graph, op, root):
                row["equal"] += 1
            else:
                row["unequal"].append({"fabric": number, "op": op})
    return row | {"cpu_s": time.process_time() - start}


def main() -> None:
    rows = [preset_row(name, op) for name in names() for op in OPERATIONS] + [random_row(1000)]
    document = {"schema": "meshwright.benchmark", "version": 1, "benchmark": "forestcoll_optimum", "python": platform.python_version(), "rows": rows}
    text = json.dumps(document, indent=1)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text + "\n")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
