"""`meshwright train export`: a training plan's layout for other tools and schedulers; a run's weights as safetensors or DCP."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result

HELP = "a plan's layout for other training tools and schedulers; a run's weights as safetensors or for torch.distributed.checkpoint"
EPILOG = """The layout in another tool's words: torchtitan (its Python configuration), torchtitan-toml (0.2.2), megatron, nemo, deepspeed, torch (a
script of plain PyTorch that runs). Files that start the plan on as many servers as it has: slurm, jobset, kueue, skypilot. nccl: variables that
follow from the fabric. What the target cannot express is listed; with --strict that is a refusal. To run the plan itself: `train run PLAN`.
Weights: `meshwright train export run/ --to safetensors -o model.safetensors`, from the newest checkpoint, in the model's own names."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a training plan; for weights, the folder of a run or of a checkpoint")
    from ..io.export.layout import TARGETS

    choices = (*TARGETS, "safetensors", "dcp")
    parser.add_argument("--to", required=True, choices=choices, help="system or format to write for")
    parser.add_argument("--out", "-o", required=True, help="file to write (`/dev/stdout` to print); for dcp, a new folder")
    parser.add_argument(
        "--average", action="store_true",
        help="write the moving averages of the weights (`train plan --ema`) in place of the weights",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="refuse if a part of the layout cannot be expressed")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError

    if args.to in ("safetensors", "dcp"):
        return _weights(args)
    if args.average:
        raise UsageError("applies only to exports of weights", where="--average", hint="use it with --to safetensors or --to dcp")
    return _layout(args)


def _weights(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_plan
    from ..errors import UsageError
    from ..run.checkpoint.export import export_checkpoint

    if not args.plan.is_dir():
        raise UsageError("is not the folder of a run", where=str(args.plan), hint="name what `train run` wrote to (--out)")
    plan = args.plan / "plan.json"
    model = str(read_plan(plan).job["training"]["model"]) if plan.is_file() else ""
    made = export_checkpoint(args.plan, Path(args.out), to=args.to, model=model, average=args.average)
    document = {
        "schema": "meshwright.train-export", "version": 1, "to": args.to, "file": args.out, "step": made.step, "tensors": list(made.names),
        "size_bytes": made.size_bytes, "notes": list(made.notes),
    }  # fmt: skip
    lines = [f"{args.out}: {len(made.names)} tensors, {made.size_bytes:,} bytes, after step {made.step}", *(f"note: {n}" for n in made.notes)]
    return Result(document, "\n".join(lines))


def _layout(args: argparse.Namespace) -> Result:
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
        "to_add": list(made.to_add), "for": made.version,
    }  # fmt: skip
    count = len(made.not_expressed)
    lines = [f"{args.out}: {args.to} ({made.version}), {count} {'thing' if count == 1 else 'things'} not expressed"]
    lines += [f"not expressed: {x}" for x in made.not_expressed]
    lines += [f"to add: {x}" for x in made.to_add]
    return Result(document, "\n".join(lines))
