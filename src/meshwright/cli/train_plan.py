"""`meshwright train plan`: decide how to train a model on a fabric, prove and simulate it, write the plan."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import TIME_LIMIT, at_least_one, graph_given, require_directory, routing_of, training_arguments
from .frame import Result, keep_memory
from .pictures import check_pictures, picture_arguments, with_pictures
from .recipe_arguments import precision_of, recipe_arguments, recipe_of, require_made

if TYPE_CHECKING:
    from ..cost import Cost
    from ..drive.training.compress import CompressWanted
    from ..drive.training.context import Made
    from ..drive.training.pipeline import PipelineWanted
    from ..drive.training.sharding import ShardingWanted
    from ..drive.training.stage_steps import StepSource
    from ..drive.training.tables import PlacedJob
    from ..drive.training.wishes import LayoutWanted
    from ..fabric.fabric import Fabric
    from ..graph.graph import OpGraph
    from ..job import Training
    from ..plan.plan import Plan
    from ..probe.costs.gpu_tables import TablePrices
    from ..probe.costs.node_prices import MeasuredPrices

MEASURED_BATCH_SAMPLES = 4  # per pass when operators are measured; other micro-batch sizes are scaled

HELP = "decide how to train a model on a fabric, and prove it"


def arguments(parser: argparse.ArgumentParser) -> None:
    training_arguments(parser)
    recipe_arguments(parser)
    _degrees_arguments(parser)
    _memory_arguments(parser)
    _schedule_arguments(parser)
    parser.add_argument("--collective", default="auto", help="auto (default) or one strategy that `meshwright collective compare` lists")
    parser.add_argument("--cost", default="roofline", help="roofline (default), measured (operators timed here), tables:SYSTEM, or a cost file")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search: equal seeds give equal plans (default 0)")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="S", help=TIME_LIMIT.format(600))
    parser.add_argument("--without", metavar="NAME,..", help="decisions to leave out, e.g. division,collectives")
    parser.add_argument("--timings", action="store_true", help="say on stderr what each decision gained and how long it took")
    parser.add_argument(
        "--gate", action="store_true", help="also compare one step of the plan, or of a smaller copy of it, with the owner's module (`train gate`)"
    )
    parser.add_argument("--out", "-o", type=Path, default=Path("plan.json"), help="where to write the plan (default plan.json)")
    picture_arguments(parser)


def _degrees_arguments(parser: argparse.ArgumentParser) -> None:
    """Who has a copy, or a part, of what."""
    parser.add_argument("--dp", type=at_least_one, help="fix the data-parallel degree")
    parser.add_argument("--tp", type=at_least_one, help="fix the tensor-parallel degree")
    parser.add_argument("--pp", type=at_least_one, help="fix the pipeline degree")
    parser.add_argument(
        "--context", default="1", metavar="N|auto",
        help="ranks that share samples and divide the positions of their sequences: 1 (default), a degree, or auto (judged by simulation and memory)",
    )  # fmt: skip
    parser.add_argument(
        "--ep", default="1", metavar="N|auto",
        help="ranks that divide the experts of converted layers (nn.convert_experts): neighbouring data replicas, and tensor ranks where these do "
        "not divide by it: 1 (default), a degree, or auto",
    )  # fmt: skip
    parser.add_argument(
        "--tables", metavar="assumed|COSTS",
        help="place the model's embedding tables on the data replicas, by costs of `tables fit` or assumed ones; a plan of `tables plan` goes "
        "behind the model's name: FILE.py:function@PLAN.json",
    )  # fmt: skip
    parser.add_argument(
        "--spare", type=at_least_one, default=0, metavar="N",
        help="places of every rank for copies of hot experts, as --routing says which they are; used where the step gets shorter (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--routing", default="uniform", metavar="uniform|zipf:S|FILE",
        help="how tokens choose experts, for the prediction and its range: alike (default), by Zipf's law, or as measured in a run",
    )  # fmt: skip
    parser.add_argument(
        "--label-smoothing", choices=("torch", "megatron"), default="torch",
        help="of a cross-entropy over a split vocabulary: torch (default; target 1-a+a/V) or megatron (target 1-a)",
    )  # fmt: skip
    parser.add_argument(
        "--sequence-parallel", choices=("auto", "on", "off"), default="auto",
        help="split what lies between tensor-parallel regions along the sequence: auto (default; judged by simulation and memory), on, off",
    )  # fmt: skip


def _memory_arguments(parser: argparse.ArgumentParser) -> None:
    """What is kept, where, and what replicas send each other for it."""
    parser.add_argument(
        "--recompute", choices=("auto", "none", "selective", "full", "layers", "optimal", "steps"), default="auto",
        help="what backward computes again: auto (default; nothing where it fits, else the cheapest that does), none, selective, full, layers (whole "
        "layers, with the messages in them), optimal, steps (whole stages planned by their step graphs; with --memory, auto tries them too)",
    )  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help="bytes of every device, e.g. 12GiB (default: what the fabric says, never more than that)")
    parser.add_argument(
        "--zero", choices=("auto", "0", "1", "2", "3"), default="auto",
        help="what data-parallel replicas divide: auto (default; judged by simulation and memory), 0 nothing, 1 optimizer state, 2 also gradients, "
        "3 also weights",
    )  # fmt: skip
    parser.add_argument(
        "--overlap", choices=("auto", "on", "off"), default="auto",
        help="sum gradients of replicas while backward goes on, bucket by bucket (default auto)",
    )  # fmt: skip
    parser.add_argument("--bucket", metavar="SIZE", help="fill buckets up to this size, e.g. 25MB (default: a quarter of a stage, at most 25 MiB)")
    parser.add_argument(
        "--compress", default="none", metavar="auto|none|CODEC",
        help="send gradients of replicas smaller: none (default), auto (where the step gets shorter), or one codec, e.g. topk:density=0.01",
    )  # fmt: skip


def _schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """Micro-batches, their order, and devices of unlike speed."""
    parser.add_argument("--microbatch", type=at_least_one, help="fix the micro-batch size")
    parser.add_argument(
        "--shapes", default="", metavar="SIZE,..",
        help="lengths that batches may have, e.g. 64,128,256 (or sizes of the first input: 3x64x64,3x96x96); the plan has a step for each, and "
        "`train run` takes the smallest that holds a batch",
    )  # fmt: skip
    parser.add_argument(
        "--pipeline", default="", metavar="NAME",
        help="order of micro-batches: 1f1b, auto (judged best together with the degrees), or one that `meshwright pipeline compare` lists (default: "
        "1f1b, and where the search chose a pipeline the fastest on its degrees)",
    )  # fmt: skip
    parser.add_argument(
        "--pipeline-option", action="append", default=[], metavar="NAME=VALUE", help="of the schedule, e.g. chunks=4, pipes=2, group=8, split=true"
    )
    parser.add_argument(
        "--unlike", default="auto", choices=("auto", "even"),
        help="devices of unlike speed: auto (default; stages, micro-batches and tensor shares by speed where that is faster), even (equal parts)",
    )  # fmt: skip

def run(args: argparse.Namespace) -> Result:
    keep_memory()
    graph = graph_given(args)  # what it refuses needs none of what is imported below
    require_directory(args.out)
    check_pictures(args)
    from ..drive.plans import read_fabric, write_plan
    from ..drive.training.context import SearchBudget
    from ..drive.training.memory import MemoryWanted
    from ..drive.training.own_model import plan_shapes
    from ..drive.training.tables import with_tables
    from ..drive.training.training import plan_training, require_job
    from ..drive.training.wishes import StepPrices
    from ..job import Training
    from ..kernels.effort import cut_of
    from ..probe.costs.name import load_cost, load_prices
    from ..report.plan_text import plan_document, plan_text

    fabric = read_fabric(args.fabric, args.devices)
    if args.memory is not None:
        fabric = _limited(fabric, args.memory)
    job = Training(
        model=args.model or (graph.model if graph else ""), global_batch=args.global_batch,
        loss=args.loss or (graph.loss if graph else "cross-entropy"),
        optimizer=args.optimizer, learning_rate=args.learning_rate, seed=args.seed, recipe=recipe_of(args),
        dtype="bfloat16" if args.precision == "mixed" else "float32",
    )  # fmt: skip
    asked, without = _asked(args, fabric), args.without.split(",") if args.without else ()
    require_job(job, fabric, asked, without)
    if args.model is not None:
        require_made(job)
    placed = _placed(args, job, fabric)
    job = job if placed is None else placed.job
    prices: MeasuredPrices | TablePrices | None = None
    if args.cost == "measured":
        fabric, graph, prices = _measured(job, fabric)
    cost = load_cost("roofline" if args.cost == "measured" else args.cost, fabric)
    prices = prices or load_prices(args.cost, cost, fabric)
    wishes = (*asked, StepPrices(prices), MemoryWanted(_steps(args, job, fabric, cost)))
    budget, watch = SearchBudget(time_limit_s=args.time_limit), _say if args.timings else None
    if args.shapes:
        _require_named(args)
        plan = plan_shapes(job, args.shapes.split(","), fabric, cost, wishes=wishes, budget=budget, without=without, watch=watch)
    else:
        plan = plan_training(job, fabric, cost, graph=graph, wishes=wishes, budget=budget, without=without, watch=watch)
    if placed is not None:
        plan = with_tables(plan, placed)
    if args.gate:
        plan = _gated(plan)
    write_plan(args.out, plan)
    notes = (*(plan.layout.notes if plan.layout is not None else ()), *(placed.notes if placed is not None else ()))
    for note in (*plan.job.get("captured", ()), *plan.job.get("undecided", ()), *notes):
        sys.stderr.write(f"warning: {note}\n")
    document = {**plan_document(plan, path=str(args.out)), "kept_whole": list(notes)}
    return with_pictures(Result(document, plan_text(plan, written=str(args.out)), cut=cut_of(plan.decisions)), args, plan)


def _asked(args: argparse.Namespace, fabric: Fabric) -> tuple[object, ...]:
    """What the flags ask of decisions, as far as it needs no model. With tables, experts divide as the search likes."""
    from ..drive.training.collective_choice import CollectivesWanted
    from ..drive.training.division import DivisionWanted
    from ..drive.training.recompute import RecomputeWanted
    from ..drive.training.wishes import PrecisionWanted

    if args.tables is not None and args.ep == "1" and _table_parts(args, fabric) > 1:
        args.ep = "auto"
    return (
        _layout(args), _sharding(args), _schedule(args), RecomputeWanted(args.recompute), DivisionWanted(args.unlike == "auto"),
        CollectivesWanted(args.collective), _compress(args.compress),
        PrecisionWanted(precision_of(args)),
    )  # fmt: skip


def _table_parts(args: argparse.Namespace, fabric: Fabric) -> int:
    """Data replicas, on which tables are placed."""
    return max(1, args.dp or len(fabric.devices) // ((args.tp or 1) * (args.pp or 1)))


def _placed(args: argparse.Namespace, job: Training, fabric: Fabric) -> PlacedJob | None:
    """The job with its model's tables placed, where that is asked for. Raises: UsageError; what `place_job_tables` raises."""
    from ..drive.training.tables import place_job_tables
    from ..errors import UsageError
    from ..io.costs.lookups import read_lookup_costs

    if args.tables is None:
        return None
    if args.model is None:
        raise UsageError("--tables needs --model", where="--tables", hint="a captured graph has no tables to place")
    if args.tables.endswith((".json", ".json.gz")):
        raise UsageError("a table plan goes behind the model's name", where="--tables", hint=f"--model {args.model}@{args.tables} --ep auto")
    costs = []
    if args.tables != "assumed":
        from ..probe.tables.fit import refuse_foreign

        costs = [read_lookup_costs(args.tables)]
        refuse_foreign(costs[0], args.tables)
    name = args.out.name.removesuffix(".gz").removesuffix(".json")
    return place_job_tables(job, fabric, costs, parts=_table_parts(args, fabric), path=args.out.with_name(f"{name}.tables.json"), seed=args.seed)


