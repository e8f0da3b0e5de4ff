"""`meshwright trace diff A B`: what changed between two runs, or between a plan and a run of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result, one_blas_thread

HELP = "what changed most between two runs, or between a plan and a run of it"
EPILOG = """\
A and B: a trace of torch.profiler, a folder with one per rank, the folder of a `meshwright train run`, or a plan (its prediction on the
fabric that the run had). Runs and plans of ours are joined by step id, others by stage and module. Seconds are per step, mean over ranks."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="trace, folder of traces, run folder or plan")
    parser.add_argument("b", metavar="B", type=Path, help="trace, folder of traces, run folder or plan")
    parser.add_argument("--plan", type=Path, help="plan of the run folders (default: plan.json in them)")
    parser.add_argument("--modules", type=Path, metavar="FILE", help="module tree of the model (`trace annotate` and `train run` write one)")
    parser.add_argument(
        "--by", choices=("auto", "steps", "modules"), default="auto",
        help="what to match between the two (default: steps, if both have them)",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="print at most N changes (default 20; 0 = all)")


def run(args: argparse.Namespace) -> Result:
    one_blas_thread()
    from ..compare.diff import diff_of
    from ..report.trace_diff import diff_document, diff_text

    found = diff_of(args.a, args.b, plan=args.plan, modules=args.modules, by=args.by)
    names = {"a": found.a, "b": found.b, "joined": found.joined}
    return Result(diff_document(found.diff, **names), diff_text(found.diff, limit=args.limit, **names))
