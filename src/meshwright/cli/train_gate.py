"""`meshwright train gate`: compare one training step of a plan with the owner's module, without running the plan's ranks as processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .frame import Result

if TYPE_CHECKING:
    from ..run.gate.gate import Stated

HELP = "compare one step of a plan with the owner's module: loss, gradients, buffers, parameters after the optimizer"


def choices(parser: argparse.ArgumentParser) -> None:
    """What the owner says is meant, of `train gate` and `train run`."""
    parser.add_argument(
        "--batch-statistics", choices=("local", "global"), default="",
        help="of BatchNorm, contrasts and balances within a batch: local (each micro-batch its own), global (of the whole batch); default: refuse",
    )  # fmt: skip
    parser.add_argument(
        "--dropout", choices=("serial", "local"), default="serial",
        help="serial (default): random numbers are those of one process, or it is refused; local: each rank may draw its own",
    )  # fmt: skip


def stated(args: argparse.Namespace) -> Stated:
    from ..run.gate.gate import Stated

    return Stated(batch_statistics=args.batch_statistics, dropout=args.dropout)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan file made by `meshwright train plan`")
    parser.add_argument("--data", default="python-source", help="data of the first batch, as for `train run` (default python-source)")
    parser.add_argument("--whole", action="store_true", help="compare the plan itself, however large, and not a smaller copy of it")
    choices(parser)


def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import check_plan, read_plan
    from ..run.gate.shapes import gate_shapes
    from ..run.launch.request import require_training_plan

    plan = read_plan(args.plan)
    check_plan(plan)
    require_training_plan(plan)
    report = gate_shapes(plan, data=args.data, stated=stated(args), limited=not args.whole)
    return Result(report.to_json(), report.text())
