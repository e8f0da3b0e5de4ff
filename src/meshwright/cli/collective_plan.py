"""`meshwright collective plan`: a schedule for a collective on a fabric, beside the bound and the schedules that lost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .collective_bound import count, problem_arguments, problem_of, seconds, seed
from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective import CollectiveStrategy

HELP = "a schedule for a collective on a fabric"


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument("--strategy", default="auto", help="auto (default: the fastest in simulation) or a strategy's name")
    parser.add_argument("--trees", type=count, help="forestcoll: trees per root (default: chosen)")
    parser.add_argument("--pieces", type=count, help="pipeline pieces (ring: slices; default: chosen)")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--time-limit", type=seconds, default=60.0, metavar="S", help="seconds for planning (default 60)")
    parser.add_argument("--out", "-o", type=Path, help="also write the plan to this file (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective import default_candidates, strategy
    from ..drive import write_plan
    from ..drive_collective_job import plan_collective
    from ..errors import UsageError
    from ..report.collective_text import plan_document, plan_line

    problem = problem_of(args, seed=args.seed, time_limit_s=args.time_limit)
    if args.trees is not None and args.strategy not in ("auto", "forestcoll"):
        raise UsageError(f"--trees means nothing to {args.strategy}", hint="use it with --strategy forestcoll")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise UsageError(f"no directory {args.out.parent}", where="--out", hint="make it first")
    listed: Sequence[CollectiveStrategy] = default_candidates() if args.strategy == "auto" else [strategy(args.strategy)()]
    candidates = [_with_options(x, slices=args.pieces, pieces=args.pieces, trees=args.trees) for x in listed]
    each_s = args.time_limit / 4 if len(candidates) > 1 else args.time_limit
    plan, ranked = plan_collective(problem, candidates=candidates, search=args.pieces is None, each_s=each_s)
    document, text = plan_document(problem, ranked), plan_line(problem, ranked)
    if args.out is not None:
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        text += f"\nwritten: {args.out}"
    return Result(document, text)


def _with_options(candidate: CollectiveStrategy, **given: int | None) -> CollectiveStrategy:
    """The candidate with those of the given options that it has."""
    has = {f.name for f in fields(candidate)}  # type: ignore[arg-type]
    return replace(candidate, **{name: value for name, value in given.items() if value is not None and name in has})  # type: ignore[type-var]
