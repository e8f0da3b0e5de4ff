"""`--trace` and `--svg` of the commands that have a plan at hand: what its program does on its fabric, for Perfetto or Chrome, or drawn."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import require_directory
from .frame import Result

if TYPE_CHECKING:
    from ..plan.plan import Plan

__all__ = ["check_pictures", "drawn", "picture_arguments", "svg_argument", "with_pictures", "write_plan_svg", "write_plan_trace"]


def picture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="simulate the plan and write a trace: .json (Chrome), .pftrace (Perfetto), or either + .gz"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="simulate the plan and draw its schedule and memory over time")


def check_pictures(args: argparse.Namespace) -> None:
    """Raises: UsageError, before any work is done, for files that could not be written."""
    from ..io.trace.write import require_ending

    if getattr(args, "trace", None) is not None:  # not every command that draws can trace
        require_ending(str(args.trace))
        require_directory(args.trace, where="--trace")
    if args.svg is not None:
        require_directory(args.svg, where="--svg")


def with_pictures(result: Result, args: argparse.Namespace, plan: Plan) -> Result:
    """The result, after writing what was asked for, with a line and a field that say where."""
    if getattr(args, "trace", None) is not None:
        write_plan_trace(args.trace, plan)
        result = _with(result, "trace", f"trace written to {args.trace}", args.trace)
    if args.svg is not None:
        write_plan_svg(args.svg, plan)
        result = drawn(result, args.svg)
    return result


def svg_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """`--svg` of a command that draws something else than a schedule it could trace."""
    parser.add_argument("--svg", type=Path, metavar="FILE", help=what)


def drawn(result: Result, path: Path) -> Result:
    """The result of a command that has drawn into `path`."""
    return _with(result, "svg", f"drawn into {path}", path)


def _with(result: Result, name: str, line: str, path: Path) -> Result:
    return result._replace(document={**result.document, name: str(path)}, text=f"{result.text}\n{line}")


def write_plan_trace(path: Path, plan: Plan, *, title: str = "") -> None:
    """Simulate the plan's main program on its fabric and write ranks, lanes, links and memory."""
    from ..drive.plans import simulate_plan
    from ..io.trace.write import write_trace
    from ..program.flat import flatten

    timeline = simulate_plan(plan, transfers=True)
    write_trace(path, flatten(plan.main, plan.programs).program, [timeline], title=title or f"{plan.kind} plan, simulated")


def write_plan_svg(path: Path, plan: Plan, *, title: str = "") -> None:
    """Simulate the plan's main program on its fabric and draw its schedule."""
    from ..drive.plans import simulate_plan
    from ..io.atomic import write_text
    from ..program.flat import flatten
    from ..report.schedule_svg import schedule_svg

    program = flatten(plan.main, plan.programs).program
    write_text(path, schedule_svg(simulate_plan(plan, transfers=True), program, title=title or f"{plan_name(plan)} on {plan.target_fabric['name']}"))


def plan_name(plan: Plan) -> str:
    """What a plan is, in a few words."""
    chosen: Mapping[str, object] = next(iter(plan.decisions.values()), {})
    return " ".join(x for x in (str(chosen.get("strategy", "")), plan.kind, "plan") if x)
