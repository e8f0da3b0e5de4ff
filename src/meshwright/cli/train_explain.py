"""`meshwright train explain`: where a plan's time and memory go and what would change it; or the ledger of a described transformer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import pictures
from .arguments import TIME_LIMIT, at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..ledger.transformer import SplitLayout, Transformer

HELP = "say where a plan's time and memory go, why the others lost, and what would change it; or size a described transformer"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, nargs="?", help="a plan file")
    parser.add_argument("--limit", type=int, default=10, help="how many runners-up to list (default 10)")
    parser.add_argument("--step-time", type=float, metavar="S", help="measured time of a step, for MFU and HFU instead of the predicted time")
    parser.add_argument("--causal", choices=("full", "half"), default="full", help="count causal attention in full (default) or below the diagonal")
    parser.add_argument("--graph", type=Path, help="the plan's captured graph (default: capture its model again)")
    parser.add_argument("--quick", action="store_true", help="leave out all that needs the model: other layouts and what-if")
    parser.add_argument("--error", metavar="KIND=E,..", help="relative error of measured, interpolated, assumed costs, e.g. assumed=0.5")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S", help=TIME_LIMIT.format(300))
    pictures.svg_argument(parser, "simulate the plan and draw its schedule and memory over time")
    described = parser.add_argument_group("a described transformer instead of a plan")
    described.add_argument("--transformer", metavar="SPEC", help="layers=48,hidden=6144,heads=64,sequence=2048,vocabulary=51200,... or FILE.toml")
    described.add_argument("--tp", type=at_least_one, help="tensor-parallel degree")
    described.add_argument("--pp", type=at_least_one, help="pipeline degree")
    described.add_argument("--dp", type=at_least_one, help="data-parallel degree")
    described.add_argument("--interleave", type=at_least_one, help="chunks per rank (interleaved 1F1B)")
    described.add_argument("--microbatch", type=at_least_one, help="micro-batch size")
    described.add_argument("--global-batch", type=at_least_one, help="samples per step, over all replicas (default: one micro-batch each)")
    described.add_argument("--sequence-parallel", action="store_true", default=None, help="split the parts between regions along the sequence")
    described.add_argument("--recompute", metavar="RULE", help="none, selective, full, uniform:K or block:K")
    described.add_argument("--distributed-optimizer", action="store_true", default=None, help="replicas divide the optimizer state (ZeRO 1)")
    described.add_argument("--keep-outputs", action="store_true", default=None, help="do not free outputs after they were sent")
    described.add_argument("--stage-layers", help="layers of every stage, e.g. 11,12,12,11")
    described.add_argument("--device", help="a GPU's name (a100, h100, ...): its memory and peak")
    described.add_argument("--dtype", default="bf16", help="data type whose peak rate counts (default bf16)")
    described.add_argument("--peak-flops", type=float, help="operations per second of one device")
    described.add_argument("--memory", help="memory of one device, e.g. 80GB; exit 3 when it does not fit")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError

    if (args.plan is None) == (args.transformer is None):
        raise UsageError("give either a plan or --transformer", hint="e.g. meshwright train explain plan.json")
    if args.step_time is not None and not 0 < args.step_time < float("inf"):
        raise UsageError(f"must be a time in seconds, got {args.step_time}", where="--step-time")
    if args.svg is not None and args.plan is None:
        raise UsageError("needs a plan: a described transformer has no schedule to draw", where="--svg", hint="give a plan")
    pictures.check_pictures(args)
    return _ledger(args) if args.plan is None else _plan(args)


def _plan(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_plan
    from ..explain.explanation import Explanation, explain_plan
    from ..report.explain_text import explain_document, explain_text

    plan = read_plan(args.plan)
    found: Explanation = explain_plan(
        plan, graph_path=args.graph, quick=args.quick, errors=_errors(args.error), step_time_s=args.step_time, causal=args.causal,
        time_limit_s=args.time_limit,
    )  # fmt: skip
    result = Result(explain_document(plan, found, path=str(args.plan), limit=args.limit), explain_text(plan, found, limit=args.limit), cut=found.cut)
    return pictures.with_pictures(result, args, plan)


def _errors(text: str | None) -> dict[str, float]:
    from ..errors import UsageError

    found: dict[str, float] = {}
    for item in text.split(",") if text else ():
        name, equals, value = item.partition("=")
        try:
            error = float(value)
        except ValueError:
            error = -1.0
        if not equals or name not in ("measured", "interpolated", "assumed", "links") or not 0 <= error < 1:
            raise UsageError(f"{item[:64]!r} is not KIND=E with 0 <= E < 1", where="--error", hint="KIND: measured, interpolated, assumed, links")
        found[name] = error
    return found


def _ledger(args: argparse.Namespace) -> Result:
    from ..ledger.advice import require_memory
    from ..report.ledger_text import ledger_document, ledger_text

    model, layout = _described(args)
    peak, memory = _device(args)
    if memory:
        require_memory(model, layout, memory)
    document = ledger_document(model, layout, peak_flops=peak, memory_bytes=memory, step_time_s=args.step_time or 0.0, causal=args.causal)
    return Result(document, ledger_text(document))


def _described(args: argparse.Namespace) -> tuple[Transformer, SplitLayout]:
    """Raises: UsageError, FormatError. Flags win over the file."""
    from ..errors import UsageError
    from ..ledger.transformer import described, layout_described

    fields: dict[str, Any] = {}
    if args.transformer.lower().endswith(".toml"):
        from ..io.model.transformer_toml import read_transformer_toml

        model, fields = read_transformer_toml(Path(args.transformer))
    else:
        model = described(args.transformer)
    flags = {
        "tensor": args.tp, "pipeline": args.pp, "data": args.dp, "interleave": args.interleave, "microbatch_size": args.microbatch,
        "sequence_parallel": args.sequence_parallel, "distributed_optimizer": args.distributed_optimizer,
        "deallocate_outputs": None if args.keep_outputs is None else False,
    }  # fmt: skip
    fields |= {name: value for name, value in flags.items() if value is not None}
    if args.recompute is not None:
        fields["recompute"], _, every = args.recompute.partition(":")
        fields["every"] = every or 1
    if args.stage_layers is not None:
        fields["stage_layers"] = args.stage_layers.split(",")
    layout = layout_described(fields)
    if args.global_batch is not None:
        each = layout.data * layout.microbatch_size
        if args.global_batch < 1 or args.global_batch % each:
            raise UsageError(f"{args.global_batch} samples do not divide into {layout.data} replicas of micro-batches of {layout.microbatch_size}",
                             where="--global-batch", hint=f"a multiple of {each}")  # fmt: skip
        layout = layout_described({**fields, "microbatches": args.global_batch // each})
    return model, layout


def _device(args: argparse.Namespace) -> tuple[float, int]:
    """Peak operations per second and memory of one device; 0 where not given."""
    from ..errors import UnknownName, UsageError
    from ..fabric.machines import GPUS
    from ..io.quantity import parse_size_bytes

    peak, memory = args.peak_flops or 0.0, 0
    if args.device is not None:
        gpu = GPUS.get(args.device.lower())
        if gpu is None:
            raise UnknownName(f"no device is called {args.device[:64]!r}", where="--device", hint=f"there are: {', '.join(GPUS)}; or --peak-flops")
        if args.dtype not in gpu.flops:
            raise UnknownName(f"{args.device} states no rate for {args.dtype[:32]!r}", where="--dtype", hint=f"it states: {', '.join(gpu.flops)}")
        peak, memory = peak or float(gpu.flops[args.dtype]), gpu.memory_bytes
    if args.memory is not None:
        try:
            memory = parse_size_bytes(args.memory)
        except ValueError as error:
            raise UsageError(str(error), where="--memory", hint="e.g. 80GB") from None
    return peak, memory
