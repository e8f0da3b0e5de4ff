"""`meshwright data analyse`: rates of device, preparation and storage, what stalls the loop, and what would change it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, whole_number
from .collective_bound import seconds, size_bytes
from .frame import Result

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

HELP = "measure what a training loop waits for: device, preparation or storage; and what a cache, cores, a disk or a device would change"


def loader_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("loader", help="FILE.py:function or module:function that returns a DataLoader over a map-style dataset")
    parser.add_argument("--files", help="FILE.py:function from an index to the item's path, where the dataset does not say its files")


def arguments(parser: argparse.ArgumentParser) -> None:
    loader_arguments(parser)
    parser.add_argument("--step", help="FILE.py:function that takes a batch and trains on it")
    parser.add_argument("--device-time", type=seconds, default=0.0, metavar="SECONDS", help="the device's seconds for a batch, instead of --step")
    parser.add_argument("--memory", metavar="SIZE", help="bytes of files that fit into memory (default: this process's limit, less a quarter)")
    parser.add_argument("--items", type=at_least_one, default=256, help="items that are measured (default 256)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="measurements, of which the median counts (default 3)")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="jobs with loaders of their own on this machine (default 1)")
    parser.add_argument("--nodes", type=at_least_one, default=1, help="nodes that could keep the files together, this one included (default 1)")
    parser.add_argument("--network", default="10Gbit/s", metavar="RATE", help="with --nodes: rate of each node's network (default 10Gbit/s)")
    parser.add_argument("--seed", type=whole_number, default=0, help="seed of the choice of items (default 0)")


def run(args: argparse.Namespace) -> Result:
    from ..data.limits import memory_budget_bytes
    from ..data.stalls import measure_stalls
    from ..errors import UsageError
    from ..io.quantity import parse_rate_Bps
    from ..profile.input_plan import Place
    from ..report.stalls_text import stalls_document, stalls_text

    if args.step and args.device_time:
        raise UsageError("give one of --step and --device-time", where="--device-time", hint="--step measures it")
    budget = memory_budget_bytes(size_bytes(args.memory, "--memory") if args.memory else None)
    try:
        network = parse_rate_Bps(args.network)
    except ValueError as error:
        raise UsageError(str(error), where="--network", hint="e.g. --network 25Gbit/s") from None
    step = function_of(args.step, "step") if args.step else None
    loader, files = loader_of(args)
    with users(args.loader):
        measured = measure_stalls(loader, step, device_s=args.device_time, items=args.items, rounds=args.rounds, seed=args.seed, files=files)
    document = stalls_document(measured, Place(memory_bytes=budget, jobs=args.jobs, nodes=args.nodes, network_Bps=network))
    return Result(document, stalls_text(document))


def users(name: str) -> AbstractContextManager[None]:
    """What the user's code raises meanwhile is told as his, with its line."""
    from ..capture.resolve import user_code

    return user_code(name, name.rpartition(":")[0])


def function_of(name: str, what: str) -> Callable[..., Any]:
    from ..capture.resolve import resolve_function

    with users(name):
        return resolve_function(name, what=what)


def loader_of(args: argparse.Namespace) -> tuple[Any, Callable[[int], Any] | None]:
    """The user's loader, and his function from indices to files."""
    from ..data.kept import by_number
    from ..errors import UsageError

    made = function_of(args.loader, "loader")
    with users(args.loader):
        loader = made()
    if not hasattr(loader, "dataset") or not hasattr(loader, "num_workers"):
        what = f"returned {type(loader).__name__}, not a DataLoader"
        raise UsageError(what, where=args.loader, hint="return torch.utils.data.DataLoader(dataset, ...) over a map-style dataset")
    if not by_number(loader.dataset):
        what = f"its dataset, a {type(loader.dataset).__name__}, hands out items in an order of its own"
        raise UsageError(what, where=args.loader,
            hint="files are measured and kept by an item's number: meshwright.data.TarSamples reads tar shards so, MdsSamples those of MDS")
    return loader, function_of(args.files, "files") if args.files else None
