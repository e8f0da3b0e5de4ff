"""`meshwright strategies list`: every strategy of every decision, ours and those of installed packages."""

from __future__ import annotations

import argparse

from .frame import Result

HELP = "strategies by decision, with their options and where they come from"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("decision", nargs="?", default="", help="only strategies of this decision, e.g. collective (default: all)")


def run(args: argparse.Namespace) -> Result:
    import msgspec

    from ..drive.strategies import listed

    rows = listed(args.decision)
    document = {
        "schema": "meshwright.strategies", "version": 1,
        "strategies": [
            {
                "decision": r.decision, "question": r.question, "name": r.name, "options": {k: _plain(v) for k, v in r.options.items()},
                "cite": msgspec.structs.asdict(r.cite), "package": r.package,
            }
            for r in rows
        ],
    }  # fmt: skip
    lines: list[str] = []
    for decision in dict.fromkeys((r.decision, r.question) for r in rows):
        own = [r for r in rows if (r.decision, r.question) == decision]
        lines.append(" ".join(filter(None, (decision[0], f"({decision[1]})" if decision[1] else ""))))
        for r in own:
            options = ", ".join(r.options) or "no options"
            origin = "" if r.package == "meshwright" else f"  [package {r.package}]"
            lines.append(f"  {r.name:<20} {r.cite.key:<28} {options}{origin}")
    return Result(document, "\n".join(lines))


def _plain(value: object) -> object:
    """A default as JSON: itself, or how it is written."""
    import json

    try:
        json.dumps(value)
    except TypeError:
        return getattr(value, "__name__", None) or str(value)
    return value
