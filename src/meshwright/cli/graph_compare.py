"""`meshwright graph compare`: planned bits beside every uniform width: time of a simulated epoch, bytes, variance."""

from __future__ import annotations

import argparse

from .frame import Result
from .graph_arguments import bits_rows, bits_table, data_of, planned_bits, planning_arguments, problem_of

__all__ = ["HELP", "arguments", "run"]

HELP = "planned bits beside every uniform width: simulated epoch, bytes, variance; or the whole curve"


def arguments(parser: argparse.ArgumentParser) -> None:
    planning_arguments(parser)
    parser.add_argument("--curve", action="store_true", help="every choice that no other dominates: seconds of all rounds, and variance")


def run(args: argparse.Namespace) -> Result:
    from ..decide.traffic.adaqp.strategy import AdaQP
    from ..drive.halo import compare_halos, default_strategies
    from ..io.quantity import show_time
    from ..kernels.effort import Budget

    planned = planned_bits(args)
    candidates = [planned, *default_strategies()[1:]]
    budget = Budget(len(candidates))
    job, parts, _, problem = problem_of(args, data_of(args), budget)
    tried = compare_halos(problem, candidates, budget=budget)
    rows = bits_rows(problem, tried)
    document = {
        "schema": "meshwright.graph-comparison", "version": 1, "graph": job.name, "fabric": problem.fabric.name, "workers": len(problem.ranks),
        "cut_edges": parts.cut, "bits": rows,
    }  # fmt: skip
    lines = [f"{job.name} on {len(problem.ranks)} workers of {problem.fabric.name}, {job.layers} layers of {job.hidden}", "", *bits_table(rows)]
    if args.curve:
        assert isinstance(planned, AdaQP)
        points, whole = planned.pareto(problem)
        document |= {"curve": [{"rounds_s": t, "variance": v} for t, v in points], "whole": whole}
        shown = points[:: max(1, len(points) // 10)]
        what = "all choices that none dominates" if whole else "choices that are best for some price of variance"
        lines += ["", f"{len(points):,} {what}; some of them:", *(f"{show_time(t):>12}{v:>14.4g}" for t, v in shown)]
    return Result(document, "\n".join(lines), cut=budget.cut)