def _require_named(args: argparse.Namespace) -> None:
    """Raises: UsageError where a shape cannot be captured for itself."""
    from ..errors import UsageError

    wrong = [
        (args.model is None, "--graph", "a captured graph has one shape"),
        (args.cost == "measured" or args.cost.startswith("tables:"), "--cost", "prices are of operators of one shape"),
        (args.memory is not None or args.recompute == "steps", "--memory", "step graphs are of one shape"),
    ]
    for is_wrong, name, why in wrong:
        if is_wrong:
            raise UsageError(f"{name} does not go with --shapes: {why}", where="--shapes", hint=f"leave {name} out")


def _gated(plan: Plan) -> Plan:
    """The plan with what was compared; raises DifferentTraining before it is written."""
    from dataclasses import replace

    from ..run.gate.shapes import gate_shapes

    report = gate_shapes(plan, data="synthetic")
    return replace(plan, job={**plan.job, "gate": {**report.to_json(), "text": report.text()}})


def _say(made: Made) -> None:
    step_s = "nothing fits" if made.after_s is None else f"step {made.after_s:.4g} s"
    sys.stderr.write(f"{made.decision}: {step_s}, {made.evaluations} candidates judged in {made.took_s:.2f} s\n")


def _limited(fabric: Fabric, text: str) -> Fabric:
    """The fabric with at most so much memory per device."""
    from dataclasses import replace

    from ..errors import UsageError
    from ..io.quantity import parse_size_bytes

    try:
        size = parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where="--memory", hint="e.g. 12GiB") from None
    if size < 1:
        raise UsageError("must be at least 1 byte", where="--memory", hint="e.g. 12GiB")
    return replace(fabric, devices=tuple(replace(d, memory_bytes=min(d.memory_bytes or size, size)) for d in fabric.devices))


