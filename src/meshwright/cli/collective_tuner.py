"""NCCL's tuner configuration, for `collective export --format nccl-tuner` and `collective import --format nccl-tuner`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .frame import Result

if TYPE_CHECKING:
    from ..fabric.fabric import Fabric
    from ..io.nccl.tuner import TunerRow

__all__ = ["export_tuner", "import_tuner"]

ALGORITHM_NAMES = {"nvlstree": "nvls_tree", "collnetdirect": "collnet_direct", "collnetchain": "collnet_chain"}  # NCCL's -> the plugin's


# NCCL's algorithm -> the strategy that plans the same exchange, for `--by simulation`
SIMULATED = {"ring": "ring", "tree": "double-tree", "pat": "pat"}


def export_tuner(args: argparse.Namespace) -> Result:
    """Per size an algorithm and a protocol; NCCL keeps its number of channels.

    By `model`: what NCCL's own model expects to be fastest on the fabric. By `simulation`: the algorithm (ring, tree, PAT) whose schedule is
    fastest on our simulator, which sees the fabric's links; the protocol is the model's best for it.
    """
    from ..decide.collective.nccl.model import choices, predict, topology_of
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..io.nccl.tuner import COLLECTIVES, rows_of_choices, write_tuner
    from .collective_nccl import sizes_of

    if args.fabric is None:
        raise UsageError("--format nccl-tuner needs --fabric", hint="e.g. --fabric dgx-h100:2")
    if args.what not in COLLECTIVES.values():
        raise UsageError(f"the tuner plugin knows no {args.what!r}", hint=f"one of {', '.join(COLLECTIVES.values())}")
    fabric = read_fabric(args.fabric, args.devices)
    names = [d.name for d in fabric.devices]
    topology = topology_of(fabric, names)
    found = []
    for size, best in choices(topology, args.what, sizes_of(args.sizes)):
        if args.by == "simulation":
            wanted = _fastest(fabric, args.what, size)
            cells = [c for c in predict(topology, args.what, size) if c.algorithm == wanted and c.time_us is not None]
            best = cells[0] if cells else best
        name = best.algorithm.lower()
        found.append((size, ALGORITHM_NAMES.get(name, name), best.protocol.lower(), -1))
    rows = rows_of_choices(args.what, found, nodes=topology.nodes, ranks=topology.ranks)
    write_tuner(args.out, rows)
    return Result(_document(args.out, rows), f"{args.out}: {len(rows)} ranges of sizes\n" + "\n".join(_lines(rows)))


def _fastest(fabric: Fabric, op: str, size_bytes: int) -> str:
    """The NCCL algorithm whose schedule takes the least simulated time."""
    import numpy as np

    from ..decide.collective import NAMES, CollectiveProblem
    from ..decide.collective.program_time import simulated_time_s
    from ..errors import Unsupported

    problem = CollectiveProblem.on(fabric, op, -(-size_bytes // 4) * 4)
    times = {}
    for algorithm, strategy in SIMULATED.items():
        try:
            plan = NAMES[strategy]().plan(problem, rng=np.random.default_rng(0))
        except Unsupported:
            continue
        times[algorithm] = simulated_time_s(plan.program, fabric, problem.ranks, None)
    return min(times, key=lambda name: times[name])


def import_tuner(path: str, where: str) -> Result:
    """What a configuration says, in order."""
    from ..io.nccl.tuner import read_tuner

    rows = read_tuner(path)
    return Result(_document(where, rows), "\n".join([f"{where}: {len(rows)} rows, the first that matches holds", *_lines(rows)]))


def _document(where: str, rows: Sequence[TunerRow]) -> dict[str, Any]:
    from dataclasses import asdict

    return {"schema": "meshwright.nccl-tuner", "version": 1, "format": "nccl-tuner", "file": where, "rows": [asdict(row) for row in rows]}


def _lines(rows: Sequence[TunerRow]) -> list[str]:
    from ..io.nccl.tuner import NO_LIMIT
    from ..io.quantity import show_size

    lines = []
    for row in rows:
        end = "any size" if row.max_bytes >= NO_LIMIT else show_size(row.max_bytes)
        channels = f", {row.channels} channels" if row.channels > 0 else ""
        lines.append(f"  {row.op} {show_size(row.min_bytes)} to {end}: {row.algorithm} {row.protocol}{channels}")
    return lines
