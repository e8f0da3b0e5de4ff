"""`meshwright experts compare`: every choice of an expert layer at every capacity, beside the bound of its degree."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one, whole_number
from .experts_plan import document_of, layer_arguments, problem_given
from .frame import Result

HELP = "every parallelism, overlap and exchange of an expert layer beside each other, and what a fixed one costs"


def arguments(parser: argparse.ArgumentParser) -> None:
    layer_arguments(parser)
    parser.add_argument("--loads", type=Path, help="tokens of every expert in a run (docs/formats.md): shown as a map, with copies of hot experts")
    parser.add_argument("--spare", type=whole_number, default=1, metavar="N", help="with --loads: places for copies on every rank (default 1)")
    parser.add_argument("--steps", type=at_least_one, default=100, metavar="N", help="with --loads: steps until loads change (default 100)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.experts import LayerPrograms, rank_choices
    from ..drive.experts.replicas import replicas_of
    from ..io.costs.expert_loads import read_expert_loads
    from ..kernels.effort import Budget
    from ..report.experts_text import choices_text, fixed_times, loads_text, row_document

    problem, chosen = problem_given(args)
    programs = LayerPrograms(problem.fabric, problem.ranks, problem.shape)
    candidates = chosen.plan(problem).candidates
    budget = Budget(1)
    with budget.net():
        ranked = [rank_choices(problem, programs, candidates, c, budget) for c in problem.capacities]
    fixed = fixed_times(ranked)
    rows = [[row_document(x) for x in rows] for rows in ranked]
    text, more = choices_text(problem, ranked, fixed), {}
    if args.loads is not None:
        layers = replicas_of(problem, read_expert_loads(args.loads), spare=args.spare, steps=args.steps)
        text, more = f"{text}\n{loads_text(layers)}", {"replicas": [x.document() for x in layers]}
    return Result(document_of(problem, "compare", capacities=rows, fixed=fixed, **more), text, cut=budget.cut)
