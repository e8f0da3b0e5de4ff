"""`meshwright fabric subset FABRIC`: the part of a fabric that some devices form, or that is left, as a file of its own."""

from __future__ import annotations

import argparse
import json

from ..errors import UsageError
from ..fabric.edit import edited
from ..io.atomic import write_text
from ..io.fabric.name import load_fabric, parts_down, parts_slow
from ..io.fabric.toml import fabric_document, fabric_toml
from .frame import Result

__all__ = ["HELP", "arguments", "edit_arguments", "run"]

HELP = "Write the part of a fabric that some devices form or that is left without some parts; the links between what remains are kept."
EPILOG = """\
examples:
  meshwright fabric subset dgx-a100:2 --devices 0-3,8-11 --out part.toml
  meshwright fabric subset cluster.toml --devices box0/gpu0,box1/gpu0
  meshwright fabric subset dgx-h100:4 --without box3/nic2,box1 --degrade 'box0/nic0<->ib=0.5' --out today.toml"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fabric", metavar="FABRIC", help="FILE.toml, FILE.json or PRESET:n (see `meshwright fabric list`)")
    parser.add_argument("--devices", metavar="LIST", help="the devices to keep, e.g. 0-3,8-11 or names (default: all)")
    edit_arguments(parser)
    parser.add_argument("-o", "--out", metavar="FILE", help="FILE.toml or FILE.json (default: TOML on stdout)")


def edit_arguments(parser: argparse.ArgumentParser) -> None:
    """What is down or slow; shared by commands that take a fabric."""
    parser.add_argument("--without", metavar="NAMES", help="parts that are down: devices, NICs, servers, links a->b or a<->b, e.g. box3/nic2,box1")
    parser.add_argument("--degrade", metavar="NAME=X", help="parts at a fraction of their rate, e.g. box3/nic2=0.5")


def run(args: argparse.Namespace) -> Result:
    down, slow = parts_down(args.without), parts_slow(args.degrade)
    if args.devices is None and not down and not slow:
        raise UsageError("needs --devices, --without or --degrade", hint="e.g. --devices 0-3 or --without box0/nic3")
    part = edited(load_fabric(args.fabric, args.devices), down, slow)
    document = fabric_document(part)
    if args.out is None:
        return Result(document, fabric_toml(part))
    lowered = args.out.lower()
    if not lowered.endswith((".toml", ".json")):
        raise UsageError(f"--out must end in .toml or .json, got {args.out!r}", hint="name a file with one of these endings")
    write_text(args.out, fabric_toml(part) if lowered.endswith(".toml") else json.dumps(document, ensure_ascii=False) + "\n")
    return Result(document, f"{args.out}: {len(part.devices)} devices, {len(part.switches)} switches, {len(part.links)} links")
