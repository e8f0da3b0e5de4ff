"""Overhead by memory budget on five nets: predicted, and run for real on partitioned FX graphs, beside Chen, Rotor and PyTorch's own partitions.

Run: `python benchmarks/memory_curve.py [--quick]` (some eight minutes on one core; --quick: two nets, fewer runs). Operators are measured first (kept
in the user's cache). Peaks are those of the allocator's events; seconds are CPU time of one thread, medians of interleaved runs of all plans
of a net, whose order is turned every round. `at_equal_peak` compares every other strategy's plan with ours at no more than its measured peak (ours
is planned for each of those peaks, too). Where ours seems slower by more than a tie, the two are run again by themselves, in turns, three times as
often, and those runs stand (`first_ratio`: the figure before). torch's sac_milp is a peer where PuLP is installed.
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
from meshwright.graph.step_graph import StepGraph, StepPlan
from meshwright.probe.steps.compare import budgets_of, compare_step
from meshwright.probe.steps.costs import StepCosts, costs_file
from meshwright.probe.steps.priced import priced_graphs
from meshwright.probe.steps.sac_plans import sac_installed, sac_plans
from meshwright.probe.steps.torch_partitions import torch_plans
from meshwright.report.memory_curve import curve_svg, curve_text
from meshwright.run.steps.step import measured_peak_bytes, runner_of, step_tensors

BUDGETS = 21
TIMED_EVERY = 5
TIES = 1.02
AGAIN = 3  # times as many runs for a pair that seems slower


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
    for plan in (*torch_plans(step, graph=graph), *(sac_plans(step, graph=graph) if sac_installed() else ())):
        found.setdefault((plan.strategy, plan.actions), plan)
    return list(found.values())


def beside(graph: StepGraph, plans: list[StepPlan], peaks: list[int], effort: int) -> list[StepPlan]:
    """Ours for the measured peak of every other strategy's plan, those that are not among the plans yet."""
    known = {p.actions for p in plans if p.strategy == "fusionaware"}
    found: dict[Any, StepPlan] = {}
    for plan, peak in zip(plans, peaks, strict=True):
        if plan.strategy != "fusionaware":
            try:
                ours = FusionAware(effort=effort).plan(graph, min(peak, plan.peak_bytes), rng=np.random.default_rng(0))
            except Infeasible:
                continue
            if ours.actions not in known:
                found.setdefault(ours.actions, ours)
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


def in_turns(step: CapturedStep, graph: StepGraph, pair: tuple[StepPlan, StepPlan], runs: int) -> float:
    """Median CPU seconds of the first plan over the second's."""
    runners = [runner_of(step, p, graph=graph) for p in pair]
    seconds: list[list[float]] = [[], []]
    for r in range(runs + 1):
        for i in (0, 1) if r % 2 else (1, 0):
            tensors = step_tensors(step)
            start = time.thread_time()
            runners[i].run(tensors)
            if r:
                seconds[i].append(time.thread_time() - start)
    return statistics.median(seconds[0]) / statistics.median(seconds[1])


def one_net(name: str, *, rounds: int, effort: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, inputs = getattr(memory_nets, name)()
    step = capture_step(module, inputs, loss=memory_nets.NETS[name], name=name)
    graph, _ = priced_graphs(step, StepCosts(costs_file()))
    begin = time.process_time()
    frontier = frontier_of(graph, effort)
    search_s = time.process_time() - begin
    budgets = budgets_of(graph, BUDGETS, effort=effort)
    plans = plans_of(step, graph, budgets, effort)
    peaks = [measured_peak_bytes(runner_of(step, p, graph=graph), step_tensors(step)) for p in plans]
    more = beside(graph, plans, peaks, effort)
    peaks += [measured_peak_bytes(runner_of(step, p, graph=graph), step_tensors(step)) for p in more]
    plans += more
    partner = {i: _partner(i, plans, peaks) for i, p in enumerate(plans) if p.strategy != "fusionaware"}
    chosen = {i for i, p in enumerate(plans) if p.strategy.startswith("torch")} | {i for i in range(len(plans)) if i % TIMED_EVERY == 0}
    chosen = sorted(chosen | {k for i, k in partner.items() if i in chosen and k is not None})
    seconds = dict(zip(chosen, timed(step, graph, [plans[i] for i in chosen], rounds), strict=True))
    rows = [
        {
            "strategy": p.strategy, "options": p.options, "peak_bytes": p.peak_bytes, "measured_peak_bytes": peak, "time_s": p.time_s,
            "floor_s": p.floor_s, "measured_cpu_s": seconds.get(i),
        }
        for i, (p, peak) in enumerate(zip(plans, peaks, strict=True))
    ]  # fmt: skip
    ours = sorted(((p, peak) for p, peak in zip(plans, peaks, strict=True) if p.strategy == "fusionaware"), key=lambda x: -x[0].peak_bytes)
    curve = compare_step(step, graph, budgets=budgets, effort=effort, torch_budgets=())
    print(curve_text(curve))
    machine.RESULTS.mkdir(exist_ok=True)
    (machine.RESULTS / f"memory_curve_{name}.svg").write_text(curve_svg(curve))
    plain_s = keep_everything(graph).time_s
    equal = [_at_equal_peak(rows[i], None if k is None else rows[k], plain_s) for i, k in partner.items()]
    for e, (i, k) in zip(equal, partner.items(), strict=True):
        if k is not None and (e["measured_ratio"] or 0.0) > TIES:
            e["first_ratio"], e["measured_ratio"] = e["measured_ratio"], in_turns(step, graph, (plans[k], plans[i]), AGAIN * rounds)
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


def _partner(i: int, plans: list[StepPlan], peaks: list[int]) -> int | None:
    """Our plan of least predicted time whose measured peak is no more than that of plan i."""
    fitting = [k for k, p in enumerate(plans) if p.strategy == "fusionaware" and peaks[k] <= peaks[i]]
    return min(fitting, key=lambda k: (plans[k].time_s, peaks[k]), default=None)


def _at_equal_peak(row: dict[str, Any], ours: dict[str, Any] | None, plain_s: float) -> dict[str, Any]:
    """`ratio`: our predicted time over another's, `measured_ratio`: of CPU seconds, where both ran; `step_less`: share of the plain step saved."""
    best = None if ours is None else ours["time_s"]
    both = ours is not None and ours["measured_cpu_s"] is not None and row["measured_cpu_s"] is not None
    return {
        "strategy": row["strategy"], "options": row["options"], "measured_peak_bytes": row["measured_peak_bytes"], "time_s": row["time_s"],
        "ours_s": best, "ratio": None if best is None else best / row["time_s"],
        "measured_ratio": ours["measured_cpu_s"] / row["measured_cpu_s"] if ours is not None and both else None,
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
        {
            "what": f"{name}: measured CPU seconds against another's at equal measured peak, worst",
            "value": max((e["measured_ratio"] for e in result["at_equal_peak"] if e["measured_ratio"] is not None), default=0.0), "unit": "ratio",
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
