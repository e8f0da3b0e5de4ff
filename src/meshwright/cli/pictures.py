"""`--trace` of the commands that have a plan at hand: what its program does on its fabric, for Perfetto or Chrome."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import require_directory
from .frame import Result

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["check_pictures", "picture_arguments", "with_pictures", "write_plan_trace"]


def picture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="simulate the plan and write a trace: .json (Chrome), .pftrace (Perfetto), or either + .gz"
    )


def check_pictures(args: argparse.Namespace) -> None:
    """Raises: UsageError, before any work is done, for files that could not be written."""
    from ..io.trace import require_ending

    if args.trace is not None:
        require_ending(str(args.trace))
        require_directory(args.trace, where="--trace")


def with_pictures(result: Result, args: argparse.Namespace, plan: Plan) -> Result:
    """The result, after writing what was asked for, with a line and a field that say where."""
    if args.trace is None:
        return result
    write_plan_trace(args.trace, plan)
    return replace(result, document={**result.document, "trace": str(args.trace)}, text=f"{result.text}\ntrace written to {args.trace}")


def write_plan_trace(path: Path, plan: Plan, *, title: str = "") -> None:
    """Simulate the plan's main program on its fabric and write ranks, lanes, links and memory."""
    from ..drive import simulate
    from ..io.trace import write_trace
    from ..program_flat import flatten

    timeline = simulate(plan, transfers=True)
    write_trace(path, flatten(plan.main, plan.programs).program, [timeline], title=title or f"{plan.kind} plan, simulated")
