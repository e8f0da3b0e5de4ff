"""An expert layer that switches its parallelism, on four ranks with links of 100 Mbit/s: every fixed choice, the search, and what was predicted.

Run: `python benchmarks/experts_lab.py` (root; three minutes on a quiet machine). H = 256, F = 1,024, two experts, k = 1; capacities 64 to 1,024 at
random; forward and backward, real experts and processes. One job runs all variants in turn at each capacity, on one machine. Times are those of
the slowest rank. Predicted: the simulator on the fabric's own rates, with compute as the simulator assumes it. Raw: results/experts_lab.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

FABRIC = "star:4?link=12.5MB/s"
CAPACITIES = (64, 128, 256, 512, 1024)
FIXED = ((0, 1, "linear"), (1, 1, "linear"), (2, 1, "linear"), (1, 4, "linear"))
ROUNDS, WARM = 3, 11  # of every capacity: measured, and steps of the search before it counts
ASKED_OF_BEST, ASKED_GAIN = 1.10, 1.2
LAB = "bench-experts"


def child() -> None:
    import torch
    import torch.distributed as dist

    from meshwright.nn import FeedForward, MoELayer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    variants: dict[str, Any] = {f"r={r} d={d}": (r, d, a) for r, d, a in FIXED} | {"search": "search"}
    layers = {
        name: MoELayer(FeedForward(256, 1024, bias=False), 2, k=1, capacity_factor=1.0, choice=choice, chunks=(1, 4), window=16, seed=1)
        for name, choice in variants.items()
    }  # fmt: skip
    for layer in layers.values():
        layer.alignment = 8

    def step(name: str, capacity: int) -> float:
        torch.manual_seed(rank)
        x = torch.randn(2 * capacity, 256, requires_grad=True)
        began = perf_counter()
        layers[name](x).sum().backward()
        lasted = torch.tensor([perf_counter() - began])
        dist.all_reduce(lasted, dist.ReduceOp.MAX)
        return float(lasted)

    for capacity in CAPACITIES:
        for _ in range(WARM):
            step("search", capacity)
        for name in variants:
            step(name, capacity)
    draw, rows = random.Random(1), []
    for _ in range(ROUNDS):
        for capacity in draw.sample(CAPACITIES, len(CAPACITIES)):
            for name in draw.sample(sorted(variants), len(variants)):
                rows.append({"capacity": capacity, "variant": name, "time_s": step(name, capacity), "used": list(layers[name].used)})
    if rank == 0:
        print("ROWS " + json.dumps(rows), flush=True)
    dist.destroy_process_group()


def predicted() -> dict[tuple[int, str], float]:
    from meshwright.decide.experts import Choice, ExpertProblem, ExpertShape
    from meshwright.drive.experts import LayerPrograms, rank_choices
    from meshwright.drive.plans import read_fabric

    fabric = read_fabric(FABRIC)
    ranks = tuple(d.name for d in fabric.devices)
    problem = ExpertProblem(fabric=fabric, ranks=ranks, shape=ExpertShape(ranks=4, experts=2, model=256, inner=1024), capacities=CAPACITIES)
    programs = LayerPrograms(fabric, ranks, problem.shape)
    return {
        (c, f"r={x.choice.degree} d={x.choice.chunks}"): x.time_s or 0.0
        for c in CAPACITIES for x in rank_choices(problem, programs, [Choice(*f) for f in FIXED], c)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().child:
        child()
        return
    import machine

    run = [sys.executable, "-m", "meshwright"]
    subprocess.run([*run, "lab", "up", FABRIC, "--name", LAB, "--no-verify", "--quiet"], check=True)
    try:
        done = subprocess.run([*run, "lab", "run", LAB, "--", sys.executable, __file__, "--child"], stdout=subprocess.PIPE, text=True, check=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    finally:
        subprocess.run([*run, "lab", "down", LAB, "--quiet"], check=True)
    said = next(line for line in done.stdout.splitlines() if "ROWS " in line)
    raw = json.loads(said[said.index("ROWS ") + 5 :])
    median = {(r["capacity"], r["variant"]): 0.0 for r in raw}
    for key in median:
        median[key] = statistics.median(r["time_s"] for r in raw if (r["capacity"], r["variant"]) == key)
    names = [f"r={r} d={d}" for r, d, _ in FIXED]
    totals = {name: sum(median[c, name] for c in CAPACITIES) for name in [*names, "search"]}
    best = sum(min(median[c, name] for name in names) for c in CAPACITIES)
    fixed = min(names, key=lambda name: totals[name])
    guess = predicted()
    off = [guess[c, n] / median[c, n] - 1 for c in CAPACITIES for n in names]
    rows = [
        {"what": "one step at every capacity, search: beside the best choice of each", "value": totals["search"], "unit": "s", "peer": best,
         "asked_ratio": ASKED_OF_BEST},
        {"what": f"the same: beside the best fixed choice ({fixed})", "value": totals["search"], "unit": "s", "peer": totals[fixed],
         "asked_gain": ASKED_GAIN, "gain": totals[fixed] / totals["search"]},
        {"what": "predicted over measured - 1, median of all fixed choices", "value": statistics.median(off), "unit": "", "limit": 0.15},
        {"what": "predicted over measured - 1, largest", "value": max(map(abs, off)), "unit": ""},
    ]  # fmt: skip
    for c in CAPACITIES:
        print(f"C={c:<5}", *(f"{n} {median[c, n] * 1e3:.0f} ms ({guess[c, n] * 1e3:.0f})" for n in names),
              f"search {median[c, 'search'] * 1e3:.0f} ms")  # fmt: skip
    for row in rows:
        print(f"{row['what']:<70} {row['value']:.3f} {row['unit']}" + (f", beside {row['peer']:.3f}" if "peer" in row else ""))
    machine.record("experts_lab", rows, command="python benchmarks/experts_lab.py", raw=raw)


if __name__ == "__main__":
    main()
