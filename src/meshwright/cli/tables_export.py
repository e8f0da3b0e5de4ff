"""`meshwright tables export`: a table plan as torchrec's ShardingPlan."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .arguments import require_directory
from .frame import Result

HELP = "A table plan as torchrec's ShardingPlan, in JSON (`meshwright.run.tables.torchrec.sharding_plan` makes the object)."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan of `meshwright tables plan`")
    parser.add_argument("--to", choices=["torchrec"], default="torchrec", help="the library that it is for")
    parser.add_argument("--out", "-o", type=Path, required=True, help="where to write it")


def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import check_plan, read_plan
    from ..drive.tables import shards_of, tables_of
    from ..io.atomic import write_bytes
    from ..io.export.torchrec import torchrec_document

    require_directory(args.out)
    plan = read_plan(args.plan)
    document = torchrec_document(tables_of(plan), shards_of(plan), plan.placement[: plan.main.ranks])
    check_plan(plan)
    write_bytes(args.out, json.dumps(document, indent=1).encode() + b"\n")
    kinds = [t["sharding_type"] for tables in document["plan"].values() for t in tables.values()]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    said = {"schema": "meshwright.tables-export", "version": 1, "file": str(args.out), "to": args.to, "tables": len(kinds), "kinds": counts}
    return Result(said, f"{args.out}: {len(kinds)} tables for torchrec, " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
