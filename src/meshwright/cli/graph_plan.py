"""`meshwright graph plan`: how many bits each row of each message gets, as a checked plan beside its bound."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import require_directory
from .frame import Result
from .graph_arguments import bits_rows, bits_table, data_of, planned_bits, planning_arguments, problem_of, share_rows

__all__ = ["HELP", "arguments", "run"]

HELP = "how many bits each row of each message gets: a checked plan beside its bound"


def arguments(parser: argparse.ArgumentParser) -> None:
    planning_arguments(parser)
    parser.add_argument("--bits", type=int, help="2, 4, 8 or 32 bits for all rows instead")
    parser.add_argument("--out", "-o", type=Path, help="write the plan here (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.traffic.adaqp.strategy import Uniform
    from ..drive.halo import default_strategies, digest_of, plan_halo
    from ..drive.plans import write_plan
    from ..io.quantity import show_time
    from ..kernels.effort import Budget

    if args.out is not None:
        require_directory(args.out)
    data = data_of(args)
    budget = Budget(1 + len(default_strategies()))
    job, parts, shares, problem = problem_of(args, data, budget)
    strategy = planned_bits(args) if args.bits is None else Uniform(bits=args.bits)
    plan, (tried, *others) = plan_halo(
        job, problem, strategy, digest=digest_of(data.graph, parts.of), edges=data.graph.edges, central=[s.central for s in shares],
        method=parts.method, seed=args.seed, budget=budget,
    )  # fmt: skip
    rows = bits_rows(problem, [tried, *(t for t in others if isinstance(t.strategy, Uniform))])
    bound_s = float(plan.bound) if plan.bound else 0.0
    assert tried.assignment is not None
    document = {
        "schema": "meshwright.graph-plan", "version": 1, "graph": job.name, "fabric": problem.fabric.name, "workers": share_rows(shares),
        "cut_edges": parts.cut, "method": parts.method, "bits": rows, "bound_s": bound_s, "exact": tried.assignment.exact,
        "gap": tried.assignment.gap,
    }  # fmt: skip
    sure = "no other choice of these groups is better" if tried.assignment.exact else f"another choice may be {tried.assignment.gap:.2%} better"
    lines = [
        f"{job.name} on {len(shares)} workers of {problem.fabric.name}, {job.layers} layers of {job.hidden}; parts by {parts.method}, "
        f"{parts.cut:,} cut",
        f"{sum(s.central for s in shares) / max(1, sum(s.own for s in shares)):.1%} of the nodes are computed while rows travel; "
        f"messages of this variance take at least {show_time(bound_s)} an epoch", sure, "", *bits_table(rows),
    ]  # fmt: skip
    if args.out is not None:
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        lines.append(f"written: {args.out}")
    return Result(document, "\n".join(lines), cut=budget.cut)
