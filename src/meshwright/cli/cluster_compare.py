"""`meshwright cluster compare`: orders times allocations on the same queue, in virtual time."""

from __future__ import annotations

import argparse

from .cluster_arguments import problem_arguments, queue_of, row_of, run_arguments, run_options, servers_of, table
from .cluster_vms import vm_arguments
from .frame import Result

HELP = "Orders times allocations on the same queue, in virtual time."


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    vm_arguments(parser, several=True)
    run_arguments(parser)
    parser.add_argument("--orders", default="fifo,srtf,las", help="default fifo,srtf,las; there are also ftf, drf and tetris")
    parser.add_argument("--allocations", default="proportional,greedy,tune,priced", help="default proportional,greedy,tune,priced; there is also opt")


def run(args: argparse.Namespace) -> Result:
    from ..decide.cluster import allocation, order
    from ..drive.cluster import simulate_queue
    from ..errors import TimeLimit
    from ..io.cluster import is_vms
    from ..kernels.effort import Budget
    from ..kernels.stages import stage
    from .cluster_vms import compare as of_vms

    if is_vms(args.queue):
        return of_vms(args)
    orders = [order(name, where="--orders") for name in args.orders.split(",")]
    allocations = [allocation(name, where="--allocations") for name in args.allocations.split(",")]
    queue, servers = queue_of(args), servers_of(args)
    options = run_options(args, queue, servers)
    pairs = [(first, strategy) for first in orders for strategy in allocations]
    rows, budget = [], Budget(len(pairs))
    with stage("orders and allocations", of=len(pairs)):
        for first, strategy in pairs:
            if not budget.spend():
                break
            try:
                with budget.net():
                    rows.append(row_of(simulate_queue(servers, queue, first(), strategy(), **options)))
            except TimeLimit:
                if not rows:
                    raise
    lines = [f"{queue.name}: {rows[0]['jobs']} jobs counted, on {servers.total_gpus} GPUs of {servers.fabric}", "", *table(rows)]
    document = {"schema": "meshwright.cluster-runs", "version": 1, "queue": queue.name, "fabric": servers.fabric, "gpus": servers.total_gpus,
        "rows": rows}
    return Result(document, "\n".join(lines), cut=budget.cut)
