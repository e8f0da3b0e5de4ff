"""`meshwright place compare`: every strategy's placement of a task graph, simulated, beside the bound."""

from __future__ import annotations

import argparse

from .frame import Result
from .place_arguments import document_of, problem_arguments, problem_of, strategies_of, table

HELP = "Every strategy's placement of a task graph, simulated, beside the bound."


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..decide.place import STRATEGIES
    from ..drive.place import compare_placements
    from ..kernels.effort import Budget

    problem = problem_of(args)
    candidates = strategies_of(args, STRATEGIES)
    budget = Budget(len(candidates))
    ranked, bound = compare_placements(problem, candidates, seed=args.seed, budget=budget)
    document = {"schema": "meshwright.placements", "version": 1, **document_of(problem, ranked, bound)}
    return Result(document, "\n".join(table(problem, ranked, bound)), cut=budget.cut)
