"""`meshwright program show FILE`: lanes and steps."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import UnknownName, UsageError
from .frame import Result
from .pictures import check_pictures, picture_arguments, with_pictures

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..program.program import Program

HELP = "print the lanes and steps of a program"
EPILOG = "FILE is a plan or a program, plain or .gz; `-` is standard input."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="plan or program")
    parser.add_argument("--program", metavar="NAME", help="one of the plan's programs: start of its hash, or its name (default: the main one)")
    parser.add_argument("--rank", type=int, metavar="R", help="only lanes of this rank")
    parser.add_argument("--lane", type=int, metavar="L", help="only this lane")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="print at most N steps (default 200; 0 = all)")
    picture_arguments(parser)


def read(path: str) -> tuple[Plan | None, Program]:
    """The plan in the file, if it is one, and its main program."""
    from ..io.plan.plan import read_plan_or_program
    from ..plan.plan import Plan

    found = read_plan_or_program(path)
    return (found, found.main) if isinstance(found, Plan) else (None, found)


def choose(path: str, name: str | None) -> tuple[Plan | None, Program]:
    """The program that `--program` names."""
    plan, program = read(path)
    if name is None:
        return plan, program
    table = plan.programs if plan is not None else {}
    hits = [p for key, p in table.items() if key.startswith(name)] or [p for p in table.values() if p.name == name]
    if len(hits) != 1:
        listed = ", ".join(f"{key[:12]} ({p.name or 'unnamed'})" for key, p in table.items()) or "none: it is a program, not a plan"
        raise UnknownName(f"{len(hits)} programs are called {name!r}", where=path, hint=f"programs of the plan: {listed}")
    return plan, hits[0]


def run(args: argparse.Namespace) -> Result:
    check_pictures(args)
    plan, p = choose(args.file, args.program)
    if (args.trace or args.svg) and (plan is None or args.program is not None):
        raise UsageError("a program alone has no fabric and no times", where="--trace, --svg", hint="name a plan, without --program")
    if args.limit < 0:
        raise UsageError(f"--limit must be >= 0, got {args.limit}")
    if args.rank is not None and not 0 <= args.rank < p.ranks:
        raise UsageError(f"the program has ranks 0..{p.ranks - 1}, got --rank {args.rank}")
    if args.lane is not None and not 0 <= args.lane < len(p.lanes):
        raise UsageError(f"the program has lanes 0..{len(p.lanes) - 1}, got --lane {args.lane}")
    left = args.limit or len(p.steps)
    lanes: list[dict[str, Any]] = []
    text = [_title(p)]
    hidden = 0
    for lane in range(len(p.lanes)):
        actor, start, end = int(p.lanes.actor[lane]), int(p.lanes.start[lane]), int(p.lanes.end[lane])
        if (args.rank is not None and actor != args.rank) or (args.lane is not None and lane != args.lane):
            continue
        shown = range(start, min(end, start + left))
        left -= len(shown)
        hidden += end - start - len(shown)
        steps = [_step(p, step) for step in shown]
        entry = {"lane": lane, "actor": actor, "unit": int(p.lanes.unit[lane]), "repeat": int(p.lanes.repeat[lane]), "steps": steps}
        lanes.append(entry | {"role": _role(int(p.lanes.role[lane])), "step_count": end - start})
        if steps or end == start:
            text.append(_lane_title(p, lanes[-1]))
            text += [f"  {s['step']:>7}  {s['what']}{_waits(s)}" for s in steps]
    if hidden:
        text.append(f"... {hidden} more steps; choose with --rank, --lane, or raise --limit")
    document = {"schema": "meshwright.program-show", "version": 1, "name": p.name, "ranks": p.ranks, "lanes": lanes, "hidden_steps": hidden}
    result = Result(document, "\n".join(text))
    return with_pictures(result, args, plan) if plan is not None else result


def _role(role: int) -> str:
    from ..program.program import Role

    return Role(role).name.lower()


def _title(p: Program) -> str:
    what = [f"{p.ranks} ranks", f"{len(p.lanes)} lanes", f"{len(p.steps)} steps", f"{len(p.channels)} channels", f"{len(p.buffers)} buffers"]
    if p.requires:
        what.append(f"uses {', '.join(p.requires)}")
    what += sorted({f"sums reproducible by {c.reproducible}" for c in p.contracts if c.reproducible != "run"})
    return f"program {p.name or '(unnamed)'}: {', '.join(what)}"


def _lane_title(p: Program, lane: dict[str, Any]) -> str:
    who = f"rank {lane['actor']}" if lane["actor"] < p.ranks else f"switch {lane['actor'] - p.ranks}"
    times = f" x {lane['repeat']}" if lane["repeat"] > 1 else ""
    return f"lane {lane['lane']} of {who}: {lane['role']}{times}, {lane['step_count']} steps"


def _step(p: Program, step: int) -> dict[str, Any]:
    st = p.step(step)
    text = p.describe(step)
    return {"step": step, "kind": st.kind.name.lower(), "what": text[text.index("(") + 1 : -1], "after": [list(edge) for edge in st.after]}


def _waits(step: dict[str, Any]) -> str:
    edges = [f"{d}" + (f" ({lag} iterations ago)" if lag else "") for d, lag in step["after"]]
    return f"  after {', '.join(edges)}" if edges else ""
