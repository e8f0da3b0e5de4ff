"""`meshwright collective bound`: the least time a collective can take on a fabric, whatever the algorithm, with its proof."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .arguments import TIME_LIMIT, at_least_one, fabric_arguments
from .fabric_subset import edit_arguments
from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective import CollectiveProblem
    from ..fabric.fabric import Fabric

HELP = "the least time a collective can take on a fabric, with its proof"

DEFAULT_EFFORT_S = 60  # counted work of one search, about the seconds of a quiet core
MAX_PIECES = 4096  # more take minutes to simulate and gain nothing
EFFORT = "counted work of the search, in seconds of a quiet machine: the same plan however busy this one is (default {})"
SIZE_HELP = "e.g. 1GiB; all-gather, gather: the gathered result; reduce-scatter, all-to-all: one rank's whole input; otherwise the (root's) buffer"


def problem_arguments(parser: argparse.ArgumentParser, *, sized: bool = True, size: str = "") -> None:
    """What names a collective problem; shared by the commands of this noun. `size`: what --size is unless given; empty = it must be given."""
    parser.add_argument("op", help="all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all, scatter, gather or permute")
    fabric_arguments(parser, devices="use only these devices, e.g. 0-3,8; ranks are numbered in the fabric's order")
    edit_arguments(parser)
    if sized:
        given = {"default": size, "help": f"{SIZE_HELP} (default {size})"} if size else {"required": True, "help": SIZE_HELP}
        parser.add_argument("--size", **given)
        parser.add_argument(
            "--shards", metavar="SIZES",
            help="bytes that each rank owns, e.g. 4KiB,8KiB,0 (all-gather, reduce-scatter, scatter, gather)",
        )  # fmt: skip
    parser.add_argument("--root", type=int, default=0, help="rank that data starts from or ends at (default 0)")
    parser.add_argument("--peers", metavar="RANKS", help="permute: the rank that each rank receives from, e.g. 1,2,0; -1 = none (default: a shift)")
    parser.add_argument(
        "--in-network", action="store_true",
        help="let switches add and copy where they can; without this they only forward (simulated)",
    )  # fmt: skip
    parser.add_argument("--element-bytes", type=at_least_one, default=4, help="bytes of one number (default 4)")


def reproducible_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reproducible", choices=("run", "tree", "exact"), default="run",
        help="bits of sums: run (default; equal for equal plans), tree (one fold over numbered contributions, whatever the plan), exact (no order "
        "matters); see docs/reproducibility.md",
    )  # fmt: skip


def seed(text: str) -> int:
    """A seed, for `type=`: 0 to 2^63 - 1, what random generators take and plans can hold."""
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^63 - 1, got {text[:32]!r}")
    return int(text)


def seconds(text: str) -> float:
    """A time limit or counted work, for `type=`: above 0; `inf` is none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text[:32]!r}")
    return value


def limit_arguments(parser: argparse.ArgumentParser, effort_s: float = DEFAULT_EFFORT_S, effort: str = EFFORT) -> None:
    parser.add_argument("--effort", type=seconds, default=effort_s, metavar="S", help=effort.format(f"{effort_s:g}"))
    parser.add_argument("--time-limit", type=seconds, default=float("inf"), metavar="S", help=TIME_LIMIT.format("none"))


def limits(args: argparse.Namespace) -> dict[str, float]:
    """A problem's limits: so much counted work, and the clock as a net under it."""
    return {"effort_s": args.effort, "time_limit_s": args.time_limit}


def count(text: str) -> int:
    """A number of pieces or trees, for `type=`: 1 to MAX_PIECES."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= MAX_PIECES:
        raise argparse.ArgumentTypeError(f"must be >= 1 and at most {MAX_PIECES}, got {text[:32]!r}")
    return int(text)


def fabric_of(args: argparse.Namespace) -> Fabric:
    """The fabric that the arguments name, as it is with what is down or slow. Raises what the fabric's reader raises."""
    from ..drive.plans import read_fabric
    from ..fabric.edit import edited
    from ..io.fabric.name import parts_down, parts_slow

    return edited(read_fabric(args.fabric, args.devices), parts_down(args.without), parts_slow(args.degrade))


def problem_of(args: argparse.Namespace, **more: object) -> CollectiveProblem:
    """The problem that the arguments name. Raises UsageError and what the fabric's reader raises."""
    from ..decide.collective import CollectiveProblem
    from ..fabric.edit import forwarding_only

    fabric = fabric_of(args)
    if not args.in_network:
        fabric = forwarding_only(fabric)
    if getattr(args, "shards", None):
        more["shard_bytes"] = tuple(size_bytes(part, "--shards") for part in args.shards.split(","))
    if args.peers:
        more["peers"] = _ranks(args.peers)
    return CollectiveProblem.on(fabric, args.op, size_bytes(args.size), root=args.root, element_bytes=args.element_bytes, **more)


def _ranks(text: str) -> tuple[int, ...]:
    from ..errors import UsageError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"not a list of ranks: {text[:64]!r}", where="--peers", hint="e.g. --peers 1,2,0") from None


def size_bytes(text: str, where: str = "--size") -> int:
    """Bytes of `64MiB` or of a plain number. Raises UsageError."""
    from ..errors import UsageError
    from ..io.quantity import parse_size_bytes

    try:
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, hint=f"e.g. {where} 64MiB") from None


def message_bytes(text: str, least: int) -> int:
    """As `size_bytes`, of a message that has something in it. Raises UsageError."""
    from ..errors import UsageError

    found = size_bytes(text)
    if found < least:
        raise UsageError(f"a message of {found} bytes holds no element", where="--size", hint=f"{least} bytes or more, e.g. --size 1MiB")
    return found


def rate_Bps(text: str, where: str = "--rate") -> int:
    """Bytes/s of `100Gbit/s`. Raises UsageError."""
    from ..errors import UsageError
    from ..io.quantity import parse_rate_Bps

    try:
        return parse_rate_Bps(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, hint=f"e.g. {where} 25Gbit/s") from None


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser, size="1GiB")


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective import collective_bound
    from ..fabric.edit import burst_s
    from ..io.quantity import show_time
    from ..report.bottleneck_text import explain_bottleneck
    from ..report.collective_text import bound_document, bound_line, bound_values

    problem = problem_of(args)
    bound = collective_bound(problem)
    lines, bottleneck = explain_bottleneck(problem, bound)
    document = bound_document(problem, bound) | {"bottleneck": bottleneck}
    if not args.in_network:
        args.in_network = True
        able = collective_bound(problem_of(args))
        if able.exact < bound.exact:
            document["in_network"] = bound_values(problem, able)
            lines.append(f"if switches that can add and copy do (--in-network): at least {show_time(float(able))}")
    if early := burst_s(fabric_of(args)):
        document["first_call_time_s"] = first_s = max(0.0, float(bound.exact - early))
        lines.append(
            f"bounds are of calls that keep the links busy; the links' token buckets can bring a first call {show_time(float(early))} below: "
            f"at least {show_time(first_s)}"
        )
    return Result(document, "\n".join([bound_line(problem, bound), *lines]))
