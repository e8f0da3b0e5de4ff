"""`meshwright train run`: carry out a training plan with one process per rank, or as one rank under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one
from .frame import Result
from .train_gate import choices, stated

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..run.launch.request import RunRequest

HELP = "train for real, as the plan says"
PROGRESS = False  # it says by itself which step it is at
EPILOG = """\
On one machine the ranks are started here. On several, start this command with torchrun, e.g. on each of two machines
  torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
    --no-python meshwright train run plan.json --out run/
with a folder --out that all of them see."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan file made by `meshwright train plan`")
    parser.add_argument(
        "--data", default="python-source",
        help="python-source (default), synthetic, a text file, or FILE.py:function that returns a dataset or a DataLoader (?pad=0,-100: "
        "shorter samples are filled up with these values, one for each input of the model)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, help="train until this many steps are done (default 20)")
    parser.add_argument("--out", "-o", type=Path, default=Path("run"), help="folder for recordings and checkpoints (default run/)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument(
        "--local-shards", default="", metavar="DIR",
        help="keep each rank's part of the checkpoint in this folder on its own device; {device} stands for the device's name",
    )  # fmt: skip
    parser.add_argument("--also-shared", action="store_true", help="with --local-shards: write checkpoints to --out as well")
    parser.add_argument("--drop-residual", action="store_true", help="with --resume: allow losing what the checkpoint's codecs had not sent")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N", help="checkpoint every N steps (default: at the end)")
    parser.add_argument(
        "--evaluate-every", type=int, default=0, metavar="N",
        help="evaluate the loss on --evaluation-data every N steps and at the end",
    )  # fmt: skip
    parser.add_argument("--evaluation-data", default="", metavar="DATA", help="samples for evaluation, in the same form as --data")
    parser.add_argument(
        "--evaluation-batches", type=int, default=0, metavar="K",
        help="global batches per evaluation (default: all whole ones; 8 if the data has no length)",
    )  # fmt: skip
    parser.add_argument("--reproducible", choices=("run", "tree"), default="run", help="tree: refuse a plan whose bits depend on the number of ranks")
    parser.add_argument("--dry-run", action="store_true", help="only list the ranks, ports, memory and time that the run needs")
    parser.add_argument("--port", type=int, default=0, help="port of the rendezvous on loopback (default: any free one)")
    parser.add_argument("--device", default="cpu", help="cpu (gloo, default) or cuda (NCCL)")
    parser.add_argument("--pacing", default="auto", help="auto (default), none, quota or paced: how ranks that outnumber the cores share them")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="give up when no rank moves for this long (default 60)")
    parser.add_argument("--max-ranks", type=at_least_one, help="refuse plans with more ranks than this")
    parser.add_argument("--profile", action="store_true", help="also write a torch.profiler trace of three steps per rank (.json.gz) into --out")
    parser.add_argument(
        "--log-every", type=int, default=0, metavar="N",
        help="a line of loss, rate and MFU every N steps, where stderr is no terminal (default: ten in all)",
    )  # fmt: skip
    parser.add_argument(
        "--tensorboard", action="store_true",
        help="also write the metrics of every step to TensorBoard (they are in OUT/metrics.jsonl in any case)",
    )  # fmt: skip
    parser.add_argument("--no-module-spans", action="store_true", help="do not record when each module runs")
    parser.add_argument("--no-gate", action="store_true", help="do not compare a step with the owner's module first (`train gate`)")
    choices(parser)
    parser.add_argument(
        "--no-calibration", action="store_true", help="do not measure costs first; `train compare` then has no prediction for this machine"
    )


def run(args: argparse.Namespace) -> Result:
    from ..errors import MeshwrightError
    from ..run.launch.request import under_torchrun

    try:
        return _run(args)
    except MeshwrightError as error:
        if under_torchrun():  # also for what goes wrong before there is a rank, such as a broken plan file
            from ..run.machine.torchrun_worker import ends_with_its_own_code, tell_torchrun

            tell_torchrun(error)
            ends_with_its_own_code(error.exit_code)
        raise


def _require_level(plan: Plan, level: str) -> None:
    from ..errors import UsageError

    if level == "tree" and (plan.layout is None or not plan.layout.step_end.folded):
        text = "the plan's gradients are summed in an order of its own layout"
        raise UsageError(text, where="--reproducible", hint="make it with `meshwright train plan --reproducible tree`")


