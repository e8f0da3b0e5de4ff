"""The driver: problem -> decisions -> program -> check -> simulate -> plan. The only place that composes decisions.

    fabric = read_fabric("two-islands")
    plan = plan_training(Training(model="examples/gpt.py:small", global_batch=32), fabric)
    write_plan("plan.json", plan)

Order, with reasons:
1. capture (or read) the operator graph: everything else is arithmetic on it;
2. layout candidates (decide.layout), ordered by a closed form and cut to a few per combination of degrees: simulation is the judge, but costs;
3. for each, the collectives it calls (decide.collective), planned once per group of devices, operation and size;
4. lower to a program, simulate it on the fabric, several placements each: the fastest that fits in memory wins;
5. for the winner, every collective strategy in turn for each purpose: they share links with the rest of the step, so a schedule that
   wins alone can lose here;
6. check the winner with code that shares nothing with the above; only then is it a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from . import __version__
from .bound import Bound, Certificate
from .cost import Cost, Priced, assumed_cost
from .decide.layout.tensor_shares import TensorOptions
from .decide.layout.unlike import EVEN
from .drive_collectives import CollectivePlanner
from .drive_compress import CompressWanted, choose_compression, compression_citations
from .drive_divide import refine_division
from .drive_evaluated import Evaluated
from .drive_layouts import LayoutSearch
from .drive_nearest import leanest_fitting
from .drive_no_plan import no_plan
from .drive_pipeline_choice import PipelineWanted, choose_schedule, pipeline_decision
from .drive_recompute import recompute_decision
from .drive_sequence import sequence_decision
from .drive_sharding import ShardingWanted, choose_sharding, sharding_decision
from .drive_stage_steps import StepSource
from .errors import UsageError
from .fabric import Fabric
from .graph import OpGraph
from .job import Training
from .plan import Alternative, CycleEntry, Plan, Prediction, TrainingLayout
from .timeline import Timeline

__all__ = ["check", "plan_of", "plan_training", "read_fabric", "read_plan", "roofline_bound", "simulate", "write_plan"]


def read_fabric(spec: str, devices: str | None = None) -> Fabric:
    """A fabric by file name or preset (`two-islands`, `dgx-h100:2`), optionally only some of its devices (`0-3,8`)."""
    from .io.fabric_name import load_fabric

    return load_fabric(spec, devices)


def read_plan(path: str | Path) -> Plan:
    from .io.plan_file import read_plan as read

    return read(Path(path))


def write_plan(path: str | Path, plan: Plan) -> None:
    from .io.plan_file import write_plan as write

    write(Path(path), plan)


def simulate(plan: Plan, fabric: Fabric | None = None, cost: Cost | None = None, *, record: bool = True, transfers: bool = False) -> Timeline:
    """Simulates the plan's main program, by default on the fabric it was made for; another fabric takes its devices in order."""
    from .simulate import simulate_stored

    target = fabric_of(plan)
    where = target if fabric is None else fabric
    placement = plan.placement if fabric is None else tuple(d.name for d in where.devices[: plan.main.ranks])
    if len(placement) < plan.main.ranks:
        raise UsageError(f"the plan needs {plan.main.ranks} devices, fabric {where.name!r} has {len(where.devices)}")
    return simulate_stored(
        plan.main, where, placement, cost or cost_of(plan), works=works_of(plan), programs=plan.programs, record=record, transfers=transfers
    )


def check(plan: Plan) -> None:
    """Raises CheckFailed with a witness unless every checker accepts the plan."""
    from .check import check_plan

    check_plan(plan, fabric_of(plan)).raise_if_wrong()


def fabric_of(plan: Plan) -> Fabric:
    from .io.fabric_document import fabric_from_document

    return fabric_from_document(dict(plan.target_fabric))


def cost_of(plan: Plan) -> Cost:
    import msgspec

    return msgspec.convert(plan.job["cost"], Cost)


def works_of(plan: Plan) -> dict[str, Any]:
    import msgspec

    from .graph import Work

    return {key: msgspec.convert(value, Work) for key, value in plan.job["works"].items()}


