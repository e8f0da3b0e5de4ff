"""`meshwright pipeline plan`: one schedule as a checked plan that can be simulated, exported and run."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import named_options, require_directory
from .frame import Result
from .pictures import check_pictures, picture_arguments, with_pictures
from .pipeline_problem import problem_arguments, problem_of

__all__ = ["HELP", "arguments", "run"]

DEFAULT_EFFORT = 200  # of exact search, for the optimum or the gap to be printed: some 20 s

HELP = "one schedule, or the fastest that fits in memory, as a checked plan"


OPTION_HELP = f"of the schedule, e.g. chunks=4, pipes=2, mode=double; search proves with effort={DEFAULT_EFFORT} (20 s or so) unless told otherwise"


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument("--strategy", default="auto", help="auto (default), or a schedule; see `meshwright pipeline compare`")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help=OPTION_HELP)
    parser.add_argument("--out", "-o", type=Path, default=Path("pipeline.json"), help="where to write the plan (default pipeline.json)")
    picture_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..drive.pipeline.pipelines import plan_pipeline
    from ..io.plan.plan import write_plan
    from ..io.quantity import show_time
    from ..kernels.effort import cut_of

    require_directory(args.out)
    check_pictures(args)
    options = named_options(args.option, where="--option")
    if args.strategy == "search":
        options.setdefault("effort", str(DEFAULT_EFFORT))
    plan = plan_pipeline(problem_of(args), args.strategy, options, seed=args.seed, time_limit_s=args.time_limit)
    write_plan(args.out, plan)
    chosen, bound, prediction = plan.decisions["pipeline"], plan.bound, plan.prediction
    assert bound is not None and prediction is not None
    ratio = prediction.time_s / float(bound) if float(bound) else None
    document = {
        "schema": "meshwright.pipeline-plan", "version": 1, "strategy": chosen["strategy"], "options": chosen["options"], "why": chosen["why"],
        "notes": chosen["notes"],
        "time_s": prediction.time_s, "bound_s": float(bound), "ratio": ratio, "orders": plan.job["schedule"]["orders"],
        "alternatives": [{"what": a.what, "time_s": a.time_s, "why": a.why} for a in plan.alternatives], "path": str(args.out),
    }  # fmt: skip
    said = ", ".join(f"{k}={v}" for k, v in chosen["options"].items())
    lines = [
        f"{chosen['strategy']}{f' ({said})' if said else ''}: {show_time(prediction.time_s)} per step, bound {show_time(float(bound))}"
        + (f" ({(ratio - 1) * 100:.1f} % above)" if ratio else ""),
        f"{chosen['why']}; checked: form, deadlock, races, certificate",
        *chosen["notes"],
    ]
    shown = 160
    lines += [f"  device {d}: {row if len(row) <= shown else row[:shown] + ' ...'}" for d, row in enumerate(plan.job["schedule"]["orders"])]
    return with_pictures(Result(document, "\n".join([*lines, f"written: {args.out}"]), cut=cut_of(plan.decisions)), args, plan)
