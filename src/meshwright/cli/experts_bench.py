"""`meshwright experts bench`: an expert layer on real processes, every choice at every capacity, beside what was predicted and the bound."""

from __future__ import annotations

import argparse
from dataclasses import replace

from .arguments import at_least_one
from .experts_plan import document_of, layer_arguments, problem_given
from .frame import Result
from .tables_arguments import lab_of

HELP = "measure every parallelism, overlap and exchange of an expert layer on real processes, one per device, beside its prediction"


def arguments(parser: argparse.ArgumentParser) -> None:
    layer_arguments(parser)
    parser.add_argument("--steps", type=at_least_one, default=5, metavar="N", help="measured steps of each; the median is shown (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default 0)")
    parser.add_argument("--lab", metavar="NAME", help="in this lab (`meshwright lab up`), one rank per device, not on loopback")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="end all ranks after this many seconds (default 300)")


def run(args: argparse.Namespace) -> Result:
    from ..bench.experts import bench_experts
    from ..decide.experts import Choice
    from ..drive.experts import LayerPrograms, rank_choices
    from ..explain.numbers import seconds_text
    from ..report.columns import columns
    from ..report.experts_text import row_document

    problem, chosen = problem_given(args)
    with lab_of(args.lab) as lab:
        if lab is not None:
            problem = replace(problem, fabric=lab.as_measured(problem.fabric))
        programs = LayerPrograms(problem.fabric, problem.ranks, problem.shape)
        ranked = [rank_choices(problem, programs, chosen.plan(problem).candidates, c) for c in problem.capacities]
        choices = [x.choice for x in sorted(ranked[0], key=lambda x: x.choice) if x.time_s is not None]
        measured = bench_experts(problem, choices, steps=args.steps, seed=args.seed, lab=lab, timeout_s=args.timeout)
    rows = [[row_document(x) | {"measured_s": measured.get((x.capacity, x.choice))} for x in rows] for rows in ranked]
    table = [["capacity", "choice", "measured", "predicted", "bound", "predicted / measured"]]
    lines = []
    for of_capacity in rows:
        known = [x for x in of_capacity if x["measured_s"] is not None]
        for x in known:
            name = Choice(x["degree"], x["chunks"], x["algorithm"]).text
            table.append([
                str(x["capacity"]), name, seconds_text(x["measured_s"]), seconds_text(x["time_s"]), seconds_text(x["bound"]["time_s"]),
                f"{x['time_s'] / x['measured_s']:.2f}",
            ])  # fmt: skip
        best = min(known, key=lambda x: x["measured_s"])
        ratio = known[0]["measured_s"] / best["measured_s"]
        lines.append(f"capacity {best['capacity']}: the choice predicted best took {ratio:.3f} of the best measured")
    head = f"{problem.shape.ranks} processes, {args.steps} steps each, slowest rank; predicted for {problem.fabric.name}"
    refused = sorted({f"refused: {x['algorithm']}: {x['why']}" for of_capacity in rows for x in of_capacity if x["measured_s"] is None})
    document = document_of(problem, "bench", steps=args.steps, lab=args.lab, capacities=rows)
    return Result(document, "\n".join([head, *columns(table), *lines, *refused]))
