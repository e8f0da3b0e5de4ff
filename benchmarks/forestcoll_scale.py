"""ForestColl at the size of clusters: exact bounds, trees and plans for 1,024 and 8,192 devices, their proof and their memory; sweeps over sizes.

Run: `python benchmarks/forestcoll_scale.py` (about eight minutes; raw output goes to benchmarks/results/forestcoll_scale.json). Every case is a
process of its own, after an untimed run on a small fabric that loads compiled kernels; seconds are processor seconds, memory is the process's
largest resident size as the kernel counts it (VmHWM), interpreter and libraries included. Fabrics are built from presets inside the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import machine

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, ForestColl, collective_bound
from meshwright.decide.collective.forestcoll.forest import build_forest
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.io.plan.program import program_bytes

GIB, MB = 1 << 30, 10**6
MISSING = {
    "one NIC": ("box3/nic5",),
    "one GPU": ("box3/gpu5", "box3/nic5"),
    "two NICs of a box, a GPU of another": ("box3/nic5", "box3/nic6", "box9/gpu0", "box9/nic0"),
    "a NIC in every eighth box": tuple(f"box{b}/nic{b % 8}" for b in range(0, 128, 8)),
}


def without(fabric: Fabric, names: tuple[str, ...]) -> Fabric:
    gone = set(names)
    return replace(
        fabric,
        devices=tuple(d for d in fabric.devices if d.name not in gone),
        switches=tuple(s for s in fabric.switches if s.name not in gone),
        links=tuple(x for x in fabric.links if x.src not in gone and x.dst not in gone),
    )


def clock(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    out = work()
    return time.process_time() - start, out


def bound_case(name: str) -> dict[str, Any]:
    def work() -> Any:
        return collective_bound(CollectiveProblem.on(load_fabric(name), "all-gather", GIB))

    collective_bound(CollectiveProblem.on(load_fabric("two-islands"), "all-gather", GIB))
    cpu_s, bound = clock(work)
    return {"cpu_s": cpu_s, "bound_s": bound.value}


def trees_case(name: str, missing: str, trees: int | None, structure: bool) -> dict[str, Any]:
    small = load_fabric("mi250:2")
    build_forest(rate_graph(small, [d.name for d in small.devices]), [1] * 32, trees=1)

    def work() -> Any:
        fabric = without(load_fabric(name), MISSING[missing]) if missing else load_fabric(name)
        graph = rate_graph(fabric, [d.name for d in fabric.devices])
        return build_forest(graph, [1] * graph.ranks, trees=trees, structure=structure)

    cpu_s, forest = clock(work)
    boxes = len({d.group for d in load_fabric(name).devices})
    return {
        "devices": forest.graph.ranks, "method": forest.method, "k": forest.k, "trees": forest.distinct, "height": forest.height,
        "height_limit": 2 * ceil(log2(boxes)) + 2, "share_of_optimum": str(forest.ratio), "cpu_s": cpu_s,
    }  # fmt: skip


def plan_case(name: str, missing: str, op: str) -> dict[str, Any]:
    ForestColl().plan(CollectiveProblem.on(load_fabric("dgx-h100:4"), op, GIB), rng=np.random.default_rng(0))

    def work() -> Any:
        fabric = without(load_fabric(name), MISSING[missing]) if missing else load_fabric(name)
        problem = CollectiveProblem.on(fabric, op, GIB, effort_s=600)
        return problem, ForestColl().plan(problem, rng=np.random.default_rng(0))

    cpu_s, (problem, plan) = clock(work)
    size = len(program_bytes(plan.program))
    check_s, verdict = clock(lambda: check_program(plan.program))
    case = {
        "devices": len(problem.ranks), "cpu_s": cpu_s, "file_bytes": size, "stored_steps": len(plan.program.steps),
        "executed_steps": plan.program.executed_steps, "folded": plan.program.fold is not None, "method": plan.notes["method"],
        "k": plan.notes["trees_per_root"], "height": plan.notes["height"], "height_limit": 2 * ceil(log2(128)) + 2,
        "share_of_optimum": plan.notes["ratio"], "check": verdict.status, "check_cpu_s": check_s, "pieces": plan.notes["pieces"],
    }  # fmt: skip
    if plan.program.fold is not None:
        sim_s, time_s = clock(lambda: simulated_time_s(plan.program, problem.fabric, problem.ranks, None))
        case |= {"simulated_share_of_bound": float(plan.bound) / time_s, "simulate_cpu_s": sim_s}
    return case


def sizes_case(name: str, op: str) -> dict[str, Any]:
    """Planning time of sizes from 1 KiB to 1 GiB in turn, simulation left out."""
    ForestColl().plan(CollectiveProblem.on(load_fabric("dgx-h100:2"), op, GIB), rng=np.random.default_rng(0))
    fabric, times = load_fabric(name), []
    for power in range(10, 31):
        problem = CollectiveProblem.on(fabric, op, 1 << power)
        times.append(clock(lambda problem=problem: ForestColl().plan(problem, rng=np.random.default_rng(0)))[0])
    return {"first_cpu_s": times[0], "largest_further_cpu_s": max(times[1:]), "all_cpu_s": sum(times)}


def rows_of(name: str, arguments: list[Any], case: dict[str, Any]) -> list[dict[str, Any]]:
    """What the case says against the limits that apply to it."""
    where = " without " + arguments[1] if name in ("trees_case", "plan_case") and arguments[1] else ""
    what = f"{arguments[0]}{where}"

    def row(text: str, value: float, unit: str, limit: float, ratio: float | None = None) -> dict[str, Any]:
        return {"what": f"{what}: {text}", "value": value, "unit": unit, "limit": limit} | ({} if ratio is None else {"ratio": ratio})

    if "failed" in case:
        return [{"what": f"{what}: {name} failed: {case['failed']}", "value": 1, "unit": "failures", "limit": 0, "ratio": float("inf")}]
    if name == "bound_case":
        return [row("exact all-gather bound", case["cpu_s"], "s", 1.0 if arguments[0] == "dgx-h100:128" else 15.0)]
    if name == "sizes_case":
        return [row(f"{arguments[1]}, first size planned", case["first_cpu_s"], "s", 2.0),
                row(f"{arguments[1]}, slowest of 20 further sizes", case["largest_further_cpu_s"], "s", 0.15)]  # fmt: skip
    share = Fraction(case["share_of_optimum"])
    if name == "trees_case":
        seconds, bytes_ = (2.0, None) if case["devices"] == 32 else (15.0, None) if case["devices"] == 128 else (600.0, 8e9) if where else (60.0, 2e9)
        kind = f"trees, k={case['k']}, {case['method']}, {float(share):.4f} of the optimum"
        rows = [row(kind, case["cpu_s"], "s", seconds)]
        if bytes_ is not None:
            rows.append(row(f"{kind}, memory", case["peak_bytes"], "B", bytes_))
        if not arguments[0].startswith("mi250") or share == 1:
            rows.append(row(f"{kind}, logical height", case["height"], "hops", case["height_limit"]))
        return rows
    kind = f"{arguments[2]} plan, {float(share):.4f} of the optimum"
    passed = {"what": f"{what}: {kind}, proved by the checker", "value": int(case["check"] == "ok"), "unit": "ok", "limit": 1}
    passed["ratio"] = 1.0 if case["check"] == "ok" else float("inf")
    return [
        row(f"{kind}, trees and program", case["cpu_s"], "s", 600.0 if where else 60.0), row(f"{kind}, file", case["file_bytes"] / MB, "MB", 50.0),
        row(f"{kind}, check by value", case["check_cpu_s"], "s", 60.0), passed,
        row(f"{kind}, memory with check", case["peak_bytes"], "B", 8e9 if where else 2e9),
        row(f"{kind}, logical height", case["height"], "hops", case["height_limit"]),
    ]  # fmt: skip


CASES: list[tuple[str, list[Any]]] = [
    ("bound_case", ["dgx-h100:128"]),
    ("bound_case", ["dgx-h100:1024"]),
    ("trees_case", ["mi250:2", "", 1, True]),
    ("trees_case", ["dgx-h100:16", "", None, False]),
    ("trees_case", ["dgx-h100:16", "", None, True]),
    ("trees_case", ["dgx-h100:128", "", None, True]),
    ("trees_case", ["dgx-h100:128?net=rails", "", None, True]),
    ("trees_case", ["dgx-a100:128", "", None, True]),
    ("trees_case", ["dgx-h100:1024", "", None, True]),
    *[("trees_case", ["dgx-h100:128", missing, trees, True]) for missing in MISSING for trees in (1, None)],
    ("trees_case", ["mi250:2", "", 83, True]),
    *[("plan_case", ["dgx-h100:128", "", op]) for op in ("all-gather", "reduce-scatter", "all-reduce", "broadcast")],
    *[("plan_case", ["dgx-h100:128", missing, "all-gather"]) for missing in ("one NIC", "two NICs of a box, a GPU of another")],
    *[("sizes_case", ["dgx-h100:8", op]) for op in ("all-gather", "all-reduce", "broadcast")],
]


def child(number: int) -> None:
    name, arguments = CASES[number]
    case = globals()[name](*arguments)
    print(json.dumps(case | {"peak_bytes": machine.memory_high_water_bytes()}))


def main() -> None:
    cases, rows = [], []
    for number, (name, arguments) in enumerate(CASES):
        done = subprocess.run([sys.executable, __file__, str(number)], capture_output=True, text=True, timeout=1200, check=False)
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        case = json.loads(done.stdout) if done.returncode == 0 else {"failed": why}
        cases.append({"case": name, "arguments": arguments, **case})
        rows += rows_of(name, arguments, case)
        print(json.dumps(cases[-1]), flush=True)
    machine.record("forestcoll_scale", rows, cases=cases)


if __name__ == "__main__":
    child(int(sys.argv[1])) if len(sys.argv) > 1 else main()
