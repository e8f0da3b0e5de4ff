"""`meshwright fabric subset FABRIC --devices LIST`: the part of a fabric that some devices form, as a file of its own."""

from __future__ import annotations

import argparse
import json

from ..errors import UsageError
from ..io.atomic import write_text
from ..io.fabric_name import load_fabric
from ..io.fabric_toml import fabric_document, fabric_toml
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Write the part of a fabric that some devices form; switches and the links between what remains are kept."
EPILOG = """\
examples:
  meshwright fabric subset dgx-a100:2 --devices 0-3,8-11 --out part.toml
  meshwright fabric subset cluster.toml --devices box0/gpu0,box1/gpu0"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fabric", metavar="FABRIC", help="FILE.toml, FILE.json or PRESET:n (see `meshwright fabric list`)")
    parser.add_argument("--devices", metavar="LIST", required=True, help="the devices to keep, e.g. 0-3,8-11 or names")
    parser.add_argument("-o", "--out", metavar="FILE", help="FILE.toml or FILE.json (default: TOML on stdout)")


def run(args: argparse.Namespace) -> Result:
    part = load_fabric(args.fabric, args.devices)
    document = fabric_document(part)
    if args.out is None:
        return Result(document, fabric_toml(part))
    lowered = args.out.lower()
    if not lowered.endswith((".toml", ".json")):
        raise UsageError(f"--out must end in .toml or .json, got {args.out!r}", hint="the ending chooses the format")
    write_text(args.out, fabric_toml(part) if lowered.endswith(".toml") else json.dumps(document, ensure_ascii=False) + "\n")
    return Result(document, f"{args.out}: {len(part.devices)} devices, {len(part.switches)} switches, {len(part.links)} links")
