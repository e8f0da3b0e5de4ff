"""`meshwright graph run`: train as a graph plan says, on local processes, and count every channel's bytes."""

from __future__ import annotations

import argparse

from .arguments import at_least_one
from .frame import Result
from .graph_arguments import data_arguments, data_of

__all__ = ["HELP", "arguments", "run"]

HELP = "train as a graph plan says, one process per worker, and count the bytes of every channel"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", help="a plan of `meshwright graph plan`")
    data_arguments(parser)
    add("--epochs", type=at_least_one, default=20, help="default 20")
    add("--timeout", type=float, default=120.0, metavar="S", help="give up after this many seconds without progress (default 120)")
    add("--port", type=int, default=0, help="port of the ranks' rendezvous on this machine (default: any free one)")


def run(args: argparse.Namespace) -> Result:
    from statistics import median

    from ..decide.traffic.adaqp import partition
    from ..drive.plans import read_plan
    from ..errors import MissingExtra, UsageError
    from ..io.quantity import show_size, show_time

    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", extra="torch", needed_for="training on a graph") from None
    from ..run.halo import run_graph

    plan = read_plan(args.plan)
    if plan.kind != "halo":
        raise UsageError(f"is a plan of kind {plan.kind}", where=args.plan, hint="meshwright graph plan makes one")
    data = data_of(args)
    parts = partition(data.graph, plan.main.ranks, method=plan.decisions["partition"]["strategy"], seed=plan.seed)
    found = run_graph(plan, data, parts.of, epochs=args.epochs, timeout_s=args.timeout, port=args.port)
    took = median(found.epochs_s[1:] or found.epochs_s)
    document = {
        "schema": "meshwright.graph-run", "version": 1, "graph": data.graph.name, "workers": plan.main.ranks, "epochs": args.epochs,
        "losses": found.losses, "accuracy": found.accuracy, "epochs_s": found.epochs_s, "epoch_s": took, "sent_bytes": found.sent_bytes,
        "as_planned": found.as_planned, "reassigned": found.reassigned,
        "predicted_s": plan.prediction.time_s if plan.prediction else None,
    }  # fmt: skip
    lines = [
        f"{data.graph.name} on {plan.main.ranks} processes, {args.epochs} epochs: loss {found.losses[0]:.4f} to {found.losses[-1]:.4f}, "
        f"accuracy {found.accuracy:.1%}",
        f"median epoch {show_time(took)} on this machine; sent {show_size(found.sent_bytes)}, every channel "
        + ("as planned" if found.as_planned else "NOT as planned"),
    ]  # fmt: skip
    if found.reassigned:
        lines.append(f"bits chosen anew before epochs {', '.join(map(str, found.reassigned))}")
    return Result(document, "\n".join(lines), 0 if found.as_planned else 4)
