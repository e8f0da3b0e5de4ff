"""`meshwright collective plan`: a schedule for a collective on a fabric, beside the bound and the schedules that lost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import require_directory
from .collective_bound import count, limit_arguments, limits, problem_arguments, problem_of, reproducible_argument, seed
from .frame import Result
from .pictures import check_pictures, picture_arguments, with_pictures

if TYPE_CHECKING:
    from ..decide.collective import CollectiveStrategy
    from ..sketch import Sketch

HELP = "a schedule for a collective on a fabric"


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    reproducible_argument(parser)
    parser.add_argument("--numbers", metavar="LIST", help="of each rank's contribution in the tree, e.g. 2,0,3,1 (default: its rank)")
    parser.add_argument("--strategy", default="auto", help="auto (default: the fastest in simulation) or a strategy's name")
    parser.add_argument("--trees", type=count, help="forestcoll: trees per root (default: chosen)")
    parser.add_argument("--pieces", type=count, help="pipeline pieces (ring: slices; default: chosen)")
    parser.add_argument("--sketch", metavar="FILE|NAME", help="taccl: a communication sketch (TACCL's JSON format), or a published one's name")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="an option of the strategy, its value as JSON or plain text, e.g. form=trees; may be repeated")  # fmt: skip
    parser.add_argument("--seed", type=seed, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    limit_arguments(parser)
    parser.add_argument("--out", "-o", type=Path, help="also write the plan to this file (.json or .json.gz)")
    picture_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective import default_candidates
    from ..drive.collective.job import plan_collective
    from ..drive.plans import write_plan
    from ..errors import UsageError
    from ..kernels.effort import cut_of
    from ..report.collective_text import plan_document, plan_line

    named = None if args.strategy == "auto" else _strategy(args.strategy, args.op)
    numbers = {"numbers": _numbers(args.numbers)} if args.numbers else {}
    problem = problem_of(args, seed=args.seed, reproducible=args.reproducible, **numbers, **limits(args))
    if args.trees is not None and args.strategy not in ("auto", "forestcoll"):
        raise UsageError(f"--trees does not apply to {args.strategy}", hint="use it with --strategy forestcoll")
    if args.out is not None:
        require_directory(args.out)
    check_pictures(args)
    listed: Sequence[CollectiveStrategy]
    if named is None:
        listed = default_candidates(problem, in_network=args.in_network)
    else:
        listed = [named()]
    candidates = [_with_options(x, slices=args.pieces, pieces=args.pieces, trees=args.trees) for x in listed]
    if args.sketch is not None:
        candidates = [_with_options(x, sketch=_sketch(args.sketch, args.strategy)) for x in candidates]
    if args.option:
        if args.strategy == "auto":
            raise UsageError("--option needs --strategy, because options belong to a strategy", hint="name a --strategy")
        candidates = [_with_texts(candidates[0], args.option, args.strategy)]
    each_s = problem.budget_s / 4 if len(candidates) > 1 else problem.budget_s
    plan, ranked = plan_collective(problem, candidates=candidates, search=args.pieces is None, each_s=each_s)
    document, text = plan_document(problem, ranked), plan_line(problem, ranked)
    if args.out is not None:
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        text += f"\nwritten: {args.out}"
    return with_pictures(Result(document, text, cut=cut_of(plan.decisions)), args, plan)


def _strategy(name: str, op: str) -> type[CollectiveStrategy]:
    """The strategy of that name, before a fabric is read. Raises: UnknownName, StrategyNotLoaded, Unsupported (it does not do the operation)."""
    from ..decide.collective import OPERATIONS, STRATEGIES, strategy
    from ..errors import Unsupported

    kind = strategy(name, where="--strategy")
    if op in OPERATIONS and op not in kind.operations:
        able = ", ".join(other.name for other in STRATEGIES if op in other.operations)
        raise Unsupported(f"{name} does not do {op}; it does {', '.join(kind.operations)}", hint=f"{op} is done by {able}; or use --strategy auto")
    return kind


def _numbers(text: str) -> tuple[int, ...]:
    from ..errors import UsageError

    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in text.split(",")):
        raise UsageError(f"not a list of numbers: {text[:64]!r}", where="--numbers", hint="e.g. --numbers 2,0,3,1")
    return tuple(int(part) for part in text.split(","))


def _sketch(text: str, name: str) -> Sketch | str:
    """The sketch in a file, or the name of a published one. Raises: UsageError, FormatError, UnknownName."""
    from ..errors import UsageError
    from ..io.msccl.taccl_sketch import read_sketch
    from ..sketch import PUBLISHED_SKETCHES, sketch_of

    if name not in ("auto", "taccl"):
        raise UsageError(f"--sketch does not apply to {name}", hint="use it with --strategy taccl")
    if text in PUBLISHED_SKETCHES or not (Path(text).exists() or "/" in text or text.endswith(".json")):
        sketch_of(text)
        return text
    return read_sketch(text)


def _with_texts(candidate: CollectiveStrategy, texts: Sequence[str], name: str) -> CollectiveStrategy:
    """The candidate with options given as NAME=VALUE. Raises: UnknownName, UsageError for a value of another type."""
    import json
    from typing import get_type_hints

    import msgspec

    from ..errors import UnknownName, UsageError

    hints = get_type_hints(type(candidate))
    known = [f.name for f in fields(candidate)]  # type: ignore[arg-type]
    for text in texts:
        option, equals, raw = text.partition("=")
        if not equals:
            raise UsageError(f"not NAME=VALUE: {text[:64]!r}", where="--option", hint=f"e.g. --option {known[0]}=...")
        if option not in known:
            raise UnknownName(f"{name} has no option {option!r}", where="--option", hint=f"options: {', '.join(known)}")
        try:
            value = json.loads(raw)
        except (json.JSONDecodeError, RecursionError):
            value = raw
        try:
            candidate = replace(candidate, **{option: msgspec.convert(value, hints[option])})  # type: ignore[type-var]
        except msgspec.ValidationError as error:
            raise UsageError(f"{option}: {error}", where="--option") from None
        except TypeError:  # a type that texts cannot give
            raise UsageError(f"{option} cannot be given as text", where="--option", hint="use --sketch for sketches") from None
    return candidate


def _with_options(candidate: CollectiveStrategy, **given: object) -> CollectiveStrategy:
    """The candidate with those of the given options that it has."""
    has = {f.name for f in fields(candidate)}  # type: ignore[arg-type]
    return replace(candidate, **{name: value for name, value in given.items() if value is not None and name in has})  # type: ignore[type-var]
