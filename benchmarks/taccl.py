"""TACCL: proof times of routing, planning times, our plans beside published ones under their link model.

Run: `python benchmarks/taccl.py [routing] [dgx2] [sweep] [published]` (no part = all, and raw output goes to benchmarks/results/taccl.json).
Times of planning are processor seconds of this process. Times of schedules are simulated on the fabric named in the row.

Published numbers (collective time in microseconds, whole output buffer 1 GB, 256 MB, ... 1 KB, decimal; null = none published), repository
microsoft/TE-CCL: TACCL: teccl/examples/experiments_output/tables/individual_tables/TACCL_NDv2_2_chassis_{AllGather,AlltoAll}.csv; TE-CCL:
`4-Collective_Finish_Time` of teccl/examples/{experiments,experiemnts}/output_provided/NDv2_output/2_chassis/{AllGather,AlltoAll}/Fast/*.json (epochs
of the fastest link, the better of the two kinds wherever both were read; Slow for all-gather 1 KB; all-gather 1 GB from its published best rate,
22.86 GB/s). In those TE-CCL runs GPU 0 of the first box is a switch (node 0 is among the topology's switches): 15 GPUs exchange blocks of a
sixteenth of the size. The rows beside TE-CCL solve that problem, on the same links, with a switch that only forwards (TE-CCL's may copy);
rows beside TACCL are the 16-GPU problem. Two rows per size: the best of all our strategies (what `auto` gives), and the taccl strategy alone.
Link model: NVLink 50 (double) and 25 GB/s, 0.7 us; GPU 0 of a box to GPU 1 of the other 12.5 GB/s, 1.3 us.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import machine
import numpy as np

from meshwright.check import check_program
from meshwright.decide.collective import CollectiveProblem, collective_bound, default_candidates
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.taccl.size_classes import Limits, routed
from meshwright.decide.collective.taccl.strategy import Taccl, _Planner
from meshwright.errors import MeshwrightError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import worked_s
from meshwright.sketch import sketch_of

PARTS = ("routing", "dgx2", "sweep", "published")
SIZES = [10**9, 256 * 10**6, 64 * 10**6, 16 * 10**6, 4 * 10**6, 10**6, 256_000, 64_000, 16_000, 4_000, 1_000]
NAMES_OF_SIZES = ["1 GB", "256 MB", "64 MB", "16 MB", "4 MB", "1 MB", "256 KB", "64 KB", "16 KB", "4 KB", "1 KB"]
PUBLISHED: dict[str, dict[str, list[float | None]]] = {
    "all-gather": {
        "TACCL": [53766.7, 12494.6, 3133.2, None, 216.5, 62.15, 25.26, 13.08, 12.68, 11.85, 10.15875],
        "TE-CCL": [43744.5, 11200.0, 2800.0, 700.0, 190.0, 48.75, 14.72, 6.08, 4.44, 4.185, 4.135],
    },
    "all-to-all": {
        "TACCL": [320049.4, 81964.2, 20532.0, 5164.4, 1324.2, 359.0, 115.72, 50.34, 35.76, 32.115, 36.799],
        "TE-CCL": [283750.0, 72640.0, 18160.0, 4540.0, 1155.0, 290.0, 77.12, 21.68, 7.94, 4.6, 4.2385],
    },
}  # fmt: skip
LINKS = ("02112000", "20120100", "11020020", "12200001", "20000211", "01002012", "00201102", "00011220")  # NVLinks between the GPUs of a box


def published_fabric() -> Fabric:
    """Two NDv2 boxes as in the published tables."""
    devices = tuple(Device(name=f"box{b}/gpu{g}", group=f"box{b}") for b in range(2) for g in range(8))
    links = [
        Link(src=f"box{b}/gpu{i}", dst=f"box{b}/gpu{j}", rate_Bps=int(row[j]) * 25 * 10**9, latency_s=0.7e-6)
        for b in range(2) for i, row in enumerate(LINKS) for j in range(8) if row[j] != "0"
    ]  # fmt: skip
    links += [Link(src=f"box{b}/gpu0", dst=f"box{1 - b}/gpu1", rate_Bps=12_500_000_000, latency_s=1.3e-6) for b in range(2)]
    return Fabric(name="ndv2:2 (published link model)", devices=devices, links=tuple(links))


def fifteen(fabric: Fabric) -> Fabric:
    """TE-CCL's problem: the first GPU is a switch."""
    first = fabric.devices[0]
    switch = Switch(name=first.name, group=first.group)
    return Fabric(name="ndv2:2 (GPU 0 a switch)", devices=fabric.devices[1:], switches=(switch,), links=fabric.links)


