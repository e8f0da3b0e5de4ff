"""Overhead by memory budget on five nets: predicted, and run for real on partitioned FX graphs, beside Chen, Rotor and PyTorch's own partitions.

Run: `python benchmarks/memory_curve.py [--quick]` (some eight minutes on one core; --quick: two nets, fewer runs). Operators are measured first (kept
in the user's cache). Peaks are those of the allocator's events; seconds are CPU time of one thread, medians of interleaved runs of all plans
of a net, whose order is turned every round. `at_equal_peak` compares every other strategy's plan with ours at no more than its measured peak.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import machine
import memory_nets

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.decide.memory.baselines import Chen, Rotor
from meshwright.decide.memory.fusionaware import FusionAware, frontier_of
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import Infeasible
from meshwright.probe.step_costs import StepCosts, costs_file, measure_step
from meshwright.report.memory_curve import curve_svg, curve_text
from meshwright.run.step import measured_peak_bytes, runner_of, step_tensors
from meshwright.run.step_compare import budgets_of, compare_step
from meshwright.run.torch_partitions import torch_plans
from meshwright.step_graph import StepGraph, StepPlan

BUDGETS = 21
TIMED_EVERY = 5
TIES = 1.02


def plans_of(step: CapturedStep, graph: StepGraph, budgets: tuple[int, ...], effort: int) -> list[StepPlan]:
    """Every strategy at every budget it can keep, and torch's partitions; plans with equal actions once per strategy."""
    found: dict[tuple[str, Any], StepPlan] = {}
    for strategy in (FusionAware(effort=effort), Rotor(), Chen()):
        for budget in budgets:
            try:
                plan = strategy.plan(graph, budget, rng=np.random.default_rng(0))
            except Infeasible:
                continue
            found.setdefault((plan.strategy, plan.actions), plan)
    for plan in torch_plans(step, graph=graph):
        found.setdefault((plan.strategy, plan.actions), plan)
    return list(found.values())


def timed(step: CapturedStep, graph: StepGraph, plans: list[StepPlan], rounds: int) -> list[float]:
    """Median CPU seconds of each plan; rounds over all plans, each beginning elsewhere."""
    runners = [runner_of(step, p, graph=graph) for p in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    for r in range(rounds + 1):
        for k in range(len(plans)):
            i = (k + r * 7) % len(plans)
            tensors = step_tensors(step)
            start = time.thread_time()
            runners[i].run(tensors)
            if r:  # the first round warms up
                seconds[i].append(time.thread_time() - start)
    return [statistics.median(s) for s in seconds]


def one_net(name: str, *, rounds: int, effort: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, inputs = getattr(memory_nets, name)()
    step = capture_step(module, inputs, loss=memory_nets.NETS[name], name=name)
    graph = measure_step(step.graph_module, step.step_graph, costs=StepCosts(costs_file()))
    begin = time.process_time()
    frontier = frontier_of(graph, effort)
    search_s = time.process_time() - begin
    budgets = budgets_of(graph, BUDGETS, effort=effort)
    plans = plans_of(step, graph, budgets, effort)
    peaks = [measured_peak_bytes(runner_of(step, p, graph=graph), step_tensors(step)) for p in plans]
    chosen = sorted({i for i, p in enumerate(plans) if p.strategy.startswith("torch")} | {i for i in range(len(plans)) if i % TIMED_EVERY == 0})
    seconds = dict(zip(chosen, timed(step, graph, [plans[i] for i in chosen], rounds), strict=True))
    rows = [
        {
            "strategy": p.strategy, "options": p.options, "peak_bytes": p.peak_bytes, "measured_peak_bytes": peak, "time_s": p.time_s,
            "floor_s": p.floor_s, "measured_cpu_s": seconds.get(i),
        }
        for i, (p, peak) in enumerate(zip(plans, peaks, strict=True))
    ]  # fmt: skip
    ours = [(p, peak) for p, peak in zip(plans, peaks, strict=True) if p.strategy == "fusionaware"]
    curve = compare_step(step, graph, budgets=budgets, effort=effort, torch_budgets=())
    print(curve_text(curve))
    machine.RESULTS.mkdir(exist_ok=True)
    (machine.RESULTS / f"memory_curve_{name}.svg").write_text(curve_svg(curve))
    equal = [_at_equal_peak(row, ours, keep_everything(graph).time_s) for row in rows if row["strategy"] != "fusionaware"]
    summary = {
        "net": name, "nodes": len(graph.nodes), "search_cpu_s": search_s, "plans_in_frontier": len(frontier.entries),
        "least_bytes": frontier.least_bytes,
        "worst_prediction": max(abs(peak / p.peak_bytes - 1) for p, peak in zip(plans, peaks, strict=True)),
        "measured_peak_monotone": all(b[1] <= a[1] for a, b in pairwise(ours)),
        "never_slower_predicted": all(e["ratio"] is None or e["ratio"] <= TIES for e in equal), "at_equal_peak": equal, "plans": rows,
    }  # fmt: skip
    best: dict[str, float] = {}
    for e in equal:
        if e["ratio"] is not None:
            best[e["strategy"]] = max(best.get(e["strategy"], 0.0), e["step_less"])
    print(
        f"{name}: prediction within {summary['worst_prediction']:.2%}, measured peak monotone: {summary['measured_peak_monotone']}, search "
        f"{search_s:.1f} CPU s, most saved of a step at equal peak: " + ", ".join(f"{s} {x:.1%}" for s, x in best.items()) + "\n"
    )
    return summary


def _at_equal_peak(row: dict[str, Any], ours: list[tuple[StepPlan, int]], plain_s: float) -> dict[str, Any]:
    """Ours at no more than the measured peak of another plan; `ratio` of predicted times, `step_less`: share of the plain step saved."""
    fitting = [p for p, peak in ours if peak <= row["measured_peak_bytes"]]
    best = min((p.time_s for p in fitting), default=None)
    return {
        "strategy": row["strategy"], "options": row["options"], "measured_peak_bytes": row["measured_peak_bytes"], "time_s": row["time_s"],
        "ours_s": best, "ratio": None if best is None else best / row["time_s"],
        "step_less": 0.0 if best is None else (row["time_s"] - best) / plain_s,
    }  # fmt: skip


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    name = result["net"]
    worse = [e["ratio"] for e in result["at_equal_peak"] if e["ratio"] is not None]
    return [
        {"what": f"{name}: measured peak against predicted, worst", "value": result["worst_prediction"], "unit": "share", "limit": 0.02},
        {"what": f"{name}: measured peak rises as the budget falls", "value": int(not result["measured_peak_monotone"]), "unit": "0 or 1"},
        {
            "what": f"{name}: predicted time against another's at equal measured peak, worst", "value": max(worse, default=0.0), "unit": "ratio",
            "limit": TIES,
        },
        {"what": f"{name}: search", "value": result["search_cpu_s"], "unit": "CPU s"},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two nets, fewer runs, a smaller search")
    parser.add_argument("--nets", default="", help="by commas (default: all five)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    nets = args.nets.split(",") if args.nets else ["swiglu", "unet"] if args.quick else list(memory_nets.NETS)
    rounds, effort = (3, 10_000_000) if args.quick else (5, 60_000_000)
    results = [one_net(name, rounds=rounds, effort=effort) for name in nets]
    rows = [row for r in results for row in rows_of(r)]
    machine.record("memory_curve", rows, command="python benchmarks/memory_curve.py" + (" --quick" if args.quick else ""), nets=results)


if __name__ == "__main__":
    main()