def _run(args: argparse.Namespace) -> Result:
    from dataclasses import replace

    from ..drive.plans import check_plan, read_plan
    from ..run.launch.dry_run import dry_run
    from ..run.launch.request import RunRequest
    from ..run.launch.train_run import train_run
    from .train_progress import Progress

    plan = read_plan(args.plan)
    check_plan(plan)  # the file may come from anywhere: nothing runs unchecked
    _require_level(plan, args.reproducible)
    request = RunRequest(
        out=args.out, data=args.data, steps=args.steps, resume=args.resume, port=args.port, device=args.device, pacing=args.pacing,
        timeout_s=args.timeout, checkpoint_every=args.checkpoint_every, max_ranks=args.max_ranks, calibrate=not args.no_calibration,
        local_shards=args.local_shards, also_shared=args.also_shared, drop_residual=args.drop_residual,
        evaluate_every=args.evaluate_every, evaluation_data=args.evaluation_data, evaluation_batches=args.evaluation_batches,
        module_spans=not args.no_module_spans, profile=args.profile, tensorboard=args.tensorboard,
    )  # fmt: skip
    if args.dry_run:
        document, text = dry_run(plan, request)
        return Result(document, text)
    request = replace(request, gate=_gate(plan, request, args))
    progress = Progress(plan, args.steps, args.out, args.device, args.log_every) if os.environ.get("RANK", "0") == "0" else None
    try:
        result = train_run(plan, request, on_step=progress)
    finally:
        if progress is not None:
            progress.close()
    if result.document is None:  # a rank of torchrun: rank 0 speaks
        raise SystemExit(0)
    import msgspec

    return Result(msgspec.to_builtins(result.document), _text(result.document, args.out))


def _gate(plan: Plan, request: RunRequest, args: argparse.Namespace) -> dict[str, Any]:
    """What a step was compared with, or why it was not. Of ranks that torchrun started, the first compares; the others wait for it."""
    from ..run.gate.shapes import gate_shapes
    from ..run.launch.request import check_request, under_torchrun

    check_request(plan, request)
    if args.no_gate:
        return {"why_not": "--no-gate"}
    if under_torchrun() and os.environ["RANK"] != "0":
        return {"why_not": "the process with RANK 0 compares"}
    report = gate_shapes(plan, data=request.data, stated=stated(args))
    for note in (report.why_not, *report.notes):
        if note:
            sys.stderr.write(f"gate: {note}\n")
    return report.to_json()


def _evaluated(evaluation: dict[str, Any]) -> str:
    losses = [f"{'nan' if loss is None else f'{loss:.4f}'} after {step}" for step, loss in evaluation["losses"]]
    shown = losses if len(losses) < 3 else [losses[0], "...", losses[-1]]
    return f"on {evaluation['samples']} samples of {evaluation['data']}: {', '.join(shown)} steps"


def _gated(gate: dict[str, Any]) -> str:
    if gate.get("why_not"):
        return f"not compared with the owner's module: {gate['why_not']}"
    stated = f" ({', '.join(gate['stated'])}, as stated)" if gate["stated"] else ""
    of = f" of a smaller copy ({gate['copy']})" if gate["copy"] else ""
    return f"one step{of} was compared with the owner's module, {gate['against']}: equal within {gate['largest_error']:.1e}{stated}"


def _restart(restart: dict[str, Any]) -> str:
    from ..io.quantity import show_size

    reused, received, stored = (show_size(sum(restart[k])) for k in ("reused_bytes", "received_bytes", "stored_bytes"))
    said = {True: "; as planned", False: "; NOT as planned"}[restart["as_planned"]] if restart["planned"] else ""
    return f"resumed with {reused} from own shards, {received} from other ranks, {stored} from shared storage{said}"


def _text(document: Any, out: Path) -> str:
    from ..io.quantity import show_size, show_time
    from ..run.recording.recording import numbers

    middle = sorted(document.step_s[2:] or document.step_s)
    losses = numbers(document.losses)
    how = f"{document.device}, {document.pacing['mode']}"
    lines = [
        f"{document.steps} steps on {document.ranks} ranks ({how}): {show_time(middle[len(middle) // 2])} per step",
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}",
        *([_evaluated(document.evaluation)] if document.evaluation else []),
        f"peak memory per rank: {', '.join(show_size(b) for b in document.memory_peak_bytes)} of tensors",
        _gated(document.gate),
        *([_restart(document.restart)] if document.restart else []),
        *(f"note: {n}" for n in document.notes),
        f"written: {out}/run.json; compare with `meshwright train compare PLAN {shlex.quote(str(out))}`",
    ]
    return "\n".join(lines)
