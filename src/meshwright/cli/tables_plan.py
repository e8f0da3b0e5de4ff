"""`meshwright tables plan`: which part of which embedding table lies on which device, as a checked plan beside the bound."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import require_directory
from .frame import Result
from .tables_arguments import compared_document, problem_arguments, problem_of, text_table, tried

HELP = "Which part of which embedding table lies on which device: a checked plan beside the bound."
MAX_SHOWN = 6  # shards of a device, in text


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument("--strategy", default="", help="neuroshard (default; with --from also fewest-moves), auto (all), or one that `compare` lists")
    parser.add_argument("--out", "-o", type=Path, help="also write the plan to this file (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.tables import NAMES, STRATEGIES, strategy
    from ..drive.plans import write_plan
    from ..io.quantity import show_time

    if args.out is not None:
        require_directory(args.out)
    usual = ["neuroshard", *(["fewest-moves"] if args.start is not None else []), *(["dim-greedy", "lookup-greedy"] if args.measure else [])]
    kinds = STRATEGIES if args.strategy == "auto" else (strategy(args.strategy, where="--strategy"),) if args.strategy else [NAMES[n] for n in usual]
    problem = problem_of(args)
    plan, ranked, bound, cut = tried(args, problem, kinds)
    best = ranked[0].plan
    assert best is not None
    document = {"schema": "meshwright.tables-plan", "version": 1, **compared_document(problem, ranked, bound)}
    lines, rows = [*text_table(problem, ranked, bound), ""], []
    for k, d in enumerate(problem.fabric.devices):
        held = [s for s in best.shards if s.device == d.name]
        size = sum(s.elements for s in held) * problem.tables.weight_bytes
        times = [float(x[k]) for x in best.phases[:3]]
        rows.append({
            "device": d.name, "size_bytes": size, "columns": best.columns[k], "compute_s": times[0], "backward_s": times[1], "forward_s": times[2],
            "shards": [{"table": s.table, "rows": list(s.rows), "columns": list(s.columns)} for s in held],
        })  # fmt: skip
        shown = ", ".join(_short(s, problem) for s in held[:MAX_SHOWN]) or "nothing"
        more = f" and {len(held) - MAX_SHOWN} more" if len(held) > MAX_SHOWN else ""
        parts = " + ".join(show_time(x) for x in (times[1], times[0], times[2]))
        said = f"{show_time(sum(times))} = {parts} (gradients, lookups, rows), {best.columns[k]} columns, {size} bytes"
        lines.append(f"{d.name}: {said}: {shown}{more}")
    document |= {"placed": rows, "moved_bytes": best.moved_bytes}
    if args.start is not None:
        lines.append(f"moved from {args.start.name}: {best.moved_bytes} bytes")
    if args.out is not None:
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        lines.append(f"written: {args.out}")
    return Result(document, "\n".join(lines), cut=cut)


def _short(s: object, problem: object) -> str:
    table = problem.tables.tables[problem.tables.number_of[s.table]]  # type: ignore[attr-defined]
    rows = "" if s.rows == (0, table.rows) else f" rows {s.rows[0]}-{s.rows[1]}"  # type: ignore[attr-defined]
    columns = "" if s.columns == (0, table.dim) else f" columns {s.columns[0]}-{s.columns[1]}"  # type: ignore[attr-defined]
    return f"{s.table}{rows}{columns}"  # type: ignore[attr-defined]
