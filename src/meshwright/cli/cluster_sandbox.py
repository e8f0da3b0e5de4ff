"""`meshwright cluster sandbox up|down|list|files`: Slurm or Ray on this machine with made-up nodes and GPUs; or files for a Slurm of your own."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one, require_directory
from .cluster_arguments import bytes_given
from .frame import Result

HELP = "Slurm or Ray on this machine with made-up nodes and GPUs, for tries; or files for a Slurm of your own."
EPILOG = """\
examples:
  meshwright cluster sandbox up slurm --nodes 4 --gpus 4 --name try
  meshwright cluster sandbox up ray --nodes 4 --gpus 4 --name rays
  meshwright cluster sandbox list
  meshwright cluster sandbox down try
  meshwright cluster sandbox files slurm --fabric dgx-h100:16 --out conf      (topology.conf and job_submit.lua)

A sandbox stays until `down`. It has ports, a key and processes of its own; when its holder is killed, the kernel ends all of them."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("do", choices=("up", "down", "list", "files"), help="up, down, list; files: write files and start nothing")
    parser.add_argument("what", nargs="?", default="", help="up: slurm or ray; files: slurm; down: the sandbox's name")
    parser.add_argument("--nodes", type=at_least_one, default=4, help="nodes (default 4)")
    parser.add_argument("--gpus", type=int, help="made-up GPUs of one node (default 4, or as many as the fabric's)")
    parser.add_argument("--cores", type=at_least_one, default=8, help="cores that a node claims (default 8)")
    parser.add_argument("--memory", default="64GiB", help="memory that a node claims (default 64GiB)")
    parser.add_argument("--name", default="", help="of the sandbox (default: a random one)")
    parser.add_argument("--fabric", help="its groups are the nodes, and topology.conf says how they are joined")
    parser.add_argument("--hold-others", action="store_true", help="job_submit.lua holds jobs that were not decided")
    parser.add_argument("--partition", default="", help="files: the partition that job_submit.lua keeps to decisions (default: all)")
    parser.add_argument("--out", "-o", type=Path, help="files: an existing folder")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError
    from ..run.engines import sandbox

    if args.do == "list":
        found = sandbox.listed()
        lines = [f"{s.name}: {s.kind}, {len(s.nodes)} nodes of {s.gpus} GPUs, ready in {s.ready_s:.1f} s" for s in found]
        return Result({"schema": "meshwright.sandboxes", "version": 1, "sandboxes": [_row(s) for s in found]}, "\n".join(lines) or "no sandbox")
    if args.do == "down":
        if not args.what:
            raise UsageError("which one?", where="NAME", hint="meshwright cluster sandbox list")
        sandbox.Sandbox.open(args.what).down()
        return Result({"schema": "meshwright.sandbox-down", "version": 1, "name": args.what}, f"{args.what} is gone")
    if args.what not in (("slurm", "ray") if args.do == "up" else ("slurm",)):
        raise UsageError(f"there is no sandbox of {args.what[:32]!r}", where="WHAT", hint="meshwright cluster sandbox up slurm, or ray")
    if args.what == "ray" and args.hold_others:
        raise UsageError("Ray holds no jobs of others", where="--hold-others", hint="leave it out")
    return _files(args) if args.do == "files" else _up(args)


def _row(state: object) -> dict[str, object]:
    import msgspec

    found: dict[str, object] = msgspec.to_builtins(state)
    return found


def _up(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_fabric
    from ..run.engines.sandbox import Sandbox

    fabric = read_fabric(args.fabric) if args.fabric else None
    gpus = args.gpus if args.gpus is not None else max(map(len, fabric.groups.values()), default=4) if fabric else 4
    made = Sandbox.up(nodes=args.nodes, gpus=gpus, cores=args.cores, memory_bytes=bytes_given(args.memory, "--memory"), name=args.name,
                      fabric=fabric, lua=args.hold_others, keep=True, kind=args.what)  # fmt: skip
    s = made.state
    lines = [
        f"{s.name}: {len(s.nodes)} nodes of {s.gpus} GPUs, {s.cores} cores, {s.memory_bytes / 1e9:.0f} GB; ready in {s.ready_s:.1f} s",
        f"export SLURM_CONF={made.conf}" if s.kind == "slurm" else f"export RAY_ADDRESS={made.address}", "",
        f"next: meshwright cluster run QUEUE --engine {s.kind} --sandbox {s.name} --folder run; at the end meshwright cluster sandbox down {s.name}",
    ]  # fmt: skip
    return Result({"schema": "meshwright.sandbox-up", "version": 1, "conf": str(made.conf) if s.kind == "slurm" else "",
                   "address": made.address if s.kind == "ray" else "", "sandbox": _row(s)}, "\n".join(lines))


def _files(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..io.atomic import write_text
    from ..io.cluster.slurm_files import job_submit_lua, topology_conf

    if not args.fabric or args.out is None:
        raise UsageError("which fabric, and where to?", where="sandbox files", hint="--fabric dgx-h100:16 --out FOLDER")
    require_directory(args.out / "topology.conf")
    texts = {"topology.conf": topology_conf(read_fabric(args.fabric)), "job_submit.lua": job_submit_lua(partition=args.partition)}
    for name, text in texts.items():
        write_text(args.out / name, text)
    return Result({"schema": "meshwright.slurm-files", "version": 1, "folder": str(args.out), "files": sorted(texts)},
                  "\n".join(f"written: {args.out / name}" for name in sorted(texts)))  # fmt: skip
