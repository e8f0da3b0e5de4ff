"""`meshwright collective export`: hand a plan to MSCCL or MSCCL++, or the choices per size to NCCL's tuner plugin."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..program.program import Program

HELP = "hand a schedule to MSCCL, MSCCL++ or NCCL"
EPILOG = """Formats: msccl-xml, an XML file for MSCCL's executor (RCCL, or NCCL with the executor); mscclpp-json, an execution plan of MSCCL++;
nccl-tuner, a configuration of NCCL's example tuner plugin: WHAT is then an operation, with --fabric and --sizes."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="a plan (see `meshwright collective plan --out`) or program; for nccl-tuner an operation")
    parser.add_argument(
        "--format", default="msccl-xml", choices=("msccl-xml", "mscclpp-json", "nccl-tuner"),
        help="format of the file (default msccl-xml)",
    )  # fmt: skip
    parser.add_argument("--out", "-o", required=True, help="file to write (`/dev/stdout` to print)")
    parser.add_argument("--place", default="auto", choices=("auto", "in", "out", "both"), help="buffers of the call (default: both if possible)")
    parser.add_argument("--proto", default="Simple", choices=("Simple", "LL", "LL128"), help="NCCL's protocol in the file (default Simple)")
    parser.add_argument("--min-size", default="0B", help="smallest message to use it for, e.g. 1MiB (default 0)")
    parser.add_argument("--max-size", default="0B", help="biggest message to use it for (default: no limit)")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="steps per block that the executor was built for (default 64)")
    parser.add_argument("--blocks", type=at_least_one, default=108, metavar="N", help="thread blocks a GPU can hold at once (default 108)")
    parser.add_argument("--fabric", help="nccl-tuner: FILE.toml or PRESET:n")
    parser.add_argument("--devices", help="nccl-tuner: use only these devices")
    parser.add_argument("--by", default="model", choices=("model", "simulation"), help="nccl-tuner: choose by NCCL's own model, or by simulation")
    parser.add_argument("--sizes", default="1KiB:1GiB", help="nccl-tuner: FIRST:LAST in powers of two, or a list A,B,C")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError

    if args.format == "nccl-tuner":
        from .collective_tuner import export_tuner

        return export_tuner(args)
    if args.fabric is not None or args.devices is not None:
        raise UsageError(f"--fabric and --devices do not apply to {args.format}: a plan names its fabric", hint="use them with --format nccl-tuner")
    plan, program = _read(args.what)
    return (_msccl if args.format == "msccl-xml" else _mscclpp)(plan, program, args)


def _read(path: str) -> tuple[Plan | None, Program]:
    from ..errors import FormatError
    from ..io.plan.plan import read_plan_or_program
    from ..plan.plan import Plan

    try:
        found = read_plan_or_program(path)
    except FormatError as error:
        hints = (error.hint, "a plan is exported; a foreign schedule becomes one with `meshwright collective import`")
        raise FormatError(error.message, where=error.where, hint="; ".join(filter(None, hints))) from None
    return (found, found.main) if isinstance(found, Plan) else (None, found)


def size_bytes(text: str, where: str) -> int:
    from ..errors import UsageError
    from ..io.quantity import parse_size_bytes

    try:
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, hint="e.g. 64MiB") from None


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Smallest and biggest message; refuses numbers that mean nothing."""
    from ..errors import UsageError

    least, most = size_bytes(args.min_size, "--min-size"), size_bytes(args.max_size, "--max-size")
    if most and most < least:
        raise UsageError(f"--max-size {most} is below --min-size {least}")
    for name, value in (("--steps", args.steps), ("--blocks", args.blocks)):
        if value < 1:
            raise UsageError(f"must be >= 1, got {value}", where=name)
    return least, most


def _msccl(plan: Plan | None, program: Program, args: argparse.Namespace) -> Result:
    from ..drive.handover.msccl import Handover, export_msccl, original_msccl
    from ..drive.handover.verdicts import check_msccl
    from ..interop.msccl import ExecutorLimits
    from ..interop.to_msccl import MscclOptions
    from ..io.msccl.xml import write_msccl

    least, most = _sizes(args)
    limits = ExecutorLimits(steps=args.steps)
    options = MscclOptions(protocol=args.proto, min_bytes=least, max_bytes=most, blocks=args.blocks, limits=limits)
    original = original_msccl(plan) if plan is not None else None
    if original is not None:  # nothing was changed since it was imported: write what was read
        done = Handover(original, check_msccl(original, limits=limits), options)
        done.verdict.raise_if_wrong()
    else:
        done = export_msccl(program, options, place=args.place)
    write_msccl(args.out, done.algo)
    algo, facts = done.algo, done.verdict.facts
    document: dict[str, Any] = {
        "schema": "meshwright.collective-export", "version": 1, "format": "msccl-xml", "file": args.out, "op": algo.collective, "ranks": algo.ranks,
        "protocol": algo.protocol, "in_place": bool(algo.in_place), "out_of_place": bool(algo.out_of_place), "channels": algo.channels,
        "blocks_per_gpu": max((len(g.blocks) for g in algo.gpus), default=0), "chunks_per_loop": algo.chunks_per_loop,
        "steps_per_block": max((len(b.steps) for g in algo.gpus for b in g.blocks), default=0), "smallest_fifo": facts.get("smallest_fifo"),
        "unchanged_import": original is not None,
    }  # fmt: skip
    place = " and ".join(facts["modes"])
    text = (
        f"{args.out}: {algo.collective} for {algo.ranks} gpus, {place}: {document['blocks_per_gpu']} blocks per gpu of at most "
        f"{document['steps_per_block']} steps, {algo.channels} channels, {algo.chunks_per_loop} chunks; checked, FIFO depth "
        f"{facts['smallest_fifo']} is enough"
    )
    return Result(document, text)


def _mscclpp(plan: Plan | None, program: Program, args: argparse.Namespace) -> Result:
    from ..drive.handover.msccl import export_mscclpp
    from ..io.msccl.mscclpp_json import write_mscclpp

    server = None
    if plan is not None:  # servers as the plan's fabric groups its devices: within one, memory channels; between, port channels
        group = {d["name"]: d.get("group", "") for d in plan.target_fabric.get("devices", [])}
        server = {rank: str(group.get(name, "")) for rank, name in enumerate(plan.placement)}
    least, most = _sizes(args)
    made = export_mscclpp(program, place=args.place, server=server, blocks=args.blocks, min_bytes=least, max_bytes=most)
    write_mscclpp(args.out, made)
    blocks = max((len(g.blocks) for g in made.gpus), default=0)
    document = {
        "schema": "meshwright.collective-export", "version": 1, "format": "mscclpp-json", "file": args.out, "op": made.collective,
        "ranks": len(made.gpus), "protocol": made.protocol, "in_place": made.in_place, "blocks_per_gpu": blocks,
    }  # fmt: skip
    text = f"{args.out}: {made.collective} for {len(made.gpus)} gpus, {'in' if made.in_place else 'out of'} place: {blocks} blocks per gpu; checked"
    return Result(document, text)
