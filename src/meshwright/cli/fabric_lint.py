"""`meshwright fabric lint FILE|PRESET`: what is wrong or unlikely in a fabric or a topology file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import FormatError
from .frame import Result

if TYPE_CHECKING:
    from ..drive.lint import Lint

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
    parser.add_argument("--format", default="auto", help="format of an imported file (default: told by content)")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")


def run(args: argparse.Namespace) -> Result:
    from ..drive.lint import Lint
    from ..fabric.lint import Finding

    try:
        lint = _lint(args)
    except FormatError as error:  # a file that cannot be read is the first thing a linter should say
        lint = Lint(args.fabric, [Finding("error", "format", error.where, error.message, error.hint)], [])
    document = {"schema": "meshwright.fabric-lint", "version": 1, **lint.to_json()}
    counts = document["counts"]
    lines = [f"{f.severity}: {f.where}: {f.message} [{f.rule}]" + (f"\n  {f.hint}" if f.hint else "") for f in lint.findings]
    lines += [cost.line() for cost in lint.costs]
    said = ", ".join(f"{count} {severity}{'s' if count != 1 else ''}" for severity, count in counts.items())
    lines.append(f"{lint.name}: {said}" if lint.findings else f"{lint.name}: nothing to say")
    failed = counts["error"] or (args.strict and counts["warning"])
    return Result(document, "\n".join(lines), exit_code=1 if failed else 0)


def _lint(args: argparse.Namespace) -> Lint:
    from ..drive.lint import lint_known_fabric, lint_source
    from ..io.fabric.imported import read_source
    from ..io.fabric.name import load_fabric

    if args.format == "auto" and args.fabric != "-" and not args.fabric.lower().endswith(ENDINGS) and not _foreign_json(args.fabric):
        return lint_known_fabric(load_fabric(args.fabric, args.devices, as_written=True))
    return lint_source(read_source(args.fabric), args.format, args.devices)


def _foreign_json(path: str) -> bool:
    """A JSON file that is no document of ours: DCGM's."""
    from ..io.fabric.imported import read_source

    return path.lower().endswith(".json") and b'"schema"' not in read_source(path).data[:4096]