def _steps(args: argparse.Namespace, job: Training, fabric: Fabric, cost: Cost) -> StepSource | None:
    """Step graphs of stages, where they are asked for."""
    from ..errors import UsageError

    if args.memory is None and args.recompute != "steps":
        return None
    if ":" not in job.model or args.model is None:
        if args.recompute == "steps":
            raise UsageError("--recompute steps needs --model", where="--recompute", hint="a captured graph has no step graphs")
        return None
    from ..probe.steps.stages import StageSource

    return StageSource(job=job, device=fabric.devices[0], cost=cost)


def _schedule(args: argparse.Namespace) -> PipelineWanted:
    from ..drive.training.pipeline import PipelineWanted
    from .arguments import named_options

    return PipelineWanted(name=args.pipeline, options=named_options(args.pipeline_option, where="--pipeline-option"))


def _sharding(args: argparse.Namespace) -> ShardingWanted:
    from ..drive.training.sharding import ShardingWanted
    from ..errors import UsageError
    from ..io.quantity import parse_size_bytes

    size = 0
    if args.bucket is not None:
        try:
            size = parse_size_bytes(args.bucket)
        except ValueError as error:
            raise UsageError(str(error), where="--bucket", hint="e.g. 25MB") from None
        if size < 1:
            raise UsageError("must be at least 1 byte", where="--bucket", hint="e.g. 25MB")
    level = None if args.zero == "auto" else int(args.zero)
    return ShardingWanted(level=level, overlap={"auto": None, "on": True, "off": False}[args.overlap], bucket_bytes=size)


