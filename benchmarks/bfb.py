"""Breadth-first broadcasts on direct connections: exact figures of graphs of 1,024 nodes, and K(4,4) in the lab beside our ring.

Run: `python benchmarks/bfb.py [figures] [random] [lab]` (some seconds for the figures; the lab needs root and takes four minutes on a quiet
machine; rows of parts that are not run stay as they were). Graphs: steps and the bandwidth factor T_B in M/B, beside the figure that was published
or the bound (N - 1)/N; processor time of the exact division at all ranks. Random: simulated time of large all-gathers and reduce-scatters on
4-regular graphs of 20 nodes, beside T_B, and both over the bound. Lab: eight devices, each joined to the four of the other side by links of 20
Mbit/s and 5 ms; median time of an all-gather and of a reduce-scatter, both planned for that fabric.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import machine
import networkx
import numpy as np

from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.bfb.strategy import BFB, Steps
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.document import fabric_document

NODES, PORTS = 1024, 4
LARGEST = {"all-gather": "4MiB", "reduce-scatter": "1MiB"}
ASKED_GAIN = 2.5  # of the ring's time at 4 KiB over ours, on K(4,4)


def graphs() -> dict[str, tuple[Iterable[tuple[int, int]], str]]:
    side = 32
    kautz = [(x, (-PORTS * x - a) % NODES) for x in range(NODES) for a in range(1, PORTS + 1)]
    turns = ((0, 1), (1, 0), (0, -1), (-1, 0))
    torus = [(a * side + b, (a + i) % side * side + (b + j) % side) for a in range(side) for b in range(side) for i, j in turns]
    line = 16  # circulant: i joined to i +- 3 and i +- 4; its line graph three times has 1,024 nodes
    arcs = [(i, (i + s) % line) for i in range(line) for s in (3, 4, -3, -4)]
    for _ in range(3):
        number = {arc: k for k, arc in enumerate(arcs)}
        leaving: dict[int, list[tuple[int, int]]] = {}
        for arc in arcs:
            leaving.setdefault(arc[0], []).append(arc)
        arcs = [(number[arc], number[after]) for arc in arcs for after in leaving[arc[1]]]
    return {"generalized Kautz (published: 5 steps, 1.332)": (kautz, "341/256"), "torus 32 x 32": (torus, "1023/1024"),
            "line graph, 3 times, of the circulant 16 {3, 4} (published: 6 steps, 1.020)": (arcs, "1.020")}  # fmt: skip


def figures() -> list[dict[str, Any]]:
    rows = []
    for name, (arcs, peer) in graphs().items():
        senders: list[dict[int, int]] = [{} for _ in range(NODES)]
        for a, b in arcs:
            if a != b:
                senders[b][a] = 1
        begin = time.process_time()
        steps = Steps.of(list(senders), tuple(map(str, range(NODES))))
        factor = steps.time() * PORTS / NODES
        rows.append({
            "what": f"bandwidth factor of {name}", "value": float(factor), "unit": "M/B", "exact": str(factor), "peer": float(Fraction(peer)),
            "steps": len(steps.tight), "cpu_s": time.process_time() - begin,
        })  # fmt: skip
        print(f"{name:<80} {len(steps.tight):>3} steps  {factor} = {float(factor):.4f}  {rows[-1]['cpu_s']:.1f} s", flush=True)
    return rows


def on_random_graphs() -> list[dict[str, Any]]:
    rows, nodes = [], 20
    for seed, op in product(range(6), ("all-gather", "reduce-scatter")):
        joined = networkx.random_regular_graph(PORTS, nodes, seed=seed).edges
        links = tuple(Link(src=f"d{x}", dst=f"d{y}", rate_Bps=10**9, latency_s=1e-6) for a, b in joined for x, y in ((a, b), (b, a)))
        fabric = Fabric(name=f"random-{seed}", devices=tuple(Device(name=f"d{i}") for i in range(nodes)), links=links)
        problem = CollectiveProblem.on(fabric, op, nodes << 20)
        begin = time.process_time()
        plan = BFB().plan(problem, rng=np.random.default_rng(0))
        took, bound_s = time.process_time() - begin, float(bandwidth_bound(problem).exact)
        time_s = simulated_time_s(plan.program, fabric, problem.ranks, None)
        in_steps = float(Fraction(plan.notes["bandwidth_factor_least"])) / ((nodes - 1) / nodes)
        least_s = plan.notes.get("shortest_ways", {}).get("least_s", bound_s)
        rows.append({
            "what": f"{op} of 20 MiB by bfb on a random 4-regular graph of 20 nodes ({seed}): simulated over the bound, beside T_B over it",
            "value": time_s / bound_s, "unit": "x", "peer": in_steps, "shortest_ways": least_s / bound_s, "cpu_s": took,
        })  # fmt: skip
        print(f"{op:<15} {seed}  simulated {time_s / bound_s:.3f}  T_B {in_steps:.3f}  shortest ways {least_s / bound_s:.3f}", flush=True)
    return rows


def seconds(row: dict[str, Any]) -> float:
    return float(row["in_place"]["time_s"])


def in_lab() -> list[dict[str, Any]]:
    sides = [(a, b) for a in range(4) for b in range(4, 8)]
    links = tuple(Link(src=f"n{x}", dst=f"n{y}", rate_Bps=2_500_000, latency_s=5e-3) for a, b in sides for x, y in ((a, b), (b, a)))
    fabric = Fabric(name="k44", devices=tuple(Device(name=f"n{i}", kind="cpu") for i in range(8)), links=links)
    run = [sys.executable, "-m", "meshwright"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "k44.json")
        path.write_text(json.dumps(fabric_document(fabric)))
        subprocess.run([*run, "lab", "up", str(path), "--name", "bench-k44", "--quiet"], check=True)
        try:
            times: dict[str, dict[str, dict[int, dict[str, Any]]]] = {op: {} for op in LARGEST}
            for op, strategy in product(LARGEST, ("bfb", "ring")):
                # ranks of the two sides in turn, so that the ring's every hop is a link
                words = ["collective", "bench", op, "--lab", "bench-k44", "--order", "0,4,1,5,2,6,3,7", "-b", "4KiB", "-e", LARGEST[op]]
                words += ["-f", "4", "-n", "21", "--strategies", strategy, "--no-builtin", "--backends", "meshwright", "--json"]
                every_size = {**os.environ, "MESHWRIGHT_MIN_BYTES": "0"}
                said = subprocess.run([*run, *words], check=True, stdout=subprocess.PIPE, env=every_size).stdout
                times[op][strategy] = {row["size_bytes"]: row for row in json.loads(said)["rows"]}
        finally:
            subprocess.run([*run, "lab", "down", "bench-k44", "--quiet"], check=True)
    for op, size in [(op, size) for op, found in times.items() for size in found["bfb"]]:
        ours, ring = (times[op][strategy][size] for strategy in ("bfb", "ring"))
        rows.append({
            "what": f"{op} of {size} B on K(4,4) in the lab: bfb, beside our ring", "value": seconds(ours), "unit": "s", "peer": seconds(ring),
            "gain": seconds(ring) / seconds(ours), "asked_gain": ASKED_GAIN if size == 4096 and op == "all-gather" else None,
            "simulated_s": ours["simulated_s"], "peer_simulated_s": ring["simulated_s"],
        })  # fmt: skip
        print(f"{op} {size:>8} B  bfb {seconds(ours):.4f} s  ring {seconds(ring):.4f} s  simulated {ours['simulated_s']}", flush=True)
    return rows


if __name__ == "__main__":
    parts = {"figures": (figures, "bandwidth factor"), "random": (on_random_graphs, "random 4-regular"), "lab": (in_lab, "in the lab")}
    path = machine.RESULTS / "bfb.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    asked, found = sys.argv[1:] or list(parts), []
    for name, (run_part, words) in parts.items():
        found += run_part() if name in asked else [row for row in before if words in row["what"]]
    machine.record("bfb", found, command=" ".join(["python benchmarks/bfb.py", *sys.argv[1:]]))
