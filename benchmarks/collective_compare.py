"""`meshwright collective compare`: all strategies at 21 sizes on 64 GPUs, in time; the winner beside the vendor's choice and beside the bound.

    python benchmarks/collective_compare.py [FABRIC]        default dgx-h100:8

Each row of `seconds` is the command in a fresh process, compiled kernels loaded from disk after an untimed run; limit 60 s of wall-clock time,
two cores. `vendor` rows: the schedule that NCCL's own tuner would choose (strategy `nccl`, a model of it on the same simulator) over the winner,
least and largest gain over the sizes. `bound` rows: the winner's time over the certified bound at the largest size. `every` rows: at sizes
between those that are planned at, the winner of the sweep over the winner when every strategy plans at that very size; 1 = nothing lost.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import machine

FABRIC = "dgx-h100:8"
SIZES = "1KiB:1GiB"
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all")
LIMIT_S = 60.0
BETWEEN = "2KiB,128KiB,2MiB,32MiB,512MiB"  # none of them is planned at in a sweep of SIZES


def compare(op: str, fabric: str, sizes: str, *more: str) -> tuple[dict[str, Any], float, float]:
    """(the document, wall seconds, processor seconds) of the command."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "meshwright", "collective", "compare", op, "--fabric", fabric, "--sizes", sizes, "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), time.monotonic() - start, cpu_s


def gains(document: dict[str, Any]) -> list[float]:
    """How many times faster than the vendor's choice the winner is, per size."""
    found = []
    for size in document["sizes"]:
        vendor = next((s["time_s"] for s in size["strategies"] if s["strategy"] == "nccl" and s["time_s"]), None)
        if vendor:
            found.append(vendor / size["strategies"][0]["time_s"])
    return found


def main(fabric: str) -> int:
    compare("all-reduce", fabric, "1KiB,1MiB")  # loads and compiles
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for op in OPERATIONS:
        document, wall_s, cpu_s = compare(op, fabric, SIZES)
        winners = [(s["size_bytes"], s["strategies"][0]["strategy"], s["strategies"][0]["ratio"]) for s in document["sizes"]]
        late = sorted({s["strategy"] for size in document["sizes"] for s in size["strategies"] if "time limit" in s["why"]})
        tried = sum(1 for s in document["sizes"][0]["strategies"])
        more: list[dict[str, Any]] = [
            {"what": f"{op}, {fabric}: seconds", "value": round(wall_s, 1), "unit": "s", "limit": LIMIT_S, "cpu_s": round(cpu_s, 1),
             "sizes": len(document["sizes"]), "strategies": tried, "time_limit": late, "winners": winners},
            {"what": f"{op}, {fabric}: bound, largest size", "value": winners[-1][2], "unit": "times", "peer": 1.0},
        ]  # fmt: skip
        if wall_s > LIMIT_S:
            broken.append(more[0]["what"])
        if found := gains(document):
            more.append({"what": f"{op}, {fabric}: vendor's choice over the winner", "value": round(min(found), 3), "unit": "times, least",
                         "largest": round(max(found), 3), "per_size": [round(g, 3) for g in found]})  # fmt: skip
        fresh, _, _ = compare(op, fabric, BETWEEN, "--every-size")
        own = {s["size_bytes"]: s["strategies"][0]["time_s"] for s in fresh["sizes"]}
        lost = [s["strategies"][0]["time_s"] / own[s["size_bytes"]] for s in document["sizes"] if s["size_bytes"] in own]
        more.append({"what": f"{op}, {fabric}: every, worst of {len(lost)}", "value": round(max(lost), 4), "unit": "times", "peer": 1.0})
        rows += more
        for row in more:
            print(f"{row['what']:<58}{row['value']:>10}  {row['unit']}", flush=True)
    machine.record("collective_compare", rows, broken=broken)
    print(f"broken: {', '.join(broken)}" if broken else "all limits kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else FABRIC))
