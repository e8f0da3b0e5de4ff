"""`meshwright fabric lint FILE|PRESET`: what is wrong or unlikely in a fabric or a topology file."""

from __future__ import annotations

import argparse

from ..errors import FormatError
from ..fabric_lint import SEVERITIES, Finding, lint_fabric
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Look for what is wrong or unlikely in a fabric or a topology file; exit code 1 if there are errors."
EPILOG = """\
examples:
  meshwright fabric lint cluster.toml
  meshwright fabric lint node.xml --strict       NCCL topology: slow bridges, missing NICs, uneven NVLinks
  meshwright fabric lint dgx-h100:4 --json"""

ENDINGS = (".xml", ".txt", ".csv", ".edges")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fabric", metavar="FABRIC", help="FILE.toml, FILE.json, PRESET:n, or what `fabric import` reads (.xml, .txt, .csv, -)")
    parser.add_argument("--devices", metavar="LIST", help="only these devices of a fabric")
    parser.add_argument("--format", default="auto", help="of a file that is imported (default: told by content)")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")


def run(args: argparse.Namespace) -> Result:
    try:
        name, findings = _findings(args)
    except FormatError as error:  # a file that cannot be read is the first thing a linter should say
        name, findings = args.fabric, [Finding("error", "format", error.where, error.message, error.hint)]
    counts = {severity: sum(f.severity == severity for f in findings) for severity in SEVERITIES}
    lines = [f"{f.severity}: {f.where}: {f.message} [{f.rule}]" + (f"\n  {f.hint}" if f.hint else "") for f in findings]
    said = ", ".join(f"{count} {severity}{'s' if count != 1 else ''}" for severity, count in counts.items())
    lines.append(f"{name}: {said}" if findings else f"{name}: nothing to say")
    document = {"schema": "meshwright.fabric-lint", "version": 1, "fabric": name, "findings": [f.to_json() for f in findings], "counts": counts}
    failed = counts["error"] or (args.strict and counts["warning"])
    return Result(document, "\n".join(lines), exit_code=1 if failed else 0)


def _findings(args: argparse.Namespace) -> tuple[str, list[Finding]]:
    from ..io.fabric_name import load_fabric, select_devices

    if args.format == "auto" and args.fabric != "-" and not args.fabric.lower().endswith(ENDINGS) and not _foreign_json(args.fabric):
        fabric = load_fabric(args.fabric, args.devices)
        return fabric.name, lint_fabric(fabric)
    from ..io.fabric_import import format_of, import_fabric, read_source
    from ..io.nccl_lint import lint_nccl
    from ..io.nccl_topology import parse_nccl_topology

    source = read_source(args.fabric)
    form = format_of(source) if args.format == "auto" else args.format
    findings = lint_nccl(parse_nccl_topology(source.data, source.where)) if form == "nccl" else []
    fabric = import_fabric([source], form=form)
    known = {f.rule for f in findings}
    part = fabric if args.devices is None else select_devices(fabric, args.devices)
    findings += [f for f in lint_fabric(part) if f.rule not in known]  # said already, with the line
    return source.where, sorted(findings, key=lambda f: SEVERITIES.index(f.severity))


def _foreign_json(path: str) -> bool:
    """A JSON file that is no fabric of ours: DCGM's."""
    from ..io.fabric_import import read_source

    return path.lower().endswith(".json") and b"meshwright.fabric" not in read_source(path).data[:4096]
