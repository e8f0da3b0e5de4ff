"""`meshwright layout plan`: SBP signatures for every operator of a model on a fabric, found by AutoDDL or after a template."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import LOSSES, TIME_LIMIT, at_least_one, fabric_arguments, require_directory
from .frame import Result

if TYPE_CHECKING:
    from ..decide.layout.autoddl import ShardingPlan, ShardingProblem

PLAIN = ("replicate", "broadcast", "partial")  # signatures that follow from those around them

HELP = "split every operator of a model over devices, and say how far that is from the least communication"


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument("--strategy", default="autoddl", help="autoddl (default), or another of `strategies list layout` for operators")
    parser.add_argument("--search", default="auto", help="search of autoddl: auto (default), exact, ilp, descent")
    parser.add_argument("--mesh", help="use only this mesh, e.g. 2x4 (default: every factorisation of the devices)")
    parser.add_argument("--restarts", type=at_least_one, default=20, help="random starts of coordinate descent (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="S", help=TIME_LIMIT.format(120))
    parser.add_argument("--out", "-o", type=Path, default=Path("layout.json"), help="where to write the plan (default layout.json)")


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="FILE.py:function or module:function that returns (module, example inputs)")
    fabric_arguments(parser)
    parser.add_argument("--batch", type=at_least_one, help="samples per step over all devices (default: that of the example inputs)")
    parser.add_argument("--loss", default="cross-entropy", help=LOSSES)
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adamw"], help="sgd (default) or adamw")
    parser.add_argument("--cost", default="roofline", help="roofline (default), tables:SYSTEM, or a cost file")
    parser.add_argument("--memory", help="bytes a device may use, e.g. 16GiB (default: what the fabric says; 0: no limit)")
    parser.add_argument("--loader-rate", default="1GB/s", help="input bytes that a device can load per second (default 1GB/s)")
    parser.add_argument("--dtype", default="", choices=["", "float32", "float64"], help="precision of the run (default: the model's)")
    parser.add_argument("--pytorch-rules", action="store_true", help="ask PyTorch's own sharding rules about operators that have no signature here")


def run(args: argparse.Namespace) -> Result:
    from ..kernels.effort import cut_of
    from ..run.dtensor.run import write_layout

    require_directory(args.out)
    plan = make_plan(args, problem_of(args), args.strategy)
    write_layout(args.out, plan)
    return Result(document_of(plan, path=str(args.out)), text_of(plan, written=str(args.out)), cut=cut_of({"layout": plan.options}))


def make_plan(args: argparse.Namespace, problem: ShardingProblem, strategy: str) -> ShardingPlan:
    """Raises: what the strategy raises; CheckFailed for a plan that is not right (please report it)."""
    from dataclasses import fields

    from ..check.sharding import check_sharding
    from ..decide.layout import strategy as named

    kind = named(strategy, "operators", where="--strategy")
    given = {"search": args.search, "restarts": args.restarts, "mesh": parse_mesh(args.mesh) if args.mesh else None, "time_limit_s": args.time_limit}
    plan: ShardingPlan = kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given}).plan(problem, seed=args.seed)
    check_sharding(plan, problem.graph).raise_if_wrong()
    return plan


def parse_mesh(text: str) -> tuple[int, ...]:
    from ..errors import UsageError

    parts = text.lower().split("x")
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise UsageError(f"{text!r} is no mesh", where="--mesh", hint="write sizes with x between them, e.g. 2x4")
    return tuple(map(int, parts))


def problem_of(args: argparse.Namespace) -> ShardingProblem:
    from ..capture.graph import capture
    from ..decide.layout.autoddl import ShardingProblem
    from ..decide.layout.autoddl.network import build_network
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..io.quantity import parse_rate_Bps, parse_size_bytes
    from ..probe.costs.name import load_cost

    fabric = read_fabric(args.fabric, args.devices)
    try:
        memory = parse_size_bytes(args.memory) if args.memory not in (None, "0") else None if args.memory is None else 0
        rate = parse_rate_Bps(args.loader_rate)
    except ValueError as error:
        raise UsageError(str(error), where="--memory or --loader-rate", hint="e.g. 16GiB, 1GB/s") from None
    graph = capture(args.model, loss=args.loss, batch_size=args.batch, scalable=False)
    problem = ShardingProblem(
        graph=graph, fabric=fabric, cost=load_cost(args.cost, fabric), optimizer=args.optimizer, loader_Bps=float(rate), memory_bytes=memory,
        item_bytes={"": 0, "float32": 4, "float64": 8}[args.dtype],
    )  # fmt: skip
    if not args.pytorch_rules:
        return problem
    from dataclasses import replace

    from ..capture.forward import trace_forward
    from ..run.dtensor.placements import derived_signatures

    unknown = [w.partition(" ")[0] for w in build_network(problem).whole]
    if not unknown:
        return problem
    traced = trace_forward(args.model, loss=args.loss, batch_size=args.batch)
    return replace(problem, signatures=derived_signatures(traced, unknown))


def document_of(plan: ShardingPlan, *, path: str = "") -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(plan)
    document["bound"] = {"time_s": plan.bound_time_s, "received_bytes": plan.bound_bytes}
    document["ratio"] = ratio(plan.time_s, plan.bound_time_s)
    document["ratio_bytes"] = ratio(mean_bytes(plan), plan.bound_bytes)
    document["path"] = path
    return document


def ratio(value: float, bound: float) -> float | None:
    return value / bound if bound else None


def mean_bytes(plan: ShardingPlan) -> float:
    return sum(b.total for b in plan.bytes_sent) / len(plan.bytes_sent)


def text_of(plan: ShardingPlan, *, written: str = "") -> str:
    """The plan for people: result and bounds first, then what it consists of, the alternatives, the states of parameters and matrix operators."""
    from ..io.quantity import show_size, show_time

    mesh = " x ".join(map(str, plan.mesh))
    redundant = "" if not plan.bound_bytes or mean_bytes(plan) >= plan.bound_bytes else " (below it: some work is done on several devices instead)"
    bytes_bound = f", {mean_bytes(plan) / plan.bound_bytes:.2f} x the least, {show_size(plan.bound_bytes)}{redundant}" if plan.bound_bytes else ""
    lines = [
        f"{plan.strategy} on {len(plan.devices)} devices as {mesh}: {show_time(plan.time_s)} per step, bound {show_time(plan.bound_time_s)}"
        f" ({plan.time_s / plan.bound_time_s:.2f} x)" + (", proven best of its search space" if plan.exact else ""),
        f"each rank sends {show_size(round(mean_bytes(plan)))}{bytes_bound}; memory {show_size(plan.memory_bytes)}",
        "time: " + ", ".join(f"{k} {show_time(v)}" for k, v in plan.parts_s.items() if v),
    ]
    for row in plan.alternatives:
        how = f"  {row['what']} {' x '.join(map(str, row['mesh']))}"
        lines.append(f"{how:<28}{show_time(row['time_s']):>10}{show_size(round(row['mean_bytes'])):>12}  {row['why']}".rstrip())
    lines.append("parameters:")
    lines += [f"  {name.partition(':')[2]:<36} {', '.join(state)}" for name, state in plan.sources.items() if name.startswith("param:")]
    lines.append("operators:")
    telling = {name: op.names for name, op in plan.ops.items() if not all(n in PLAIN or n.startswith("split") for n in op.names)}
    lines += [f"  {name:<36} {', '.join(names)}" for name, names in telling.items()]
    lines += [f"warning: {note}" for note in plan.notes]
    return "\n".join(lines + ([f"written: {written}"] if written else []))
