"""`meshwright collective warm`: plan a job's collectives before it starts, so that its first calls do not wait."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..run.group.warm import Warmed

HELP = "plan a job's collectives into its cache before it starts"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fabric", required=True, help="FILE.toml or PRESET:n, the same as MESHWRIGHT_FABRIC of the job")
    parser.add_argument(
        "--devices",
        help="device names, one per rank, separated by commas, the same as MESHWRIGHT_DEVICES of the job (default: the fabric's devices in order)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=at_least_one, help="number of ranks of the job: it uses the first N devices (default: all)")
    parser.add_argument("--ops", default="all-reduce", help="operations, separated by commas (default all-reduce)")
    parser.add_argument("--sizes", help="A,B,C or FIRST:LAST in powers of two, e.g. 1MiB:64MiB")
    parser.add_argument("--model", help="FILE.py:function or module:function instead of --sizes: the all-reduces of its gradients under DDP")
    parser.add_argument("--ranks-per-core", type=float, default=1.0, help="ranks of a machine over its cores, if ranks share cores (default 1)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective.problem import OPERATIONS
    from ..drive.plans import read_fabric
    from ..errors import UnknownName, UsageError
    from ..run.group.settings import current_settings
    from ..run.group.warm import warm

    ops = args.ops.split(",")
    for op in ops:
        if op not in OPERATIONS:
            raise UnknownName(f"no collective {op!r}", where="--ops", hint=f"operations: {', '.join(OPERATIONS)}")
    if (args.sizes is None) == (args.model is None):
        raise UsageError("name sizes or a model", where="--sizes", hint="--sizes 1MiB:64MiB or --model train.py:model")
    if not args.ranks_per_core > 0:
        raise UsageError(f"must be > 0, got {args.ranks_per_core}", where="--ranks-per-core")
    settings = current_settings()
    fabric = read_fabric(args.fabric)
    names = tuple(args.devices.split(",")) if args.devices else settings.devices or tuple(d.name for d in fabric.devices)
    for name in names:
        fabric.device(name)
    if args.ranks is not None:
        if not 2 <= args.ranks <= len(names):
            raise UsageError(f"must be 2..{len(names)}, got {args.ranks}", where="--ranks")
        names = names[: args.ranks]
    wanted = [(op, size) for op in ops for size in _sizes(args, settings.min_bytes)]

    def say(row: Warmed) -> None:
        sys.stderr.write(_line(row) + "\n")
        sys.stderr.flush()

    rows = warm(fabric, names, wanted, settings, ranks_per_core=args.ranks_per_core, say=say)
    document: dict[str, Any] = {
        "schema": "meshwright.collective-warm", "version": 1, "fabric": fabric.name, "devices": list(names), "rows": [_row(row) for row in rows],
    }  # fmt: skip
    planned = sum(not isinstance(row.answer, str) for row in rows)
    already = sum(row.kept for row in rows)
    text = f"{len(rows)} size classes for {len(names)} ranks: {planned} with a plan, {len(rows) - planned} stay with gloo; {already} kept already"
    return Result(document, text)


def _sizes(args: argparse.Namespace, min_bytes: int) -> list[int]:
    """Sizes that the job would plan for. Raises UsageError, and what building the model raises."""
    from ..errors import UsageError

    if args.model is None:
        from .collective_nccl import sizes_of

        sizes = sizes_of(args.sizes)
    else:
        from ..capture.resolve import build_model
        from ..run.group.warm import ddp_buckets

        sizes = ddp_buckets(build_model(args.model, device="meta", lazy=True).module)
    large = [size for size in sizes if size >= min_bytes]
    if not large:
        where = "--model" if args.model else "--sizes"
        raise UsageError(f"nothing of at least {min_bytes} bytes to plan", where=where, hint="see MESHWRIGHT_MIN_BYTES")
    return large


def _row(row: Warmed) -> dict[str, Any]:
    head = {"op": row.op, "size_bytes": row.size_bytes, "kept": row.kept}
    if isinstance(row.answer, str):
        return {**head, "strategy": None, "why": row.answer}
    return {**head, "strategy": row.answer.strategy, "predicted_s": row.answer.predicted_s, "builtin_s": row.answer.builtin_s}


def _line(row: Warmed) -> str:
    from ..io.quantity import show_size, show_time

    head = f"{row.op} {show_size(row.size_bytes)}: "
    tail = ", kept already" if row.kept else ""
    if isinstance(row.answer, str):
        return f"{head}gloo ({row.answer}{tail})"
    predicted = show_time(row.answer.predicted_s) if row.answer.predicted_s is not None else "?"
    beside = f", gloo {show_time(row.answer.builtin_s)}" if row.answer.builtin_s is not None else ""
    return f"{head}{row.answer.strategy} ({predicted} predicted{beside}{tail})"
