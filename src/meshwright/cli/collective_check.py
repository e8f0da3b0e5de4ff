"""`meshwright collective check FILE`: is a schedule right? Ours or a foreign one; exit code 4 and a witness if not."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..check import Verdict

HELP = "prove a schedule right, or show where it is wrong: MSCCL XML, MSCCL++ JSON, our plans"
EPILOG = """FILE is an MSCCL XML file, an MSCCL++ execution plan, or a plan of ours; `-` is standard input.
Proved are: delivery of every chunk, no deadlock with channels of the stated depth, no races, the executor's limits. A plan's claims are judged too:
its bound and what that is of, its prediction beside the simulator, the names of its strategies."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="schedule to check")
    parser.add_argument("--fifo", type=at_least_one, default=2, metavar="N", help="messages that fit into a channel (default 2)")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="steps per block that the executor was built for (default 64)")
    parser.add_argument("--root", type=int, help="root of a broadcast, reduce, scatter or gather, where the file does not say")
    parser.add_argument("--copies", action="store_true", help="the runtime makes the local copies of <copy> elements (MSCCL's executor does not)")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError

    for name, value in (("--fifo", args.fifo), ("--steps", args.steps)):
        if value < 1:
            raise UsageError(f"must be >= 1, got {value}", where=name)
    data, where = read_schedule(args.file)
    kind = kind_of(data, where)
    verdict, facts = {"msccl-xml": _msccl, "mscclpp-json": _mscclpp, "plan": _plan}[kind](data, where, args)
    document = {"schema": "meshwright.collective-check", "version": 1, "file": where, "format": kind, **facts, **verdict.to_json()}
    return Result(document, verdict_text(where, facts, verdict), 0 if verdict.ok else 4)


def read_schedule(path: str) -> tuple[bytes, str]:
    """The bytes of a schedule and its name in messages."""
    from ..io.strict_json import read_document

    return read_document(path), "standard input" if path == "-" else Path(path).name


def kind_of(data: bytes, where: str) -> str:
    """"msccl-xml", "mscclpp-json" or "plan", by the first characters. Raises: FormatError for anything else."""
    from ..errors import FormatError

    start = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] == b"<" or start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "msccl-xml"
    if start[:1] == b"{":
        return "plan" if b'"schema"' in start[:256] else "mscclpp-json"
    raise FormatError("is neither XML nor JSON", where=where, hint="expected an MSCCL XML file, an MSCCL++ plan or a plan of meshwright")


def _msccl(data: bytes, where: str, args: argparse.Namespace) -> tuple[Verdict, dict[str, Any]]:
    from ..drive.handover.verdicts import check_msccl
    from ..interop.msccl import ExecutorLimits, collective_of
    from ..io.msccl.xml import parse_msccl

    algo = parse_msccl(data, where)
    if args.root is not None:
        algo = replace(algo, root=args.root)
    verdict = check_msccl(algo, limits=ExecutorLimits(steps=args.steps, depth=args.fifo), run_copies=args.copies)
    return verdict, {"op": collective_of(algo) or algo.collective, "ranks": algo.ranks, "protocol": algo.protocol}


def _mscclpp(data: bytes, where: str, args: argparse.Namespace) -> tuple[Verdict, dict[str, Any]]:
    from ..drive.handover.verdicts import check_mscclpp
    from ..io.msccl.mscclpp_json import parse_mscclpp

    plan = parse_mscclpp(data, where)
    return check_mscclpp(plan, root=args.root), {"op": plan.collective, "ranks": len(plan.gpus), "protocol": plan.protocol}


def _plan(data: bytes, where: str, args: argparse.Namespace) -> tuple[Verdict, dict[str, Any]]:
    from ..check import check_program
    from ..drive.claims import check_claims
    from ..io.plan.plan import plan_from_bytes, program_from_bytes

    if b'"meshwright.program"' in data[:256]:
        program = program_from_bytes(data, where=where)
        return check_program(program), {"op": program.contract.op if program.contract else "", "ranks": program.ranks}
    plan = plan_from_bytes(data, where=where)
    return check_claims(plan), {"op": plan.main.contract.op if plan.main.contract else plan.kind, "ranks": plan.main.ranks}


def verdict_text(where: str, facts: dict[str, Any], verdict: Verdict) -> str:
    """A verdict as lines: what was looked at, what is wrong, and notes."""
    head = f"{where}: {facts['op']} among {facts['ranks']} ranks"
    found = verdict.facts
    size = [f"{found[name]} {name}" for name in ("blocks", "steps", "channels") if name in found]
    lines = [f"{head} ({', '.join(size)}): {verdict.status}" if size else f"{head}: {verdict.status}"]
    lines += [f"  {f.check}: {f.message}" for f in verdict.findings]
    if found.get("modes"):
        lines.append(f"  judged {' and '.join(found['modes'])}")
    if found.get("smallest_fifo"):
        lines.append(f"  smallest FIFO depth that works: {found['smallest_fifo']} (the executor has {found['fifo']})")
    return "\n".join(lines + [f"  note: {note}" for note in verdict.notes])
