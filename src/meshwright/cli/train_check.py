"""`meshwright train check PLAN`: is a plan right, and does it claim what is so? Exit code 4 and a witness if not."""

from __future__ import annotations

import argparse

from .collective_check import verdict_text
from .frame import Result

HELP = "prove a plan right and its claims true, or show where they are not"
EPILOG = """Proved are: form, no deadlock, no races, every gradient whole, memory, links, the bound; compared are the prediction with the simulator
and the names of strategies with those that exist. Any plan of ours will do, a pipeline's or a collective's too."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan to check; `-` is standard input")


def run(args: argparse.Namespace) -> Result:
    from ..drive.claims import check_claims
    from ..drive.plans import read_plan

    plan = read_plan(args.plan)
    verdict = check_claims(plan)
    facts = {"op": f"{plan.kind} plan", "ranks": plan.main.ranks}
    document = {"schema": "meshwright.train-check", "version": 1, "file": args.plan, **facts, **verdict.to_json()}
    return Result(document, verdict_text(args.plan, facts, verdict), 0 if verdict.ok else 4)
