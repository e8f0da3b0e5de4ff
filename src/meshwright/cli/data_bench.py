"""`meshwright data bench`: epochs of a loader as it is, or with files kept in the page cache."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from .arguments import at_least_one, whole_number
from .collective_bound import seconds, size_bytes
from .data_analyse import loader_arguments, loader_of, users
from .frame import Result

HELP = "epochs of a loader: seconds, items and bytes from storage; with --keep or --plan, files are kept in memory up to a budget"


def arguments(parser: argparse.ArgumentParser) -> None:
    loader_arguments(parser)
    parser.add_argument("--epochs", type=at_least_one, default=3, help="how many (default 3)")
    parser.add_argument("--keep", nargs="?", const="", metavar="SIZE", help="keep so many bytes of files (default: what processes leave free)")
    parser.add_argument("--plan", type=Path, help="feed it as a plan of `data plan` says: budget, medium and workers")
    parser.add_argument("--device-time", type=seconds, default=0.0, metavar="SECONDS", help="a device that takes so long for a batch (played)")
    parser.add_argument("--seed", type=whole_number, default=0, help="seed of the choice of files to keep (default 0)")


def run(args: argparse.Namespace) -> Result:
    import time

    from ..data.epochs import run_epochs
    from ..data.kept import Kept
    from ..data.planned import planned_loader, with_dataset
    from ..errors import UsageError
    from ..io.data.input_plan import read_input_plan
    from ..io.quantity import show_size
    from ..report.columns import columns

    if args.plan is not None and args.keep is not None:
        raise UsageError("give one of --keep and --plan", where="--plan", hint="the plan says what is kept")
    plan = read_input_plan(args.plan) if args.plan is not None else None
    loader, files = loader_of(args)
    if args.keep is not None:
        budget = size_bytes(args.keep, "--keep") if args.keep else None
        loader = with_dataset(loader, Kept(loader.dataset, budget, files=files, seed=args.seed))
    elif plan is not None:
        loader = planned_loader(loader, plan, files=files)
    kept = loader.dataset if isinstance(loader.dataset, Kept) else None
    step = (lambda batch: time.sleep(args.device_time)) if args.device_time else None
    with users(args.loader):
        epochs = run_epochs(loader, args.epochs, step)
    rows = [[str(i + 1), f"{e.time_s:.2f} s", f"{e.items / e.time_s:,.0f}", show_size(e.read_bytes)] for i, e in enumerate(epochs)]
    text = "\n".join(columns([["epoch", "time", "items/s", "from storage"], *rows]))
    document = {"schema": "meshwright.data.bench", "version": 1, "epochs": [asdict(e) for e in epochs], "kept": None, "planned": None}
    if plan is not None:
        document["planned"] = {"epoch_s": plan.epoch_s, "storage_bytes": plan.storage_bytes, "jobs": plan.place.jobs}
        text += f"\nplanned for {plan.place.jobs} jobs, with the device: {plan.epoch_s:.3g} s, {show_size(plan.storage_bytes)} from storage"
    if kept is not None:
        found = kept.check()
        document["kept"] = {**asdict(found), "budget_bytes": kept.budget_bytes, "holds": found.holds}
        text += f"\n{found}"
        kept.close()
    return Result(document, text)
