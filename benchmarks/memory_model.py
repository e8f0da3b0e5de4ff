"""Predicted against measured peak of training steps, at every budget, for every strategy, on five nets, in eager mode.

Run: `python benchmarks/memory_model.py [--nets unet,swiglu] [--budgets 21] [--strategies keep,...] [--pieces FILE] [--minutes 9] [--quick]`. With
`--pieces` every row is kept in that file as soon as it is there, and those that it holds are not run again: start the same command until it says that
all is done (with `--minutes` it stops by itself in time), then it records the whole. Each row is one plan run for real: predicted peak, the
allocator's own peak (running sum of its events), and once per net the growth of the process's resident peak (VmHWM) in a process of its own; from the
events' figure what kernels allocate for results and never write is taken off there (the scratch that the mean of `mse_loss` keeps: 1 MiB of SwiGLU's
62 MB), because no page of it is ever resident. Gradients are compared with the plain step's, bit by bit. `--quick`: two small nets, three budgets.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import memory_nets

HERE = Path(__file__).parent
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def captured(net: str) -> tuple[Any, Any]:
    """(real step, its measured graph)."""
    from meshwright.capture.step import capture_step_of
    from meshwright.probe.steps.costs import StepCosts, costs_file, measure_step

    step = capture_step_of(f"{HERE / 'memory_nets.py'}:{net}", loss=memory_nets.NETS[net], device="cpu")
    return step, measure_step(step.graph_module, step.step_graph, costs=StepCosts(costs_file()))


def bit_equal(step: Any, graph: Any, plan: Any, reference: list[Any]) -> bool:
    import torch

    from meshwright.run.steps.step import runner_of, step_tensors

    torch.manual_seed(7)
    found = runner_of(step, plan, graph=graph).run(step_tensors(step))
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, reference, strict=True))


class Pieces:
    """Rows that are there already, by net, strategy and share of the peak; new ones are added to the file, one line each."""

    def __init__(self, path: Path | None, minutes: float) -> None:
        self.path, self.until = path, time.monotonic() + 60 * minutes
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.rows: dict[tuple[str, str, float], dict[str, Any]] = {}
        for row in map(json.loads, lines):
            self.rows[row["net"], row["strategy"], row["share"]] = row

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["net"], row["strategy"], row["share"]] = row
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def late(self) -> bool:
        return time.monotonic() > self.until


def shares_of(budgets: int) -> list[float]:
    return [round(1 - i / max(1, budgets - 1), 4) for i in range(budgets)]


def fill(net: str, strategies: list[str], budgets: int, pieces: Pieces) -> bool:
    """Runs what is missing of a net; False where time was up."""
    import numpy as np
    import torch

    from meshwright.check.training.step_memory import check_step_plan
    from meshwright.decide.memory import strategy as named
    from meshwright.decide.memory.step import keep_everything
    from meshwright.errors import MeshwrightError
    from meshwright.run.steps.step import measured_peak_bytes, runner_of, step_tensors

    missing = [(share, s) for share in shares_of(budgets) for s in strategies if (net, s, share) not in pieces.rows]
    if not missing:
        return True
    step, graph = captured(net)
    full, tensors = keep_everything(graph), step_tensors(step)
    torch.manual_seed(7)
    reference = runner_of(step, full, graph=graph).run([*tensors])
    for share, strategy in missing:
        if pieces.late():
            return False
        row: dict[str, Any] = {"net": net, "strategy": strategy, "share": share, "budget_bytes": int(share * full.peak_bytes)}
        try:
            start = time.process_time()
            plan = named(strategy, "step")().plan(graph, row["budget_bytes"], rng=np.random.default_rng(0))
            row["plan_s"] = round(time.process_time() - start, 2)
        except MeshwrightError as error:
            pieces.add(row | {"refused": error.message})
            continue
        check_step_plan(graph, plan).raise_if_wrong()
        row["bit_equal"] = bit_equal(step, graph, plan, reference)
        measured = measured_peak_bytes(runner_of(step, plan, graph=graph), tensors)
        row |= {"predicted_bytes": plan.peak_bytes, "measured_bytes": measured, "time_s": plan.time_s, "keep_time_s": full.time_s}
        row["error"] = round(plan.peak_bytes / measured - 1, 5)
        pieces.add(row)
        sizes = f"predicted {plan.peak_bytes:>12,} measured {measured:>12,}"
        print(f"{net:<9} {strategy:<12} {share:6.2f} {sizes} {100 * row['error']:+.2f} %", flush=True)
    return True


def resident_growth(net: str) -> dict[str, int]:
    """In a process of its own: growth of VmHWM over one run of the plain step, beside the events' growth. Allocations go straight to the system."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), "--resident", net], capture_output=True, text=True, timeout=900, check=True
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def resident(net: str) -> None:
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    from meshwright.decide.memory.step import keep_everything
    from meshwright.run.steps.step import measured_peak_bytes, runner_of, step_tensors
    from meshwright.run.steps.storage_peak import storage_bytes
    from meshwright.simulate.step_memory import alive_at

    step, graph = captured(net)
    plan = keep_everything(graph)
    runner, tensors = runner_of(step, plan, graph=graph), step_tensors(step)
    runner.run([*tensors])
    makers = {a.made_by for a in alive_at(graph, plan.actions, plan.peak_at)}
    shown = step.step_graph.storages  # as large as results are; `graph` says what their kernels allocate
    untouched = sum(graph.storages[s].size_bytes - shown[s].size_bytes for x in makers for s in graph.nodes[x].makes)
    events = measured_peak_bytes(runner, tensors) - storage_bytes(tensors)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    runner.run([*tensors])
    print(json.dumps({"events_bytes": events - untouched, "untouched_bytes": untouched, "resident_bytes": status("VmHWM") - before}))


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nets", default=",".join(memory_nets.NETS))
    parser.add_argument("--budgets", type=int, default=21)
    parser.add_argument("--strategies", default="", help="default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pieces", type=Path, help="keep rows here, and run only those that are missing")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop when this time is up; start again to go on")
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.resident:
        return resident(args.resident)
    from meshwright.decide.memory import strategies as listed

    nets = ["swiglu", "unet"] if args.quick else args.nets.split(",")
    strategies = args.strategies.split(",") if args.strategies else [kind.name for kind in listed("step")]
    pieces, growth = Pieces(args.pieces, args.minutes), {}
    budgets = 3 if args.quick else args.budgets
    for net in nets:
        if not fill(net, strategies, budgets, pieces):
            whole = len(nets) * len(strategies) * budgets
            print(f"time is up: {len(pieces.rows)} of {whole} rows are in {args.pieces}; start again to go on")
            return None
    rows = [pieces.rows[n, s, share] for n in nets for share in shares_of(budgets) for s in strategies]
    for net in nets:
        growth[net] = resident_growth(net)
        share = growth[net]["resident_bytes"] / growth[net]["events_bytes"] - 1
        print(f"{net:<9} resident growth {growth[net]['resident_bytes']:,} B, by events {growth[net]['events_bytes']:,} B ({100 * share:+.2f} %)")
    ran = [r for r in rows if "error" in r]
    worst = max((abs(r["error"]) for r in ran), default=0.0)
    print(f"{len(ran)} plans run, {len(rows) - len(ran)} refused; worst error {100 * worst:.2f} %; bit-equal {sum(r['bit_equal'] for r in ran)}")
    apart = max(abs(g["resident_bytes"] / g["events_bytes"] - 1) for g in growth.values())
    summary = [
        {"what": "predicted against measured peak, worst", "value": worst, "unit": "share", "limit": 0.02},
        {"what": "events against resident growth, worst", "value": round(apart, 5), "unit": "share", "limit": 0.01},
        {"what": "plans whose gradients are not bit-equal", "value": sum(not r["bit_equal"] for r in ran), "unit": "plans"},
    ]
    if not args.quick:
        machine.record("memory_model", summary, plans=rows, resident=growth)
    return None


if __name__ == "__main__":
    main()
