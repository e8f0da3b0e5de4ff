"""`meshwright place compare`: every strategy's placement of a task graph, simulated, beside the bound."""

from __future__ import annotations

import argparse

from .frame import Result
from .place_arguments import document_of, problem_arguments, problem_of, table

HELP = "Every strategy's placement of a task graph, simulated, beside the bound."


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from dataclasses import fields, replace

    from ..decide.place import STRATEGIES
    from ..drive.place import compare_placements

    problem = problem_of(args)
    made = [kind() for kind in STRATEGIES]
    if args.evaluations:
        made = [replace(s, evaluations=args.evaluations) if "evaluations" in {f.name for f in fields(s)} else s for s in made]  # type: ignore[type-var, arg-type]
    ranked, bound = compare_placements(problem, made, seed=args.seed)
    document = {"schema": "meshwright.placements", "version": 1, **document_of(problem, ranked, bound)}
    return Result(document, "\n".join(table(problem, ranked, bound)))
