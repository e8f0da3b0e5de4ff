"""`meshwright memory pack`: offsets in one arena for storages with lifetimes, beside a lower bound that names who needs the space."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import TIME_LIMIT, at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..arena import ArenaPlan, ArenaProblem

HELP = "place storages with lifetimes in one arena, as small as can be"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=Path, help="storages as CSV: id,lower,upper,size (MiniMalloc's format)")
    parser.add_argument("--out", "-o", type=Path, help="write the table with offsets here")
    parser.add_argument("--capacity", help="the arena's size, e.g. 1048576 or 4GiB; exit code 3 if none is found (default: as small as can be)")
    parser.add_argument("--alignment", type=at_least_one, default=1, help="alignment of offsets in bytes (default 1)")
    parser.add_argument(
        "--effort", type=int, default=1,
        help="effort of the search; 1 takes about ten seconds (default 1; 0: no search, only direct placements)",
    )  # fmt: skip
    parser.add_argument("--time-limit", "--seconds", type=float, default=0.0, metavar="S", dest="seconds",
                        help=TIME_LIMIT.format("none"))  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (default 0)")


def run(args: argparse.Namespace) -> Result:
    import numpy as np

    from ..arena import intervals_problem
    from ..check.arena import check_arena
    from ..decide.memory.static import CITE, MINIMALLOC, StaticMemory
    from ..errors import CheckFailed, UsageError
    from ..io.plan.minimalloc_csv import buffers_csv, read_buffers_csv
    from ..io.quantity import parse_size_bytes
    from ..kernels.effort import Cut

    try:
        capacity = 0 if not args.capacity else int(args.capacity) if args.capacity.isdecimal() else parse_size_bytes(args.capacity)
    except ValueError as error:
        raise UsageError(str(error), where="--capacity") from None
    table = read_buffers_csv(args.table)
    problem = intervals_problem(table.lower, table.upper, table.size_bytes, alignment_bytes=args.alignment, names=table.names)
    strategy = StaticMemory(effort=args.effort, capacity_bytes=capacity, seconds=args.seconds)
    plan = strategy.plan(problem, rng=np.random.default_rng(args.seed))
    verdict = check_arena(problem, plan)
    verdict.raise_if_wrong()
    if not verdict.ok:
        raise CheckFailed(verdict.findings[0].message, where="arena")
    if args.out:
        from ..io.atomic import write_text

        write_text(args.out, buffers_csv(table, plan.offset_bytes.tolist()))
    document = {
        "schema": "meshwright.memory.pack", "version": 1, "storages": len(table.names), "arena_bytes": plan.arena_bytes,
        "bound_bytes": plan.bound_bytes, "optimal": plan.optimal, "clique": [table.names[t] for t in plan.clique],
        "tried": [{"way": w, "arena_bytes": h} for w, h in plan.tried],
        "offset_bytes": dict(zip(table.names, plan.offset_bytes.tolist(), strict=True)), "check": verdict.to_json(),
        "cites": [CITE.key, MINIMALLOC.key],
    }  # fmt: skip
    return Result(document, "\n".join(_lines(problem, plan, args.out)), cut=Cut(*plan.cut) if plan.cut else None)


def _lines(problem: ArenaProblem, plan: ArenaPlan, output: Path | None) -> list[str]:
    above = plan.arena_bytes > plan.bound_bytes
    quality = f"{plan.arena_bytes / plan.bound_bytes - 1:.1%} above the bound" if above else "the bound: nothing smaller exists"
    if above and plan.optimal:
        quality += ", proved smallest by search"
    lines = [f"{len(problem.size_bytes)} storages, {int(problem.size_bytes.sum())} bytes: an arena of {plan.arena_bytes} bytes ({quality})"]
    lines += [f"  {way:<26} {height:>14}" for way, height in plan.tried]
    largest = sorted(plan.clique, key=lambda t: (-int(problem.size_bytes[t]), t))[:10]
    lines.append(f"bound {plan.bound_bytes}: {len(plan.clique)} storages in use together, the largest of them:")
    lines += [f"  {problem.name(t):<26} {int(problem.size_bytes[t]):>14}" for t in largest]
    lines.append("checked: no two storages that may be in use together share a byte" + (f"; written: {output}" if output else ""))
    return lines
