"""`meshwright collective bench`: collectives measured for real, with the flags and columns of nccl-tests."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .collective_bound import size_bytes
from .frame import Result

if TYPE_CHECKING:
    from ..bench.measure import BenchRow, Request

HELP = "measure collectives on real processes: nccl-tests' flags and columns, simulated and bound beside them"
EPILOG = """\
examples:
  meshwright collective bench all-reduce --ranks 4 -b 64KiB -e 16MiB -f 4
  meshwright lab up two-islands --name isl --scale 8 && meshwright collective bench all-reduce --lab isl -b 1MiB -e 16MiB -f 4
  torchrun --nproc-per-node 4 --no-python meshwright collective bench all-reduce     (inside a job: every rank runs the command, rank 0 prints)

Without --lab and outside a job, --ranks processes are started on this machine."""
MAX_RANKS = 256  # processes on one machine, each with an interpreter of its own


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", help="all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all, scatter or gather")
    parser.add_argument("-b", "--minbytes", default="64KiB", metavar="SIZE", help="smallest size (default 64KiB)")
    parser.add_argument("-e", "--maxbytes", default="16MiB", metavar="SIZE", help="largest size (default 16MiB)")
    parser.add_argument("-f", "--stepfactor", type=at_least_one, default=4, metavar="N", help="factor between sizes (default 4)")
    parser.add_argument("-n", "--iters", type=at_least_one, default=5, metavar="N", help="timed iterations; the median is shown (default 5)")
    parser.add_argument("-w", "--warmup", type=int, default=1, metavar="N", help="iterations before them (default 1)")
    parser.add_argument("-d", "--datatype", default="float", help="int8, uint8, int32, int64, half, bfloat16, float or double")
    parser.add_argument("-o", "--redop", default="sum", help="sum, prod, min, max or avg")
    parser.add_argument("-r", "--root", type=int, default=0, metavar="RANK", help="root of broadcast, reduce, scatter and gather")
    parser.add_argument("-c", "--check", type=int, choices=(0, 1), default=1, help="check the result and count wrong elements (default 1)")
    parser.add_argument(
        "--reproducible", choices=("run", "tree", "exact"),
        help="promise the bits of sums: run (equal plans), tree (one fold, whatever the plan), exact (no order matters); docs/reproducibility.md",
    )  # fmt: skip
    parser.add_argument("--digest", action="store_true", help="also print a digest of the result's bits on uneven inputs, to compare machines by")
    parser.add_argument("--ranks", type=at_least_one, default=4, metavar="N", help="processes to start on this machine (default 4)")
    parser.add_argument("--lab", metavar="NAME", help="run on this lab, one rank per device, with its fabric")
    parser.add_argument("--order", metavar="LIST", help="with --lab: device of each rank, e.g. 3,1,0,2")
    parser.add_argument("--fabric", help="fabric to plan for (default: the lab's)")
    parser.add_argument("--plan", action="append", default=[], metavar="FILE", help="plan file to use; may be repeated")
    parser.add_argument("--strategies", help="plan with these strategies only, separated by commas")
    parser.add_argument("--backends", default="meshwright,gloo", help="backends to compare, in this order (default meshwright,gloo)")
    parser.add_argument("--no-builtin", action="store_true", help="never choose the built-in backend where a plan exists")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search and of the test data (default 0)")


def request_of(args: argparse.Namespace) -> Request:
    """Raises: UsageError."""
    from ..bench.data import DTYPES, REDUCTIONS
    from ..bench.measure import Request
    from ..bench.operations import OPERATIONS, REDUCING
    from ..errors import UsageError

    for what, value, known in (("operation", args.op, OPERATIONS), ("type", args.datatype, tuple(DTYPES)), ("reduction", args.redop, REDUCTIONS)):
        if value not in known:
            raise UsageError(f"no {what} {value[:32]!r}", hint=f"{what}s: {', '.join(known)}")
    counts = (("-f", args.stepfactor, 2), ("-n", args.iters, 1), ("-w", args.warmup, 0), ("-r", args.root, 0), ("--ranks", args.ranks, 1))
    for name, number, least in counts:
        if number < least:
            raise UsageError(f"must be >= {least}, got {number}", where=name)
    if args.ranks > MAX_RANKS:
        raise UsageError(f"at most {MAX_RANKS} processes on one machine, got {args.ranks}", where="--ranks")
    if args.digest and args.op not in REDUCING:
        raise UsageError(f"{args.op} adds nothing, so its bits say nothing", where="--digest", hint=f"operations: {', '.join(REDUCING)}")
    first, last = size_bytes(args.minbytes, "-b"), size_bytes(args.maxbytes, "-e")
    if not 0 < first <= last:
        raise UsageError(f"the sizes {args.minbytes} to {args.maxbytes} are empty", where="-b, -e", hint="-b must be above 0 and not above -e")
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= args.stepfactor
    return Request(
        op=args.op, sizes=tuple(sizes), dtype=args.datatype, reduction=args.redop, root=args.root, iterations=args.iters, warmup=args.warmup,
        check=bool(args.check), seed=args.seed, digest=args.digest,
    )  # fmt: skip


def environment(args: argparse.Namespace, request: Request) -> dict[str, str]:
    """What the ranks are told."""
    import msgspec

    env = {"MESHWRIGHT_BENCH": msgspec.json.encode(request).decode(), "MESHWRIGHT_BENCH_BACKENDS": args.backends, "OMP_NUM_THREADS": "1"}
    if args.fabric:
        env["MESHWRIGHT_FABRIC"] = args.fabric
    if args.plan:
        env["MESHWRIGHT_PLAN"] = os.pathsep.join(args.plan)
    if args.strategies:
        env["MESHWRIGHT_STRATEGIES"] = args.strategies
    if args.reproducible:
        env["MESHWRIGHT_REPRODUCIBLE"] = args.reproducible
    if args.no_builtin:
        env["MESHWRIGHT_BUILTIN"] = "0"
    return env


def run(args: argparse.Namespace) -> Result:
    from ..bench.start import in_job, on_lab, on_this_machine
    from ..errors import UsageError

    request = request_of(args)
    unknown = [b for b in args.backends.split(",") if b not in ("meshwright", "gloo", "nccl")]
    if unknown:
        raise UsageError(f"no backend {unknown[0][:32]!r}", where="--backends", hint="meshwright, gloo, nccl")
    env = environment(args, request)
    if args.lab:
        order = [int(x) for x in args.order.split(",")] if args.order else None
        rows = on_lab(args.lab, env, order)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rows = in_job(request, env)
    else:
        rows = on_this_machine(args.ranks, env)
    return Result(document(request, rows), text(request, rows))


def document(request: Request, rows: list[BenchRow]) -> dict[str, Any]:
    import msgspec

    return {"schema": "meshwright.collective-bench", "version": 1, **msgspec.to_builtins(request), "rows": msgspec.to_builtins(rows)}


def text(request: Request, rows: list[BenchRow]) -> str:
    """The columns of nccl-tests, a row per backend and size, with what ran, the simulated time and the bound."""
    if not rows:
        return ""  # a rank other than 0
    head = f"{'size':>12} {'count':>12} {'type':>8} {'redop':>6} {'root':>5}"
    form = f"{'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
    lines = [
        f"# {request.op}: median of {request.iterations} iterations after {request.warmup} of warm-up, each as long as at its slowest rank",
        f"# {'':>46} {'out-of-place':^32}   {'in-place':^32}",
        f"# {head} {form}   {form}  {'simulated':>9} {'bound':>9}  backend (what ran)",
        f"# {'(B)':>12} {'(elements)':>12} {'':>8} {'':>6} {'':>5} {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}   "
        f"{'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}  {'(us)':>9} {'(us)':>9}",
    ]
    redop = request.reduction if request.op in ("all-reduce", "reduce-scatter", "reduce") else "none"
    root = request.root if request.op in ("broadcast", "reduce", "scatter", "gather") else -1
    for row in sorted(rows, key=lambda r: r.size_bytes):
        said = f"{row.backend} ({row.ran})" if row.ran else row.backend
        lines.append(
            f"  {row.size_bytes:>12} {row.count:>12} {request.dtype:>8} {redop:>6} {root:>5} {_form(row.out_of_place)}   {_form(row.in_place)}  "
            f"{_us(row.simulated_s)} {_us(row.bound_s)}  {said}"
        )
        if row.digest:
            lines.append(f"  digest {row.digest}")
    return "\n".join(lines)


def _form(timed: Any) -> str:
    if timed is None:
        return f"{'-':>9} {'-':>7} {'-':>7} {'-':>6}"
    wrong = "N/A" if timed.wrong is None else str(timed.wrong)
    return f"{timed.time_s * 1e6:>9.1f} {timed.algbw_Bps / 1e9:>7.3f} {timed.busbw_Bps / 1e9:>7.3f} {wrong:>6}"


def _us(time_s: float | None) -> str:
    return f"{'-':>9}" if time_s is None else f"{time_s * 1e6:>9.1f}"
