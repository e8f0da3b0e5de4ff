"""`meshwright fabric show FABRIC`: summary, structure and matrix as text, or a drawing as SVG; servers that are alike are shown once."""

from __future__ import annotations

import argparse

from ..errors import Disconnected, UsageError
from ..io.atomic import write_text
from ..io.fabric.document import fabric_document
from ..io.fabric.name import load_fabric
from ..report.fabric_fold import drawn, fold_text
from ..report.fabric_matrix import cells, matrix_text, rates, summary_text
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Show a fabric: what it consists of, and over what its devices reach each other."
EPILOG = """\
examples:
  meshwright fabric show dgx-a100:2
  meshwright fabric show p5.48xlarge:128                 servers that are alike once, with their number
  meshwright fabric show two-islands --rates
  meshwright fabric show 'dgx-h100:4?net=rails' --devices 0-7 --svg box.svg"""

DEFAULT_MATRIX_DEVICES = 32  # that a matrix shows unless --limit says more: a screen's width
MAX_MATRIX_DEVICES = 1024  # a million cells


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fabric", metavar="FABRIC", help="FILE.toml, FILE.json or PRESET:n (see `meshwright fabric list`)")
    parser.add_argument("--devices", metavar="LIST", help="only these devices, e.g. 0-3,8-11 or names")
    parser.add_argument("--rates", action="store_true", help="show rates instead of kinds of links")
    parser.add_argument("--limit", type=int, default=DEFAULT_MATRIX_DEVICES, metavar="N", help="most devices in the matrix (default %(default)s)")
    parser.add_argument("--svg", metavar="FILE", help="also draw the fabric into this file; above 64 devices, alike servers are drawn once")
    parser.add_argument("--whole", action="store_true", help="with --svg: draw every server")


def run(args: argparse.Namespace) -> Result:
    if not 0 <= args.limit <= MAX_MATRIX_DEVICES:
        raise UsageError(f"--limit must be between 0 and {MAX_MATRIX_DEVICES}, got {args.limit}", hint="name a part with --devices")
    fabric = load_fabric(args.fabric, args.devices)
    shown = min(args.limit, len(fabric.devices))
    connected = True
    try:
        fabric.require_connected()
    except Disconnected:
        connected = False
    document = {
        "schema": "meshwright.fabric-show",
        "version": 1,
        "fabric": fabric_document(fabric),
        "connected": connected,
        "matrix": {
            "devices": [d.name for d in fabric.devices[:shown]],
            "truncated": shown < len(fabric.devices),
            "kinds": cells(fabric, shown),
            "rates_Bps": rates(fabric, shown),
        },
    }
    text = summary_text(fabric) + "\n\n" + fold_text(fabric)
    if shown:
        text += "\n\n" + matrix_text(fabric, shown, with_rates=args.rates)
    if args.svg:
        from ..report.fabric_svg import fabric_svg

        write_text(args.svg, fabric_svg(fabric if args.whole else drawn(fabric).fabric))
        document["svg"] = args.svg
        text += f"\n\ndrawn into {args.svg}"
    return Result(document, text)
