"""BlueConnect: simulated time against ring and ForestColl, bytes between servers, the table against the simulator, planning time.

Run: `python benchmarks/blueconnect.py` (prints one JSON document; raw output goes to benchmarks/results/blueconnect.json).
Times called cpu_s are processor seconds of this process after one untimed run that compiles; all others are simulated seconds.
"""

from __future__ import annotations

import json
import time
from fractions import Fraction
from typing import Any

import machine
import numpy as np

from meshwright.decide.collective import CollectivePlan, CollectiveProblem, ForestColl, Ring
from meshwright.decide.collective.blueconnect.cost import Level
from meshwright.decide.collective.blueconnect.strategy import BlueConnect
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.program.program import Part

GB = 10**9


def servers(sizes: tuple[int, ...], port_Bps: int = 12_500_000_000) -> Fabric:
    """Servers of these sizes: a 150 GB/s switch inside, every GPU with a port of its own to one network switch."""
    cables = []
    for h, k in enumerate(sizes):
        for i in range(k):
            cables += [(f"s{h}/{i}", f"s{h}/in", 150 * GB, 0.35e-6), (f"s{h}/{i}", "net", port_Bps, 1.3e-6)]
    return Fabric(
        name="+".join(map(str, sizes)),
        devices=tuple(Device(name=f"s{h}/{i}", group=f"s{h}") for h, k in enumerate(sizes) for i in range(k)),
        switches=(*(Switch(name=f"s{h}/in", group=f"s{h}") for h in range(len(sizes))), Switch(name="net")),
        links=tuple(Link(src=a, dst=b, rate_Bps=r, latency_s=t) for u, v, r, t in cables for a, b in ((u, v), (v, u))),
    )


def crossing(plan: CollectivePlan, problem: CollectiveProblem) -> list[Fraction]:
    """Bytes that leave each server over the message (with padding)."""
    p = plan.program
    group = [problem.fabric.device(name).group for name in problem.ranks]
    moved = p.message_bytes() * p.lanes.repeat[p.lane_of_step()]
    out: dict[str, int] = dict.fromkeys(group, 0)
    for step in np.flatnonzero(p.steps.parts & Part.SEND):
        a, b = (group[int(side[p.steps.chan_out[step]])] for side in (p.channels.src, p.channels.dst))
        if a != b:
            out[a] += int(moved[step])
    held = int(p.buffers.chunks[0]) * int(p.buffers.chunk_bytes[0]) * int(p.lanes.repeat.max())
    return [Fraction(x, held) for x in out.values()]


def row(fabric: Fabric, op: str, size: int) -> dict[str, Any]:
    problem = CollectiveProblem.on(fabric, op, size)
    out: dict[str, Any] = {"what": "simulated", "fabric": fabric.name, "devices": len(problem.ranks), "op": op, "size_bytes": size}
    for name, strategy in (("blueconnect", BlueConnect()), ("ring", Ring()), ("forestcoll", ForestColl())):
        if op == "all-to-all" and name != "blueconnect":
            continue
        start = time.process_time()
        plan = strategy.plan(problem, rng=np.random.default_rng(0))
        out[f"{name}_plan_cpu_s"] = time.process_time() - start
        out[f"{name}_s"] = simulated_time_s(plan.program, fabric, problem.ranks, None)
        if name == "blueconnect":
            out["stages"], out["slices"] = plan.notes["stages"], plan.notes["slices"]
            out["over_bound"] = out["blueconnect_s"] / float(plan.bound) if plan.bound else None
            servers_count = len(plan.notes["servers"])
            if op == "all-reduce" and servers_count > 1:
                out["bytes_out_of_servers_over_message"] = sorted({str(x) for x in crossing(plan, problem)})
                out["least_possible"] = str(Fraction(2 * (servers_count - 1), servers_count))
            judged = [r for r in plan.notes["judged"] if r["table_s"]]
            out["table_over_simulated"] = [round(r["table_s"] / r["simulated_s"], 3) for r in judged if r["slices"] == judged[0]["slices"]][:4]
        else:
            out[f"{name}_over_blueconnect"] = out[f"{name}_s"] / out["blueconnect_s"]
    return out


def example_row() -> dict[str, Any]:
    """48 servers of 4 GPUs, 100 MB, closed form: NVLink 30 GB/s and 3 us inside, 10 GB/s shared by 4 and 5 us outside."""
    inside, across, size = Level(3e-6, 30e9), Level(5e-6, 10e9, share=4), 100e6
    grid = 2 * (inside.stage_s("ring", 4, size) + across.stage_s("ring", 48, size / 4))
    ring = 2 * Level(5e-6, 10e9).stage_s("ring", 192, size)
    return {"what": "closed form, 4 x 48", "blueconnect_s": grid, "flat_ring_s": ring, "ratio": ring / grid}


def main() -> None:
    row(load_fabric("two-islands"), "all-reduce", 1 << 20)  # compiles
    rows = [example_row()]
    for fabric in (servers((4, 4)), servers((3, 5)), servers((2, 3, 8)), load_fabric("ndv2:2"), load_fabric("dgx-a100:2"), load_fabric("dgx-h100:4")):
        rows += [row(fabric, "all-reduce", size) for size in (1 << 12, 1 << 20, 1 << 28)]
    for op in ("reduce-scatter", "all-gather", "all-to-all"):
        rows += [row(fabric, op, size) for fabric in (servers((3, 5)), load_fabric("dgx-a100:2")) for size in (1 << 12, 1 << 28)]
    rows.append(row(load_fabric("dgx-h100:8"), "all-reduce", 1 << 20))
    print(json.dumps(machine.record("blueconnect", rows), indent=1))


if __name__ == "__main__":
    main()