def plan_training(
    job: Training,
    fabric: Fabric,
    cost: Cost | None = None,
    *,
    graph: OpGraph | None = None,
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    microbatch: int | None = None,
    collective: str = "auto",
    prices: Callable[[OpGraph, TrainingLayout], dict[str, Priced]] | None = None,
    time_limit_s: float = 120.0,
    unchecked: bool = False,
    tensor_options: TensorOptions | None = None,
    schedule: PipelineWanted | None = None,
    borders: tuple[str, ...] = (),
    recompute: str = "auto",
    sharding: ShardingWanted | None = None,
    steps: StepSource | None = None,
    compress: CompressWanted | None = None,
    divide: bool = True,
) -> Plan:
    """Plans a training job on all devices of `fabric`.

    Args:
        graph: a captured graph; None captures `job.model` (needs torch).
        data, tensor, pipeline, microbatch: fix some degrees; None leaves them to the search.
        prices: gives better prices than `cost` for a layout's steps, by the keys of `Cost.table` (e.g. `probe.node_prices`).
        collective: `auto`, or the name of one collective strategy for every all-reduce.
        unchecked: skip the final check (for debugging planners only).
        borders: the operators that begin the stages after the first; empty leaves the cuts to the search.
        recompute: `auto` (keep everything where it fits, else the cheapest choice per stage that fits), `none`, `selective` (core attention of
            every layer), `full` (every layer), `optimal` (as auto, without another word), `steps` (whole stages by their step graphs).
        steps: step graphs of stages; with it, `auto` and `optimal` also try plans of whole stages, and take what is faster.
        sharding: level of data-parallel sharding, overlap of gradient sums, bucket size; None: the search chooses all three.
        compress: which codec gradient sums go through, or `auto`; None: they are summed as they are.
        tensor_options: shares of tensor-parallel ranks, label smoothing of split losses; None: equal speeds, torch's smoothing.
        divide: on devices of unlike speed, also try layers, micro-batches and tensor shares by speed, not in equal parts only.
        schedule: of the pipeline: one by name, or `auto`; None: 1F1B.

    Raises: Disconnected, UsageError (degrees or batch that do not divide), Infeasible (nothing fits: carries the smallest violated
        limit), TimeLimit (degrees were left out for size or time, none of the others fits), CaptureError,
        CheckFailed (a planner is wrong: please report it).
    """
    fabric.require_connected()
    cost = cost or assumed_cost(fabric)
    if graph is None:
        from .capture.graph import capture

        graph = capture(job.model, loss=job.loss, seed=job.seed)
    planner = CollectivePlanner(fabric=fabric, transport=cost.transport, strategy=collective, seed=job.seed)
    search = LayoutSearch(job=job, fabric=fabric, cost=cost, graph=graph, planner=planner, time_limit_s=time_limit_s, prices=prices)
    search.borders = borders
    search.recompute, search.steps, search.divide = recompute, steps, divide
    if recompute == "steps" and steps is None:
        raise UsageError("plans of whole stages need the stages' step graphs", where="recompute", hint="give steps, e.g. run.stage_steps.StageSource")
    if tensor_options is not None:
        search.tensor_options = tensor_options
    fixed = (data, tensor, pipeline, microbatch)
    best, judged = search.best(fixed)
    wanted = sharding or ShardingWanted()
    best, judged = choose_sharding(search, fixed, best, judged, wanted)
    asked = schedule or PipelineWanted()
    best, judged = choose_schedule(search, fixed, best, judged, asked, wanted)
    if best is None and not wanted.level and asked.name in ("1f1b", "auto"):  # with a level asked for, only layouts that have it count
        best = leanest_fitting(search, judged)
        judged = judged if best is None else [*judged, best]
    if best is None:
        raise no_plan(search, fixed, judged, asked)
    best = refine_division(search, search.whole(best))
    best = search.refine_collectives(best)
    best, search.compression = choose_compression(search, best, judged, compress, wanted)
    plan = plan_of(job, fabric, cost, search, best, judged, wanted, asked)
    if not unchecked:
        check(plan)
    return plan


def roofline_bound(graph: OpGraph, fabric: Fabric, cost: Cost, global_batch: int) -> Bound:
    """No plan can do the step's arithmetic faster than all devices at their peak together."""
    flops = sum(n.forward.flops + n.backward.flops for n in graph.nodes) * global_batch // graph.batch_size
    speed = sum(int(d.flops.get(cost.dtype, cost.default_flops)) for d in fabric.devices)
    data = {"flops": flops, "flops_per_s": speed, "devices": len(fabric.devices), "dtype": cost.dtype}
    return Bound(quantity="step time", value=f"{flops}/{speed}", unit="s", certificate=Certificate(kind="roofline", data=data))


def plan_of(
    job: Training, fabric: Fabric, cost: Cost, search: LayoutSearch, best: Evaluated, judged: list[Evaluated],
    wanted: ShardingWanted | None = None, schedule: PipelineWanted | None = None,
) -> Plan:  # fmt: skip
    from .decide.layout import grid, megatron
    from .io.fabric_document import fabric_document
    from .io.plan_file import program_hash

    layout, timeline = best.layout, best.recorded()
    assert best.program is not None, "the best candidate was simulated"
    main = program_hash(best.program)
    cites = {"layout": [c.key for c in (grid.CITE, megatron.CITE)]}
    decisions: dict[str, Any] = {
        "layout": {
            "strategy": "grid",
            "options": {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline, "microbatch_size": layout.microbatch_size}
            | ({"division": str(best.candidate.division)} if best.candidate.division != EVEN else {}),
            "why": _why(best, judged),
            "cite": cites["layout"],
        },
        "pipeline": pipeline_decision(best, judged, schedule or PipelineWanted()),
        "recompute": recompute_decision(best, search.recompute),
        "placement": {"strategy": best.placement_name, "options": {}, "why": "fastest of the axis orders tried", "cite": []},
    }
    if layout.tensor > 1:
        decisions["sequence"] = sequence_decision(search.tensor_options.sequence, best, judged)
    if layout.data > 1 or len(layout.placement) > 1:
        decisions["sharding"] = sharding_decision(best, judged, wanted or ShardingWanted())
    decisions |= ({"compress": search.compression} if search.compression else {}) | search.planner.decisions(best.callees)
    builtin = msgspec.to_builtins
    return Plan(
        kind="training",
        job={
            "training": builtin(job),
            "graph_fingerprint": search.graph.fingerprint(),
            "graph_outline": search.graph.outline(),
            "parameters": search.graph.parameter_count,
            "cost": builtin(best.cost),
            "works": {key: builtin(work) for key, work in sorted(best.works.items())},
        },
        target_fabric=fabric_document(fabric),
        placement=best.placement,
        programs={main: best.program, **best.callees},
        cycle=(CycleEntry(program=main),),
        decisions=decisions,
        layout=layout,
        bound=roofline_bound(search.graph, fabric, cost, job.global_batch),
        prediction=_prediction(fabric, best, timeline),
        alternatives=tuple(_alternative(e, best) for e in _ordered(judged) if e is not best and e.identity != best.identity),
        seed=job.seed,
        versions={"meshwright": __version__},
    )


