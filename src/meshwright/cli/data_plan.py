"""`meshwright data plan`: where files are kept and how many bytes, who prepares batches, with how many workers; checked, beside the bound."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, require_directory, whole_number
from .collective_bound import seconds, size_bytes
from .frame import Result

if TYPE_CHECKING:
    from ..profile.input_plan import InputPlan, Place
    from ..profile.input_rates import InputRates

HELP = "choose how a training loop is fed: cache size and kind, parts of nodes, batches shared by jobs, workers; checked, beside the bound"
EPILOG = """\
examples:
  meshwright data plan feed.py:loader --device-time 0.02 --out feed.json
  meshwright data analyse feed.py:loader --json > rates.json; meshwright data plan rates.json --jobs 4 --nodes 2 --network 25Gbit/s
  meshwright data bench feed.py:loader --plan feed.json --device-time 0.02"""
MAX_SHOWN = 6  # other ways, in text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="what `data analyse --json` printed, or FILE.py:function or module:function that returns a DataLoader")
    parser.add_argument("--files", help="of a loader: FILE.py:function from an index to the item's path, where the dataset does not say its files")
    parser.add_argument("--step", help="of a loader: FILE.py:function that takes a batch and trains on it")
    parser.add_argument("--device-time", type=seconds, default=0.0, metavar="SECONDS", help="of a loader: the device's seconds for a batch")
    parser.add_argument("--items", type=at_least_one, default=256, help="of a loader: items that are measured (default 256)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="of a loader: measurements, of which the median counts (default 3)")
    parser.add_argument("--memory", metavar="SIZE", help="what files and waiting batches may fill (default: this process's limit, less a quarter)")
    parser.add_argument("--shared-memory", metavar="SIZE", help="free in shared memory (default: as /dev/shm has)")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="equal jobs on each node (default 1)")
    parser.add_argument("--nodes", type=at_least_one, default=1, help="nodes that could keep the files together, this one included (default 1)")
    parser.add_argument("--network", default="10Gbit/s", metavar="RATE", help="with --nodes: rate of each node's network (default 10Gbit/s)")
    parser.add_argument("--margin", type=float, default=0.1,
        help="share by which device and preparation may be faster than measured before the cache is too small (default 0.1)")
    parser.add_argument("--seed", type=whole_number, default=0, help="which items are measured, and which files are kept (default 0)")
    parser.add_argument("--out", "-o", type=Path, help="also write the plan to this file (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    import numpy as np

    from ..check.input_plan import check_input_plan
    from ..decide.data import FeedProblem, ways
    from ..decide.data.coordl import Coordl
    from ..io.data.input_plan import input_plan_document, write_input_plan

    if args.out is not None:
        require_directory(args.out)
    place = _place(args)
    strategy = Coordl(margin=args.margin)
    rates = _rates(args)
    plan = strategy.plan(FeedProblem(rates=rates, place=place, seed=args.seed), rng=np.random.default_rng(args.seed))
    verdict = check_input_plan(plan)
    verdict.raise_if_wrong()
    others = [{"what": w.words, "epoch_s": rates.items / w.speed.items_per_s, "limit": w.speed.limit, "cached": w.cached} for w in ways(rates, place)]
    assert plan.bound is not None
    bound_s = float(plan.bound)
    document = {
        "schema": "meshwright.data.plan", "version": 1, "plan": input_plan_document(plan), "words": plan.words, "epoch_s": plan.epoch_s,
        "bound_s": bound_s, "ratio": plan.epoch_s / bound_s if bound_s else None, "limits_s": verdict.facts["limits_s"],
        "cached": verdict.facts["cached"], "ways": others, "written": str(args.out) if args.out else "",
    }  # fmt: skip
    if args.out is not None:
        write_input_plan(args.out, plan)
    return Result(document, _text(plan, document))


def _place(args: argparse.Namespace) -> Place:
    import shutil

    from ..data.copies import SHARED_MEMORY
    from ..data.limits import memory_budget_bytes
    from ..errors import UsageError
    from ..io.quantity import parse_rate_Bps
    from ..profile.input_plan import Place

    try:
        network = parse_rate_Bps(args.network)
    except ValueError as error:
        raise UsageError(str(error), where="--network", hint="e.g. --network 25Gbit/s") from None
    budget = memory_budget_bytes(size_bytes(args.memory, "--memory") if args.memory else None)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    shared = size_bytes(args.shared_memory, "--shared-memory") if args.shared_memory else free
    return Place(memory_bytes=budget, jobs=args.jobs, nodes=args.nodes, network_Bps=network, shared_bytes=shared)


def _rates(args: argparse.Namespace) -> InputRates:
    from ..errors import UsageError
    from ..io.data.input_plan import read_input_rates

    of_loader = args.step or args.device_time or args.files
    if ":" not in args.source:
        if of_loader:
            raise UsageError("an analysis was measured already", where="SOURCE", hint="give --step, --device-time and --files to `data analyse`")
        return read_input_rates(args.source)
    from ..data.stalls import measure_stalls
    from .data_analyse import function_of, loader_of, users

    if args.step and args.device_time:
        raise UsageError("give one of --step and --device-time", where="--device-time", hint="--step measures it")
    step = function_of(args.step, "step") if args.step else None
    args.loader = args.source
    loader, files = loader_of(args)
    with users(args.source):
        return measure_stalls(loader, step, device_s=args.device_time, items=args.items, rounds=args.rounds, seed=args.seed, files=files)


def _text(plan: InputPlan, document: dict[str, Any]) -> str:
    from ..io.quantity import show_size
    from ..report.columns import columns
    from ..report.stalls_text import WORDS

    m, place, bound_s = plan.rates, plan.place, document["bound_s"]
    above = f"{max(plan.epoch_s / bound_s - 1, 0.0):.1%} above" if bound_s else "nothing bounds it"
    jobs = f" of {place.jobs} jobs" if place.jobs > 1 else ""
    lines = [
        f"{m.items:,} items, {show_size(m.total_bytes)}{jobs}{f' on each of {place.nodes} nodes' if place.nodes > 1 else ''}",
        f"plan: {plan.words}",
        f"an epoch takes {plan.epoch_s:.3g} s, limited by {WORDS[plan.limit]}; bound {bound_s:.3g} s ({above})",
        f"kept: {show_size(plan.kept_bytes)} of files on each node, {document['cached']:.0%} of the bytes come from memory; "
        f"{show_size(place.memory_bytes)} may be filled",
        f"read from storage in an epoch: {show_size(plan.storage_bytes)}"
        + (f"; over the network {show_size(plan.network_bytes)}" if plan.network_bytes else ""),
    ]  # fmt: skip
    if plan.shared:
        lines.append(f"shared: {plan.staged} batches of {show_size(m.batch_bytes)} wait at most")
    if not m.device_s:
        lines.append("the device was not measured, so the cache is sized for a device that never waits")
    rows = [["way", "from memory", "epoch", "limited by"]]
    rows += [[w["what"], f"{w['cached']:.0%}", f"{w['epoch_s']:.3g} s", WORDS[w["limit"]]] for w in document["ways"][:MAX_SHOWN]]
    lines += ["", *columns(rows)]
    if document["written"]:
        lines += ["", f"written: {document['written']}"]
    if plan.shared:
        lines += ["", f"next: meshwright data serve LOADER --jobs {place.jobs}, or meshwright.data.SharedLoader"]
    return "\n".join(lines)
