"""`meshwright place run`: a placement on processes of this machine, measured beside simulated."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one, require_directory
from .frame import Result
from .tables_arguments import lab_of

HELP = "Run a placement, one process per device under its share of a core, with data over sockets: measured beside simulated."


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", type=Path, help="a plan of `meshwright place plan`")
    add("--work", default="", metavar="FILE.py:FUNCTION", help="function(task, inputs, outputs): bytes by parent to read, by child to fill; "
        "without it, a task takes as much processor time as its device gives it in the time of the plan")  # fmt: skip
    add("--lab", metavar="NAME", help="in this lab (`meshwright lab up`): shaped links, shares of cores; without it on loopback")
    add("--runs", type=at_least_one, default=1, metavar="N", help="runs one after the other; the one of median time is told (default 1)")
    add("--no-replan", action="store_true", help="end where a device is lost; without it the rest is planned again and run")
    add("--timeout", type=float, default=300.0, metavar="S", help="end all devices after this many seconds (default 300)")
    add("--tasks-out", type=Path, metavar="FILE", help="also write the tasks with the work that each took here, to plan again")
    add("--trace", type=Path, metavar="FILE", help="also write both timelines as a trace (.pftrace or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_plan
    from ..errors import MissingExtra
    from ..io.model.tasks import write_tasks
    from ..io.quantity import show_time
    from ..io.trace.write import require_ending, write_trace

    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", extra="torch", needed_for="running a placement") from None
    from ..run.place.run import measured_work, run_placement

    if args.tasks_out is not None:
        require_directory(args.tasks_out)
    if args.trace is not None:
        require_directory(args.trace)
        require_ending(str(args.trace))
    plan, said = read_plan(args.plan), list[str]()
    with lab_of(args.lab) as lab:
        found = run_placement(
            plan, work=args.work, lab=lab, runs=args.runs, timeout_s=args.timeout, replan=not args.no_replan, seed=plan.seed, told=said.append
        )
    rows, lines = [], [f"{'task':<24}{'device':<16}{'simulated':>24}{'measured':>24}"]
    for number, r in enumerate(found.rounds):
        begun = dict(zip(r.simulated.spans.step.tolist(), zip(r.simulated.spans.start_s.tolist(), r.simulated.spans.end_s.tolist(), strict=True),
                         strict=True))  # fmt: skip
        m = r.measured.spans
        for n in m.start_s.argsort(kind="stable").tolist():
            device, step = r.plan.placement[int(m.rank[n])], int(m.step[n])
            rows.append({
                "round": number, "task": m.name[n], "device": device, "simulated_s": list(begun[step]),
                "measured_s": [float(m.start_s[n]), float(m.end_s[n])], "took_s": r.took_s[m.name[n]],
            })  # fmt: skip
            spans = [f"{show_time(a)} to {show_time(b)}" for a, b in (rows[-1]["simulated_s"], rows[-1]["measured_s"])]
            lines.append(f"{m.name[n]:<24}{device:<16}{spans[0]:>24}{spans[1]:>24}")
        if r.lost:
            lines.append(said[number])
    last = found.rounds[-1]
    planned = sum(r.simulated.makespan_s if not r.lost else r.measured.makespan_s for r in found.rounds)
    off = found.measured_s / planned - 1 if planned else 0.0
    lines.append(f"measured {show_time(found.measured_s)}, simulated {show_time(planned)}: {abs(off):.1%} {'more' if off >= 0 else 'less'}")
    document = {
        "schema": "meshwright.place-run", "version": 1, "plan": str(args.plan), "measured_s": found.measured_s, "simulated_s": planned,
        "planned_s": plan.prediction.time_s if plan.prediction else None, "lost": [r.lost for r in found.rounds if r.lost], "tasks": rows,
        "runs_s": list(found.rounds[0].runs_s),
    }  # fmt: skip
    if args.tasks_out is not None:
        write_tasks(args.tasks_out, measured_work(found))
        document["tasks_out"] = str(args.tasks_out)
        lines.append(f"written: {args.tasks_out}")
    if args.trace is not None:
        write_trace(args.trace, last.plan.main, [last.simulated, last.measured], title=f"{args.plan}: simulated and measured")
        document["trace"] = str(args.trace)
        lines.append(f"written: {args.trace}")
    return Result(document, "\n".join(lines))
