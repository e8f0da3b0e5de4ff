"""`meshwright cluster simulate`: a queue on a cluster in virtual time, under one order and one allocation."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import require_directory
from .cluster_arguments import problem_arguments, queue_of, row_of, run_arguments, run_options, servers_of, table
from .cluster_vms import vm_arguments
from .frame import Result

HELP = "A queue on a cluster in virtual time, under one order and one allocation."


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    vm_arguments(parser)
    run_arguments(parser)
    parser.add_argument("--order", default="fifo", help="who goes first: fifo (default), srtf, las, ftf, drf or tetris")
    parser.add_argument("--allocation", default="priced", help="who gets what: priced (default), proportional, greedy, tune or opt")
    parser.add_argument("--export", type=Path, help="also write the queue (or the machines) to this file, as meshwright.queue (meshwright.vms)")
    parser.add_argument("--needed", action="store_true", help="of machines: also how many hosts refuse at most one of ten thousand")
    parser.add_argument("--jobs-out", type=Path, help="also write arrival, start and end of every job to this file, as CSV")


def run(args: argparse.Namespace) -> Result:
    from ..decide.cluster import allocation, order
    from ..drive.cluster import simulate_queue
    from ..io.atomic import write_bytes
    from ..io.cluster import is_vms, write_queue
    from ..kernels.effort import Budget
    from .cluster_vms import simulate as of_vms

    if is_vms(args.queue):
        return of_vms(args)
    for path in (args.export, args.jobs_out):
        if path is not None:
            require_directory(path)
    first, strategy = order(args.order, where="--order"), allocation(args.allocation, where="--allocation")
    queue, servers = queue_of(args), servers_of(args)
    with Budget(1).net():
        found = simulate_queue(servers, queue, first(), strategy(), **run_options(args, queue, servers))
    row = row_of(found)
    lines = [
        f"{queue.name}: {row['jobs']} jobs counted, on {servers.total_gpus} GPUs of {servers.fabric}, {row['rounds']} rounds, "
        f"{row['planned']} planned",
        "", *table([row]),
    ]  # fmt: skip
    document = {"schema": "meshwright.cluster-run", "version": 1, "queue": queue.name, "fabric": servers.fabric, "gpus": servers.total_gpus, **row}
    if args.export is not None:
        write_queue(args.export, queue)
        lines.append(f"queue: {args.export}")
    if args.jobs_out is not None:
        done = found.run
        text = ["name,gpus,profile,arrival_s,start_s,end_s,moves,resizes"]
        for i, job in enumerate(queue.jobs):
            name = job.name.replace('"', '""')
            times = ",".join(f"{x:.6f}" if x < float("inf") else "" for x in (job.arrival_s, float(done.start_s[i]), float(done.end_s[i])))
            text.append(f'"{name}",{job.gpus},"{job.profile}",{times},{done.moves[i]},{done.resizes[i]}')
        write_bytes(args.jobs_out, ("\n".join(text) + "\n").encode())
        lines.append(f"jobs: {args.jobs_out}")
    return Result(document, "\n".join(lines))
