"""`meshwright fabric import FILE...`: a fabric from what describes a cluster: files of NCCL, nvidia-smi, DCGM, a scheduler's nodes, matrices."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..errors import UsageError
from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..fabric.fabric import Fabric
    from ..io.fabric.imported import Source

__all__ = ["HELP", "arguments", "run"]

HELP = "Read a cluster from the files that describe it; several files are several servers. Graph files of NCCL are shown."
EPILOG = """\
examples:
  meshwright fabric import node.xml --boxes 4 --net rails -o cluster.toml       NCCL_TOPO_DUMP_FILE of one of four equal nodes
  meshwright fabric import vm.xml --nvswitch 300GB/s --nic 25GB/s --gpu a100    a cloud's file that holds only the PCIe tree
  nvidia-smi topo -m | meshwright fabric import - --nvlink 50GB/s -o box.toml
  rocm-smi --showtopo | meshwright fabric import - --gpu mi300x -o box.toml
  kubectl get nodes -o json | meshwright fabric import - -o cluster.toml        nodes as the presets of their instance types
  scontrol show node | meshwright fabric import - -o cluster.toml
  meshwright fabric import rates.csv --unit 25GB/s -o box.toml                  an adjacency matrix of link counts
  meshwright fabric import graph.xml                                            the rings and trees that NCCL found"""

AS = ("toml", "json", "matrix", "edges", "nccl")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="what to read; - is standard input")
    formats = "auto (default: told by content), nccl, nccl-graph, nvidia-smi, rocm-smi, dcgm, kubernetes, slurm, matrix or edges"
    parser.add_argument("--format", default="auto", help=formats)
    parser.add_argument("-o", "--out", metavar="FILE", help="write the fabric there (default: stdout)")
    parser.add_argument("--as", dest="form", choices=AS, help="format to write (default: by the ending of --out, else toml)")
    parser.add_argument("--name", default="", help="the fabric's name (default: the file's)")
    joined = parser.add_argument_group("several servers")
    joined.add_argument("--boxes", type=at_least_one, default=1, metavar="N", help="N servers like each file (default 1)")
    joined.add_argument("--net", default="switch", help="between servers: switch (default), rails, spine, planes, direct or trunk")
    joined.add_argument(
        "--oversubscription", type=at_least_one, default=1, metavar="N",
        help="oversubscription of rails (spine) or of servers (trunk)",
    )  # fmt: skip
    joined.add_argument("--trunk", metavar="RATE", help="with --net trunk: rate of a server's uplink")
    facts = parser.add_argument_group("what the file does not say, or says wrongly")
    facts.add_argument("--nic", metavar="RATE", help="rate of every NIC's port")
    facts.add_argument("--nvswitch", metavar="RATE", help="nccl: add an NVSwitch that the file does not show; its rate per GPU")
    facts.add_argument("--nvlink", metavar="RATE", help="nvidia-smi, dcgm, rocm-smi: rate of one NVLink (default 25GB/s) or XGMI link (64GB/s)")
    facts.add_argument("--pcie", metavar="RATE", help="nvidia-smi, dcgm, rocm-smi: rate of one PCIe link (default 24GB/s)")
    facts.add_argument("--gpu", help="model of the GPUs (a100, h100, ...), for memory and FLOP/s")
    facts.add_argument(
        "--rates", choices=("nccl", "nominal"), default="nccl",
        help="nccl: NVLink rates that NCCL plans with (default), or nominal rates",
    )  # fmt: skip
    facts.add_argument("--unit", default="1GB/s", metavar="RATE", help="matrix, edges: what the number 1 means (default 1GB/s)")


def run(args: argparse.Namespace) -> Result:
    from ..io.atomic import write_text
    from ..io.fabric.document import fabric_document
    from ..io.fabric.imported import FORMATS, format_of, read_source
    from ..io.fabric.nodes import LEFT_OUT

    if args.format not in ("auto", *FORMATS):
        raise UsageError(f"no format {args.format!r}", where="--format", hint=f"auto, {', '.join(FORMATS)}")
    sources = [read_source(path) for path in args.files]
    if (format_of(sources[0]) if args.format == "auto" else args.format) == "nccl-graph":
        return _graphs(sources)
    fabric = _fabric(args, sources)
    form = args.form or ("json" if (args.out or "").lower().endswith(".json") else "toml")
    text = _text(fabric, form)
    document = fabric_document(fabric)
    if args.out is None:
        return Result(document, text if form != "json" else json.dumps(document, ensure_ascii=False))
    write_text(args.out, text)
    said = f"{args.out}: {len(fabric.devices)} devices, {len(fabric.switches)} switches, {len(fabric.links)} links"
    said += "".join(f"\n{note.what}: {note.source}" for note in fabric.provenance if LEFT_OUT in note.source)
    if form in ("toml", "json"):
        said += "".join(f"\nassumed: {x}" for x in _left_out(args, sources)) + f"\ncheck it: meshwright fabric lint {args.out}"
    return Result(document, said)


def _left_out(args: argparse.Namespace, sources: list[Source]) -> list[str]:
    """What NCCL files do not say and no option says instead."""
    from ..io.fabric.imported import format_of
    from ..io.nccl.lint import lint_nccl
    from ..io.nccl.topology import parse_nccl_topology

    if args.nic is not None or args.nvswitch is not None or (format_of(sources[0]) if args.format == "auto" else args.format) != "nccl":
        return []
    found = (f for s in sources for f in lint_nccl(parse_nccl_topology(s.data, s.where)) if f.rule == "pcie-only")
    return [f"{f.where}: {f.message}; {f.hint}" for f in found]


def _fabric(args: argparse.Namespace, sources: list[Source]) -> Fabric:
    from ..fabric.preset_parts import NET
    from ..io.fabric.imported import import_fabric
    from ..io.fabric.topo_matrix import Assumed
    from ..io.nccl.fabric import Join

    if args.net not in NET.choices:
        raise UsageError(f"no network {args.net!r}", where="--net", hint=f"one of: {', '.join(NET.choices)}")
    for option, value in (("--boxes", args.boxes), ("--oversubscription", args.oversubscription)):
        if not 1 <= value <= 4096:
            raise UsageError(f"must be between 1 and 4096, got {value}", where=option)
    nic, trunk, nvswitch = (_rate(args, name) for name in ("nic", "trunk", "nvswitch"))
    join = Join(net=args.net, oversubscription=args.oversubscription, trunk=trunk, nic=nic, nvswitch=nvswitch, gpu=args.gpu, copies=args.boxes,
                rates=args.rates)  # fmt: skip
    assumed = Assumed(
        nvlink=_rate(args, "nvlink"), pcie=_rate(args, "pcie") or 24 * 10**9, nic=nic, net=args.net, gpu=args.gpu, copies=args.boxes,
        oversubscription=args.oversubscription, trunk=trunk,
    )  # fmt: skip
    return import_fabric(sources, form=args.format, name=args.name, join=join, assumed=assumed, unit_Bps=_rate(args, "unit") or 10**9)


def _rate(args: argparse.Namespace, name: str) -> int | None:
    from ..io.quantity import parse_rate_Bps

    text = getattr(args, name)
    if text is None:
        return None
    try:
        value = parse_rate_Bps(text)
    except ValueError as error:
        raise UsageError(str(error), where=f"--{name}", hint="e.g. 25GB/s or 200Gbit/s") from None
    if not 0 < value <= 10**16:
        raise UsageError(f"must be above 0 and at most 10 PB/s, got {text}", where=f"--{name}")
    return value


def _text(fabric: Fabric, form: str) -> str:
    from ..io.fabric.adjacency import edges_text, matrix_text_of
    from ..io.fabric.document import fabric_document
    from ..io.fabric.toml import fabric_toml
    from ..io.nccl.write import nccl_topology_text

    if form == "json":
        return json.dumps(fabric_document(fabric), ensure_ascii=False) + "\n"
    return {"toml": fabric_toml, "matrix": matrix_text_of, "edges": edges_text, "nccl": nccl_topology_text}[form](fabric)


def _graphs(sources: list[Source]) -> Result:
    from dataclasses import asdict

    from ..io.nccl.graph import graph_lines, parse_nccl_graph

    found = [(source.where, parse_nccl_graph(source.data, source.where)) for source in sources]
    lines = [line for where, graphs in found for line in ([f"{where}:"] if len(found) > 1 else []) + graph_lines(graphs)]
    files = [{"file": where, "graphs": [asdict(graph) for graph in graphs]} for where, graphs in found]
    return Result({"schema": "meshwright.nccl-graphs", "version": 1, "files": files}, "\n".join(lines))
