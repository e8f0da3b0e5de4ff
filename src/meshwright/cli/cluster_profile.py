"""`meshwright cluster profile -- COMMAND`: how fast a command is at so many cores and so much memory, measured under real limits."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import require_directory
from .cluster_arguments import bytes_given, seconds_given
from .frame import Result

HELP = "How fast a command is at so many cores and so much memory, measured under real limits of control groups."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: the command and its arguments")
    parser.add_argument("--name", default="command", help="of the profile (default command)")
    parser.add_argument("--cores", default="0.5,1,1.5,2", help="cores to look at, e.g. 0.5,1,1.5,2 (the default)")
    parser.add_argument("--memory", default="1GB", help="memory sizes to look at, e.g. 512MB,1GB (default 1GB)")
    parser.add_argument("--share", help="CORES,MEMORY of its proportional share (default: the middle one of each)")
    parser.add_argument("--steps", default="", help="pattern of an output line that is a step; without it a run's whole time counts")
    parser.add_argument("--seconds", default="5s", help="of steps that are counted at each point (default 5s)")
    parser.add_argument("--warm-up", default="1s", help="of steps that are not (default 1s)")
    parser.add_argument("--limit", default="10min", help="a run is given up then (default 10min)")
    parser.add_argument("--read-rate", help="also limit reading from disk, e.g. 50MB/s")
    parser.add_argument("--disk", type=Path, default=Path(), help="a path on the disk that --read-rate means (default: here)")
    parser.add_argument("--full", action="store_true", help="measure all pairs, not the few that matter")
    parser.add_argument("--out", "-o", type=Path, help="write the profile to this file: a meshwright.queue without jobs")


def run(args: argparse.Namespace) -> Result:
    from ..cluster import Queue
    from ..errors import UsageError
    from ..io.cluster import write_queue
    from ..io.quantity import parse_rate_Bps
    from ..probe.speeds import Timing, profile_command

    if args.out is not None:
        require_directory(args.out)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("there is no command", where="COMMAND", hint="meshwright cluster profile --cores 1,2 -- python train.py")
    try:
        cores = sorted({float(x) for x in args.cores.split(",")})
    except ValueError:
        raise UsageError(f"{args.cores!r} are no numbers", where="--cores", hint="as in 0.5,1,2") from None
    if not all(0 < c <= 4096 for c in cores):
        raise UsageError(f"{args.cores!r}", where="--cores", hint="above 0")
    memory = sorted({bytes_given(x, "--memory") for x in args.memory.split(",")})
    share = (cores[len(cores) // 2], memory[len(memory) // 2])
    if args.share:
        first, _, second = args.share.partition(",")
        try:
            share = (float(first), bytes_given(second, "--share") if second else share[1])
        except ValueError:
            raise UsageError(f"{args.share!r} is no share", where="--share", hint="CORES,MEMORY: 1,1GB") from None
    timing = Timing(
        steps=args.steps, warm_up_s=seconds_given(args.warm_up, "--warm-up"), seconds=seconds_given(args.seconds, "--seconds"),
        limit_s=seconds_given(args.limit, "--limit"),
    )
    try:
        read_Bps = parse_rate_Bps(args.read_rate) if args.read_rate else None
    except ValueError as error:
        raise UsageError(str(error), where="--read-rate", hint="as in 50MB/s") from None
    found = profile_command(command, timing, name=args.name, cores=cores, memory_bytes=memory, share=share, full=args.full, read_Bps=read_Bps,
                            disk=args.disk if read_Bps else None)  # fmt: skip
    p = found.profile
    lines = [
        f"{args.name}: {len(found.points)} points measured of {found.grid}; speed as a multiple of that at {share[0]:g} cores and "
        f"{share[1] / 1e9:g} GB", "",
        f"{'cores':>8}" + "".join(f"{m / 1e9:>9g} GB" for m in p.memory_bytes),
        *(f"{c:>8g}" + "".join(f"{w:>12.3f}" for w in row) for c, row in zip(p.cores, p.speed, strict=True)),
    ]  # fmt: skip
    document = {
        "schema": "meshwright.cluster-profile", "version": 1, "name": p.name, "cores": list(p.cores), "memory_bytes": list(p.memory_bytes),
        "speed": [list(row) for row in p.speed], "share_cores": share[0], "share_memory_bytes": share[1], "grid": found.grid,
        "points": [{"cores": c, "memory_bytes": m, "rate": rate} for (c, m), rate in sorted(found.points.items())],
    }  # fmt: skip
    if args.out is not None:
        write_queue(args.out, Queue(name=args.name, profiles=(p,)))
        document["written"] = str(args.out)
        lines.append(f"written: {args.out}")
    return Result(document, "\n".join(lines))
