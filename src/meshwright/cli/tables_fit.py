"""`meshwright tables fit`: what embedding lookups and their exchanges cost on this machine, measured, and learned by nets."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one, require_directory, whole_number
from .frame import Result
from .tables_arguments import lab_of, tables_arguments, tables_given

HELP = "Measure what embedding lookups and their exchanges cost on this machine, and train the nets that plans are made by."


def arguments(parser: argparse.ArgumentParser) -> None:
    tables_arguments(parser)
    parser.add_argument("--points", type=at_least_one, default=3000, help="sets of tables whose lookups are measured (default 3000: some minutes)")
    loads = "loads whose exchanges are measured between one process per device (default 500; 0: priced by the fabric's links)"
    parser.add_argument("--exchange-points", type=whole_number, default=500, help=loads)
    parser.add_argument("--epochs", type=at_least_one, default=300, help="of training (default 300)")
    parser.add_argument("--lab", metavar="NAME", help="measure exchanges in this lab (`meshwright lab up`), not on loopback")
    parser.add_argument("--out", "-o", type=Path, default=Path("costs.safetensors"), help="where to write the costs (default costs.safetensors)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_fabric
    from ..io.costs.lookups import write_lookup_costs
    from ..probe.tables.fit import fit_costs

    require_directory(args.out)
    tables, fabric = tables_given(args), read_fabric(args.fabric, args.devices)
    exchanges = args.exchange_points if len(fabric.devices) > 1 else 0
    with lab_of(args.lab) as lab:
        found = fit_costs(tables, fabric, points=args.points, exchange_points=exchanges, epochs=args.epochs, seed=args.seed, lab=lab)
    costs = found.costs
    write_lookup_costs(args.out, costs)
    document = {
        "schema": "meshwright.tables-fit", "version": 1, "file": str(args.out), "points": args.points, "exchange_points": exchanges,
        "errors": dict(costs.errors), "additive_error": found.additive_error, "floor_s": list(costs.floor), "overhead_s": costs.overhead_s,
        "machine": dict(costs.machine), "batch": costs.batch, "fabric": costs.fabric, "devices": costs.devices,
    }  # fmt: skip
    lines = [
        f"{args.points} sets of {len(tables.tables)} tables, {tables.batch} samples, by {costs.machine['operator']} on {costs.machine['cpu']}",
        f"lookups: median error {costs.errors['compute']:.1%} on sets that the net never saw; the best additive formula {found.additive_error:.1%}",
    ]
    if exchanges:
        told = ", ".join(f"{name} {error:.1%}" for name, error in sorted(costs.errors.items()) if name != "compute")
        lines.append(f"exchanges: median errors {told}; {'nets' if costs.forward is not None else 'links'} are used")
    lines.append(f"written: {args.out}")
    return Result(document, "\n".join(lines))
