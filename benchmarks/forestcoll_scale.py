"""ForestColl at the size of clusters: exact bounds, trees and plans for 1,024 and 8,192 devices, their proof and their memory.

Run: `python benchmarks/forestcoll_scale.py` (raw output goes to benchmarks/results/forestcoll_scale.json). Every row is a process of its own,
after an untimed run on a small fabric that loads compiled kernels; `cpu_s` are processor seconds, `peak_bytes` the process's largest resident
size as the kernel counts it (VmHWM), interpreter and libraries included. Fabrics are built from presets inside the time.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, ForestColl, collective_bound
from meshwright.decide.collective.forest import build_forest
from meshwright.decide.collective.rates import rate_graph
from meshwright.decide.collective.value import simulated_time_s
from meshwright.fabric import Fabric
from meshwright.io.fabric_name import load_fabric
from meshwright.io.program_json import program_bytes

RESULTS = Path(__file__).parent / "results" / "forestcoll_scale.json"
GIB = 1 << 30
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


def bound_row(name: str) -> dict[str, Any]:
    def work() -> Any:
        return collective_bound(CollectiveProblem.on(load_fabric(name), "all-gather", GIB))

    collective_bound(CollectiveProblem.on(load_fabric("two-islands"), "all-gather", GIB))
    cpu_s, bound = clock(work)
    return {"what": "all-gather bound, fabric included", "fabric": name, "cpu_s": cpu_s, "bound_s": bound.value}


def trees_row(name: str, missing: str, trees: int | None, structure: bool) -> dict[str, Any]:
    small = load_fabric("mi250:2")
    build_forest(rate_graph(small, [d.name for d in small.devices]), [1] * 32, trees=1)

    def work() -> Any:
        fabric = without(load_fabric(name), MISSING[missing]) if missing else load_fabric(name)
        graph = rate_graph(fabric, [d.name for d in fabric.devices])
        return build_forest(graph, [1] * graph.ranks, trees=trees, structure=structure)

    cpu_s, forest = clock(work)
    boxes = len({d.group for d in load_fabric(name).devices})
    return {
        "what": "trees, fabric included", "fabric": name, "missing": missing, "devices": forest.graph.ranks, "method": forest.method, "k": forest.k,
        "trees": forest.distinct, "height": forest.height, "height_limit": 2 * ceil(log2(boxes)) + 2, "share_of_optimum": str(forest.ratio),
        "cpu_s": cpu_s,
    }  # fmt: skip


def plan_row(name: str, missing: str, op: str) -> dict[str, Any]:
    ForestColl().plan(CollectiveProblem.on(load_fabric("dgx-h100:4"), op, GIB), rng=np.random.default_rng(0))

    def work() -> Any:
        fabric = without(load_fabric(name), MISSING[missing]) if missing else load_fabric(name)
        problem = CollectiveProblem.on(fabric, op, GIB, time_limit_s=600)
        return problem, ForestColl().plan(problem, rng=np.random.default_rng(0))

    cpu_s, (problem, plan) = clock(work)
    size = len(program_bytes(plan.program))
    check_s, verdict = clock(lambda: check_program(plan.program))
    row = {
        "what": f"{op} plan, 1 GiB", "fabric": name, "missing": missing, "devices": len(problem.ranks), "cpu_s": cpu_s, "file_bytes": size,
        "stored_steps": len(plan.program.steps), "executed_steps": plan.program.executed_steps, "folded": plan.program.fold is not None,
        "method": plan.notes["method"], "height": plan.notes["height"], "share_of_optimum": plan.notes["ratio"], "check": verdict.status,
        "check_cpu_s": check_s, "pieces": plan.notes["pieces"],
    }  # fmt: skip
    if plan.program.fold is not None:
        sim_s, time_s = clock(lambda: simulated_time_s(plan.program, problem.fabric, problem.ranks, None))
        row |= {"simulated_share_of_bound": float(plan.bound) / time_s, "simulate_cpu_s": sim_s}
    return row


ROWS: list[tuple[str, list[Any]]] = [
    ("bound_row", ["dgx-h100:128"]),
    ("bound_row", ["dgx-h100:1024"]),
    ("trees_row", ["mi250:2", "", 1, True]),
    ("trees_row", ["dgx-h100:16", "", None, False]),
    ("trees_row", ["dgx-h100:16", "", None, True]),
    ("trees_row", ["dgx-h100:128", "", None, True]),
    ("trees_row", ["dgx-h100:128?net=rails", "", None, True]),
    ("trees_row", ["dgx-a100:128", "", None, True]),
    ("trees_row", ["dgx-h100:1024", "", None, True]),
    *[("trees_row", ["dgx-h100:128", missing, trees, True]) for missing in MISSING for trees in (1, None)],
    *[("plan_row", ["dgx-h100:128", "", op]) for op in ("all-gather", "reduce-scatter", "all-reduce", "broadcast")],
    ("plan_row", ["dgx-h100:128", "one NIC", "all-gather"]),
]


def child(number: int) -> None:
    name, arguments = ROWS[number]
    row = globals()[name](*arguments)
    status = Path("/proc/self/status").read_text()
    row["peak_bytes"] = 1024 * int(status.split("VmHWM:")[1].split()[0])
    print(json.dumps(row))


def main() -> None:
    rows = []
    for number in range(len(ROWS)):
        done = subprocess.run([sys.executable, __file__, str(number)], capture_output=True, text=True, timeout=1200, check=False)
        rows.append(json.loads(done.stdout) if done.returncode == 0 else {"row": ROWS[number], "failed": done.stderr.strip().splitlines()[-1]})
        print(json.dumps(rows[-1]), flush=True)
    document = {"schema": "meshwright.benchmark", "version": 1, "benchmark": "forestcoll_scale", "python": platform.python_version(), "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    child(int(sys.argv[1])) if len(sys.argv) > 1 else main()
