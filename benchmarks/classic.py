"""Classic collective algorithms: simulated against textbook times on an ideal fabric, winners by size, what planning costs, NCCL's figures.

Run: `python benchmarks/classic.py` (raw output in benchmarks/results/classic.json). Times of planning are processor seconds, best of three.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from machine import cpu_s, record

from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.classic.strategy import ALGORITHMS, classic_candidates
from meshwright.decide.collective.nccl.model import predict, topology_of
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric

ALPHA_S, RATE_Bps = 1e-5, 10**9


def hub(n: int) -> Fabric:
    """n ports on a switch that never blocks: a message takes ALPHA_S + bytes / RATE_Bps."""
    devices = tuple(Device(name=f"d{i}") for i in range(n))
    up = tuple(Link(src=d.name, dst="hub", rate_Bps=RATE_Bps, latency_s=ALPHA_S) for d in devices)
    down = tuple(Link(src="hub", dst=d.name, rate_Bps=RATE_Bps) for d in devices)
    return Fabric(name=f"hub:{n}", devices=devices, switches=(Switch(name="hub"),), links=up + down)


def textbook_s(name: str, op: str, n: int, size: int) -> float | None:
    """The formulas of the textbook for n a power of two."""
    log, whole = n.bit_length() - 1, size / RATE_Bps
    share = (n - 1) / n * whole
    return {
        ("ring", "all-reduce"): 2 * (n - 1) * ALPHA_S + 2 * share,
        ("halving-doubling", "all-reduce"): 2 * log * ALPHA_S + 2 * share,
        ("recursive-doubling", "all-reduce"): log * (ALPHA_S + whole),
        ("direct", "all-reduce"): 2 * ALPHA_S + 2 * share,
        ("bruck", "all-gather"): log * ALPHA_S + share,
        ("pat", "all-gather"): log * ALPHA_S + share,
        ("halving-doubling", "all-gather"): log * ALPHA_S + share,
        ("direct", "all-gather"): ALPHA_S + share,
        ("direct", "all-to-all"): ALPHA_S + share,
        ("bruck", "all-to-all"): log * (ALPHA_S + whole / 2),
        ("rooted-tree", "broadcast"): log * (ALPHA_S + whole),
    }.get((name, op))


def simulated(name: str, options: dict[str, Any], problem: CollectiveProblem) -> float | None:
    try:
        plan = ALGORITHMS[name](**options).plan(problem, rng=np.random.default_rng(0))
    except Unsupported:
        return None
    return simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport)


def textbook_rows() -> list[dict[str, Any]]:
    rows = []
    for n in (8, 32):
        for op in ("all-reduce", "all-gather", "all-to-all", "broadcast"):
            for name in ALGORITHMS:
                size = 1 << 22
                book = textbook_s(name, op, n, size)
                options: dict[str, Any] = {"pieces": 1} if name == "rooted-tree" else {"pack": True} if name == "bruck" else {}
                if name == "direct" and op == "all-reduce":
                    options = {"shots": 2}
                took = simulated(name, options, CollectiveProblem.on(hub(n), op, size)) if book is not None else None
                if took is not None:
                    rows.append({"what": f"{op} of 4 MiB on {n} ports, {name}: simulated against textbook", "value": took, "unit": "s", "peer": book})
    return rows


def winner_rows(fabric_name: str) -> list[dict[str, Any]]:
    fabric, rows = load_fabric(fabric_name), []
    for op in ("all-reduce", "all-gather", "all-to-all", "broadcast"):
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
            problem = CollectiveProblem.on(fabric, op, size)
            times = {name: t for name, options in classic_candidates(problem) if (t := simulated(name, options, problem)) is not None}
            best = min(times, key=lambda name: times[name])
            rows.append({"what": f"{op} of {size} B on {fabric_name}: fastest is {best}", "value": times[best], "unit": "s", "all_s": times})
    return rows


def planning_rows(fabric_name: str) -> list[dict[str, Any]]:
    fabric, rows = load_fabric(fabric_name), []
    for op in ("all-reduce", "all-to-all"):
        problem = CollectiveProblem.on(fabric, op, 1 << 20)
        for name, options in classic_candidates(problem):
            strategy = ALGORITHMS[name](**options)
            seconds, plan = cpu_s(lambda strategy=strategy, problem=problem: strategy.plan(problem, rng=np.random.default_rng(0)))
            rows.append({"what": f"planning {op} on {fabric_name}: {name}", "value": seconds, "unit": "cpu s", "steps": plan.program.executed_steps})
    return rows


def nccl_rows() -> list[dict[str, Any]]:
    """NCCL's own model, bus bandwidth of large all-reduces against figures that users report."""
    fabric = load_fabric("dgx-h100:1")
    topology = topology_of(fabric, [d.name for d in fabric.devices])
    size = 8 << 30
    best = predict(topology, "all-reduce", size)[0]
    assert best.time_us is not None
    row = {"what": f"8 H100, all-reduce of 8 GiB: {best.algorithm}/{best.protocol}", "value": size / best.time_us / 1e3 * 2 * 7 / 8, "unit": "GB/s"}
    return [row | {"peer": 480.0, "peer_source": "about what users report with NVLS"}]


def main() -> None:
    rows = textbook_rows() + winner_rows("dgx-h100:2") + winner_rows("two-islands:8") + planning_rows("dgx-h100:8") + nccl_rows()
    document = record("classic", rows)
    for row in document["rows"]:
        print(f"{row['what']}: {row['value']:.6g} {row['unit']}" + (f" (ratio {row['ratio']})" if "ratio" in row else ""))


if __name__ == "__main__":
    main()
