"""`meshwright tables compare`: every strategy's plan of embedding tables beside the bound, the best of them measured where that is asked."""

from __future__ import annotations

import argparse

from .frame import Result
from .tables_arguments import compared_document, problem_arguments, problem_of, text_table, tried

HELP = "Every strategy's plan of embedding tables beside the bound, the best of them measured where that is asked."


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..decide.tables import STRATEGIES

    problem = problem_of(args)
    _, ranked, bound, cut = tried(args, problem, STRATEGIES)
    document = {"schema": "meshwright.tables-compare", "version": 1, **compared_document(problem, ranked, bound)}
    return Result(document, "\n".join(text_table(problem, ranked, bound)), cut=cut)