def _layout(args: argparse.Namespace) -> LayoutWanted:
    from ..decide.layout.tensor_shares import TensorOptions
    from ..drive.training.wishes import LayoutWanted

    options = TensorOptions(smoothing=args.label_smoothing, sequence={"auto": None, "on": True, "off": False}[args.sequence_parallel])
    return LayoutWanted(
        data=args.dp, tensor=args.tp, pipeline=args.pp, microbatch=args.microbatch, context=_degree(args.context, "--context"),
        expert=_degree(args.ep, "--ep"), routing=routing_of(args.routing), spare=args.spare, tensor_options=options,
    )  # fmt: skip


def _degree(text: str, flag: str) -> int | None:
    from ..errors import UsageError

    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise UsageError(f"must be auto or a degree of at least 1, got {text!r}", where=flag, hint=f"e.g. {flag} 2")
    return int(text)


def _compress(text: str) -> CompressWanted | None:
    if text == "none":
        return None
    from ..drive.training.compress import CompressWanted
    from ..probe.traffic.profile import profile_tensors

    return CompressWanted(codec=text, profile=profile_tensors)


def _measured(job: Training, fabric: Fabric) -> tuple[Fabric, OpGraph, MeasuredPrices]:
    """The fabric as fast as this machine's processor, which stands for its devices; the graph; prices measured here."""
    from ..errors import UsageError
    from ..probe.costs.node_prices import as_measured, measured_prices

    if any(d.kind != "cpu" for d in fabric.devices):
        raise UsageError("measured costs are this processor's; the fabric has other devices", where="--cost", hint="use roofline or tables:SYSTEM")
    if ":" not in job.model:
        raise UsageError("measured costs need --model", where="--cost", hint="a captured graph cannot be run")
    from ..capture.graph import capture

    graph = capture(job.model, loss=job.loss, seed=job.seed)
    prices = measured_prices(job, batch_size=MEASURED_BATCH_SAMPLES, share=fabric.devices[0].cpu_share or 1.0)
    return as_measured(fabric, prices.peak_flops(graph), "fp32"), graph, prices
