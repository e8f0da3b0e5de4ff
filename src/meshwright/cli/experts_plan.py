"""`meshwright experts plan`: the fastest choice of an expert layer per capacity, as a checked table of programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, fabric_arguments, require_directory
from .frame import Result

if TYPE_CHECKING:
    from ..decide.experts import ExpertProblem, Tutel

HELP = "how tokens reach the experts of a layer: parallelism, overlap and exchange per capacity, with bounds"
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers separated by commas, for `type=`."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers separated by commas, got {text[:64]!r}") from None
    return found


def layer_arguments(parser: argparse.ArgumentParser) -> None:
    """A layer, the capacities to plan for, and what may be chosen."""
    fabric_arguments(parser, devices="use only these devices, e.g. 0-3,8; ranks are numbered in the fabric's order")
    parser.add_argument("--experts", type=at_least_one, required=True, metavar="E", help="experts of the layer, over all ranks")
    parser.add_argument("--model-dim", type=at_least_one, required=True, metavar="H", help="elements of a token")
    parser.add_argument("--inner", type=at_least_one, required=True, metavar="F", help="inner dimension of an expert")
    parser.add_argument("--gated", action="store_true", help="experts of three matrices (SwiGLU) instead of two")
    parser.add_argument("--dtype", choices=list(BYTES), default="fp32", help="of tokens and weights (default fp32)")
    parser.add_argument("--capacities", type=whole_numbers, metavar="C,...", help="rows per expert and rank to plan for, e.g. 64,256,1024")
    parser.add_argument("--tokens", type=at_least_one, metavar="T", help="tokens of a rank, instead of --capacities")
    parser.add_argument("--k", type=at_least_one, default=2, help="experts of a token, with --tokens (default 2)")
    parser.add_argument("--capacity-factor", type=float, default=1.0, metavar="f", help="with --tokens: capacity is k int(f ceil(T / E)) (default 1)")
    parser.add_argument("--degrees", type=whole_numbers, metavar="r,...", help="degrees of parallelism to try (default: all of the layer)")
    parser.add_argument("--chunks", type=whole_numbers, default=(1, 2, 4), metavar="d,...", help="overlap degrees to try (default 1,2,4)")
    parser.add_argument(
        "--algorithms", default="linear,2dh", help="of the exchanges: linear, 2dh, or names of all-to-all strategies (default linear,2dh)"
    )
    parser.add_argument("--inference", action="store_true", help="count forward passes alone")


def problem_given(args: argparse.Namespace) -> tuple[ExpertProblem, Tutel]:
    """Raises: UsageError."""
    from ..decide.experts import ExpertProblem, ExpertShape, Tutel
    from ..decide.experts.tutel import alignment_of
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..kernels.capacity import aligned, capacity_of

    fabric = read_fabric(args.fabric, args.devices)
    ranks = tuple(d.name for d in fabric.devices)
    shape = ExpertShape(
        ranks=len(ranks), experts=args.experts, model=args.model_dim, inner=args.inner, matrices=3 if args.gated else 2,
        element_bytes=BYTES[args.dtype],
    )  # fmt: skip
    if (args.capacities is None) == (args.tokens is None):
        raise UsageError("give one of --capacities and --tokens", hint="e.g. --capacities 64,256,1024")
    if args.tokens is not None and args.k > args.experts:
        raise UsageError(f"must be 1..{args.experts} (there are {args.experts} experts), got {args.k}", where="--k", hint=f"--k {args.experts}")
    wanted = args.capacities
    if wanted is None:
        if args.capacity_factor <= 0:
            raise UsageError("0 and below follow the demand, which is not known here", where="--capacity-factor", hint="give --capacities")
        wanted = (capacity_of(args.capacity_factor, tokens=args.tokens, experts=args.experts, k=args.k, demand=0),)
    if min(wanted) < 1:
        raise UsageError(f"must be at least 1, got {min(wanted)}", where="--capacities")
    chosen = Tutel(chunks=args.chunks, degrees=args.degrees, algorithms=tuple(a for a in args.algorithms.split(",") if a))
    if not args.chunks or min(args.chunks) < 1:
        raise UsageError("must be 1 or more", where="--chunks")
    multiple = alignment_of(shape.shares, args.chunks)
    capacities = tuple(sorted({aligned(c, multiple) for c in wanted}))
    passes = "inference" if args.inference else "training"
    return ExpertProblem(fabric=fabric, ranks=ranks, shape=shape, capacities=capacities, passes=passes), chosen


def document_of(problem: ExpertProblem, schema: str, **more: Any) -> dict[str, Any]:
    shape = problem.shape
    return {
        "schema": f"meshwright.experts.{schema}", "version": 1, "fabric": problem.fabric.name, "devices": shape.ranks, "experts": shape.experts,
        "model_dim": shape.model, "inner": shape.inner, "degrees": list(shape.degrees), "passes": problem.passes, **more,
    }  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    layer_arguments(parser)
    parser.add_argument("--out", "-o", type=Path, help="write the plan here (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.experts import plan_experts
    from ..drive.plans import write_plan
    from ..kernels.effort import Budget
    from ..report.experts_text import choices_text, row_document

    if args.out is not None:
        require_directory(args.out)
    problem, chosen = problem_given(args)
    budget = Budget(1)
    with budget.net():
        plan, ranked = plan_experts(problem, chosen, budget)
    text = choices_text(problem, [rows[:1] for rows in ranked])
    if args.out is not None:
        write_plan(args.out, plan)
        text += f"\nwrote {args.out}"
    rows = [row_document(rows[0]) for rows in ranked]
    return Result(document_of(problem, "plan", table=dict(plan.cycle[0].table), choices=rows), text, cut=budget.cut)
