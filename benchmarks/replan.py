"""Planning again when a NIC or a GPU is down: processor time, and the throughput that is lost.

Run: `python benchmarks/replan.py` (prints the rows; raw output goes to benchmarks/results/replan.json). Every case is a process of its own:
after an untimed case on a small fabric that compiles kernels, the whole fabric and the parts down go in, and a checked plan for what is
left comes out; `cpu_s` is processor time of all of it (both bounds, trees, program, simulation, check). "lost" is exact: the bound of the
damaged fabric against that of the whole one, verified here against the bound of a fabric edited by hand. "reached" is the simulated plan
against the exact bound of the damaged fabric. Limits: seconds for a NIC or link (servers can be planned as alike), a minute for a GPU of
16 boxes, ten minutes for one of 128 (the issue's limit for trees of unlike boxes).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

from machine import fresh, memory_high_water_bytes, record

from meshwright.decide.collective import CollectiveProblem, collective_bound
from meshwright.drive.collective.replan import replan
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric

GIB = 1 << 30
# fabric, parts down, parts slow, limit of processor seconds, least share of the damaged fabric's bound that the plan reaches
CASES: dict[str, tuple[str, list[str], dict[str, str], float, float]] = {
    "NIC down, 16 boxes": ("dgx-h100:16", ["box3/nic2"], {}, 10, 0.95),
    "NIC at half rate, 16 boxes": ("dgx-h100:16", [], {"box3/nic2": "1/2"}, 10, 0.95),
    "GPU down, 16 boxes": ("dgx-h100:16", ["box3/gpu2", "box3/nic2"], {}, 60, 0.9),
    "NIC down, 4 H100 and 4 A100 boxes": ("h100-a100:4", ["box1/nic2"], {}, 60, 0.9),
    "GPU down, 4 H100 and 4 A100 boxes": ("h100-a100:4", ["box6/gpu2", "box6/nic2"], {}, 60, 0.9),
    "NIC down, 128 boxes": ("dgx-h100:128", ["box3/nic2"], {}, 60, 0.85),
    "GPU down, 128 boxes": ("dgx-h100:128", ["box3/gpu2", "box3/nic2"], {}, 600, 0.8),
}


def damaged_by_hand(fabric: Fabric, down: list[str], slow: dict[str, str]) -> Fabric:
    """Written apart from `meshwright.fabric.edit`, to compare with."""
    gone = set(down)
    links = [x for x in fabric.links if x.src not in gone and x.dst not in gone]
    for name, factor in slow.items():
        links = [replace(x, rate_Bps=int(x.rate_Bps * Fraction(factor))) if name in (x.src, x.dst) else x for x in links]
    return replace(fabric, devices=tuple(d for d in fabric.devices if d.name not in gone),
                   switches=tuple(s for s in fabric.switches if s.name not in gone), links=tuple(links))  # fmt: skip


def measure(case: str) -> dict[str, Any]:
    spec, down, slow, _, _ = CASES[case]
    for parts in (["box1/nic2"], ["box1/gpu2", "box1/nic2"]):
        replan(CollectiveProblem.on(load_fabric("dgx-h100:3"), "all-gather", GIB), parts, {})
    start = time.process_time()
    problem = CollectiveProblem.on(load_fabric(spec), "all-gather", GIB, effort_s=900)
    found = replan(problem, down, {name: Fraction(x) for name, x in slow.items()})
    cpu_s = time.process_time() - start
    exact = collective_bound(CollectiveProblem.on(damaged_by_hand(problem.fabric, down, slow), "all-gather", GIB)).exact
    if exact != found.now_bound.exact:
        raise AssertionError(f"{case}: bound {found.now_bound.exact} of the edited fabric, {exact} by hand")
    best = found.ranked[0]
    assert best.time_s is not None and best.plan is not None
    return {
        "cpu_s": cpu_s, "peak_bytes": memory_high_water_bytes(), "lost": str(found.lost), "strategy": best.strategy, "devices": len(found.now.ranks),
        "reached": float(exact) / best.time_s, "optimum_share": best.plan.notes["ratio"], "pieces": best.plan.notes["pieces"],
        "lost_in_simulation": 1 - float(found.whole_bound.exact) / best.time_s,
    }  # fmt: skip


def main() -> None:
    rows: list[dict[str, Any]] = []
    for case, (spec, down, slow, limit_s, least) in CASES.items():
        try:
            m = fresh("replan", case, timeout_s=limit_s + 60)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            rows.append({"what": f"{case}: planning again", "value": None, "unit": "processor s", "limit": limit_s, "ratio": None,
                         "failed": f"{type(error).__name__}: no plan within {limit_s + 60} s of wall time"})  # fmt: skip
            record("replan", rows)
            continue
        facts = {"fabric": spec, "down": down, "slow": slow, "devices": m["devices"], "strategy": m["strategy"]}
        rows += [
            {"what": f"{case}: planning again", "value": round(m["cpu_s"], 2), "unit": "processor s", "limit": limit_s, **facts,
             "peak_bytes": m["peak_bytes"]},
            {"what": f"{case}: throughput lost, exact", "value": round(float(Fraction(m["lost"])), 5), "unit": "share", "exact": m["lost"]},
            {"what": f"{case}: share of the damaged fabric's bound, simulated", "value": round(m["reached"], 4), "unit": "share", "at_least": least,
             "ratio": round(least / m["reached"], 4), "trees_share_of_optimum": m["optimum_share"], "pieces": m["pieces"],
             "throughput_lost_against_whole_bound": round(m["lost_in_simulation"], 4)},
        ]  # fmt: skip
        for row in rows[-3:]:
            print(f"{row['what']}: {row['value']} {row['unit']}" + (f" (limit {row['limit']})" if "limit" in row else ""), flush=True)
        record("replan", rows)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1]))) if len(sys.argv) > 1 else main()
