"""TACCL: proof times of routing, plans of a two-box DGX-2 at all sizes, and our plans beside published ones under their link model.

Run: `python benchmarks/taccl.py` (prints one JSON document; raw output goes to benchmarks/results/taccl.json).
Times of planning are processor seconds of this process. Times of schedules are simulated on the fabric named in the row.

Published numbers (collective time in microseconds, whole output buffer 1 GB, 256 MB, ... 1 KB, decimal; null = none published), repository
microsoft/TE-CCL: TACCL: teccl/examples/experiments_output/tables/individual_tables/TACCL_NDv2_2_chassis_{AllGather,AlltoAll}.csv; TE-CCL:
`4-Collective_Finish_Time` of teccl/examples/{experiments,experiemnts}/output_provided/NDv2_output/2_chassis/*/*/*.json, from the files that
we read (all-gather: Slow 1KB, Fast 4KB, 16KB, 64KB, 256KB; all-to-all: Fast 1KB, 4KB, Slow 16KB, 1GB; all-gather 1 GB from its published best rate,
22.86 GB/s); null elsewhere. In those TE-CCL runs GPU 0 of the first box is a switch (node 0 is among the topology's switches): 15 GPUs
exchange blocks of a sixteenth of the size. `published_15` rows solve that problem, on the same links, with a switch that only forwards; TE-CCL's
times are compared with them. `published` rows are the 16-GPU problem, TACCL's times are compared with them.
Where no TE-CCL time was read, `most_any_planner_could_gain` = ours over the certified bound says how much faster any planner could be.
Link model: NVLink 50 (double) and 25 GB/s, 0.7 us; GPU 0 of a box to GPU 1 of the other 12.5 GB/s, 1.3 us.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.check import check_program
from meshwright.decide.collective import NAMES, CollectiveProblem, collective_bound
from meshwright.decide.collective.taccl import Taccl, _Planner, _routed
from meshwright.decide.collective.value import simulated_time_s
from meshwright.errors import MeshwrightError
from meshwright.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric_name import load_fabric
from meshwright.sketch import sketch_of

RESULTS = Path(__file__).parent / "results" / "taccl.json"
SIZES = [10**9, 256 * 10**6, 64 * 10**6, 16 * 10**6, 4 * 10**6, 10**6, 256_000, 64_000, 16_000, 4_000, 1_000]
NAMES_OF_SIZES = ["1GB", "256MB", "64MB", "16MB", "4MB", "1MB", "256KB", "64KB", "16KB", "4KB", "1KB"]
PUBLISHED: dict[str, dict[str, list[float | None]]] = {
    "all-gather": {
        "taccl": [53766.7, 12494.6, 3133.2, None, 216.5, 62.15, 25.26, 13.08, 12.68, 11.85, 10.15875],
        "te-ccl": [43744.5, None, None, None, None, None, 14.72, 6.08, 4.44, 4.185, 4.135],
    },
    "all-to-all": {
        "taccl": [320049.4, 81964.2, 20532.0, 5164.4, 1324.2, 359.0, 115.72, 50.34, 35.76, 32.115, 36.799],
        "te-ccl": [295000.0, None, None, None, None, None, None, None, 8.24, 4.6, 4.2385],
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


def routing_row(fabric: str, sketch: str, op: str, chunkup: int, size_bytes: int) -> dict[str, Any]:
    """Stage 1 alone: greedy routes, then the integer program until it is proven."""
    problem = CollectiveProblem.on(load_fabric(fabric), op, size_bytes, time_limit_s=300)
    options = Taccl(sketch=sketch_of(sketch), chunkup=chunkup)
    start = time.process_time()
    planner = _Planner(problem, options, collective_bound(problem))
    routing = planner._routing(planner.topology)
    how, _ = _routed(routing, (100.0, 100.0), 10**6, 10**6)[0]
    cpu_s = time.process_time() - start
    variables = sum(map(len, routing.allowed)) // max(1, len(routing.group))
    return {
        "what": "routing", "fabric": fabric, "sketch": sketch, "op": op, "chunkup": chunkup, "size_bytes": size_bytes, "binaries": variables,
        "cpu_s": cpu_s, "how": how,
    }  # fmt: skip


def plan_row(fabric: str, sketch: str | None, op: str, size_bytes: int) -> dict[str, Any]:
    problem = CollectiveProblem.on(load_fabric(fabric), op, size_bytes)
    start = time.process_time()
    plan = Taccl(sketch=sketch).plan(problem, rng=np.random.default_rng(0))
    cpu_s = time.process_time() - start
    assert plan.bound is not None and check_program(plan.program).ok
    time_s = simulated_time_s(plan.program, problem.fabric, problem.ranks, None)
    return {
        "what": "plan", "fabric": fabric, "sketch": sketch, "op": op, "size_bytes": size_bytes, "cpu_s": cpu_s, "time_s": time_s,
        "bound_s": float(plan.bound), "over_bound": time_s / float(plan.bound), "how": plan.notes["routing"], "instances": plan.notes["instances"],
    }  # fmt: skip


def union_row(fabric: Fabric, op: str, place: int, peer: str) -> dict[str, Any]:
    """All strategies on one size; the fastest in simulation beside the published times."""
    ranks = len(fabric.devices)
    size_bytes = SIZES[place] if ranks == 16 else round(SIZES[place] / 16 * ranks / 4) * 4
    problem = CollectiveProblem.on(fabric, op, size_bytes, time_limit_s=60)
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    bound_s = float(collective_bound(problem))
    tries: dict[str, Any] = {name: kind() for name, kind in NAMES.items()}
    if op == "all-gather":
        tries["taccl chunkup 4"] = Taccl(chunkup=4)
        tries["forestcoll 512 pieces"] = NAMES["forestcoll"](pieces=512, max_pieces=512)  # type: ignore[call-arg]
    for name, strategy in tries.items():
        try:
            plan = strategy.plan(problem, rng=np.random.default_rng(0))
            times[name] = simulated_time_s(plan.program, fabric, problem.ranks, None)
        except MeshwrightError as error:
            refused[name] = str(error)
    best = min(times, key=times.__getitem__)
    best_us, taccl_us, given = times[best] * 1e6, times["taccl"] * 1e6, PUBLISHED[op][peer][place]
    return {
        "what": "published" if ranks == 16 else "published_15", "op": op, "size": NAMES_OF_SIZES[place], "best": best, "best_us": best_us,
        "taccl_us": taccl_us, "bound_us": bound_s * 1e6, "most_any_planner_could_gain": times[best] / bound_s, "peer": peer, "peer_us": given,
        "peer_over_best": None if given is None else given / best_us, "peer_over_our_taccl": None if given is None else given / taccl_us,
        "all_us": {k: v * 1e6 for k, v in sorted(times.items(), key=lambda x: x[1])}, "refused": refused,
    }  # fmt: skip


def main(parts: list[str]) -> None:
    plan_row("two-islands", None, "all-gather", 1 << 20)  # compiles
    rows: list[dict[str, Any]] = []
    if "routing" in parts:
        for size in (10**9, 10**6, 1000):
            rows += [routing_row("ndv2:2?sketch=1", "ndv2-sk-1:2", op, 1, size) for op in ("all-gather", "all-to-all")]
            rows.append(routing_row("ndv2:2?sketch=1", "ndv2-sk-1:2", "all-gather", 2, size))
            rows.append(routing_row("ndv2:4?sketch=1", "ndv2-sk-1:4", "all-gather", 1, size))
            print(rows[-4:], file=sys.stderr)
    if "dgx2" in parts:
        for op in ("all-gather", "all-to-all", "all-reduce"):
            for size in SIZES:
                rows.append(plan_row("dgx2:2", None, op, size))
                print(rows[-1], file=sys.stderr)
        rows += [plan_row("dgx2:2?sketch=1", "dgx2-sk-1:2", "all-gather", size) for size in SIZES[:3]]
        rows += [plan_row("dgx2:2", "dgx2-sk-2:2", "all-gather", size) for size in SIZES[-3:]]
    if "published" in parts:
        for fabric, peer in ((published_fabric(), "taccl"), (fifteen(published_fabric()), "te-ccl")):
            for op in PUBLISHED:
                for place in range(len(SIZES)):
                    rows.append(union_row(fabric, op, place, peer))
                    print({k: v for k, v in rows[-1].items() if k not in ("refused", "all_us")}, file=sys.stderr)
    document = {"schema": "meshwright.benchmark", "version": 1, "benchmark": "taccl", "python": platform.python_version(), "rows": rows}
    text = json.dumps(document, indent=1)
    if len(parts) == 3:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:] or ["routing", "dgx2", "published"])
