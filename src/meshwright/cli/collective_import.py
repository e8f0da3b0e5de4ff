"""`meshwright collective import FILE`: a foreign schedule as a plan of ours, with bound and prediction on a fabric."""

from __future__ import annotations

import argparse
from dataclasses import replace

from .arguments import at_least_one
from .collective_check import kind_of, read_schedule
from .frame import Result

HELP = "turn a foreign schedule into a plan: MSCCL XML, MSCCL++ JSON; or read an NCCL tuner configuration"
EPILOG = """With --fabric and --size the result is a plan with its bound and predicted time; without, the bare program.
A plan that is not changed is exported again as it was read."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="schedule to read; `-` is standard input")
    formats = ("auto", "msccl-xml", "mscclpp-json", "nccl-tuner")
    parser.add_argument("--format", default="auto", choices=formats, help="format of the file (default: told by its content)")
    parser.add_argument("--out", "-o", help="plan or program to write (.json or .json.gz)")
    parser.add_argument("--fabric", help="FILE.toml or PRESET:n, see `meshwright fabric list`")
    parser.add_argument("--devices", help="use only these devices, e.g. 0-3,8; GPU i of the file is the i-th of them in the fabric's order")
    parser.add_argument("--size", help="message size, e.g. 1GiB")
    parser.add_argument("--element-bytes", type=at_least_one, default=4, help="bytes of one number (default 4)")
    parser.add_argument("--root", type=int, help="root of a broadcast, reduce, scatter or gather, where the file does not say")


def run(args: argparse.Namespace) -> Result:
    from ..errors import FormatError, UsageError

    if args.format == "nccl-tuner":
        from .collective_tuner import import_tuner

        return import_tuner(args.file, args.file)
    if args.out is None:
        raise UsageError("--out is missing", hint="name the plan to write; `meshwright collective check` only looks")
    if (args.fabric is None) != (args.size is None):
        raise UsageError("--fabric and --size go together", hint="give both for a plan, none for a bare program")
    data, where = read_schedule(args.file)
    kind = kind_of(data, where) if args.format == "auto" else args.format
    if kind == "plan":
        raise FormatError("is a plan of meshwright already", where=where, hint="see `meshwright program show`")
    return (_msccl if kind == "msccl-xml" else _mscclpp)(data, where, args)


def _msccl(data: bytes, where: str, args: argparse.Namespace) -> Result:
    from ..drive.handover.verdicts import check_msccl
    from ..interop.from_msccl import import_msccl, root_of
    from ..interop.msccl import collective_of
    from ..io.msccl.xml import msccl_text, parse_msccl
    from ..io.plan.plan import write_program

    algo = parse_msccl(data, where)
    if args.root is not None:
        algo = replace(algo, root=args.root)
    check_msccl(algo).raise_if_wrong()
    op = collective_of(algo)
    document = {
        "schema": "meshwright.collective-import", "version": 1, "format": "msccl-xml", "file": where, "out": args.out, "op": op, "ranks": algo.ranks,
    }  # fmt: skip
    if args.fabric is None:
        program = import_msccl(algo, in_place=algo.modes[0]).program
        write_program(args.out, program)
        steps = len(program.steps)
        return Result(document | {"steps": steps}, f"{where}: {op} among {algo.ranks} ranks, {steps} steps\nwritten: {args.out}")
    from ..decide.collective.problem import CollectiveProblem
    from ..drive.handover.msccl import plan_of_msccl
    from ..drive.plans import read_fabric, write_plan
    from ..io.quantity import show_time
    from .collective_export import size_bytes

    fabric = read_fabric(args.fabric, args.devices)
    size = size_bytes(args.size, "--size")
    problem = CollectiveProblem.on(fabric, str(op), size, root=max(0, root_of(algo)), element_bytes=args.element_bytes)
    plan = plan_of_msccl(algo, msccl_text(algo), problem, source=where)
    write_plan(args.out, plan)
    assert plan.prediction is not None and plan.bound is not None
    time_s, bound_s = plan.prediction.time_s, float(plan.bound)
    document |= {"fabric": fabric.name, "size_bytes": size, "time_s": time_s, "bound_s": bound_s, "steps": len(plan.main.steps)}
    text = f"{where}: {op} of {args.size} on {algo.ranks} devices: {show_time(time_s)}, bound {show_time(bound_s)}\nwritten: {args.out}"
    return Result(document, text)


def _mscclpp(data: bytes, where: str, args: argparse.Namespace) -> Result:
    from ..drive.handover.verdicts import check_mscclpp
    from ..errors import UsageError
    from ..interop.from_mscclpp import import_mscclpp
    from ..io.msccl.mscclpp_json import parse_mscclpp
    from ..io.plan.plan import write_program

    if args.fabric is not None:
        raise UsageError("a plan on a fabric is made from MSCCL XML only", hint="leave --fabric and --size away for the bare program")
    foreign = parse_mscclpp(data, where)
    check_mscclpp(foreign, root=args.root).raise_if_wrong()
    program = import_mscclpp(foreign, root=args.root).program
    write_program(args.out, program)
    document = {
        "schema": "meshwright.collective-import", "version": 1, "format": "mscclpp-json", "file": where, "out": args.out, "op": foreign.collective,
        "ranks": len(foreign.gpus), "steps": len(program.steps),
    }  # fmt: skip
    return Result(document, f"{where}: {foreign.collective} among {len(foreign.gpus)} ranks, {len(program.steps)} steps\nwritten: {args.out}")
