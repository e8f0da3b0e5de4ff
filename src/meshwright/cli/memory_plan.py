"""`meshwright memory plan`: which operators of a model's layer to compute again, per pipeline stage, and what it costs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import pictures, step_arguments
from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..decide.memory import RecomputePlan, RecomputeProblem
    from ..decide.memory.problem import RecomputeStrategy
    from ..errors import Infeasible

HELP = "choose what a training step keeps for its backward pass and what it computes again"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, nargs="?", help="a captured graph (`train capture`): plan its repeated layer; or else --model")
    parser.add_argument("--layer", help="module path of the layer, e.g. blocks.0 (default: the one that repeats most)")
    parser.add_argument("--batch", type=at_least_one, help="micro-batch size (default: that of the graph)")
    parser.add_argument(
        "--budget",
        help="bytes, e.g. 4GB; with a graph: for the activations of a stage, or one number per stage separated by commas; with --model: see above",
    )  # fmt: skip
    parser.add_argument("--layers", help="layers of every stage, separated by commas (default: all that repeat, spread evenly)")
    parser.add_argument("--pp", type=at_least_one, default=1, help="pipeline stages (default 1)")
    parser.add_argument("--microbatches", type=at_least_one, default=1, help="micro-batches per step (default 1); stage i of p keeps min(N, p - i)")
    parser.add_argument("--strategy", help="optimal (default), another of `strategies list memory`, or all (prints a table); with --model: see above")
    parser.add_argument("--every", type=at_least_one, default=1, help="uniform: layers per checkpoint; block: layers computed again")
    parser.add_argument("--device", default="a100", help="GPU for which operators are priced, by roofline (default a100)")
    step_arguments.arguments(parser)
    parser.add_argument("--max-batch", action="store_true", help="with --model: the largest batch that fits in --budget, and why one more does not")
    parser.add_argument("--measure", action="store_true", help="with --model: run the plan here and print the measured peak beside the predicted one")
    parser.add_argument("-o", "--out", type=Path, help="with --model: write the plan as JSON")
    pictures.svg_argument(parser, "with --model: draw memory over the planned step, with its peak")


def run(args: argparse.Namespace) -> Result:
    import msgspec
    import numpy as np

    from ..decide.memory import CITES, strategies, strategy
    from ..errors import Infeasible, Unsupported, UsageError

    pictures.check_pictures(args)
    if args.model:
        from .step_plan import run as run_step

        return run_step(args)
    if args.graph is None or args.budget is None:
        raise UsageError("needs --budget, and a captured graph or --model", where="memory plan", hint="see memory plan --help")
    if args.svg is not None:
        raise UsageError("works only with --model", where="--svg", hint="give --model FILE.py:function instead of a graph")
    args.strategy = args.strategy or "optimal"
    from ..report.recompute_text import plan_lines, table_lines

    kinds = strategies("regions") if args.strategy == "all" else (strategy(args.strategy, "regions", where="--strategy", also=("all",)),)
    name, problem = _problem(args)
    plans: dict[str, RecomputePlan] = {}
    refused: dict[str, str] = {}
    for made in [variant for kind in kinds for variant in kind.variants(problem, every=args.every)]:
        try:
            plans[made.name] = made.plan(problem, rng=np.random.default_rng(0))
        except (Infeasible, Unsupported) as error:
            if args.strategy != "all":
                if isinstance(error, Infeasible):
                    raise _nearest(error, args, problem, made) from None
                raise
            refused[made.name] = str(error)
    document = {
        "schema": "meshwright.memory.plan", "version": 1, "layer": name, "operators": [o.name for o in problem.layer.operators],
        "stages": msgspec.to_builtins(problem.stages), "plans": msgspec.to_builtins(plans), "refused": refused,
        "cites": [CITES[s].key for s in plans if s in CITES],
    }  # fmt: skip
    if args.strategy == "all":
        return Result(document, "\n".join(table_lines(name, problem, plans, refused)))
    return Result(document, "\n".join(plan_lines(name, problem, plans[args.strategy])))


def _nearest(error: Infeasible, args: argparse.Namespace, problem: RecomputeProblem, strategy: RecomputeStrategy) -> Infeasible:
    """What would make it fit, found by planning with it; smaller micro-batches where the graph scales."""
    from ..decide.memory import strategies
    from ..decide.memory.nearest import nearest_feasible
    from ..errors import MeshwrightError
    from ..io.model.graph import read_graph

    def smaller() -> Iterator[tuple[int, RecomputeProblem]]:
        batch = args.batch or read_graph(args.graph).batch_size
        while batch > 1:
            batch //= 2
            try:
                yield batch, _problem(argparse.Namespace(**{**vars(args), "batch": batch}))[1]
            except MeshwrightError:
                return  # the graph does not say how its sizes change with the batch

    others = {v.name: v for kind in strategies("regions") if kind.name != strategy.name for v in kind.variants(problem, every=args.every)}
    return nearest_feasible(error, problem, strategy, others, smaller=smaller())


def _problem(args: argparse.Namespace) -> tuple[str, RecomputeProblem]:
    """Raises: UsageError, UnknownName, FormatError."""
    from ..cost import Cost
    from ..decide.memory import RecomputeProblem, StageBudget
    from ..decide.memory.captured import core_attention, layer_nodes, layer_of, repeated_layers
    from ..decide.pipeline import peak_in_flight
    from ..errors import UnknownName, UsageError
    from ..fabric.fabric import Device
    from ..fabric.machines import GPUS
    from ..graph.scale import at_batch
    from ..io.model.graph import read_graph

    gpu = GPUS.get(args.device.lower())
    if gpu is None:
        raise UnknownName(f"no device is called {args.device[:64]!r}", where="--device", hint=f"there are: {', '.join(GPUS)}")
    graph = read_graph(args.graph)
    if args.batch is not None and args.batch != graph.batch_size:
        graph = at_batch(graph, args.batch)
    paths = repeated_layers(graph)
    name = args.layer or (paths[0] if paths else "")
    if not name:
        raise UsageError(f"no module of {graph.model} repeats", where="--layer", hint="name one, e.g. --layer encoder")
    device = Device(name=args.device, memory_bytes=gpu.memory_bytes, memory_bandwidth_Bps=gpu.bandwidth_Bps, flops=gpu.flops)
    half = "bf16" if "bf16" in gpu.flops else "fp16"
    low = any(o.dtype in ("bfloat16", "float16") for n in layer_nodes(graph, name) for o in n.outputs)
    cost = Cost(dtype=half if low else "fp32")
    layer = layer_of(graph, name, lambda n: cost.roofline(n.forward, device).time_s if n.forward.calls else 0.0)
    counts = _per_stage(args.layers, args.pp, "--layers", int) if args.layers else _even(max(len(paths), 1), args.pp)
    budgets = _per_stage(args.budget, args.pp, "--budget", _size)
    stages = tuple(
        StageBudget(layers=n, in_flight=peak_in_flight(args.pp, args.microbatches, i), budget_bytes=b)
        for i, (n, b) in enumerate(zip(counts, budgets, strict=True))
    )
    return name, RecomputeProblem(layer=layer, core=core_attention(layer_nodes(graph, name)), stages=stages)


def _even(layers: int, stages: int) -> list[int]:
    """The remainder goes to the later stages, which keep fewer micro-batches."""
    each, more = divmod(layers, max(stages, 1))
    return [each + (i >= stages - more) for i in range(stages)]


def _per_stage(text: str, stages: int, where: str, parse: Any) -> list[int]:
    from ..errors import UsageError

    try:
        values = [parse(item) for item in text.split(",")]
    except ValueError as error:
        raise UsageError(str(error), where=where) from None
    if len(values) == 1:
        values *= max(stages, 1)
    if len(values) != stages or min(values, default=0) < 0:
        raise UsageError(f"names {len(values)} stages, there are {stages}", where=where, hint="one value, or one per stage")
    return values


def _size(text: str) -> int:
    from ..io.quantity import parse_size_bytes

    plain = text.strip()
    return int(plain) if plain.isascii() and plain.isdigit() and len(plain) <= 20 else parse_size_bytes(text)  # without a unit: bytes
