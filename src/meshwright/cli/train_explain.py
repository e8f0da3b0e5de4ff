"""`meshwright train explain`: why a plan is as it is, with the runners-up and what each lost by."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "say why a plan was chosen, with the runners-up"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan file")
    parser.add_argument("--limit", type=int, default=10, help="how many runners-up to list (default 10)")


def run(args: argparse.Namespace) -> Result:
    from ..drive import read_plan
    from ..report.plan_text import explain_text, plan_document

    plan = read_plan(args.plan)
    return Result(plan_document(plan, path=str(args.plan), alternatives=args.limit), explain_text(plan, limit=args.limit))
