"""ForestColl: certified link loads against the exact optimum, and simulated rates against it.

Run: `python benchmarks/forestcoll_optimum.py` (about ten minutes; prints one line per case, raw output goes to
benchmarks/results/forestcoll_optimum.json).
Presets, at their default size and with two units: trees for the exact optimum; the largest load over rate of any link, in whole numbers, must
equal the optimum, whose certificate the checker proves again from the fabric. Then the default plan for 1 GiB on the simulator, with the
presets' latencies (library included) and without any: the first is what a user gets, the second shows what pipelining and shared links cost.
Where the first falls short of 99 %, a finer plan is tried too (more pieces, a channel per tree), as far as its simulation stays affordable.
`most_possible_share` says what latency alone forbids: a byte that crosses the bottleneck cut on a link has first come from a rank inside and has
still to get to one outside, so every link of the cut works that much shorter. Whatever the schedule, time >= (bytes + sum of rate · latency) /
rate of the cut.
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

from meshwright.check.certificate import check_bound
from meshwright.decide.collective import CollectivePlan, CollectiveProblem, ForestColl
from meshwright.decide.collective.bounds.collective import bandwidth_bound
from meshwright.decide.collective.forestcoll.forest import Forest, build_forest
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.decide.collective.value import simulated_time_s
from meshwright.errors import MeshwrightError
from meshwright.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric_name import load_fabric
from meshwright.presets import PRESETS

GIB = 1 << 30
ENOUGH, NEARLY = 0.99, Fraction(999, 1000)
MOST_STEPS = 3_000_000  # of a finer plan
MOST_SIMULATE_S = 12.0
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


def most_possible_share(problem: CollectiveProblem) -> float:
    """Share of the bandwidth bound that no schedule exceeds because of latency; see the module's docstring."""
    fabric, bound = problem.fabric, bandwidth_bound(problem)
    inside = set(bound.certificate.data["inside"])
    devices = {d.name for d in fabric.devices}
    before = distances(fabric, devices & inside, forward=True)
    after = distances(fabric, devices - inside, forward=False)
    rate, lost = 0, Fraction(0)
    for x in fabric.links:
        if x.src in inside and x.dst not in inside:
            library_s = x.library_latency_s if x.src in devices else 0.0
            latency_s = Fraction(before[x.src]) + Fraction(x.latency_s) + Fraction(library_s) + Fraction(after[x.dst])
            rate, lost = rate + x.rate_Bps, lost + x.rate_Bps * latency_s
    return float(bound.exact / (bound.exact + lost / rate))


def distances(fabric: Fabric, start: set[str], *, forward: bool) -> dict[str, float]:
    """Least latency from the nearest of `start` to every node, with what the library adds on the first link; or wire only, from every node to it."""
    far = {name: (0.0 if name in start else float("inf")) for name in (*(d.name for d in fabric.devices), *(s.name for s in fabric.switches))}
    changed = True
    while changed:
        changed = False
        for x in fabric.links:
            u, v = (x.src, x.dst) if forward else (x.dst, x.src)
            latency_s = x.latency_s + (x.library_latency_s if forward and u in start else 0.0)
            if far[u] + latency_s < far[v]:
                far[v], changed = far[u] + latency_s, True
    return far


def share(problem: CollectiveProblem, plan: CollectivePlan, *, still: bool = False) -> float:
    fabric = problem.fabric
    if still:
        fabric = replace(fabric, links=tuple(replace(x, latency_s=0.0, library_latency_s=0.0) for x in fabric.links))
    return float(bandwidth_bound(problem)) / simulated_time_s(plan.program, fabric, problem.ranks, None)


def preset_case(name: str, op: str, *, with_finer: bool = True) -> dict[str, Any]:
    fabric = load_fabric(name)
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
    simulate_s = time.process_time() - start
    case["simulated_share_without_latency"] = share(problem, plan, still=True)
    case["most_possible_share"] = most_possible_share(problem)
    if case["simulated_share"] < ENOUGH and with_finer:
        case |= finer(problem, plan, simulate_s)
    return case


def finer(problem: CollectiveProblem, plan: CollectivePlan, simulate_s: float) -> dict[str, Any]:
    """More pieces, a channel per tree, and as many trees as the optimum needs.

    The largest such plan whose simulation should keep to MOST_SIMULATE_S.
    """
    exact = {} if Fraction(plan.notes["ratio"]) > NEARLY else {"trees": None, "structure": True}
    options = {**plan.options, **exact, "quantum": 1, "pieces": 1, "depth": 16, "unroll": None, "fold": None}
    one = ForestColl(**options).plan(problem, rng=np.random.default_rng(0))
    affordable = min(MOST_STEPS, MOST_SIMULATE_S / max(simulate_s, 1e-3) * plan.program.executed_steps)
    pieces = 1
    while pieces < 1024 and 2 * pieces * one.program.executed_steps <= affordable:
        pieces *= 2
    if pieces < 2 or (not exact and pieces <= plan.notes["pieces"]):
        return {"finer": f"not simulated: {one.program.executed_steps} steps per piece"}
    found = ForestColl(**{**options, "pieces": pieces}).plan(problem, rng=np.random.default_rng(0))
    return {
        "finer_pieces": pieces, "finer_steps": found.program.executed_steps, "finer_share": share(problem, found),
        "finer_share_without_latency": share(problem, found, still=True),
    }  # fmt: skip


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
    best = [max(c["simulated_share"], c.get("finer_share", 0.0)) for c in planned]
    enough = [share >= ENOUGH or c["most_possible_share"] < ENOUGH for c, share in zip(planned, best, strict=True)]
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
        {"what": "the same, best of default and finer plan, or latency forbids it", "value": sum(enough), "unit": "cases", "limit": len(known)},
        {"what": "the same, default plan, fabrics without latency", "value": sum(c["simulated_share_without_latency"] >= ENOUGH for c in planned),
         "unit": "cases", "limit": len(known)},
    ]  # fmt: skip
    for case, share in zip(planned, best, strict=True):
        if case["simulated_share"] < ENOUGH:
            limited = f", latency allows {case['most_possible_share']:.4f}" if case["most_possible_share"] < ENOUGH else ""
            rows.append(reached(f"{case['fabric']} {case['op']}: simulated, default plan{limited}", case["simulated_share"]))
            if share > case["simulated_share"]:
                rows.append(reached(f"{case['fabric']} {case['op']}: simulated, {case['finer_pieces']} pieces", share))
    return rows


def main() -> None:
    """All cases; or with names of fabrics as arguments only the default plans of these, the rest as the kept result has it."""
    only, kept = sys.argv[1:], {}
    if only:
        kept = json.loads((machine.RESULTS / "forestcoll_optimum.json").read_text())
    random = kept["random"] if only else random_cases(1000)
    print(json.dumps({k: v for k, v in random.items() if k not in ("refused", "unequal")}), flush=True)
    known = {(c["fabric"], c["op"]): c for c in kept.get("presets", ())}
    presets = []
    for name in names():
        for op in OPERATIONS:
            old = known.get((name, op), {})
            finer_then = {k: v for k, v in old.items() if k.startswith("finer")}
            presets.append(old if only and name not in only else preset_case(name, op, with_finer=not finer_then) | finer_then)
            if presets[-1] is not old:
                print(json.dumps(presets[-1]), flush=True)
    again = sorted({*only, *kept.get("default_plans_taken_again", ())})  # the rest is of an earlier run than the machine's line says
    machine.record("forestcoll_optimum", rows_of(presets, random), presets=presets, random=random, default_plans_taken_again=again)


if __name__ == "__main__":
    main()
