"""`meshwright trace breakdown TRACE...`: where the time of measured steps went, and what to do about it."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one
from .frame import Result, one_blas_thread

HELP = "where the time of measured steps went, per rank and stage, and what to do about it"
EPILOG = """\
TRACE is a trace written by torch.profiler (.json or .json.gz), one per rank of one run, a folder of such traces, or the folder of a
`meshwright train run`. Ranks are put on one clock by the collectives they share."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a trace per rank, a folder of them, or one run folder")
    parser.add_argument("--plan", type=Path, help="with a run folder: the plan that was run (default: plan.json in it)")
    parser.add_argument("--modules", type=Path, metavar="FILE", help="module tree of the model (`trace annotate` and `train run` write one)")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="capture the module tree from this function")
    parser.add_argument(
        "--fabric",
        help="FILE.toml or PRESET:n with the rates that links should have, to find slow ones (default: compare links with each other)",
    )  # fmt: skip
    parser.add_argument("--without-last-step", action="store_true", help="leave the last profiler step out of the device totals")
    parser.add_argument("--limit", type=at_least_one, default=10, metavar="N", help="print at most N bottlenecks (default 10)")


def run(args: argparse.Namespace) -> Result:
    one_blas_thread()
    from ..compare.breakdown import breakdown_of
    from ..errors import UsageError
    from ..report.trace_breakdown import breakdown_document, breakdown_text

    if args.modules and args.model:
        raise UsageError("give --modules or --model, not both", where="--modules")
    found, devices = breakdown_of(
        args.traces, plan=args.plan, modules=args.modules, model=args.model, fabric=args.fabric, last_step=not args.without_last_step
    )  # fmt: skip
    return Result(breakdown_document(found, devices), breakdown_text(found, devices, limit=args.limit))
