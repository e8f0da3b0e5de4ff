"""`meshwright collective plan`: a schedule for a collective on a fabric, beside the bound and the schedules that lost."""

from __future__ import annotations

import argparse

from .collective_bound import problem_arguments, problem_of
from .frame import Result

HELP = "a schedule for a collective on a fabric"


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument("--strategy", default="auto", help="auto (default: the fastest in simulation), ring or forestcoll")
    parser.add_argument("--trees", type=int, help="forestcoll: trees per root (default: chosen)")
    parser.add_argument("--pieces", type=int, help="pipeline pieces (ring: slices; default: chosen)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds for planning (default 60)")


def run(args: argparse.Namespace) -> Result:
    from ..check import check_program
    from ..decide.collective import ForestColl, Ring, auto, strategy
    from ..errors import UsageError
    from ..report.collective_text import plan_document, plan_line

    problem = problem_of(args, seed=args.seed, time_limit_s=args.time_limit)
    ring, forest = Ring(slices=args.pieces), ForestColl(trees=args.trees, pieces=args.pieces)
    if args.trees is not None and args.strategy not in ("auto", "forestcoll"):
        raise UsageError(f"--trees means nothing to {args.strategy}", hint="use it with --strategy forestcoll")
    if args.strategy == "auto":
        ranked = auto(problem, candidates=[ring, Ring(slices=args.pieces, bidirectional=True), forest])
    else:
        ranked = auto(problem, candidates=[ring if strategy(args.strategy) is Ring else forest])
    best = ranked[0].plan
    assert best is not None
    check_program(best.program).raise_if_wrong()
    return Result(plan_document(problem, ranked), plan_line(problem, ranked))
