"""`meshwright pipeline compare`: every schedule that applies, simulated and checked, with bounds and the time-memory frontier."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .frame import Result
from .pipeline_problem import problem_arguments, problem_of

if TYPE_CHECKING:
    from ..drive.pipeline.pipelines import Comparison, Row

__all__ = ["HELP", "arguments", "run"]

HELP = "every pipeline schedule that applies: time, bubble, memory, bounds, and which are best"
EPILOG = """\
bubble   idle share of devices x time between the common start and the common end of the step
span     idle share between each device's own first start and last end: the zero-bubble papers' figure
kept     most micro-batches of a stage whose activations a device keeps (a stage of `interleaved` is a part of one of `1f1b`)
memory   weights + activations of the fullest device; received and not yet used included
bound    no order on that placement is faster (with a memory cap: none that fits)
there    with --search: no order on that placement which keeps no more activations is faster
*        on the frontier: nothing that fits is better in both time and memory"""


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument(
        "--search", type=int, default=0, metavar="EFFORT",
        help="also search for better orders, and for a tighter bound of every row at the memory it keeps, with this effort; "
        "100 takes about 10 s per row (default: no search)",
    )  # fmt: skip
    parser.add_argument("--chunks", default="2", help="stages per device of interleaved and breadth-first, e.g. 2,4 (default 2)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.pipeline.pipelines import compare_pipelines
    from ..errors import UsageError

    parts = args.chunks.split(",")
    if not all(p.isdecimal() and int(p) > 1 for p in parts):
        raise UsageError(f"{args.chunks!r} is not a list of whole numbers above 1", where="--chunks", hint="e.g. 2,4")
    problem = problem_of(args)
    if args.search < 0:
        raise UsageError(f"must be >= 0, got {args.search}", where="--search")
    chunks = [int(p) for p in parts]
    found = compare_pipelines(problem, chunks=chunks, seed=args.seed, time_limit_s=args.time_limit, effort=args.search)
    code = 0 if found.fitting or found.cut else 3
    return Result(document_of(found), text_of(found), code, found.cut)


def document_of(found: Comparison) -> dict[str, Any]:
    from dataclasses import asdict

    import msgspec

    from ..drive.pipeline.pipelines import frontier

    best = {id(r) for r in frontier(found.rows)}
    return {
        "schema": "meshwright.pipeline-compare", "version": 1, "problem": asdict(found.problem), "bound": msgspec.to_builtins(found.bound),
        "schedules": [_row(r, id(r) in best) for r in found.rows], "frontier": [r.name for r in frontier(found.rows)],
    }  # fmt: skip


def _row(row: Row, best: bool) -> dict[str, Any]:
    import msgspec

    out: dict[str, Any] = {"name": row.name, "strategy": row.strategy, "options": dict(row.options)}
    j = row.judged
    if j is None and row.estimate is not None:
        return out | {"estimated_s": row.estimate[0], "estimated_bytes": row.estimate[1], "not_simulated": row.why}
    if j is None:
        return out | {"refused": row.why, "hint": row.hint}
    bound_s = float(j.bound)
    return out | {
        "time_s": j.time_s, "bound": msgspec.to_builtins(j.bound), "ratio": j.time_s / bound_s if bound_s else None, "bubble": j.bubble,
        "span_bubble": j.span_bubble, "in_flight": list(j.in_flight), "memory_bytes": list(j.memory_bytes), "weight_bytes": list(j.weight_bytes),
        "program_bytes": list(j.program_bytes), "fits": row.fits, "over_bytes": max(0, j.over_bytes), "frontier": best,
        "kept_bound": None if row.kept_bound is None else msgspec.to_builtins(row.kept_bound), "notes": list(j.schedule.notes),
    }  # fmt: skip


def _kept(row: Row) -> str:
    """The bound at the row's own memory, and how far the row is above it."""
    from ..io.quantity import show_time

    if row.kept_bound is None or row.judged is None:
        return ""
    bound_s = float(row.kept_bound)
    return f"{show_time(bound_s):>10}" + (f"{(row.judged.time_s / bound_s - 1) * 100:>6.1f} %" if bound_s else "")


def text_of(found: Comparison) -> str:
    from ..drive.pipeline.pipelines import frontier
    from ..io.quantity import show_size, show_time

    p = found.problem
    best = {id(r) for r in frontier(found.rows)}
    searched = any(r.kept_bound is not None for r in found.rows)
    lines = [
        f"{p.devices} stages, {p.microbatches} micro-batches: no schedule takes less than {show_time(float(found.bound))}",
        f"  {'schedule':<34}{'time':>10}{'bound':>10}{'above':>8}{'bubble':>8}{'span':>7}{'kept':>6}{'memory':>11}"
        + (f"{'there':>10}{'above':>8}" if searched else ""),
    ]
    for row in found.rows:
        j = row.judged
        if j is None and row.estimate is not None:
            time_s, size = row.estimate
            lines.append(f"~ {row.name:<34}{show_time(time_s):>10}{'':>39}{show_size(size):>11}  {row.why}")
            continue
        if j is None:
            lines.append(f"- {row.name:<34}{row.why}" + (f"; {row.hint}" if row.hint else ""))
            continue
        bound_s = float(j.bound)
        above = f"{(j.time_s / bound_s - 1) * 100:.1f} %" if bound_s else ""
        over = "" if row.fits else f"  over the cap by {show_size(j.over_bytes)}"
        lines.append(
            f"{'*' if id(row) in best else ' '} {row.name:<34}{show_time(j.time_s):>10}{show_time(bound_s):>10}{above:>8}{j.bubble * 100:>6.1f} %"
            f"{j.span_bubble * 100:>5.1f} %{max(j.in_flight):>6}{show_size(max(j.memory_bytes)):>11}{_kept(row)}{over}"
        )
        lines += [f"    {note}" for note in j.schedule.notes]
    judged = any(row.judged is not None or row.estimate is not None for row in found.rows)
    if not found.fitting and (judged or found.cut is None):
        lines.append("nothing fits in memory: raise the cap, use smaller micro-batches or more stages")
    return "\n".join(lines)