def routing_row(boxes: int, op: str, chunkup: int, size_bytes: int, limit_s: float) -> dict[str, Any]:
    """Stage 1 alone: greedy routes, then the integer program until it is proven."""
    problem = CollectiveProblem.on(load_fabric(f"ndv2:{boxes}?sketch=1"), op, size_bytes, effort_s=300)
    sketch = sketch_of(f"ndv2-sk-1:{boxes}")
    start = time.process_time()
    planner = _Planner(problem, Taccl(sketch=sketch, chunkup=chunkup))
    (routing,) = planner.routings()
    how, _ = routed(routing, Limits(worked_s(), 300.0, float("inf"), 100.0, 10**6, 10**6, True))[0]
    cpu_s = time.process_time() - start
    variables = sum(map(len, routing.allowed)) // max(1, len(routing.group))
    what = f"routing of {op}, {chunkup} chunk(s) a block, {size_bytes} B, ndv2:{boxes} with sketch sk-1: {how}"
    row = {"what": what, "value": cpu_s, "unit": "s (cpu)", "limit": limit_s, "binaries": variables, "how": how}
    return row if "optimal" in how or "at the bound" in how else row | {"ratio": float("inf")}


def plan_row(fabric: str, sketch: str | None, op: str, size_bytes: int) -> dict[str, Any]:
    problem = CollectiveProblem.on(load_fabric(fabric), op, size_bytes)
    start = time.process_time()
    plan = Taccl(sketch=sketch).plan(problem, rng=np.random.default_rng(0))
    cpu_s = time.process_time() - start
    assert plan.bound is not None and check_program(plan.program).ok
    time_s = simulated_time_s(plan.program, problem.fabric, problem.ranks, None)
    where = fabric + (f" with {sketch}" if sketch else "")
    return {
        "what": f"{op} of {size_bytes} B on {where}: time beside the bound", "value": time_s * 1e6, "unit": "us", "peer": float(plan.bound) * 1e6,
        "planning_cpu_s": cpu_s, "how": plan.notes["routing"], "instances": plan.notes["instances"],
    }  # fmt: skip


def dgx2_rows() -> list[dict[str, Any]]:
    rows = []
    for op in ("all-gather", "all-to-all", "all-reduce"):
        mine = [plan_row("dgx2:2", None, op, size) for size in SIZES]
        spent_s = sum(r["planning_cpu_s"] for r in mine)
        rows.append({"what": f"{op} plans at all {len(SIZES)} sizes, dgx2:2 (32 GPUs)", "value": spent_s, "unit": "s (cpu)", "limit": 180.0})
        rows += mine
    all_s = sum(r["value"] for r in rows if "limit" in r)
    rows.insert(0, {"what": "all three operations at all sizes, dgx2:2 (32 GPUs)", "value": all_s, "unit": "s (cpu)", "limit": 180.0})
    rows += [plan_row("dgx2:2?sketch=1", "dgx2-sk-1:2", "all-gather", size) for size in SIZES[:3]]
    rows += [plan_row("dgx2:2", "dgx2-sk-2:2", "all-gather", size) for size in SIZES[-3:]]
    return rows


