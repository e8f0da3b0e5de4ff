"""`meshwright collective order`: which host should play which rank, from a probe, a matrix file or a fabric."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .collective_bound import seed
from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective.cloudcollectives.cost import CostMatrix
    from ..decide.collective.cloudcollectives.strategy import RankOrder
    from ..probe.fabric.rank_order import Endpoint
    from ..run.executor.ordered import LaunchOrder

HELP = "which host should play which rank, from probed or stated costs"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", default="all-reduce", help="the collective to order ranks for (default all-reduce)")
    source = parser.add_argument_group("where the costs come from (one of these)")
    source.add_argument("--fabric", help="FILE.toml or PRESET:n; with --devices in the order in which the ranks are now")
    source.add_argument("--matrix", type=Path, help="a file written by --save-matrix")
    agent = "an agent (`python -m meshwright.probe.fabric.rank_order_agent`); repeat"
    source.add_argument("--probe", action="append", metavar="NAME=HOST:PORT", help=agent)
    source.add_argument("--probe-local", type=at_least_one, metavar="N", help="start N agents on this machine and probe them (to try it)")
    parser.add_argument("--devices", help="with --fabric: ranks in order, e.g. 0,4,1,5")
    parser.add_argument("--token-file", type=Path, help="with --probe: the agents' shared secret")
    names = "ring, halving-doubling, halving-doubling-far, bcube, recursive-doubling, bruck, hierarchical, double-tree, rooted-tree"
    parser.add_argument("--algorithm", default="ring", help=f"{names}, or best (default ring)")
    parser.add_argument("--sizes", default="64MiB", help="message sizes: A,B,C or FIRST:LAST in powers of two (default 64MiB)")
    parser.add_argument("--first", help="endpoint that must be rank 0 (it writes checkpoints, or hosts the rendezvous)")
    parser.add_argument("--each-device", action="store_true", help="move single endpoints instead of whole hosts")
    parser.add_argument("--budget", type=int, default=4000, help="orders tried at most per algorithm (default 4000)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    parser.add_argument("--echoes", type=at_least_one, default=100, help="round trips per pair and direction (default 100)")
    parser.add_argument("--hostfile", type=Path, help="write the endpoints in rank order to this file")
    parser.add_argument("--assignment", type=Path, help="write `name RANK=r` lines to this file")
    parser.add_argument("--save-order", type=Path, metavar="FILE", help="write the order for `meshwright run ordered` to this file (JSON)")
    parser.add_argument("--save-matrix", type=Path, help="write the costs to this file (JSON)")


def run(args: argparse.Namespace) -> Result:
    from dataclasses import replace

    import numpy as np

    from ..decide.collective.cloudcollectives.cost import ALGORITHMS
    from ..decide.collective.cloudcollectives.strategy import best_choice, order_ranks
    from ..decide.collective.problem import OPERATIONS
    from ..errors import UnknownName
    from ..io.atomic import write_bytes
    from ..run.executor.ordered import write_order
    from .collective_nccl import sizes_of

    if args.op not in OPERATIONS:
        raise UnknownName(f"no collective {args.op!r}", hint=f"operations: {', '.join(OPERATIONS)}")
    if args.algorithm not in (*ALGORITHMS, "best"):
        raise UnknownName(f"no algorithm {args.algorithm!r}", hint=f"algorithms: {', '.join(ALGORITHMS)}, best")
    sizes = sizes_of(args.sizes)
    matrix = _matrix(args)
    if args.each_device:
        matrix = replace(matrix, host=tuple(range(len(matrix))))
    first = _first(matrix, args.first)
    rows: list[RankOrder] = []
    for size in sizes:
        rng = np.random.default_rng(args.seed)
        if args.algorithm == "best":
            rows.append(best_choice(matrix, args.op, size, rng=rng, first=first, budget=args.budget)[0])
        else:
            rows.append(order_ranks(matrix, args.algorithm, args.op, size, rng=rng, first=first, budget=args.budget))
    document: dict[str, Any] = {
        "schema": "meshwright.rank-order", "version": 1, "op": args.op, "endpoints": list(matrix.names), "source": matrix.source, "seed": args.seed,
        "groups": list(matrix.group), "matrix": matrix.to_document(), "rows": [row.to_json() for row in rows],
    }  # fmt: skip
    last = rows[-1]
    written = []
    for path, text in ((args.hostfile, last.hostfile()), (args.assignment, last.assignment()), (args.save_matrix, _json(matrix))):
        if path is not None:
            write_bytes(path, text.encode())
            written.append(str(path))
    if args.save_order is not None:
        write_order(args.save_order, launch_order(matrix, last))
        written.append(str(args.save_order))
    return Result(document, _text(matrix, rows, written))


def launch_order(matrix: CostMatrix, found: RankOrder) -> LaunchOrder:
    """The order with what is needed to start programs in it."""
    from ..io.quantity import show_size
    from ..run.executor.ordered import LaunchOrder

    note = f"{found.op} {show_size(found.size_bytes)} {found.algorithm}: {found.gain:.2f}x by the model; {matrix.source}"
    address = matrix.address or ("",) * len(matrix)
    return LaunchOrder(names=matrix.names, host=matrix.host, address=address, order=found.order, note=note)


def _json(matrix: CostMatrix) -> str:
    import json

    return json.dumps(matrix.to_document()) + "\n"


def _matrix(args: argparse.Namespace) -> CostMatrix:
    from ..decide.collective.cloudcollectives.cost import CostMatrix
    from ..errors import UsageError

    given = [name for name in ("fabric", "matrix", "probe", "probe_local") if getattr(args, name) is not None]
    if len(given) != 1:
        raise UsageError("give one source of costs", where=" ".join(f"--{x.replace('_', '-')}" for x in given), hint="--fabric, --matrix or --probe")
    if args.devices is not None and args.fabric is None:
        raise UsageError("--devices needs --fabric", where="--devices")
    if args.matrix is not None:
        return _read(args.matrix)
    if args.fabric is None:
        return _probed(args)
    from dataclasses import replace

    from ..drive.plans import read_fabric

    fabric = read_fabric(args.fabric, None)
    chosen = range(len(fabric.devices)) if args.devices is None else _numbers(args.devices, len(fabric.devices))
    names = [fabric.devices[i].name for i in chosen]
    if len(names) < 2:
        raise UsageError("an order needs at least two devices", where="--devices")
    matrix = CostMatrix.of_fabric(fabric, names)
    return replace(matrix, host=tuple(range(len(names)))) if len(set(matrix.host)) == 1 else matrix


def _numbers(text: str, count: int) -> list[int]:
    """`0,4,1-3`: the order is kept. Raises UsageError."""
    from ..errors import UsageError

    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or not (high or low).isdigit() or int(high or low) >= count or int(low) > int(high or low):
            raise UsageError(f"{part!r} is no device of 0-{count - 1}", where="--devices", hint="e.g. --devices 0,4,1,5")
        found += range(int(low), int(high or low) + 1)
    if len(set(found)) < len(found):
        raise UsageError(f"device {next(x for i, x in enumerate(found) if x in found[:i])} is named twice", where="--devices")
    return found


def _read(path: Path) -> CostMatrix:
    import json

    from ..decide.collective.cloudcollectives.cost import CostMatrix
    from ..errors import FormatError
    from ..io.strict_json import read_document, refuse_ambiguous

    data = read_document(path, limit=256 << 20)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}", where=path.name) from None
    refuse_ambiguous(data, path.name)
    if not isinstance(document, dict):
        raise FormatError("must be an object", where=path.name)
    try:
        return CostMatrix.from_document(document)
    except FormatError as error:
        raise FormatError(error.message, where=f"{path.name}: {error.where}", hint="write it with --save-matrix") from None


def _probed(args: argparse.Namespace) -> CostMatrix:
    from ..probe.fabric.rank_order import probe

    with probed_agents(args) as (endpoints, token):
        return probe(endpoints, token, echoes=args.echoes).matrix


@contextmanager
def probed_agents(args: argparse.Namespace) -> Iterator[tuple[list[Endpoint], str]]:
    """Endpoints and secret that `--probe-local`, or `--probe` and `--token-file`, name. Raises: UsageError."""
    from ..errors import UsageError
    from ..probe.fabric.rank_order import local_agents, parse_endpoint

    if args.probe_local is not None:
        if not 2 <= args.probe_local <= 64:
            raise UsageError(f"must be 2 to 64 agents, got {args.probe_local}", where="--probe-local", hint="e.g. --probe-local 4")
        with local_agents(args.probe_local) as (endpoints, token):
            yield list(endpoints), token
        return
    if args.token_file is None:
        raise UsageError("--probe needs the agents' secret", where="--token-file", hint="the file that the agents were started with")
    try:
        token = args.token_file.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where="--token-file") from error
    yield [parse_endpoint(text) for text in args.probe], token


def _first(matrix: CostMatrix, name: str | None) -> int | None:
    from ..errors import UnknownName

    if name is None:
        return None
    if name not in matrix.names:
        raise UnknownName(f"no endpoint {name!r}", where="--first", hint=f"endpoints: {', '.join(matrix.names[:8])}")
    return matrix.names.index(name)


def _text(matrix: CostMatrix, rows: list[RankOrder], written: list[str]) -> str:
    from ..io.quantity import show_size, show_time

    proofs = {"bound": "the bound is reached", "time bound": "the bound on the time is reached", "": "best found"}
    groups = len(set(matrix.group))
    lines = [f"{len(matrix)} endpoints, {groups} group{'s' if groups != 1 else ''} ({matrix.source})"]
    for row in rows:
        times = f"{show_time(row.before.time_s)} as given, {show_time(row.after.time_s)} ordered ({row.gain:.2f}x), bound {show_time(row.bound_s)}"
        proof = f"nothing better exists among {row.more['proved_for']}" if row.proof == "exact" else proofs[row.proof]
        lines.append(f"{row.op} {show_size(row.size_bytes)} {row.algorithm}: {times}; {row.verdict} ({proof})")
    lines.append("order: " + " ".join(matrix.names[i] for i in rows[-1].order))
    lines += [f"written: {path}" for path in written]
    return "\n".join(lines)
