"""`meshwright cite`: the publications that a plan rests on."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "the publications a plan rests on"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan file")


def run(args: argparse.Namespace) -> Result:
    from ..drive.citations import citations
    from ..drive.plans import read_plan
    from ..io.plan.traffic import is_traffic_plan

    if is_traffic_plan(args.plan):
        from ..drive.traffic import load_traffic_plan, traffic_citations

        cites = traffic_citations(load_traffic_plan(args.plan))
    else:
        cites = citations(read_plan(args.plan))
    lines = [f"{part}: {cite.line()}" for part, cite in cites]
    document = {
        "schema": "meshwright.citations",
        "version": 1,
        "citations": [{"part": part, "key": c.key, "title": c.title, "year": c.year, "venue": c.venue} for part, c in cites],
    }
    return Result(document, "\n".join(lines))
