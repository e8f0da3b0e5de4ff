"""`meshwright data bench`: epochs of a loader as it is, or with files kept in the page cache."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from .arguments import at_least_one, whole_number
from .collective_bound import size_bytes
from .data_analyse import loader_arguments, loader_of
from .frame import Result

HELP = "epochs of a loader: seconds, items and bytes from storage; with --keep, files are kept in memory up to a budget"


def arguments(parser: argparse.ArgumentParser) -> None:
    loader_arguments(parser)
    parser.add_argument("--epochs", type=at_least_one, default=3, help="how many (default 3)")
    parser.add_argument("--keep", nargs="?", const="", metavar="SIZE", help="keep so many bytes of files (default: the memory limit less a quarter)")
    parser.add_argument("--seed", type=whole_number, default=0, help="which files are kept (default 0)")


def run(args: argparse.Namespace) -> Result:
    from ..data.epochs import run_epochs
    from ..data.kept import Kept
    from ..io.quantity import show_size
    from ..report.columns import columns

    loader, files = loader_of(args)
    kept = None
    if args.keep is not None:
        kept = Kept(loader.dataset, size_bytes(args.keep, "--keep") if args.keep else None, files=files, seed=args.seed)
        loader = with_dataset(loader, kept)
    epochs = run_epochs(loader, args.epochs)
    rows = [[str(i + 1), f"{e.time_s:.2f} s", f"{e.items / e.time_s:,.0f}", show_size(e.read_bytes)] for i, e in enumerate(epochs)]
    text = "\n".join(columns([["epoch", "time", "items/s", "from storage"], *rows]))
    document = {"schema": "meshwright.data.bench", "version": 1, "epochs": [asdict(e) for e in epochs], "kept": None}
    if kept is not None:
        found = kept.check()
        document["kept"] = {**asdict(found), "budget_bytes": kept.budget_bytes, "holds": found.holds}
        text += f"\n{found}"
    return Result(document, text)


def with_dataset(loader: Any, dataset: Any) -> Any:
    """The loader over another dataset of the same items, its workers kept from epoch to epoch."""
    from torch.utils.data import DataLoader

    if loader.batch_sampler is not None and hasattr(loader.batch_sampler, "sampler"):  # torch's own: sampler, batch size and drop_last say all
        how: dict[str, Any] = {"sampler": loader.sampler, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    else:
        how = {"batch_sampler": loader.batch_sampler}
    more = {"persistent_workers": True, "prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
    return DataLoader(
        dataset, num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, generator=loader.generator,
        worker_init_fn=loader.worker_init_fn, **how, **(more if loader.num_workers else {}),
    )  # fmt: skip
