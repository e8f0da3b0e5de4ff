"""`meshwright collective bound`: the least time a collective can take on a fabric, whatever the algorithm, with its proof."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective import CollectiveProblem

HELP = "the least time a collective can take on a fabric, with its proof"


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    """What names a collective problem; shared by the commands of this noun."""
    parser.add_argument("op", help="all-reduce, all-gather, reduce-scatter, broadcast or reduce")
    parser.add_argument("--fabric", required=True, help="FILE.toml or PRESET:n, see `meshwright fabric list`")
    parser.add_argument("--devices", help="use only these devices, e.g. 0-3,8; rank i is the i-th of them")
    parser.add_argument(
        "--size", required=True, help="e.g. 1GiB; all-gather: the gathered result; reduce-scatter: one rank's whole input; otherwise the buffer"
    )
    parser.add_argument("--root", type=int, default=0, help="rank that a broadcast starts at or a reduce ends at (default 0)")
    parser.add_argument("--element-bytes", type=int, default=4, help="bytes of one number (default 4)")


def problem_of(args: argparse.Namespace, **more: object) -> CollectiveProblem:
    """The problem that the arguments name. Raises UsageError and what the fabric's reader raises."""
    from ..decide.collective import CollectiveProblem
    from ..drive import read_fabric

    size = _size_bytes(args.size)
    fabric = read_fabric(args.fabric, args.devices)
    return CollectiveProblem.on(fabric, args.op, size, root=args.root, element_bytes=args.element_bytes, **more)


def _size_bytes(text: str) -> int:
    from ..errors import UsageError
    from ..io.quantity import parse_size_bytes

    try:
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where="--size", hint="e.g. --size 64MiB") from None


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective import collective_bound
    from ..report.collective_text import bound_document, bound_line

    problem = problem_of(args)
    bound = collective_bound(problem)
    return Result(bound_document(problem, bound), bound_line(problem, bound))
