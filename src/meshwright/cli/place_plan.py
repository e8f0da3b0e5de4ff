"""`meshwright place plan`: which task runs on which device, and in which order, as a checked plan beside the bound."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import require_directory
from .frame import Result
from .pictures import check_pictures, picture_arguments, with_pictures
from .place_arguments import document_of, problem_arguments, problem_of, strategies_of, table

HELP = "Which task runs on which device, and in which order: a checked plan beside the bound."
MAX_SHOWN_TASKS = 12  # of a device, in text
MAX_SHOWN_MOVES = 12  # of giph, those that made the schedule shorter


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument("--strategy", default="search",
                        help="search (default), auto (all: the shortest in simulation), or one that `place compare` lists")  # fmt: skip
    parser.add_argument("--out", "-o", type=Path, help="also write the plan to this file (.json or .json.gz)")
    picture_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..decide.place import STRATEGIES, strategy
    from ..drive.place import plan_placement
    from ..drive.plans import write_plan
    from ..io.quantity import show_time
    from ..kernels.effort import Budget

    if args.out is not None:
        require_directory(args.out)
    check_pictures(args)
    kinds = STRATEGIES if args.strategy == "auto" else (strategy(args.strategy, where="--strategy"),)
    problem = problem_of(args)
    candidates = strategies_of(args, kinds)
    budget = Budget(len(candidates))
    plan, ranked, bound = plan_placement(problem, candidates, seed=args.seed, budget=budget)
    best = ranked[0].placement
    assert best is not None
    graph, devices = problem.graph, problem.fabric.devices
    orders = {d.name: [graph.tasks[i].name for i in best.sequence if best.on[i] == k] for k, d in enumerate(devices)}
    document = {"schema": "meshwright.placement", "version": 1, **document_of(problem, ranked, bound), "orders": orders}
    lines = [*table(problem, ranked, bound), ""]
    for name, order in orders.items():
        more = f" and {len(order) - MAX_SHOWN_TASKS} more" if len(order) > MAX_SHOWN_TASKS else ""
        lines.append(f"{name}: {', '.join(order[:MAX_SHOWN_TASKS]) or 'nothing'}{more}")
    moves = best.notes.get("moves", [])
    if moves:
        lines.append("")
        lines += [f"{m['task']}: {m['from']} > {m['to']}, {show_time(m['before_s'])} to {show_time(m['after_s'])}: {m['why']}"
                  for m in moves[:MAX_SHOWN_MOVES]]  # fmt: skip
    if args.out is not None:
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        lines.append(f"written: {args.out}")
    return with_pictures(Result(document, "\n".join(lines), cut=budget.cut), args, plan)
