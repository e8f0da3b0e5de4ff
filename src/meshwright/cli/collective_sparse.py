"""`meshwright collective sparse`: which sparse all-reduce pays for a gradient on a fabric, or whether the dense one is faster."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import fabric_arguments, require_directory
from .frame import Result

if TYPE_CHECKING:
    from ..cost import Cost
    from ..decide.collective.sparse import SparseProblem

HELP = "which sparse all-reduce is worth it, if any, for a gradient of which k elements are sent"


def arguments(parser: argparse.ArgumentParser) -> None:
    fabric_arguments(parser, devices="use only these devices, e.g. 0-3,8; ranks are numbered in the fabric's order")
    parser.add_argument("--elements", type=whole, required=True, metavar="N", help="elements of the fused gradient, float32")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--density", type=float, metavar="D", help="share of the elements that a rank sends, e.g. 0.01")
    size.add_argument("--k", type=whole, metavar="K", help="elements that a rank sends")
    parser.add_argument("--overlap", type=float, default=0.3, metavar="O", help="share of a rank's selection that all have in common (default 0.3)")
    parser.add_argument("--cost", default="roofline", help="roofline (default: compute by bytes), measured (kernels timed here), or a cost file")
    parser.add_argument("--strategies", help="strategies to compare, separated by commas (default: all)")
    parser.add_argument("--out", "-o", type=Path, help="also write the best plan to this file (.json or .json.gz)")


def whole(text: str) -> int:
    """A count, for `type=`: digits, or like 1e7."""
    try:
        value = int(text) if text.isascii() and text.isdigit() else float(text)
    except ValueError:
        value = 0.0
    if not (1 <= value < 1 << 48 and value == int(value)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 2^48 - 1, got {text[:32]!r}")
    return int(value)


def _cost(name: str, problem: SparseProblem) -> Cost | None:
    """None: the default. Raises: what reading a cost file raises."""
    if name == "roofline":
        return None
    if name != "measured":
        from ..io.costs.table import read_cost

        return read_cost(name)
    from ..cost import assumed_cost
    from ..probe.traffic.sparse_prices import priced_here

    share = min(d.cpu_share or 1.0 for d in problem.fabric.devices)
    return priced_here(assumed_cost(problem.fabric), problem.elements, problem.k, len(problem.ranks), share=share)


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective.sparse import SparseProblem
    from ..decide.collective.sparse.choice import receive_bound_s
    from ..drive.collective.sparse import plan_sparse
    from ..drive.plans import read_fabric, write_plan
    from ..errors import UsageError
    from ..report.sparse_text import sparse_document, sparse_text

    if args.out is not None:
        require_directory(args.out)
    if args.density is not None and not 0 < args.density <= 1:
        raise UsageError(f"must lie in (0, 1], got {args.density:g}", where="--density", hint="a share of the elements: 0.01 is 1 %")
    fabric = read_fabric(args.fabric, args.devices)
    k = args.k if args.k is not None else max(1, int(args.density * args.elements))
    names = tuple(d.name for d in fabric.devices)
    problem = SparseProblem(fabric=fabric, ranks=names, elements=args.elements, k=k, overlap=args.overlap)
    problem = replace(problem, cost=_cost(args.cost, problem))
    plan, ranked = plan_sparse(problem, strategies=args.strategies.split(",") if args.strategies else ())
    document, text = sparse_document(problem, ranked, receive_bound_s(problem)), sparse_text(problem, ranked, receive_bound_s(problem))
    if args.out is not None:
        if plan is None:
            raise UsageError("the dense all-reduce is fastest, there is no sparse plan to write", where="--out", hint="meshwright collective plan")
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        text += f"\nwritten: {args.out}"
    return Result(document, text)
