"""`meshwright lab up FABRIC`: network namespaces with shaped links, after any fabric, on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..errors import UsageError
from ..io.fabric.name import load_fabric
from .arguments import at_least_one
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Build a rehearsal lab: one network namespace per device and switch, links shaped as the fabric says."
EPILOG = """\
examples:
  meshwright lab up two-islands:4 --name islands
  meshwright lab up dgx1-v100:1 --devices 0-4 --scale 8000        (25 GB/s become 25 Mbit/s)
  meshwright lab up fabric.toml --dry-run

The lab stays until `meshwright lab down NAME`. Nothing outside it is changed: no address, route or setting of this machine."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fabric", metavar="FABRIC", help="FILE.toml, FILE.json or PRESET:n (see `meshwright fabric list`)")
    parser.add_argument("--devices", metavar="LIST", help="only these devices, e.g. 0-3,8-11 or names")
    parser.add_argument("--name", help="name of the lab (default: a random one)")
    parser.add_argument("--scale", "--rate-scale", metavar="X", default="1", help="divide all rates by X, so that a GPU fabric fits this machine")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, in order, and run none")
    parser.add_argument("--no-verify", action="store_true", help="do not measure the links first")
    parser.add_argument("--force", action="store_true", help="build it even if the processors cannot carry its rates")
    parser.add_argument("--mtu", type=at_least_one, default=1500, metavar="BYTES", help="largest packet (default %(default)s)")
    parser.add_argument("--no-delay", action="store_true", help="do not imitate latencies (those below 0.2 ms never are); the simulator counts them")
    parser.add_argument("--loss", action="append", default=[], metavar="LINK=P", help="lose packets on a link (a->b, a<->b) with probability P")
    parser.add_argument("--seed", type=int, default=0, help="seed of the losses (default %(default)s)")
    parser.add_argument("--no-offload", action="store_true", help="send single packets instead of super-packets of up to 64 KiB")


def run(args: argparse.Namespace) -> Result:
    from ..lab.lab import Lab
    from ..lab.planning import Options, plan_lab
    from ..lab.scaling import parse_scale
    from ..lab.state import new_name

    fabric = load_fabric(args.fabric, args.devices)
    scale = parse_scale(args.scale)
    loss = _losses(args.loss)
    if args.dry_run:
        options = Options(
            scale=scale, mtu=args.mtu, offload=not args.no_offload, force=args.force, delay=not args.no_delay, loss=loss, seed=args.seed
        )
        plan = plan_lab(fabric, args.name or new_name(), options)
        document = {"schema": "meshwright.lab-dry-run", "version": 1, "style": plan.wiring.style, "notes": list(plan.notes),
                    "commands": plan.shell_text().splitlines()}  # fmt: skip
        return Result(document, plan.shell_text())
    lab = Lab.up(
        fabric, name=args.name, scale=scale, verify=not args.no_verify, keep=True, mtu=args.mtu, offload=not args.no_offload, force=args.force,
        delay=not args.no_delay, loss=loss, seed=args.seed,
        say=lambda line: print(line, file=sys.stderr),  # noqa: T201
    )
    lab.close()
    from .lab_show import lab_document, lab_text

    return Result(lab_document(lab), lab_text(lab) + _next(lab.name))


def _losses(given: list[str]) -> dict[str, float]:
    """`["a->b=0.01"]` -> {"a->b": 0.01}. Raises: UsageError."""
    found = {}
    for item in given:
        name, equals, text = item.rpartition("=")
        try:
            found[name] = float(text)
        except ValueError:
            equals = ""
        if not name or not equals:
            raise UsageError(f"not LINK=PROBABILITY: {item[:64]!r}", where="--loss", hint="e.g. --loss 'd0->hub=0.01'")
    return found


def _next(name: Any) -> str:
    return f"\n\nnext: meshwright lab run {name} -- COMMAND, and at the end meshwright lab down {name}"
