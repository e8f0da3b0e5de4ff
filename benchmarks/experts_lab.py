"""An expert layer that switches its parallelism, on four ranks with links of 100 Mbit/s: every fixed choice, the search, and what was predicted.

Run: `python benchmarks/experts_lab.py [star|islands|overlap]` (root; three, three and one minutes on a quiet machine). H = 256, F = 1,024, two
experts, k = 1; capacities 64 to 1,024 at random; forward and backward, real experts and processes. One job runs all variants in turn at each
capacity, on one machine. Times are those of the slowest rank. Predicted: the simulator on what the lab's links were measured to pass, with compute as
the simulator assumes it. `islands`: two servers of two ranks, 1 Gbit/s inside, 100 Mbit/s between. `overlap`: on the star, forward, with experts that
take 1 to 2 times as long as one all-to-all (they sleep in proportion to their rows), in 1, 2 and 4 chunks. Raw: results/experts_lab*.json.
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

FABRICS = {"star": "star:4?link=12.5MB/s", "islands": "two-islands:2?trunk=12.5MB/s", "overlap": "star:4?link=12.5MB/s"}
CAPACITIES = (64, 128, 256, 512, 1024)
FIXED = ((0, 1, "linear"), (1, 1, "linear"), (2, 1, "linear"), (1, 4, "linear"))
PACED, PACED_CAPACITY, CHUNKS, PACED_STEPS = (1.0, 1.5, 2.0), 512, (1, 2, 4), 7  # experts' time over one all-to-all's
ROUNDS, WARM = 3, 17  # of every capacity: measured, and steps of the search before it counts
ASKED_OF_BEST, ASKED_GAIN, ASKED_OF_FIXED = 1.10, 1.2, 1.02
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


def paced_child() -> None:
    """Forward passes with experts whose time is given: seconds of an all-to-all are measured first, by a layer whose experts take none."""
    import time

    import torch
    import torch.distributed as dist

    from meshwright.nn import FeedForward, MoELayer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row_s, rows = 0.0, []

    class Paced(FeedForward):
        def run(self, x: torch.Tensor, params: Any, share: float) -> torch.Tensor:
            time.sleep(row_s * x.shape[0] * x.shape[1])
            return x.clone()

    layers = {d: MoELayer(Paced(256, 8, bias=False), 4, k=1, capacity_factor=1.0, choice=(1, d, "linear"), seed=1) for d in CHUNKS}
    x = torch.randn(4 * PACED_CAPACITY, 256)

    def forward(d: int) -> float:
        dist.barrier()
        began = perf_counter()
        with torch.no_grad():
            layers[d](x)
        lasted = torch.tensor([perf_counter() - began])
        dist.all_reduce(lasted, dist.ReduceOp.MAX)
        return float(lasted)

    exchange_s = statistics.median(forward(1) for _ in range(PACED_STEPS)) / 2
    for times in PACED:
        row_s = times * exchange_s / (4 * PACED_CAPACITY)
        for step in range(PACED_STEPS + 1):
            for d in CHUNKS:
                lasted = forward(d)
                if step:
                    rows.append({"paced": times, "chunks": d, "time_s": lasted, "exchange_s": exchange_s})
    if dist.get_rank() == 0:
        print("ROWS " + json.dumps(rows), flush=True)
    dist.destroy_process_group()


def predicted(fabric: Any) -> dict[tuple[int, str], float]:
    from meshwright.decide.experts import Choice, ExpertProblem, ExpertShape
    from meshwright.drive.experts import LayerPrograms, rank_choices

    ranks = tuple(d.name for d in fabric.devices)
    problem = ExpertProblem(fabric=fabric, ranks=ranks, shape=ExpertShape(ranks=4, experts=2, model=256, inner=1024), capacities=CAPACITIES)
    programs = LayerPrograms(fabric, ranks, problem.shape)
    return {
        (c, f"r={x.choice.degree} d={x.choice.chunks}"): x.time_s or 0.0
        for c in CAPACITIES for x in rank_choices(problem, programs, [Choice(*f) for f in FIXED], c)
    }  # fmt: skip


def measured_fabric() -> Any:
    from meshwright.lab import Lab

    lab = Lab.open(LAB)
    try:
        return lab.measured_fabric
    finally:
        lab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=list(FABRICS), default="star")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        paced_child() if args.what == "overlap" else child()
        return
    run = [sys.executable, "-m", "meshwright"]
    subprocess.run([*run, "lab", "up", FABRICS[args.what], "--name", LAB, "--quiet"], check=True)
    try:
        command = [*run, "lab", "run", LAB, "--", sys.executable, __file__, args.what, "--child"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        there = measured_fabric()
    finally:
        subprocess.run([*run, "lab", "down", LAB, "--quiet"], check=True)
    said = next(line for line in done.stdout.splitlines() if "ROWS " in line)
    raw = json.loads(said[said.index("ROWS ") + 5 :])
    overlapped(raw) if args.what == "overlap" else compared(args.what, raw, predicted(there))


def overlapped(raw: list[dict[str, Any]]) -> None:
    import machine

    rows = []
    for times in PACED:
        median = {d: statistics.median(r["time_s"] for r in raw if (r["paced"], r["chunks"]) == (times, d)) for d in CHUNKS}
        best, bound = min(median, key=lambda d: median[d]), max(2.0, times) * raw[0]["exchange_s"]
        rows.append({"what": f"experts take {times} of an all-to-all: {best} chunks beside one", "value": median[best], "unit": "s",
                     "peer": median[1], "gain": median[1] / median[best], "asked_gain": ASKED_GAIN, "bound_s": bound})  # fmt: skip
        print(f"{rows[-1]['what']}: {median[1] / median[best]:.2f} times (asked {ASKED_GAIN}); " +
              ", ".join(f"d={d} {t * 1e3:.0f} ms" for d, t in median.items()) + f", bound {bound * 1e3:.0f} ms")  # fmt: skip
    machine.record("experts_lab_overlap", rows, command="python benchmarks/experts_lab.py overlap", raw=raw)


def compared(what: str, raw: list[dict[str, Any]], guess: dict[tuple[int, str], float]) -> None:
    import machine

    median = {(r["capacity"], r["variant"]): 0.0 for r in raw}
    for key in median:
        median[key] = statistics.median(r["time_s"] for r in raw if (r["capacity"], r["variant"]) == key)
    names = [f"r={r} d={d}" for r, d, _ in FIXED]
    totals = {name: sum(median[c, name] for c in CAPACITIES) for name in [*names, "search"]}
    best = sum(min(median[c, name] for name in names) for c in CAPACITIES)
    fixed = min(names, key=lambda name: totals[name])
    off = [guess[c, n] / median[c, n] - 1 for c in CAPACITIES for n in names]
    rows = [
        {"what": "one step at every capacity, search: beside the best choice of each", "value": totals["search"], "unit": "s", "peer": best,
         "asked_ratio": ASKED_OF_BEST},
        {"what": f"the same: beside the best fixed choice ({fixed})", "value": totals["search"], "unit": "s", "peer": totals[fixed],
         **({"asked_gain": ASKED_GAIN} if what == "star" else {"asked_ratio": ASKED_OF_FIXED}), "gain": totals[fixed] / totals["search"]},
        {"what": "predicted over measured - 1, median of all fixed choices", "value": statistics.median(off), "unit": "", "limit": 0.15},
        {"what": "predicted over measured - 1, largest", "value": max(map(abs, off)), "unit": ""},
    ]  # fmt: skip
    for c in CAPACITIES:
        print(f"C={c:<5}", *(f"{n} {median[c, n] * 1e3:.0f} ms ({guess[c, n] * 1e3:.0f})" for n in names),
              f"search {median[c, 'search'] * 1e3:.0f} ms")  # fmt: skip
    for row in rows:
        print(f"{row['what']:<70} {row['value']:.3f} {row['unit']}" + (f", beside {row['peer']:.3f}" if "peer" in row else ""))
    machine.record("experts_lab" if what == "star" else f"experts_lab_{what}", rows, command=f"python benchmarks/experts_lab.py {what}", raw=raw)


if __name__ == "__main__":
    main()
