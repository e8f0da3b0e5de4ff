"""`meshwright lab fault NAME cut|rate|restore LINK [RATE]`: change a link of a running lab."""

from __future__ import annotations

import argparse

from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Change a link of a running lab: cut it, give it another rate, or restore it."
EPILOG = """\
examples:
  meshwright lab fault islands cut 'island0/switch<->island1/switch'
  meshwright lab fault islands rate 'island0/cpu0->island0/switch' 1Mbit/s
  meshwright lab fault islands restore island0/cpu0                (a device: all its links)"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the lab")
    parser.add_argument("what", choices=("cut", "rate", "restore"), help="what happens to the link")
    parser.add_argument("link", metavar="LINK", help="a->b, a<->b, or a device or switch with all its links")
    parser.add_argument("value", metavar="RATE", nargs="?", help="with `rate`: the new rate, e.g. 1Mbit/s")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError
    from ..io.quantity import parse_rate_Bps
    from ..lab.lab import Lab

    if (args.what == "rate") != (args.value is not None):
        raise UsageError(f"{args.what!r} {'needs a rate' if args.what == 'rate' else 'takes no rate'}", hint="e.g. rate a->b 1Mbit/s")
    lab = Lab.open(args.name)
    try:
        if args.what == "rate":
            try:
                rate = parse_rate_Bps(args.value)
            except ValueError as error:
                raise UsageError(str(error), where="RATE") from None
            lab.set_rate(args.link, rate)
        elif args.what == "cut":
            lab.cut(args.link)
        else:
            lab.restore(args.link)
        links = {lab.link_name(i): lab.state.links[i] for i in lab.links_named(args.link)}
    finally:
        lab.close()
    changed = [{"link": name, "rate_Bps": x.rate_Bps, "cut": x.cut} for name, x in links.items()]
    text = "\n".join(f"{name}: " + ("cut" if x.cut else f"{x.rate_Bps * 8 / 1e6:.4g} Mbit/s") for name, x in links.items())
    return Result({"schema": "meshwright.lab-fault", "version": 1, "lab": args.name, "links": changed}, text)
