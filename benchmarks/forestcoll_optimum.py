"""ForestColl: certified link loads against the exact optimum, and simulated rates against it.

Run: `python benchmarks/forestcoll_optimum.py` (about a quarter of an hour; prints one line per case, raw output goes to
benchmarks/results/forestcoll_optimum.json).
Presets, at their default size and with two units: trees for the exact optimum; the largest load over rate of any link, in whole numbers, must
equal the optimum, whose certificate the checker proves again from the fabric. Then the default plan for 1 GiB on the simulator, with the
presets' latencies (library included), with those of the wires alone, and without any: the first is what a user gets, the others show what the
library's overhead, and what pipelining and shared links cost.
`most_possible_share` says what latency forbids, whatever the schedule (`decide.collective.bounds.delay`): what crosses a cut last has still to get
where it is needed. The checker proves each such bound again.
Random fabrics: 1,000 balanced ones with up to 4 switches, all four operations, against every cut by brute force; a splitting that sticks is kept
with its graph.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import machine

from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.collective import CollectivePlan, CollectiveProblem, ForestColl
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.bounds.delay import delay_bound
from meshwright.decide.collective.forestcoll.forest import Forest, build_forest
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.errors import MeshwrightError
from meshwright.fabric.edit import forwarding_only
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.fabric.machines import MACHINES
from meshwright.fabric.presets import PRESETS
from meshwright.io.fabric.name import load_fabric

GIB = 1 << 30
ENOUGH = 0.99
OPERATIONS = ("all-gather", "reduce-scatter", "broadcast", "reduce")


def names() -> list[str]:
    """Every preset at its default size, and with two units where the default is one; TPU slices, whose units are chips, at their default."""
    out = []
    for preset in PRESETS.values():
        if preset.name in MACHINES and MACHINES[preset.name].shape == "slice":
            out.append(f"{preset.name}:{preset.default}")
            continue
        out += [f"{preset.name}:{n}" for n in dict.fromkeys((preset.default, 2)) if n * preset.devices_per_unit <= 144]
    return out


def forest_of(graph: RateGraph, op: str, root: int, **limits: Any) -> Forest:
    of = graph if op in ("all-gather", "broadcast") else graph.reversed()
    weight = [int(r == root) for r in range(graph.ranks)] if op in ("broadcast", "reduce") else [1] * graph.ranks
    return build_forest(of, weight, max_trees=10**9, **limits)


def largest_load(forest: Forest) -> Fraction:
    """Load over rate of the fullest link, per tree of a root: what the optimum bounds from below."""
    return max(Fraction(load, forest.k * forest.graph.arcs[arc]) for arc, load in forest.load.items())


def most_possible_share(problem: CollectiveProblem) -> tuple[float, bool]:
    """Share of the bandwidth bound that no schedule exceeds because of latency, and whether the checker proves that again."""
    bound = delay_bound(problem)
    if bound is None:
        return 1.0, True
    return float(bandwidth_bound(problem).exact / bound.exact), not check_bound(bound, problem.fabric)


def share(problem: CollectiveProblem, plan: CollectivePlan, **latencies: float) -> float:
    """Share of the bandwidth bound that the plan reaches with these latencies of all links instead of the fabric's."""
    fabric = problem.fabric
    fabric = replace(fabric, links=tuple(replace(x, **latencies) for x in fabric.links))  # type: ignore[arg-type]
    return float(bandwidth_bound(problem)) / simulated_time_s(plan.program, fabric, problem.ranks, None)


def preset_case(name: str, op: str) -> dict[str, Any]:
    fabric = forwarding_only(load_fabric(name))
    case: dict[str, Any] = {"fabric": name, "op": op}
    if len(fabric.devices) < 2:
        return case | {"skipped": "one device"}
    problem = CollectiveProblem.on(fabric, op, GIB)
    graph = rate_graph(fabric, problem.ranks)
    try:
        forest = forest_of(graph, op, 0)
    except MeshwrightError as error:
        arcs = [[graph.names[u], graph.names[v], rate * graph.unit_Bps] for (u, v), rate in graph.arcs.items()]
        return case | {"refused": str(error), "graph": arcs}
    shares = 1 if op in ("broadcast", "reduce") else graph.ranks
    bound = bandwidth_bound(problem)
    load_s = largest_load(forest) * GIB / shares / graph.unit_Bps
    case |= {"k": forest.k, "method": forest.method, "exact_height": forest.height, "loads_equal_optimum": load_s == bound.exact}
    case["certificate_proved"] = not check_bound(bound, fabric)
    start = time.process_time()
    plan = ForestColl().plan(problem, rng=np.random.default_rng(0))
    case |= {"plan_cpu_s": round(time.process_time() - start, 3), "trees_per_root": plan.notes["trees_per_root"]}
    case |= {"height": plan.notes["height"], "pieces": plan.notes["pieces"], "share_of_optimum": float(Fraction(plan.notes["ratio"]))}
    start = time.process_time()
    case["simulated_share"] = share(problem, plan)
    case["simulate_cpu_s"] = round(time.process_time() - start, 3)
    case["simulated_share_wires_alone"] = share(problem, plan, library_latency_s=0.0)
    case["simulated_share_without_latency"] = share(problem, plan, latency_s=0.0, library_latency_s=0.0)
    case["most_possible_share"], case["latency_certificate_proved"] = most_possible_share(problem)
    return case


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


