"""`meshwright program import PREFIX`: what execution traces (Chakra's, PyTorch's) say, and a plan of Chakra's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import require_directory
from .frame import Result
from .pictures import check_pictures, picture_arguments, with_pictures

if TYPE_CHECKING:
    from ..interop.chakra_graph import RankSummary

HELP = "read execution traces (Chakra, PyTorch): a summary, and of Chakra's with --fabric a checked, simulated plan"
EPILOG = """PREFIX stands before `.0.et`, `.1.et`, ...; or name a folder with one such set in it, or one file. Rank i is placed on device i.
Without --fabric the traces are only checked and summed up. Foreign traces say nothing about memory: only messages
under way count. FILE.json or FILE.json.gz instead of PREFIX: a trace of torch.profiler.ExecutionTraceObserver, of one
process; it has no times, so its operators are only counted and summed up."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", metavar="PREFIX", help="traces to read: a prefix or folder of .et files, or a .json of PyTorch")
    parser.add_argument("--groups", type=Path, metavar="FILE", help="process groups (default: PREFIX.comm_group.json or comm_group.json, if there)")
    parser.add_argument("--fabric", help="FILE.toml or PRESET:n, see `meshwright fabric list`: make a plan")
    parser.add_argument("--devices", help="use only these devices, e.g. 0-3,8")
    parser.add_argument("--collective", default="auto", help="schedule of collectives that are called by name: auto (default), ring, forestcoll")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    parser.add_argument("--out", "-o", type=Path, help="where to write the plan (.json or .json.gz)")
    picture_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    if args.prefix.endswith((".json", ".json.gz")):
        return _of_pytorch(args)
    from ..drive.handover.chakra import plan_of_chakra
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..explain.numbers import seconds_text
    from ..interop.chakra_graph import summarise
    from ..io.chakra.et import read_chakra_set
    from ..io.plan.plan import write_plan

    if args.fabric is None and (args.out or args.trace or args.svg):
        raise UsageError("a plan needs a fabric", where="--fabric", hint="e.g. --fabric dgx-h100:1")
    check_pictures(args)
    if args.out is not None:
        require_directory(args.out)
    traces = read_chakra_set(args.prefix, groups=args.groups)
    rows = summarise(traces)
    document: dict[str, Any] = {
        "schema": "meshwright.program-import", "version": 1, "format": "chakra", "ranks": len(rows), "schema_version": traces.traces[0].version,
        "groups": {key: list(members) for key, members in traces.groups.items()},
        "per_rank": [
            {
                "nodes": row.nodes, "compute_s": row.compute_micros * 1e-6, "longest_chain_s": row.longest_micros * 1e-6,
                "sent_bytes": row.sent_bytes, "received_bytes": row.received_bytes, "collective_bytes": row.collective_bytes,
            }
            for row in rows
        ],
    }  # fmt: skip
    lines = _lines(rows)
    if args.fabric is None:
        return Result(document, "\n".join(lines))
    title = traces.names[0].removesuffix(".0.et")
    plan = plan_of_chakra(traces, read_fabric(args.fabric, args.devices), strategy=args.collective, title=title, seed=args.seed)
    assert plan.prediction is not None
    document |= {"fabric": plan.target_fabric["name"], "time_s": plan.prediction.time_s, "decisions": dict(plan.decisions)}
    lines.append(f"on {plan.target_fabric['name']}: {seconds_text(plan.prediction.time_s)} simulated; checked: form, deadlock, races")
    if args.out is not None:
        write_plan(args.out, plan)
        document["plan"] = str(args.out)
        lines.append(f"plan written to {args.out}")
    return with_pictures(Result(document, "\n".join(lines)), args, plan)


def _of_pytorch(args: argparse.Namespace) -> Result:
    from ..errors import UsageError
    from ..io.chakra.execution_trace import read_execution_trace
    from ..report.execution_trace_text import execution_trace_document, execution_trace_text

    if args.fabric or args.out or args.trace or args.svg or args.groups:
        raise UsageError(
            "cannot become a plan: a PyTorch execution trace has no times and is of one process",
            where=args.prefix, hint="give it alone, for a summary",
        )  # fmt: skip
    trace = read_execution_trace(args.prefix)
    return Result(execution_trace_document(trace), execution_trace_text(trace))


def _lines(rows: list[RankSummary]) -> list[str]:
    from ..explain.numbers import bytes_text, seconds_text

    kinds: dict[str, int] = {}
    collectives: dict[str, int] = {}
    for row in rows:
        for total, part in ((kinds, row.nodes), (collectives, row.collective_bytes)):
            for name, count in part.items():
                total[name] = total.get(name, 0) + count
    compute = [row.compute_micros for row in rows]
    lines = [
        f"{len(rows)} ranks, {sum(kinds.values()):,} nodes: {', '.join(f'{count:,} {name}' for name, count in sorted(kinds.items()))}",
        f"compute per rank {seconds_text(min(compute) * 1e-6)} to {seconds_text(max(compute) * 1e-6)}, "
        f"longest chain of one rank {seconds_text(max(row.longest_micros for row in rows) * 1e-6)}",
        f"sent {bytes_text(sum(row.sent_bytes for row in rows))} in messages",
    ]
    lines += [f"{name}: {bytes_text(size)} of input over all ranks" for name, size in sorted(collectives.items())]
    return lines
