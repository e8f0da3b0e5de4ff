"""`meshwright run ordered --order FILE -- COMMAND`: start any program with the ranks of an order, without changing the program."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .frame import Result

HELP = "start any program (after `--`) with the ranks of an order (`collective order --save-order`)"
PROGRESS = False  # what it runs writes to the terminal
EPILOG = """\
usage: meshwright run ordered --order FILE [options] -- COMMAND [ARGUMENTS]

examples:
  meshwright collective order --matrix costs.json --save-order order.json
  meshwright run ordered --order order.json -- torchrun --nnodes=8 --master-port=29500 train.py      # on every host; --node-rank is added
  mpirun ... meshwright run ordered --order order.json -- python train.py                            # RANK, WORLD_SIZE set per process
  torchrun ... --no-python meshwright run ordered --order order.json -- python train.py              # any rendezvous"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--order", type=Path, required=True, metavar="FILE", help="the file with the order")
    parser.add_argument("--as", dest="me", metavar="NAME", help="which endpoint this process or host is (default: by its addresses, or by RANK)")
    parser.add_argument("--show", action="store_true", help="only print what would be started, and with which environment")
    parser.set_defaults(after_dashes=[])


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError
    from ..run.executor.ordered import ordered, read_order

    order = read_order(args.order)
    command, environment = ordered(order, args.after_dashes, os.environ, me=args.me)
    changed = {k: v for k, v in environment.items() if os.environ.get(k) != v}
    document = {"schema": "meshwright.ordered-launch", "version": 1, "command": command, "environment": changed, "order": list(order.order)}
    if args.show:
        return Result(document, "\n".join([*(f"{k}={v}" for k, v in sorted(changed.items())), " ".join(command)]))
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]!r}: {error.strerror}", hint="is it installed on this host?") from None