def _prediction(fabric: Fabric, best: Evaluated, timeline: Timeline) -> Prediction:
    from .check.memory import worst_order_peaks

    phases = best.phases(timeline)
    ranks = len(phases)
    return Prediction(
        target_fabric=fabric.name,
        time_s=timeline.makespan_s,
        phases_s={name: sum(p[name] for p in phases) / ranks for name in phases[0]},
        memory_peak_bytes=tuple(timeline.memory_peak_bytes),
        memory_worst_bytes=best.worst_order_bytes or tuple(worst_order_peaks(best.inlined.program)),
        evidence=best.evidence(timeline),
    )


def _ordered(judged: list[Evaluated]) -> list[Evaluated]:
    return sorted(judged, key=lambda e: (e.timeline is None, e.excess_bytes > 0, e.time_s, str(e.candidate.degrees), e.placement_name))


def _alternative(e: Evaluated, best: Evaluated) -> Alternative:
    what = f"{e.candidate.what}, {e.placement_name}" if e.timeline is not None else e.candidate.what
    what += f", {e.policy}" if str(e.policy) else ""
    if e.timeline is None:
        return Alternative(what=what, why=e.why)
    peak = max(e.timeline.memory_peak_bytes)
    if e.excess_bytes > 0:
        return Alternative(what=what, time_s=e.time_s, memory_peak_bytes=peak, why=f"needs {e.excess_bytes} bytes more than rank {e.worst_rank} has")
    return Alternative(what=what, time_s=e.time_s, memory_peak_bytes=peak, why=f"{e.time_s / best.time_s:.3f} times the chosen step time")


def _why(best: Evaluated, judged: list[Evaluated]) -> str:
    simulated = [e for e in judged if e.timeline is not None]
    fitting = [e for e in simulated if e.excess_bytes <= 0]
    return f"shortest simulated step of {len(fitting)} layouts that fit, {len(simulated)} simulated, {len(judged)} considered"


def citations(plan: Plan) -> list[tuple[str, Any]]:
    """(decision, Cite) of every published method that the plan uses."""
    from importlib import import_module

    from .decide.collective import CITES
    from .decide.collective.sparse import CITES as SPARSE_CITES
    from .msccl import CITE as MSCCL_CITE

    modules = {"layout": ("decide.layout.grid", "decide.layout.megatron")}
    found = [("layout", import_module(f".{name}", __package__).CITE) for name in modules["layout"]]
    if plan.layout is not None and plan.layout.sequence:
        found.append(("sequence", import_module(".decide.layout.sequence", __package__).CITE))
    if plan.layout is not None and plan.layout.zero_level:
        found.append(("sharding", import_module(".decide.layout.data_sharding", __package__).CITE))
    for name, decision in plan.decisions.items():
        if name.startswith("collective:"):
            for strategy in decision["strategy"].split("+"):
                known = {**CITES, **SPARSE_CITES, "msccl": MSCCL_CITE}  # planners, imported files
                if cite := known.get(strategy):
                    found.append((name, cite))
        elif name == "recompute" and decision["cite"]:
            from .decide.memory.selective import CITE

            found.append((name, CITE))
        elif name == "pipeline":
            known = import_module(".decide.pipeline", __package__).CITES
            found += [(name, known[decision["strategy"]])] if decision["strategy"] in known else []
        elif name == "compress":
            found += compression_citations(decision)
        elif name == "fill":
            found.append((name, import_module(".decide.pipeline.fill", __package__).CITE))
    return found


def options_of_plan(plan: Plan) -> Mapping[str, Any]:
    """The degrees and strategies of a plan as one flat record, for tables."""
    layout = plan.layout
    if layout is None:
        return {}
    found: dict[str, Any] = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline}
    found |= {"microbatch_size": layout.microbatch_size, "microbatches": layout.microbatches}
    return found | {name: d["strategy"] for name, d in plan.decisions.items()}
