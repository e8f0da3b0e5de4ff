"""`meshwright pipeline export`: a pipeline plan as PyTorch's schedule CSV, or simulated as a trace."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from .arguments import require_directory
from .frame import Result
from .pictures import write_plan_trace

__all__ = ["HELP", "arguments", "run"]

HELP = "hand a pipeline plan to torch.distributed.pipelining, or show it as a trace"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="a plan of `meshwright pipeline plan`")
    parser.add_argument("--format", choices=["csv", "trace"], default="csv", help="csv (default): as PyTorch reads it; trace: Chrome or Perfetto")
    parser.add_argument("--step", type=int, default=0, help="trace of a plan with filled bubbles: which step of its cycle (default 0)")
    parser.add_argument("--out", "-o", type=Path, help="where to write it (default schedule.csv, or trace.json)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.pipeline.pipelines import schedule_of_plan
    from ..drive.plans import read_plan
    from ..errors import UsageError
    from ..io.atomic import write_bytes
    from ..io.plan.pipeline_csv import pipeline_csv

    out = args.out or Path("schedule.csv" if args.format == "csv" else "trace.json")
    require_directory(out)
    plan = read_plan(args.plan)
    schedule = schedule_of_plan(plan)
    if args.format == "csv":
        cells = [[(a.kind, a.stage, a.microbatch) for a in order] for order in schedule.orders]
        grouped = any(a.count > 1 for order in schedule.orders for a in order)
        text = pipeline_csv(cells, copies=schedule.copies, grouped=grouped, moved=any(schedule.offloads))
        write_bytes(out, text.encode())
    else:
        if not 0 <= args.step < len(plan.cycle):
            raise UsageError(f"there is no step {args.step} in a cycle of {len(plan.cycle)}", where="--step")
        plan = replace(plan, cycle=plan.cycle[args.step : args.step + 1])
        write_plan_trace(out, plan, title=f"{schedule.name}, simulated")
    document = {
        "schema": "meshwright.pipeline-export", "version": 1, "format": args.format, "schedule": schedule.name, "ranks": schedule.devices,
        "path": str(out),
    }  # fmt: skip
    return Result(document, f"{schedule.name} on {schedule.devices} devices: {args.format} written to {out}")
