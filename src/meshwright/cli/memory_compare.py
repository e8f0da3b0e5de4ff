"""`meshwright memory compare`: what every strategy's recomputation costs at every budget, PyTorch's own included, beside a bound."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one
from .frame import Result

HELP = "time beyond keeping everything, by memory budget, of all strategies and PyTorch's own, beside a bound"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="FILE.py:function or module:function that returns (module, example inputs)")
    parser.add_argument("--loss", default="cross-entropy", help="cross-entropy (default), mse, output, or module:function")
    parser.add_argument("--batch", type=at_least_one, help="rows of the batch (default: as the example inputs)")
    parser.add_argument("--budgets", type=at_least_one, default=11, help="budgets, evenly from keeping everything to the least peak (default 11)")
    parser.add_argument(
        "--strategies", default="",
        help="strategies, separated by commas, or all (monet takes long); default: those that give a whole curve at once",
    )  # fmt: skip
    parser.add_argument("--effort", type=int, default=100, help="effort of the search, in millions of simulated operator runs (default 100)")
    parser.add_argument(
        "--implementations", default="plain", metavar="KINDS",
        help="a curve of plans that choose how operators run, too: exact (others with the same bits), rounding, bf16, int8 (by commas; default: "
        "plain, no such curve); takes up to two minutes a budget, and with rounding as long again for images channels last",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, help="draw the curve into this file (SVG)")


def run(args: argparse.Namespace) -> Result:
    import msgspec

    from ..errors import UsageError
    from ..io.atomic import write_text
    from ..probe.steps.compare import budgeted, compare_step
    from ..probe.steps.measured import implementations_named, measured_steps
    from ..report.memory_curve import curve_svg, curve_text

    if args.budgets < 2 or args.effort < 1:
        raise UsageError("must be at least " + ("2" if args.budgets < 2 else "1"), where="--budgets" if args.budgets < 2 else "--effort")
    kinds = implementations_named(args.implementations)
    names = args.strategies.split(",") if args.strategies not in ("", "all") else budgeted(all_of_them=args.strategies == "all")
    steps = measured_steps(args.model, loss=args.loss, batch_size=args.batch, implementations=args.implementations)
    given = next(m for m in steps if not m.step.channels_last)
    joint = {} if "plain" in kinds else {",".join(kinds) + (" channels last" if m is not given else ""): m.graph for m in steps}
    curve = compare_step(given.step, given.plain, strategies=names, budgets=args.budgets, effort=args.effort * 10**6, joint=joint)
    document = {"schema": "meshwright.memory.compare", "version": 1, **msgspec.to_builtins(curve)}
    text = curve_text(curve)
    if args.svg:
        write_text(args.svg, curve_svg(curve))
        text += f"\nwrote {args.svg}"
    return Result(document, text)
