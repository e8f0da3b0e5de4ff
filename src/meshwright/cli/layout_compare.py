"""`meshwright layout compare`: AutoDDL's plan beside the templates, predicted and, on request, measured in turns on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import TIME_LIMIT
from .frame import Result

if TYPE_CHECKING:
    from ..decide.layout.autoddl import ShardingPlan
    from ..kernels.effort import Cut

HELP = "AutoDDL beside data parallelism, Megatron pairs and convolution-DP + FC-TP: predicted, and measured with --run"


def arguments(parser: argparse.ArgumentParser) -> None:
    from .layout_plan import problem_arguments

    problem_arguments(parser)
    parser.add_argument("--run", action="store_true", help="also run the plans in processes on this machine, in turns, and measure them")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of every plan (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="S", help=TIME_LIMIT.format(120))
    parser.set_defaults(search="auto", mesh=None, restarts=20)


def run(args: argparse.Namespace) -> Result:
    from ..io.quantity import show_size, show_time
    from .layout_plan import mean_bytes, problem_of

    problem = problem_of(args)
    plans, cut = candidates(args, problem)
    measured: dict[str, float] = {}
    if args.run:
        from ..run.dtensor.run import run_layout

        measured = {p.strategy: r.time_s for p, r in zip(plans, run_layout(plans, steps=args.steps, dtype=args.dtype), strict=True)}
    rows: list[dict[str, Any]] = []
    for p in plans:
        rows.append({
            "strategy": p.strategy, "mesh": list(p.mesh), "time_s": p.time_s, "mean_bytes": mean_bytes(p), "memory_bytes": p.memory_bytes,
            "measured_s": measured.get(p.strategy),
        })  # fmt: skip
    best = plans[0]
    lines = [f"{'strategy':<16}{'mesh':<10}{'predicted':>11}{'measured':>11}{'sent by a rank':>16}{'memory':>11}"]
    for x in rows:
        known = show_time(x["measured_s"]) if x["measured_s"] is not None else "-"
        mesh = " x ".join(map(str, x["mesh"]))
        lines.append(
            f"{x['strategy']:<16}{mesh:<10}{show_time(x['time_s']):>11}{known:>11}{show_size(round(x['mean_bytes'])):>16}"
            f"{show_size(x['memory_bytes']):>11}"
        )
    lines.append(f"bound: {show_time(best.bound_time_s)}; at least {show_size(best.bound_bytes)} received by a rank that does no work twice")
    lines += [f"warning: {note}" for note in best.notes]
    document = {
        "schema": "meshwright.layout-comparison", "version": 1, "rows": rows,
        "bound": {"time_s": best.bound_time_s, "received_bytes": best.bound_bytes},
        "ratio": best.time_s / best.bound_time_s if best.bound_time_s else None, "notes": list(best.notes),
    }  # fmt: skip
    return Result(document, "\n".join(lines), cut=cut)


def candidates(args: argparse.Namespace, problem: Any) -> tuple[list[ShardingPlan], Cut | None]:
    """AutoDDL's plan first, then that of every other strategy for operators that this model and number of devices have."""
    from ..decide.layout import strategies
    from ..decide.layout.autoddl import AutoDDL
    from ..errors import Infeasible, TimeLimit, Unsupported
    from ..kernels.effort import Budget
    from .layout_plan import make_plan

    found: list[ShardingPlan] = []
    names = [AutoDDL.name, *(x.name for x in strategies("operators") if x is not AutoDDL)]
    budget = Budget(len(names), time_limit_s=args.time_limit)
    for name in names:
        if not budget.spend():
            break
        try:
            with budget.net():
                found.append(make_plan(args, problem, name))
        except (Unsupported, Infeasible, TimeLimit):
            if not found:
                raise
    return found, budget.cut
