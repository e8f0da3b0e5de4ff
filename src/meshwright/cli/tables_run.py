"""`meshwright tables run`: a table plan on processes of this machine, beside one process with whole tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one
from .frame import Result
from .tables_arguments import lab_of

HELP = "Run a table plan: lookups, both exchanges and SGD, one process per device, compared with whole tables in one process."
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # of the largest entry: what another order of partial sums may change


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan of `meshwright tables plan`")
    parser.add_argument("--steps", type=at_least_one, default=5, help="iterations (default 5)")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32", help="of weights and sums (default float32)")
    parser.add_argument("--operator", choices=["auto", "embedding_bag", "fbgemm"], default="auto", help="auto: fbgemm where there is one, in float32")
    parser.add_argument("--no-verify", action="store_true", help="do not train whole tables beside it: for tables that one process cannot hold")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--lab", metavar="NAME", help="in this lab (`meshwright lab up`), not on loopback")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="end all ranks after this many seconds")


def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import check_plan, read_plan
    from ..drive.tables import shards_of, tables_of
    from ..io.quantity import show_time
    from ..probe.tables.operator import operator_name
    from ..run.tables.run import run_tables

    plan = read_plan(args.plan)
    tables, shards = tables_of(plan), shards_of(plan)
    check_plan(plan)
    operator = args.operator
    if operator == "auto":
        operator = operator_name() if args.dtype == "float32" else "embedding_bag"
    names = plan.placement[: plan.main.ranks]
    with lab_of(args.lab) as lab:
        found = run_tables(
            tables, shards, names, steps=args.steps, seed=args.seed, dtype=args.dtype, operator=operator, verify=not args.no_verify, lab=lab,
            timeout_s=args.timeout,
        )  # fmt: skip
    limit = TOLERANCE[args.dtype]
    equal = None if args.no_verify else max(found.outputs_apart, found.weights_apart) <= limit
    predicted = plan.prediction.time_s if plan.prediction is not None else None
    document = {
        "schema": "meshwright.tables-run", "version": 1, "plan": str(args.plan), "operator": operator, "steps": args.steps, "time_s": found.time_s,
        "step_s": list(found.step_s), "predicted_s": predicted, "sent_bytes": list(found.sent_bytes), "outputs_apart": found.outputs_apart,
        "weights_apart": found.weights_apart, "equal": equal,
    }  # fmt: skip
    lines = [f"{args.steps} iterations on {len(names)} processes by {operator}: median {show_time(found.time_s)}, slowest rank"]
    lines.append(f"pooled rows sent: {sum(found.sent_bytes)} bytes an iteration, {max(found.sent_bytes)} by one rank")
    if equal is not None:
        word = "equal" if equal else "NOT equal"
        lines.append(f"{word} to whole tables in one process: outputs within {found.outputs_apart:.1e}, weights within {found.weights_apart:.1e}")
    return Result(document, "\n".join(lines), exit_code=4 if equal is False else 0)
