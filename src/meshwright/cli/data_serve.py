"""`meshwright data serve`: batches prepared once for several jobs, and files kept by several nodes, as a service over sockets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, whole_number
from .collective_bound import size_bytes
from .data_analyse import loader_arguments, loader_of
from .frame import Result

if TYPE_CHECKING:
    from ..data.batches import Batches

HELP = "serve a loader's batches to several jobs, each prepared once and sent to each job once; or its files to the other nodes that keep them"
EPILOG = """\
examples:
  meshwright data serve feed.py:loader --jobs 4 --at 127.0.0.1:29100
  meshwright data serve feed.py:loader --jobs 4 --at ./feed.sock --plan feed.json --once
  meshwright data serve feed.py:loader --nodes node0:29000,node1:29000 --node 0 --keep 200GB

In a job:  from meshwright.data import ServedLoader; loader = ServedLoader("127.0.0.1:29100", job="lr-0.1")
It ends with Ctrl-C. Batches are neither encrypted nor signed: use an address of this machine or a network of your own."""


def arguments(parser: argparse.ArgumentParser) -> None:
    loader_arguments(parser)
    parser.add_argument("--jobs", type=at_least_one, help="serve batches; the first epoch begins when so many jobs have come")
    parser.add_argument("--at", default="", metavar="ADDRESS", help="with --jobs: HOST:PORT (port 0: any) or a path of a socket's file")
    parser.add_argument("--workers", type=at_least_one, help="with --jobs: processes that prepare (default: the plan's for all jobs, or the cores)")
    parser.add_argument("--staged", type=at_least_one, help="with --jobs: batches that wait at most (default: the plan's, or two a job and worker)")
    parser.add_argument("--plan", type=Path, help="as `data plan` said: files kept, workers, batches that wait")
    parser.add_argument("--seed", type=whole_number, default=0, help="with --jobs: of orders and random numbers (default 0)")
    parser.add_argument("--once", action="store_true", help="with --jobs: end when all jobs that came have left")
    parser.add_argument("--nodes", default="", help="serve files: all nodes as HOST:PORT,HOST:PORT, in the same order everywhere")
    parser.add_argument("--node", type=whole_number, default=0, help="with --nodes: which of them this is (default 0)")
    parser.add_argument("--keep", metavar="SIZE", help="with --nodes: bytes of files on each node (default: the plan's, or the limit less a quarter)")


def run(args: argparse.Namespace) -> Result:
    import signal
    import sys

    from ..data.service import guarded, removed, serve
    from ..data.wire import listening
    from ..errors import PortInUse, UsageError
    from ..io.data.input_plan import read_input_plan

    if not args.jobs and not args.nodes:
        raise UsageError("nothing to serve", where="--jobs", hint="--jobs 4 --at HOST:PORT for batches, --nodes HOST:PORT,... for files")
    if bool(args.jobs) != bool(args.at):
        raise UsageError("batches are served to so many jobs at an address", where="--at", hint="give both: --jobs 4 --at HOST:PORT")
    plan = read_input_plan(args.plan) if args.plan is not None else None
    loader, files = loader_of(args)
    runs: list[Any] = []
    told: list[str] = []
    of, at = None, args.at
    if args.nodes:
        run_files, text = _files(args, loader, files, plan)
        runs.append(run_files)
        told.append(text)
    if args.jobs:
        workers, staged, of = _batches(args, loader, files, plan)
        try:
            listener = listening(args.at)
        except OSError as error:
            raise PortInUse(f"cannot listen: {error.strerror}", where=args.at, hint="another address, or a folder that is there") from error
        if "/" not in at:
            at = "{}:{}".format(*listener.getsockname()[:2])
        runs.append(lambda again: serve(of, listener, workers=workers, staged=staged, again=again, once=args.once))
        told.append(f"serving {of.batches} batches of {of.batch_size} items an epoch to {of.jobs} jobs at {at}, {workers} workers")
    ends: list[int] = []
    before = {s: signal.signal(s, lambda number, frame: ends.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    print("\n".join(told), file=sys.stderr, flush=True)  # noqa: T201
    try:
        again = guarded(runs, ending=lambda: bool(ends))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if of is not None:
            removed(of)
            if "/" in at:
                Path(at).unlink(missing_ok=True)
    document = {"schema": "meshwright.data.serve", "version": 1, "at": at, "jobs": args.jobs or 0, "batches": of.batches if of is not None else 0,
                "nodes": args.nodes.split(",") if args.nodes else [], "started_again": again}  # fmt: skip
    return Result(document, "\n".join([*told, f"ended; started again {again} times after a kill"]))


def _batches(args: argparse.Namespace, loader: Any, files: Any, plan: Any) -> tuple[int, int, Batches]:
    """Workers, batches that wait, and the batches of the loader: its dataset, size, order and collate_fn."""
    import hashlib
    import os

    from torch.utils.data import RandomSampler, SequentialSampler

    from ..data.batches import Batches
    from ..data.planned import planned_loader
    from ..errors import UsageError

    if plan is not None:
        loader = planned_loader(loader, plan, files=files)
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        hint = "DataLoader(dataset, batch_size=..., shuffle=...)"
        raise UsageError("a loader with batches or an order of its own cannot be shared", where="LOADER", hint=hint)
    own = str(Path(args.at).absolute()) if "/" in args.at else f"{args.at}-{os.getpid()}" if args.at.endswith(":0") else args.at
    name = f"serve-{hashlib.blake2b(own.encode(), digest_size=6).hexdigest()}"
    of = Batches(
        dataset=loader.dataset, batch_size=loader.batch_size, name=name, jobs=args.jobs, shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last, seed=args.seed, collate_fn=loader.collate_fn, timeout_s=300.0,
    )  # fmt: skip
    workers = args.workers or (max(1, plan.workers * args.jobs) if plan is not None else len(os.sched_getaffinity(0)))
    return workers, args.staged or (plan.staged if plan is not None else 0) or 2 * (args.jobs + workers), of


def _files(args: argparse.Namespace, loader: Any, files: Any, plan: Any) -> tuple[Any, str]:
    """What serves this node's files, and what is said of it. Whoever reads them: `PeerFiles(files, nodes, node, budget, serve=False)`."""
    import time

    from ..data.kept import files_of, ranges_of
    from ..data.limits import memory_budget_bytes
    from ..data.peers import PeerFiles
    from ..io.quantity import show_size

    nodes = args.nodes.split(",")
    where = files or files_of(loader.dataset)
    listed = [ranges_of(where(i))[0] for i in range(len(loader.dataset))]
    budget = size_bytes(args.keep, "--keep") if args.keep else (plan.kept_bytes if plan is not None else 0) or memory_budget_bytes()
    made = PeerFiles(listed, nodes, args.node, budget, serve=False)  # refuses what does not fit before anything is started
    mine = [n for n, owner in enumerate(made.owner) if owner == args.node]

    def serve_files(again: bool) -> None:
        PeerFiles(listed, nodes, args.node, budget)
        while True:
            time.sleep(3600)

    size = show_size(sum(made.sizes[n] for n in mine))
    return serve_files, f"serving {len(mine)} of {len(listed)} files, {size}, as node {args.node} of {len(nodes)} at {nodes[args.node]}"
