"""`meshwright fabric here`: the fabric of the machine this runs on, from what its own tools say, with what had to be assumed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..errors import UsageError
from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..probe.speeds.cores import CoreSpeeds

__all__ = ["HELP", "arguments", "run"]

HELP = "Read this machine: its GPUs, their links, its network ports; without GPUs, its CPUs. Says what it assumed."
EPILOG = """\
examples:
  meshwright fabric here                              what it finds, as text
  meshwright fabric here -o node.toml                 write it, for --fabric node.toml
  meshwright fabric here --boxes 4 -o cluster.toml    four machines like this one
  meshwright fabric here --measure-cores -o box.toml  with how much busy cores slow each other down, for the simulator
  meshwright fabric here --save outputs               keep what the tools said; --from outputs reads it elsewhere

reads nvidia-smi topo -m, nvidia-smi -q, ibstat or ibv_devinfo -v, lscpu and NCCL's topology file, those that are there; measures nothing
(`meshwright fabric probe` does), but for --measure-cores."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", help="write the fabric into this .toml or .json")
    parser.add_argument("--boxes", type=at_least_one, default=1, metavar="N", help="N machines like this one (default 1)")
    parser.add_argument("--net", default="switch", help="between machines: switch (default), rails, spine, planes, direct or trunk")
    parser.add_argument("--cores", type=at_least_one, metavar="N", help="without GPUs: N processes (default: one for each CPU)")
    help_text = "without GPUs: measure how much busy cores slow each other down, and what a CPU quota costs (seconds; on a quiet machine)"
    parser.add_argument("--measure-cores", action="store_true", help=help_text)
    parser.add_argument("--save", metavar="DIR", help="keep the tools' outputs in this folder")
    parser.add_argument("--from", dest="saved", metavar="DIR", help="read the outputs in this folder instead of this machine")


def run(args: argparse.Namespace) -> Result:
    from ..fabric.preset_parts import NET
    from ..io.atomic import write_text
    from ..io.fabric.document import fabric_document
    from ..io.fabric.machine_outputs import machine_fabric
    from ..io.fabric.toml import fabric_toml
    from ..probe.fabric.machine import machine_outputs, nccl_settings, read_outputs, save_outputs
    from ..report.fabric_fold import fold_text
    from ..report.fabric_matrix import summary_text

    for option, value, most in (("--boxes", args.boxes, 2048), ("--cores", args.cores, 4096)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"must be between 1 and {most}, got {value}", where=option)
    if args.net not in NET.choices:
        raise UsageError(f"no network {args.net!r}", where="--net", hint=f"one of: {', '.join(NET.choices)}")
    if args.out and not args.out.lower().endswith((".toml", ".json")):
        raise UsageError(f"--out must end in .toml or .json, got {args.out[-64:]!r}")
    if args.measure_cores and (args.saved or args.boxes > 1):
        raise UsageError("measures this machine alone", where="--measure-cores", hint="leave out --from and --boxes")
    outputs, missing = (read_outputs(args.saved), []) if args.saved else machine_outputs()
    if args.save:
        save_outputs(outputs, args.save)
    fabric = machine_fabric(outputs, boxes=args.boxes, net=args.net, cores=args.cores)
    cores = None
    if args.measure_cores:
        from ..probe.speeds.cores import measure_cores, require_cpus, with_speeds

        require_cpus(fabric)
        cores = measure_cores()
        fabric = with_speeds(fabric, cores)
    settings = {} if args.saved else nccl_settings()
    document = {
        "schema": "meshwright.fabric-here", "version": 1, "fabric": fabric_document(fabric), "read": sorted(outputs), "not_read": missing,
        "nccl": settings,
    }  # fmt: skip
    if cores is not None:
        document["cores"] = asdict(cores)
    lines = [summary_text(fabric), "", fold_text(fabric), "", f"read: {', '.join(sorted(outputs)) or 'nothing'}"]
    lines += [f"not read: {x}" for x in missing]
    lines += [f"NCCL is told {name}={value}" for name, value in sorted(settings.items())]
    if cores is not None:
        lines += ["", *_cores_text(cores)]
    if args.out:
        text = fabric_toml(fabric) if args.out.lower().endswith(".toml") else json.dumps(document["fabric"], ensure_ascii=False) + "\n"
        write_text(args.out, text)
        lines.append(f"written: {args.out}; check it: meshwright fabric lint {args.out}")
    return Result(document, "\n".join(lines))


def _cores_text(found: CoreSpeeds) -> list[str]:
    from ..report.columns import columns

    rows = [["busy cores", *found.speeds], *([str(k + 1), *(f"{s[k]:.2f}" for s in found.speeds.values())] for k in range(found.cores))]
    lines = ["speed of each busy core, by one alone:", *columns(rows)]
    for q in found.quotas:
        said = ", ".join(f"{kind} {x:.2f}" for kind, x in q.cost.items())
        lines.append(f"a quota of {q.share:g} of a core gives {q.got:.3f}; processor time of the same work, by that without: {said}")
    lines.append(f"median of {found.rounds} rounds; other programs used {found.others_share:.0%} of the machine")
    return lines
