"""`meshwright cite`: the publications that a plan rests on."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "the publications a plan rests on"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan file")


def run(args: argparse.Namespace) -> Result:
    from ..drive import citations, read_plan

    cites = citations(read_plan(args.plan))
    lines = [f"{part}: {cite.line()}" for part, cite in cites]
    document = {
        "schema": "meshwright.citations",
        "version": 1,
        "citations": [{"part": part, "key": c.key, "title": c.title, "year": c.year, "venue": c.venue} for part, c in cites],
    }
    return Result(document, "\n".join(lines))
