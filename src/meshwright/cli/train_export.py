"""`meshwright train export`: a training plan's layout as torchtitan TOML, Megatron flags or DeepSpeed JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "hand a training plan's layout to torchtitan, Megatron or DeepSpeed"
EPILOG = """What the target cannot express is listed; with --strict that is a refusal. To run the plan itself: `meshwright train run PLAN`."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a training plan")
    parser.add_argument("--to", required=True, choices=("torchtitan", "megatron", "deepspeed"), help="whose words")
    parser.add_argument("--out", "-o", required=True, help="file to write (`/dev/stdout` to print)")
    parser.add_argument("--strict", action="store_true", help="write nothing unless all of the layout can be expressed")


def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_plan
    from ..errors import Unsupported
    from ..io.atomic import write_text
    from ..io.export.layout import export_layout

    made = export_layout(read_plan(args.plan), args.to)
    if args.strict and made.not_expressed:
        raise Unsupported(
            f"{args.to} cannot express {made.not_expressed[0]}" + (f" and {len(made.not_expressed) - 1} more" if len(made.not_expressed) > 1 else ""),
            hint="leave out --strict to write what it can", data={"not_expressed": list(made.not_expressed)},
        )  # fmt: skip
    write_text(args.out, made.text)
    document = {
        "schema": "meshwright.train-export", "version": 1, "to": args.to, "file": args.out, "not_expressed": list(made.not_expressed),
        "to_add": list(made.to_add),
    }  # fmt: skip
    lines = [f"{args.out}: {args.to}, {len(made.not_expressed)} things not expressed"]
    lines += [f"not expressed: {x}" for x in made.not_expressed]
    lines += [f"to add: {x}" for x in made.to_add]
    return Result(document, "\n".join(lines))
