"""`meshwright collective replan`: a new schedule when a NIC, GPU, server or link is down or slow, and the throughput that is lost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import require_directory
from .collective_bound import limit_arguments, limits, problem_arguments, problem_of, seed
from .frame import Result

if TYPE_CHECKING:
    from ..decide.collective import CollectiveStrategy

DEFAULT_EFFORT_S = 600  # counted work, about the seconds of a quiet core
HELP = "a new schedule when a NIC, GPU or link is down or slow, and what is lost"
EPILOG = """\
examples:
  meshwright collective replan all-gather --fabric dgx-h100:128 --size 1GiB --without box3/nic2
  meshwright collective replan all-reduce --fabric dgx-a100:4 --size 64MiB --without box1/gpu5,box2/nic0 --degrade box0/nic3=0.5"""


def arguments(parser: argparse.ArgumentParser) -> None:
    problem_arguments(parser)
    parser.add_argument("--strategy", default="auto", help="auto (default: forestcoll, on alike servers where that is as good) or a strategy's name")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    limit_arguments(parser, DEFAULT_EFFORT_S)
    parser.add_argument("--out", "-o", type=Path, help="also write the plan to this file (.json or .json.gz)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.collective import strategy
    from ..drive.collective.replan import replan
    from ..drive.plans import write_plan
    from ..io.fabric.name import parts_down, parts_slow
    from ..io.quantity import show_rate
    from ..kernels.effort import cut_of
    from ..report.bottleneck_text import explain_bottleneck
    from ..report.collective_text import bound_document, plan_document, plan_line

    down, slow = parts_down(args.without), parts_slow(args.degrade)
    if args.out is not None:
        require_directory(args.out)
    args.without = args.degrade = None
    whole = problem_of(args, seed=args.seed, **limits(args))
    given: Sequence[CollectiveStrategy] = () if args.strategy == "auto" else [strategy(args.strategy)()]
    found = replan(whole, down, slow, candidates=given)
    lines, bottleneck = explain_bottleneck(found.now, found.now_bound)
    before, after = (int(p.size_bytes / b.exact) for p, b in ((found.whole, found.whole_bound), (found.now, found.now_bound)))
    document = plan_document(found.now, found.ranked) | {
        "down": list(down), "slow": {name: str(x) for name, x in slow.items()}, "whole": bound_document(found.whole, found.whole_bound),
        "lost": str(found.lost), "bottleneck": bottleneck,
    }  # fmt: skip
    lost = f"{100 * float(found.lost):.3g} % of the whole fabric's throughput" if found.lost > 0 else "nothing"
    text = f"{plan_line(found.now, found.ranked)}\nlost: {lost}; at best {show_rate(after)} instead of {show_rate(before)}"
    if args.out is not None:
        write_plan(args.out, found.plan)
        document["plan"] = str(args.out)
        lines.append(f"written: {args.out}")
    return Result(document, "\n".join([text, *lines]), cut=cut_of(found.plan.decisions))
