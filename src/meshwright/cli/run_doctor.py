"""`meshwright run doctor`: what the flight recorders of a run's ranks say."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .frame import Result

if TYPE_CHECKING:
    from ..run.group.doctor import Diagnosis

__all__ = ["HELP", "arguments", "run"]

HELP = "read the flight recorders of all ranks and name the first divergence"
EPILOG = """\
The first line names what is wrong. Records of a run that ended well are removed; those of a failed or killed one stay in
MESHWRIGHT_RECORD_DIR or in a private folder of the user. For a run on several machines, copy them into one folder.
With --aggregator, a switch in software is asked instead: which slot of which job waits for which worker.

exit code: 0 nothing is wrong, 1 something is"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="DIR|FILE", help="folders or records (default: MESHWRIGHT_RECORD_DIR, else the private folder)")
    parser.add_argument("--dump", action="store_true", help="with --json: everything that the records hold")
    parser.add_argument(
        "--bits", nargs=2, metavar=("RUN", "OTHER"), type=Path,
        help="instead: the first sum, element and fold node in which two runs recorded with MESHWRIGHT_RECORD_BITS differ",
    )  # fmt: skip
    parser.add_argument("--run", default="", metavar="ID", help="the run to look at (default: the latest)")
    parser.add_argument("--aggregator", metavar="HOST:PORT", help="ask this switch (`meshwright collective aggregator`) instead of reading records")


def run(args: argparse.Namespace) -> Result:
    if args.aggregator:
        return _switch(args.aggregator)
    from ..run.group.doctor import diagnose, dump, find_records
    from ..run.group.recorder import private_folder

    if args.bits:
        return _bits(*args.bits)
    paths = args.paths or [os.environ.get("MESHWRIGHT_RECORD_DIR") or private_folder()]
    records, damaged = find_records(paths, args.run)
    found = diagnose(records, damaged=damaged)
    document = found.to_json() | ({"records": dump(records)} if args.dump else {})
    return Result(document, _text(found), exit_code=1 if found.wrong else 0)


def _bits(one: Path, other: Path) -> Result:
    from ..run.group.bits import first_difference

    found, compared = first_difference(one, other)
    document = {"schema": "meshwright.bits", "version": 1, "compared": compared, "difference": found.to_json() if found is not None else None}
    text = found.line() if found is not None else f"equal bits in {compared} sums"
    return Result(document, text, exit_code=1 if found is not None else 0)


def _switch(address: str) -> Result:
    import msgspec

    from ..run.aggregate.client import ask_status
    from ..run.aggregate.doctor import status_lines
    from ..run.aggregate.sockets import parse_address

    status = ask_status(parse_address(address, "--aggregator"))
    lines, wrong = status_lines(status)
    document = {"schema": "meshwright.aggregator-status", "version": 1, "line": lines[0], "wrong": wrong, **msgspec.to_builtins(status)}
    return Result(document, "\n".join(lines), exit_code=1 if wrong else 0)


def _text(found: Diagnosis) -> str:
    lines = [found.line]
    for group in found.groups:
        ranks = f"group of {len(group.ranks)} rank{'s' if len(group.ranks) > 1 else ''}"
        lines += ["", ranks if group.verdict is None else f"{ranks}: {group.verdict.code}"]
        lines += [f"  rank {rank:<4} {found.processes.get(rank, 'unknown'):<8} {place}" for rank, place in sorted(group.places.items())]
        lines += [f"  link {a} -> {b}: waited {s:.3g} s" for a, b, s in group.waits[:3]]
        if group.verdict is not None and group.verdict.hint:
            lines.append(f"  {group.verdict.hint}")
    lines += [f"unreadable: {text}" for text in found.damaged]
    return "\n".join(lines)
