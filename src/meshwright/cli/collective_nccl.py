"""`meshwright collective nccl`: what NCCL would choose per message size, by its own tuner model, and what would change it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import fabric_arguments
from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective.nccl.model import NcclTopology, Option

HELP = "what NCCL would choose for a collective, by its own model"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", help="all-reduce, all-gather, reduce-scatter, broadcast or reduce")
    fabric_arguments(parser)
    parser.add_argument("--sizes", default="1KiB:1GiB", help="FIRST:LAST[:FACTOR] (factor 2 by default) or a list A,B,C (default 1KiB:1GiB)")
    parser.add_argument("--arch", help="volta, ampere, hopper or blackwell (default: by the devices' figures)")
    parser.add_argument("--cpu", default="intel", help="intel, amd or other: NCCL's figures depend on it (default intel)")
    parser.add_argument("--algo", help="algorithms allowed, written as in NCCL_ALGO: ring,tree or ^nvls")
    parser.add_argument("--proto", help="protocols allowed, written as in NCCL_PROTO: LL,Simple or ^LL128")
    parser.add_argument("--all", action="store_true", help="print every cell of the tuner's table, not only the choice")


def sizes_of(text: str) -> list[int]:
    """As `collective compare --sizes`; every size at least a byte. Raises UsageError."""
    from ..errors import UsageError
    from .collective_compare import sizes_of as sizes

    found = sizes(text)
    if min(found) < 1:
        raise UsageError(f"{text[:64]!r} names no size", where="--sizes", hint="e.g. --sizes 1KiB:1GiB")
    return found


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective.nccl.model import changes, parse_list, predict, topology_of
    from ..decide.collective.nccl.tables import ALGORITHMS, PROTOCOLS, SOURCE
    from ..decide.collective.problem import OPERATIONS, busbw_factor
    from ..drive.plans import read_fabric
    from ..errors import UnknownName, UsageError

    if args.op not in OPERATIONS:
        raise UnknownName(f"no collective {args.op!r}", hint=f"operations: {', '.join(OPERATIONS)}")
    sizes = sizes_of(args.sizes)
    fabric = read_fabric(args.fabric, args.devices)
    if len(fabric.devices) < 2:
        raise UsageError(f"a collective needs at least 2 devices, got {len(fabric.devices)}", hint="name more devices")
    topology = topology_of(fabric, [d.name for d in fabric.devices], arch=args.arch, cpu=args.cpu)
    lists = {"algorithms": parse_list(args.algo, ALGORITHMS, "algorithm"), "protocols": parse_list(args.proto, PROTOCOLS, "protocol")}
    factor = float(busbw_factor(args.op, topology.ranks))
    rows = [_row(size, predict(topology, args.op, size, **lists), factor) for size in sizes]
    document: dict[str, Any] = {
        "schema": "meshwright.nccl-prediction", "version": 1, "op": args.op, "fabric": fabric.name, "model": "NCCL's own tuner, not a simulation",
        "source": SOURCE, "topology": _facts(topology), "rows": rows, "changes": changes(topology, args.op, sizes[len(sizes) // 2], **lists),
    }  # fmt: skip
    return Result(document, _text(document, every=args.all))


def _row(size: int, cells: list[Option], factor: float) -> dict[str, Any]:
    best = cells[0]
    assert best.time_us is not None
    algbw = size / best.time_us * 1e6
    return {
        "size_bytes": size, "algorithm": best.algorithm, "protocol": best.protocol, "time_s": best.time_us * 1e-6, "algbw_Bps": algbw,
        "busbw_Bps": algbw * factor, "table": [c.to_json() for c in cells],
    }  # fmt: skip


def _facts(t: NcclTopology) -> dict[str, Any]:
    return {
        "ranks": t.ranks, "nodes": t.nodes, "arch": t.arch, "intra": t.intra, "cpu": t.cpu, "channels": t.ring.count,
        "intra_GBps": t.ring.intra_GBps, "inter_GBps": t.ring.inter_GBps, "nvls_channels": t.nvls.count if t.nvls else 0,
        "assumptions": list(t.assumptions),
    }  # fmt: skip


def _text(document: dict[str, Any], *, every: bool) -> str:
    from ..io.quantity import show_size

    facts = document["topology"]
    lines = [
        f"{document['op']} on {document['fabric']}: {facts['nodes']} node(s), {facts['ranks']} {facts['arch']} GPUs, {facts['channels']} channels of "
        f"{facts['intra_GBps']:g} GB/s ({document['source']})",
        f"{'size':>10}  {'algorithm':<9} {'protocol':<8} {'time':>12} {'algbw GB/s':>11} {'busbw GB/s':>11}",
    ]
    for row in document["rows"]:
        speeds = f"{row['algbw_Bps'] / 1e9:>11.2f} {row['busbw_Bps'] / 1e9:>11.2f}"
        lines.append(f"{show_size(row['size_bytes']):>10}  {row['algorithm']:<9} {row['protocol']:<8} {row['time_s'] * 1e6:>9.1f} us {speeds}")
        for cell in row["table"] if every else []:
            what = f"{cell['time_us']:>9.1f} us" if cell["time_us"] is not None else f"    - {cell['why']}"
            lines.append(f"{'':>10}  {cell['algorithm']:<9} {cell['protocol']:<8} {what}")
    middle = document["rows"][len(document["rows"]) // 2]
    lines += [f"at {show_size(middle['size_bytes'])}: {change}" for change in document["changes"]]
    lines += ["assumed: " + "; ".join(facts["assumptions"]), "This is NCCL's own model, not a simulation; `collective compare` simulates."]
    return "\n".join(lines)
