"""`meshwright collective compare`: every strategy at every size, the bound, and the winner, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .collective_bound import EFFORT, SIZE_HELP, limit_arguments, problem_arguments, problem_of, reproducible_argument, seed, size_bytes
from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective import CollectiveStrategy

HELP = "all strategies at all sizes: time, algbw, busbw, the bound and the winner"
MAX_SIZES = 64  # of one table, each simulated for every strategy
DEFAULT_EFFORT_S = 5  # counted work of one strategy per size class


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser, sized=False)
    parser.add_argument("--sizes", required=True, help=f"FIRST:LAST[:FACTOR] (factor 2 by default) or a list, e.g. 1KiB:1GiB; {SIZE_HELP}")
    reproducible_argument(parser)
    parser.add_argument("--strategies", help="strategies to compare, separated by commas (default: all)")
    parser.add_argument("--winners", action="store_true", help="print only the winner of every size")
    limit_arguments(parser, DEFAULT_EFFORT_S, f"of one strategy per size class, {EFFORT}")
    parser.add_argument("--every-size", action="store_true", help="make new plans at every size, not only at sizes 16 times apart")
    parser.add_argument("--no-search", action="store_true", help="keep each strategy's own number of pieces; do not look for a better one")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the search: equal seeds give equal plans (default 0)")


def sizes_of(text: str) -> list[int]:
    """The sizes that `--sizes` names, in bytes. Raises UsageError."""
    from ..errors import UsageError

    if ":" not in text:
        found = [size_bytes(part, "--sizes") for part in text.split(",")]
    else:
        parts = text.split(":")
        factor = parts[2] if len(parts) == 3 else "2"
        if len(parts) > 3 or not factor.isascii() or not factor.isdigit() or int(factor) < 2:
            raise UsageError(f"not a range of sizes: {text[:64]!r}", where="--sizes", hint="FIRST:LAST or FIRST:LAST:FACTOR, e.g. 1KiB:1GiB:4")
        size, last = size_bytes(parts[0], "--sizes"), size_bytes(parts[1], "--sizes")
        if size < 1 or size > last:
            raise UsageError(f"the range {text[:64]!r} is empty", where="--sizes", hint="the first size must be >= 1 B and not above the last")
        found = []
        while size <= last and len(found) <= MAX_SIZES:
            found.append(size)
            size *= int(factor)
    if len(found) > MAX_SIZES:
        raise UsageError(f"more than {MAX_SIZES} sizes", where="--sizes", hint="use a larger factor")
    return found


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective import default_candidates, strategy
    from ..decide.collective.sweep import sweep
    from ..kernels.effort import Budget
    from ..report.collective_sweep import sweep_document, sweep_text

    sizes = sizes_of(args.sizes)
    args.size = str(sizes[0])
    problem = problem_of(args, seed=args.seed, reproducible=args.reproducible)
    listed: list[CollectiveStrategy] = list(default_candidates(problem, in_network=args.in_network))
    if args.strategies:
        listed = [strategy(name, where="--strategies")() for name in args.strategies.split(",")]
    budget = Budget(len(set(sizes)), time_limit_s=args.time_limit)
    rows = list(sweep(problem, sizes, listed, search=not args.no_search, each_s=args.effort, every=args.every_size, budget=budget))
    return Result(sweep_document(rows), sweep_text(rows, winners=args.winners), cut=budget.cut)