def random_cases(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(2026)
    out: dict[str, Any] = {"fabrics": count, "cases": 0, "equal": 0, "refused": [], "unequal": []}
    start = time.process_time()
    for number in range(count):
        fabric = random_fabric(rng)
        graph = rate_graph(fabric, [d.name for d in fabric.devices])
        root = int(rng.integers(graph.ranks))
        for op in OPERATIONS:
            out["cases"] += 1
            arcs = [[x.src, x.dst, x.rate_Bps] for x in fabric.links]
            try:
                found = largest_load(forest_of(graph, op, root))
            except MeshwrightError as error:
                out["refused"].append({"fabric": number, "op": op, "root": root, "why": str(error), "graph": arcs})
                continue
            if found == brute_force(graph, op, root):
                out["equal"] += 1
            else:
                out["unequal"].append({"fabric": number, "op": op, "root": root, "graph": arcs})
    return out | {"cpu_s": round(time.process_time() - start, 2)}


def rows_of(presets: list[dict[str, Any]], random: dict[str, Any]) -> list[dict[str, Any]]:
    """Counts against how many there are (ratio 1 = all), and shares of the optimum against 99 % (ratio <= 1 = reached)."""

    def reached(what: str, share: float) -> dict[str, Any]:
        return {"what": what, "value": share, "unit": "share", "limit": ENOUGH, "ratio": round(ENOUGH / share, 4)}

    known = [c for c in presets if "skipped" not in c]
    planned = [c for c in known if "refused" not in c]
    enough = [c["simulated_share"] >= ENOUGH or c["most_possible_share"] < ENOUGH for c in planned]
    rows = [
        {"what": "presets x operations: link loads equal the exact optimum", "value": sum(c["loads_equal_optimum"] for c in planned),
         "unit": "cases", "limit": len(known)},
        {"what": "presets x operations: certificate proved again from the fabric", "value": sum(c["certificate_proved"] for c in planned),
         "unit": "cases", "limit": len(known)},
        {"what": "random fabrics with switches x operations: loads equal the brute-force optimum", "value": random["equal"], "unit": "cases",
         "limit": random["cases"]},
        {"what": "splittings that stuck, presets and random", "value": len(random["refused"]) + len(known) - len(planned), "unit": "cases",
         "limit": 0, "ratio": float(len(random["refused"]) + len(known) - len(planned))},
        {"what": "presets x operations: 99 % of the optimum simulated at 1 GiB, default plan", "unit": "cases", "limit": len(known),
         "value": sum(c["simulated_share"] >= ENOUGH for c in planned)},
        {"what": "the same, or latency forbids it", "value": sum(enough), "unit": "cases", "limit": len(known)},
        {"what": "presets x operations: what latency forbids, proved again by the checker",
         "value": sum(c["latency_certificate_proved"] for c in planned), "unit": "cases", "limit": len(known)},
        {"what": "the same, default plan, latency of the wires alone, no library overhead", "unit": "cases", "limit": len(known),
         "value": sum(max(c.get("simulated_share_wires_alone", 0.0), c["simulated_share"]) >= ENOUGH for c in planned)},
        {"what": "the same, default plan, fabrics without latency", "value": sum(c["simulated_share_without_latency"] >= ENOUGH for c in planned),
         "unit": "cases", "limit": len(known)},
    ]  # fmt: skip
    for case in planned:
        if case["simulated_share"] < ENOUGH:
            what = f"{case['fabric']} {case['op']}: simulated, default plan; latency allows {case['most_possible_share']:.4f}"
            rows.append(reached(what, case["simulated_share"]))
    return rows


def main() -> None:
    """All cases; or with names of fabrics ("dgx-h100:2", "dgx-h100:2 reduce") as arguments only these, the rest as the kept result has it."""
    only, kept = sys.argv[1:], {}
    if only:
        kept = json.loads((machine.RESULTS / "forestcoll_optimum.json").read_text())
    random = kept["random"] if only else random_cases(1000)
    print(json.dumps({k: v for k, v in random.items() if k not in ("refused", "unequal")}), flush=True)
    known = {(c["fabric"], c["op"]): c for c in kept.get("presets", ())}
    again = sorted({*only, *(kept.get("taken_again", ()) if only else ())})  # the rest is of an earlier run than the machine's line says
    presets = []
    for name in names():
        for op in OPERATIONS:
            if not only or {name, f"{name} {op}"} & set(only):
                known[name, op] = preset_case(name, op)
                print(json.dumps(known[name, op]), flush=True)
            presets.append(known[name, op])
    machine.record("forestcoll_optimum", rows_of(presets, random), presets=presets, random=random, taken_again=again)


if __name__ == "__main__":
    main()
