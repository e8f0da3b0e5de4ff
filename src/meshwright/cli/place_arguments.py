"""What `place plan` and `place compare` share: the tasks, the fabric, strategies and their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..bound import Bound
    from ..decide.place import PlaceProblem, PlaceStrategy
    from ..drive.place import Tried

__all__ = ["document_of", "problem_arguments", "problem_of", "strategies_of", "table"]


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tasks", type=Path, help="a task graph: meshwright.tasks (docs/formats.md) or WfFormat, .json or .json.gz")
    parser.add_argument("--fabric", required=True, help="FILE.toml or PRESET:n; a device runs kinds of tasks that it has a rate for (runs, flops)")
    parser.add_argument("--devices", help="use only these devices, e.g. 0-3,8")
    parser.add_argument("--objective", choices=("makespan", "energy", "cost"), default="makespan", help="what is least: the time of the last task "
                        "(default), joules (watts and joules_per_byte of the fabric), or seconds of all tasks and messages together")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    parser.add_argument("--evaluations", type=int, default=0, help="schedules that search, giph and random-eft look at (default: by size)")
    parser.add_argument("--net", type=Path, metavar="FILE", help="of `place fit`: what giph moves tasks by")
    parser.add_argument("--from", dest="start", type=Path, metavar="PLAN", help="begin with it; tasks of devices that left are placed anew")
    parser.add_argument("--done", metavar="TASKS", help="with --from: tasks that ended, e.g. shoot,pack; what they made stays where it is")


def problem_of(args: argparse.Namespace) -> PlaceProblem:
    from dataclasses import replace

    from ..decide.place import PlaceProblem
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..io.model.tasks import read_tasks

    if args.evaluations < 0:
        raise UsageError(f"must be at least 0, got {args.evaluations}", where="--evaluations", hint="0: by the number of tasks")
    if args.seed < 0:
        raise UsageError(f"must be at least 0, got {args.seed}", where="--seed")
    if args.done is not None and args.start is None:
        raise UsageError("says nothing alone", where="--done", hint="give the plan that ran with --from PLAN")
    graph, fabric = read_tasks(args.tasks), read_fabric(args.fabric, args.devices)
    if args.start is None:
        return PlaceProblem(graph=graph, fabric=fabric, objective=args.objective)
    from ..decide.place.remaining import remaining
    from ..drive.place import devices_of
    from ..drive.plans import read_plan

    on = devices_of(read_plan(args.start))
    if args.done is None:
        return PlaceProblem(graph=graph, fabric=fabric, start=on, objective=args.objective)
    return replace(remaining(graph, fabric, on, args.done.split(",")), objective=args.objective)


def strategies_of(args: argparse.Namespace, kinds: Sequence[type[PlaceStrategy]]) -> list[PlaceStrategy]:
    """With the evaluations asked for. Raises: UsageError where none of them takes any."""
    from dataclasses import fields, replace

    from ..errors import UsageError

    made: list[Any] = [kind() for kind in kinds]
    if args.net is not None:
        from ..io.costs.moves import read_move_net

        net = read_move_net(args.net)
        made = [replace(s, net=net) if hasattr(s, "net") else s for s in made]
        if not any(hasattr(s, "net") for s in made):
            raise UsageError(f"{made[0].name} reads no net", where="--net", hint="use it with --strategy giph, or auto")
    takes = [any(f.name == "evaluations" for f in fields(s)) for s in made]
    if args.evaluations and not any(takes):
        raise UsageError(f"{made[0].name} looks at no number of schedules", where="--evaluations", hint="use it with search, giph or random-eft")
    return [replace(s, evaluations=args.evaluations) if args.evaluations and t else s for s, t in zip(made, takes, strict=True)]


def document_of(problem: PlaceProblem, ranked: list[Tried], bound: Bound) -> dict[str, Any]:
    from ..decide.place import place_bound

    rows = [
        {
            "strategy": t.strategy.name, "time_s": t.time_s if t.placement else None, "alone_s": t.placement.makespan_s if t.placement else None,
            "evaluations": t.placement.evaluations if t.placement else 0,
            "value": t.value if t.placement else None, "over_bound": t.value / float(bound) if t.placement and float(bound) else None,
            "why": t.why, "notes": dict(t.placement.notes) if t.placement else {},
        }
        for t in ranked
    ]  # fmt: skip
    return {
        "tasks": problem.graph.name, "task_count": len(problem.graph.tasks), "edges": len(problem.graph.edges), "fabric": problem.fabric.name,
        "devices": len(problem.fabric.devices), "objective": problem.objective, "unit": bound.unit, "bound_value": float(bound),
        "bound_s": float(bound if problem.objective == "makespan" else place_bound(problem)), "bound": bound.certificate.data["form"],
        "strategies": rows,
    }  # fmt: skip


def table(problem: PlaceProblem, ranked: list[Tried], bound: Bound) -> list[str]:
    from ..io.quantity import show_time

    by_time = problem.objective == "makespan"
    say = {"path": "the longest path, every task on its best device", "load": "the work over the rates of all devices together",
           "messages": "the least of every task and message, parts of messages counted at tasks"}  # fmt: skip
    most = f"no schedule is shorter than {show_time(float(bound))}" if by_time else f"no {problem.objective} is below {float(bound):.6g} {bound.unit}"
    lines = [
        f"{problem.graph.name}: {len(problem.graph.tasks)} tasks, {len(problem.graph.edges)} edges, on {len(problem.fabric.devices)} devices of "
        f"{problem.fabric.name}", f"{most}: {say[bound.certificate.data['form']]}", "",
        f"{'strategy':<12}{'time':>12}{'' if by_time else f'{problem.objective:>14}'}{'of bound':>10}{'schedules':>11}",
    ]  # fmt: skip
    for t in ranked:
        if t.placement is None:
            lines.append(f"{t.strategy.name:<12}{'-':>12}{'' if by_time else '-'.rjust(14)}{'-':>10}{'-':>11}  {t.why}")
        else:
            over = f"{t.value / float(bound):.3f}" if float(bound) else "-"
            value = "" if by_time else f"{f'{t.value:.6g} {bound.unit}':>14}"
            lines.append(f"{t.strategy.name:<12}{show_time(t.time_s):>12}{value}{over:>10}{t.placement.evaluations:>11,}")
    return lines
