"""`meshwright train compare`: the plan's own program, simulated on the fabric the run had, beside what was measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "lay prediction and measurement over each other"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan file")
    parser.add_argument("run", type=Path, help="the folder of a run of that plan")
    parser.add_argument("--trace", type=Path, default=None, help="where to write the trace (default: RUN/trace.json.gz)")
    parser.add_argument("--no-trace", action="store_true", help="write no trace")


def run(args: argparse.Namespace) -> Result:
    from ..compare.run import compare_run
    from ..drive.plans import read_plan
    from ..io.trace.write import write_trace
    from ..report.compare import compare_document, compare_text

    plan = read_plan(args.plan)
    comparison, inlined = compare_run(plan, args.run)
    trace = ""
    if not args.no_trace:
        path = args.trace or args.run / "trace.json.gz"
        middle = comparison.typical_step()
        write_trace(path, inlined.program, [comparison.predicted, middle], title=f"{args.plan} and {args.run}")
        trace = str(path)
    document = compare_document(comparison)
    document["trace"] = trace
    return Result(document, compare_text(comparison, trace=trace))
