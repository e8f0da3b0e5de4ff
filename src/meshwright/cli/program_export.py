"""`meshwright program export PLAN -o FOLDER`: the plan's main program as Chakra execution traces."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "write a plan's program as Chakra execution traces (NAME.RANK.et), which ASTRA-sim reads"
EPILOG = """Collectives that the program calls become COMM_COLL nodes, for which the simulator has algorithms of its own;
with --inline they are written as the sends and receives of the plan's schedules. Process groups of some ranks
only are written to NAME.comm_group.json."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan, plain or .gz; `-` is standard input")
    parser.add_argument("--format", choices=["chakra"], default="chakra", help="chakra (default)")
    parser.add_argument("--inline", action="store_true", help="write collectives as sends and receives")
    parser.add_argument("--name", help="first part of the files' names (default: the plan's name without its ending)")
    parser.add_argument("--out", "-o", type=Path, required=True, metavar="FOLDER", help="folder to write to; it is made if needed")


def run(args: argparse.Namespace) -> Result:
    from ..drive.handover.chakra import chakra_of_plan
    from ..drive.plans import read_plan
    from ..errors import UsageError
    from ..interop.chakra import NodeType
    from ..io.chakra.et import write_chakra_set

    name = args.name or Path(args.plan).name.partition(".")[0] or "trace"
    if Path(name).name != name:
        raise UsageError(f"{name!r} is no file name", where="--name", hint="e.g. --name step")
    plan = read_plan(args.plan)
    traces = chakra_of_plan(plan, inlined=args.inline)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder: {error.strerror}", where=str(args.out)) from error
    files = write_chakra_set(args.out, name, traces)
    kinds = [node.type for trace in traces.traces for node in trace.nodes]
    counts = {kind.name: kinds.count(kind) for kind in NodeType if kind in kinds}
    document = {
        "schema": "meshwright.program-export", "version": 1, "format": "chakra", "folder": str(args.out), "ranks": len(traces.traces),
        "nodes": counts, "groups": {key: list(members) for key, members in traces.groups.items()}, "files": files,
    }  # fmt: skip
    said = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    text = f"{len(traces.traces)} traces, {said or 'no nodes'}: {args.out / name}.0.et ... {name}.{len(traces.traces) - 1}.et"
    return Result(document, text + (f"\nprocess groups: {name}.comm_group.json" if traces.groups else ""))
