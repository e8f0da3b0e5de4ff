"""`meshwright collective aggregator --listen ADDR`: a switch in software that sums what workers send."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..run.aggregate.operators import Operator
    from ..run.aggregate.server import Aggregator

__all__ = ["HELP", "arguments", "run"]

HELP = "a switch in software: sums what the workers of jobs send it over UDP, until it is ended"
EPILOG = """\
examples:
  meshwright collective aggregator --listen 10.0.0.1:48864 --slots 512
  meshwright run doctor --aggregator 10.0.0.1:48864          (which slot waits for which worker)

Workers join with `meshwright.run.aggregate.client`; `lab up` starts one for every switch with the ability `aggregate`. Packets are neither encrypted
nor signed: listen on a network of your own."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address to listen on; port 0 takes a free one")
    parser.add_argument("--slots", type=at_least_one, default=512, help="chunks that may be under way, of all jobs together (default %(default)s)")
    parser.add_argument("--words", type=at_least_one, default=256, help="32-bit numbers per packet (default %(default)s: 1 KiB; at most 2048)")
    parser.add_argument("--span", type=at_least_one, default=1 << 14, help="indices that a block of sparse jobs may have (default %(default)s)")
    parser.add_argument(
        "--places", type=at_least_one, default=1 << 12, help="of a sparse block's table, with another switch above (default %(default)s)"
    )
    parser.add_argument(
        "--operator", metavar="FILE.py:NAME", help="an operator beside the built-in ones: a function that returns `own_operator(...)`"
    )
    for name, what in (("lost", "lost"), ("doubled", "sent twice"), ("late", "sent again three turns of their slot later")):
        parser.add_argument(f"--{name}", type=float, default=0.0, metavar="P", help=f"rehearse faults: this share of packets, each way, is {what}")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default %(default)s)")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError
    from ..run.aggregate.process import run_aggregator
    from ..run.aggregate.sockets import parse_address

    for name in ("lost", "doubled", "late"):
        if not 0 <= getattr(args, name) < 1:
            raise UsageError(f"must be at least 0 and below 1, got {getattr(args, name):g}", where=f"--{name}", hint="a share, such as 0.01")

    def ready(aggregator: Aggregator) -> None:
        sys.stderr.write(f"listening on {aggregator.address}: {aggregator.slots} slots of {4 * aggregator.words} B\n")
        sys.stderr.flush()

    counts = run_aggregator(
        parse_address(args.listen), slots=args.slots, words=args.words, span=args.span, places=args.places,
        own=_operator(args.operator), lost=args.lost, doubled=args.doubled, late=args.late, seed=args.seed, ready=ready,
    )  # fmt: skip
    return Result({"schema": "meshwright.aggregator", "version": 1, "packets": counts}, "  ".join(f"{k} {v}" for k, v in counts.items()))


def _operator(name: str | None) -> Operator | None:
    if name is None:
        return None
    from ..capture.resolve import resolve_function
    from ..errors import UsageError
    from ..run.aggregate.operators import Operator

    made = resolve_function(name, what="operator")()
    if not isinstance(made, Operator):
        raise UsageError(f"{name} gives {type(made).__name__}, no operator", where="--operator", hint="a function that returns own_operator(...)")
    return made