def sweep_rows(op: str) -> list[dict[str, Any]]:
    """21 sizes on one fabric object, as `collective compare` asks for them."""
    fabric = load_fabric("dgx-h100:8")
    first, again = [], []
    seen = set()
    for exponent in range(10, 31):
        problem = CollectiveProblem.on(fabric, op, 1 << exponent, effort_s=5.0)
        start = time.process_time()
        Taccl().plan(problem, rng=np.random.default_rng(0))
        spent_s = time.process_time() - start
        size_class = _Planner(problem, Taccl()).size_class()
        (again if size_class in seen else first).append(spent_s)
        seen.add(size_class)
    where = f"{op} on dgx-h100:8, 1 KiB to 1 GiB"
    return [
        {"what": f"{where}: planning the first of a size class, at most", "value": max(first), "unit": "s (cpu)", "limit": 3.0},
        {"what": f"{where}: planning a further size of a class, at most", "value": max(again), "unit": "s (cpu)", "limit": 0.25},
        {"what": f"{where}: planning all 21 sizes in {len(first)} classes", "value": sum(first) + sum(again), "unit": "s (cpu)"},
    ]


def published_rows(fabric: Fabric, op: str, place: int, peer: str) -> list[dict[str, Any]]:
    """All strategies on one size; the fastest in simulation beside the published times."""
    ranks = len(fabric.devices)
    size_bytes = SIZES[place] // 16 * ranks  # the published blocks are sixteenths; they need not be whole words
    element = 1 if SIZES[place] // 16 % 4 or (op == "all-to-all" and size_bytes // ranks % 4) else 4
    problem = CollectiveProblem.on(fabric, op, size_bytes, effort_s=60, element_bytes=element)
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    bound_us = float(collective_bound(problem)) * 1e6
    for strategy in default_candidates(problem):
        name = strategy.label
        try:
            plan = strategy.plan(problem, rng=np.random.default_rng(0))
            assert check_program(plan.program).ok
            times[name] = simulated_time_s(plan.program, fabric, problem.ranks, None) * 1e6
        except MeshwrightError as error:
            refused[name] = str(error)
    best, given = min(times, key=times.__getitem__), PUBLISHED[op][peer][place]
    rows = []
    for who, value in ((f"best of all ({best})", times[best]), ("taccl alone", times["taccl"])):
        row: dict[str, Any] = {
            "what": f"{op} {NAMES_OF_SIZES[place]}, NDv2 x2, {ranks} GPUs, beside {peer}: {who}", "value": value, "unit": "us", "bound_us": bound_us,
            "over_bound": value / bound_us,
        }  # fmt: skip
        rows.append(row | ({} if given is None else {"peer": given, "ratio": round(value / given, 6)}))
    rows[0] |= {"all_us": dict(sorted(times.items(), key=lambda x: x[1])), "refused": refused}
    return rows


def collected(parts: list[str]) -> list[dict[str, Any]]:
    plan_row("two-islands", None, "all-gather", 1 << 20)  # compiles
    rows: list[dict[str, Any]] = []
    if "routing" in parts:
        for size in (10**9, 10**6, 1000):
            rows += [routing_row(2, op, 1, size, 2.0) for op in ("all-gather", "all-to-all")]
            rows += [routing_row(2, "all-gather", 2, size, 2.0)]
            rows += [routing_row(4, op, 1, size, 60.0) for op in ("all-gather", "all-to-all")]
    if "dgx2" in parts:
        rows += dgx2_rows()
    if "sweep" in parts:
        rows += [row for op in ("all-reduce", "all-gather", "all-to-all") for row in sweep_rows(op)]
    if "published" in parts:
        for fabric, peer in ((published_fabric(), "TACCL"), (fifteen(published_fabric()), "TE-CCL")):
            found = [row for op in PUBLISHED for place in range(len(SIZES)) for row in published_rows(fabric, op, place, peer)]
            for who in ("best of all", "taccl alone"):
                worst = max(r["ratio"] for r in found if "ratio" in r and who in r["what"])
                rows.append({"what": f"worst of all sizes beside {peer}: {who}", "value": worst, "unit": "ratio", "limit": 1.0})
            rows += found
    return rows


def main(parts: list[str]) -> None:
    rows = collected(parts or list(PARTS))
    for row in rows:
        ratio = row.get("ratio", row["value"] / row["limit"] if "limit" in row else row["value"] / row["peer"] if "peer" in row else None)
        print(f"{row['what']:<110} {row['value']:12.6g} {row['unit']:<8} {'' if ratio is None else f'{ratio:.4f}'}")
    if not parts:
        machine.record("taccl", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
