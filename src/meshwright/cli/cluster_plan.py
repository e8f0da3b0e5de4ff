"""`meshwright cluster plan`: one round: which jobs run, and which GPUs, cores and memory each gets; checked, beside the bound."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import require_directory
from .cluster_arguments import problem_arguments, queue_of, servers_of
from .cluster_vms import vm_arguments
from .frame import Result

HELP = "One round: which jobs run, and which GPUs, cores and memory each gets; checked, beside the bound."
MAX_SHOWN = 16  # servers, in text


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    vm_arguments(parser)
    parser.add_argument("--order", default="fifo", help="who goes first: fifo (default), srtf, las, ftf, drf or tetris")
    parser.add_argument("--allocation", default="priced", help="who gets what: priced (default), proportional, greedy, tune or opt")
    parser.add_argument("--bound", choices=("prices", "fillings"), default="prices",
        help="fillings: also the tighter bound of whole servers, seconds")
    parser.add_argument("--out", "-o", type=Path, help="also write the allocation to this file (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..cluster.allocation import floor_of
    from ..decide.cluster import allocation, order
    from ..drive.cluster import plan_allocation, speeds
    from ..io.cluster import is_vms, write_allocation
    from ..io.cluster.allocation import allocation_document
    from .cluster_vms import plan as of_vms

    if is_vms(args.queue):
        return of_vms(args)
    if args.out is not None:
        require_directory(args.out)
    first, strategy = order(args.order, where="--order"), allocation(args.allocation, where="--allocation")
    queue, servers = queue_of(args), servers_of(args)
    found, divided = plan_allocation(servers, queue, first(), strategy(), bound=args.bound, seed=args.seed)
    assert found.bound is not None
    limit = float(found.bound)
    floor = speeds(servers, queue, floor_of)
    shares = sum(queue.jobs[j].gpus * floor(j, parts) for j, parts in divided.parts.items())
    wanted = sum(job.gpus for job in queue.jobs if job.name in set(found.order))
    lines = [
        f"{queue.name}: {len(found.order)} of {len(queue.jobs)} jobs on {wanted} of {servers.total_gpus} GPUs of {servers.fabric}",
        f"GPUs x speed {found.speed:.2f}, {found.speed / limit if limit else 1:.3f} of the bound {limit:.2f} ({found.bound.quantity}); "
        f"proportional shares give {shares:.4g}; nobody is below their share", "",
    ]  # fmt: skip
    for server in servers.servers[:MAX_SHOWN]:
        here = [g for g in found.given if g.server == server.name]
        told = [f"{g.job} {len(g.gpus)} GPUs {g.cores} cores {g.memory_bytes / 1e9:.0f} GB" for g in here]
        lines.append(f"{server.name}: {', '.join(told) or 'nothing'}")
    if len(servers) > MAX_SHOWN:
        lines.append(f"and {len(servers) - MAX_SHOWN} servers more")
    document = {
        "schema": "meshwright.cluster-plan", "version": 1, "allocation": allocation_document(found),
        "ratio": found.speed / limit if limit else 1.0, "gpus": wanted, "notes": dict(divided.notes),
    }  # fmt: skip
    if args.out is not None:
        write_allocation(args.out, found)
        document["written"] = str(args.out)
        lines.append(f"written: {args.out}")
    return Result(document, "\n".join(lines))
