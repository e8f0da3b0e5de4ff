"""`meshwright experts compare`: every choice of an expert layer at every capacity, beside the bound of its degree."""

from __future__ import annotations

import argparse

from .experts_plan import document_of, layer_arguments, problem_given
from .frame import Result

HELP = "every parallelism, overlap and exchange of an expert layer beside each other, and what a fixed one costs"


def arguments(parser: argparse.ArgumentParser) -> None:
    layer_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..drive.experts import LayerPrograms, rank_choices
    from ..report.experts_text import choices_text, fixed_times, row_document

    problem, chosen = problem_given(args)
    programs = LayerPrograms(problem.fabric, problem.ranks, problem.shape)
    candidates = chosen.plan(problem).candidates
    ranked = [rank_choices(problem, programs, candidates, c) for c in problem.capacities]
    fixed = fixed_times(ranked)
    rows = [[row_document(x) for x in rows] for rows in ranked]
    return Result(document_of(problem, "compare", capacities=rows, fixed=fixed), choices_text(problem, ranked, fixed))
