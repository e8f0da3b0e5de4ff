"""`meshwright lab run NAME -- COMMAND`: one process per device of a lab, with the environment that PyTorch expects."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .arguments import at_least_one
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Run a command (after `--`) once per device of a lab: RANK, WORLD_SIZE, MASTER_ADDR, GLOO_SOCKET_IFNAME, ... are set."
PROGRESS = False  # what it runs writes to the terminal
EPILOG = """\
usage: meshwright lab run NAME [options] -- COMMAND [ARGUMENTS]
With --torchrun, what follows `--` is a script and its arguments, or torchrun's own options before them.

examples:
  meshwright lab run islands -- python job.py
  meshwright lab run islands --order 0,4,1,5,2,6,3,7 -- python job.py
  meshwright lab run islands --torchrun -- job.py --epochs 1      (one torchrun agent per device, as on several nodes)

All processes end when one fails, on Ctrl-C, and when this command is killed. The exit code is that of the first failure."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the lab")
    parser.set_defaults(after_dashes=[])
    parser.add_argument("--ranks", metavar="LIST", help="use only these devices, e.g. 0-3")
    parser.add_argument("--order", metavar="LIST", help="device of each rank, e.g. 3,1,0,2")
    parser.add_argument("--per-device", type=at_least_one, default=1, metavar="N", help="ranks per device (default %(default)s)")
    parser.add_argument("--torchrun", action="store_true", help="start one torchrun agent per device instead of the command itself")
    parser.add_argument("--timeout", type=float, metavar="S", help="end all ranks after this many seconds")
    parser.add_argument("--counters", action="store_true", help="show the bytes on each link afterwards")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set this for every rank; may be repeated")


def run(args: argparse.Namespace) -> Result:
    from ..lab.lab import Lab
    from .lab_show import counters_text

    lab = Lab.open(args.name)
    try:
        before = lab.counters() if args.counters else {}
        sink = _Sink(len(lab.state.devices) * max(1, args.per_device), as_json=args.json)
        result = lab.run(
            args.after_dashes, ranks=_numbers(args.ranks, "--ranks"), order=_numbers(args.order, "--order"), per_device=args.per_device,
            env=_variables(args.env), torchrun=args.torchrun, timeout_s=args.timeout, sink=sink, check=False,
        )  # fmt: skip
        counts = {name: c - before[name] for name, c in lab.counters().items()} if args.counters else {}
    finally:
        lab.close()
    document: dict[str, Any] = {
        "schema": "meshwright.lab-run", "version": 1, "lab": args.name, "returncodes": result.returncodes, "first_failure": result.first_failure,
        "wall_s": result.wall_s, "pacing": lab.state.pacing, "counters": {name: vars(c) for name, c in counts.items()},
        "machine": result.machine.to_json() if result.machine is not None else None,
    }  # fmt: skip
    text = counters_text(counts) if args.counters else ""
    if result.first_failure is not None:
        text = (text + "\n" if text else "") + f"rank {result.first_failure} failed first: {_ended(result.returncodes[result.first_failure])}"
    if result.machine is not None and result.machine.disturbed:
        text += ("\n" if text else "") + f"note: other programs used {result.machine.others:.0%} of the processors; times taken now prove little"
    return Result(document, text, exit_code=result.exit_code)


def _ended(code: int) -> str:
    import signal

    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class _Sink:
    """Lines of all ranks on stdout (with `--json`, where stdout is one document, on stderr), each with its rank in front."""

    def __init__(self, ranks: int, *, as_json: bool) -> None:
        self.width = len(str(ranks - 1))
        self.stream = (sys.stderr if as_json else sys.stdout).buffer

    def __call__(self, rank: int, line: bytes) -> None:
        self.stream.write(f"[{rank:>{self.width}}] ".encode() + line + b"\n")
        self.stream.flush()


def _numbers(text: str | None, where: str) -> list[int] | None:
    """`0-3,8` -> 0 1 2 3 8. Raises: UsageError."""
    from ..errors import UsageError

    if text is None:
        return None
    found: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(item) > 16:
            raise UsageError(f"not a number or range: {item[:32]!r}", where=where, hint="e.g. 0-3,8")
        if int(last or first) >= 1 << 20:
            raise UsageError(f"there is no device {last or first}", where=where)
        found += range(int(first), int(last or first) + 1)
    return found


def _variables(given: list[str]) -> dict[str, str]:
    from ..errors import UsageError

    found = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UsageError(f"not NAME=VALUE: {item[:64]!r}", where="--env")
        found[name] = value
    return found
