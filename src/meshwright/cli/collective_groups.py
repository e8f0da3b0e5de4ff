"""`meshwright collective groups`: several collectives at once, planned together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, require_directory
from .collective_bound import count, limit_arguments, limits, seed
from .collective_bound import size_bytes as parse_size
from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective import CollectiveProblem
    from ..drive.collective.groups import RankedGroups
    from ..plan.plan import Plan

HELP = "several collectives at once on one fabric, planned together"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fabric", required=True, help="FILE.toml or PRESET:n, see `meshwright fabric list`")
    parser.add_argument(
        "--group", action="append", required=True, metavar="OP:SIZE:DEVICES",
        help="repeat for every group, e.g. all-reduce:64MiB:0-3; several groups alike with `/`: all-reduce:64MiB:0-3/4-7; rooted operations start "
        "or end at the first device",
    )  # fmt: skip
    parser.add_argument("--element-bytes", type=at_least_one, default=4, help="bytes of one number (default 4)")
    parser.add_argument("--trees", type=count, help="most trees per group and direction (default 256)")
    parser.add_argument("--pieces", type=count, help="pipeline pieces, the same for all groups (default: chosen)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    limit_arguments(parser)
    parser.add_argument("--out", "-o", type=Path, help="also write the plan to this file (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective.groups.strategy import Groups
    from ..drive.collective.groups import plan_groups
    from ..drive.plans import write_plan
    from ..kernels.effort import cut_of

    if args.out is not None:
        require_directory(args.out)
    groups = _groups(args)
    options = {name: value for name, value in (("max_trees", args.trees), ("pieces", args.pieces)) if value is not None}
    plan, ranked = plan_groups(groups, joint=Groups(**options), **limits(args), seed=args.seed)
    document, text = _document(args.fabric, groups, plan, ranked)
    if args.out is not None:
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        text += f"\nwritten: {args.out}"
    return Result(document, text, cut=cut_of(plan.decisions))


def _groups(args: argparse.Namespace) -> list[CollectiveProblem]:
    from ..decide.collective import CollectiveProblem
    from ..drive.plans import read_fabric
    from ..errors import UsageError

    whole = read_fabric(args.fabric, None)
    found = []
    for i, text in enumerate(args.group):
        fields = text.split(":", 2)
        if len(fields) != 3:
            raise UsageError(f"must be OP:SIZE:DEVICES, got {text!r}", where=f"--group {i + 1}", hint="e.g. --group all-reduce:64MiB:0-3")
        size = parse_size(fields[1], where=f"--group {i + 1}")
        for devices in fields[2].split("/"):
            names = tuple(d.name for d in read_fabric(args.fabric, devices).devices)
            found.append(CollectiveProblem(fabric=whole, op=fields[0], ranks=names, size_bytes=size, element_bytes=args.element_bytes))
    return found


def _document(fabric: str, groups: list[CollectiveProblem], plan: Plan, ranked: list[RankedGroups]) -> tuple[dict[str, Any], str]:
    import msgspec

    from ..io.quantity import show_size, show_time

    best = ranked[0]
    assert best.time_s is not None and best.plan is not None
    bound_s = float(plan.bound) if plan.bound is not None else 0.0
    document: dict[str, Any] = {
        "schema": "meshwright.collective-groups", "version": 1, "fabric": fabric, "groups": plan.job["collectives"], "strategy": best.name,
        "strategies": list(best.plan.strategies), "time_s": best.time_s, "ratio": best.time_s / bound_s if bound_s else None,
        "bound": None if plan.bound is None else {"time_s": bound_s, "exact_time_s": plan.bound.value,
                                                  "certificate": msgspec.to_builtins(plan.bound.certificate)},
        "alternatives": [{"strategy": e.name, "time_s": e.time_s, "why": e.why} for e in ranked[1:]], "notes": dict(best.plan.notes),
    }  # fmt: skip
    lines = [f"{len(groups)} groups on {fabric}: {show_time(best.time_s)} ({best.name})"]
    if bound_s:
        lines[0] += f", bound {show_time(bound_s)} ({100 * (best.time_s / bound_s - 1):.1f} % above)"
    lines += [f"  {g.op} {show_size(g.size_bytes)} on {len(g.ranks)} devices: {s}" for g, s in zip(groups, best.plan.strategies, strict=True)]
    lines += [f"  {e.name}: {show_time(e.time_s) if e.time_s is not None else 'none'}, {e.why}" for e in ranked[1:]]
    return document, "\n".join(lines)
