"""Training plans: problem -> decisions -> program -> check -> simulate -> plan.

    fabric = read_fabric("two-islands")
    plan = plan_training(Training(model="examples/gpt.py:small", global_batch=32), fabric)
    write_plan("plan.json", plan)

The operator graph is captured, or given. The rest is arithmetic on it. `decisions.DECISIONS` lists the decisions in order. A checker that shares no
code with the planners checks the winner. Only then is it a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from ...bound import Bound, Certificate
from ...cost import Cost
from ...errors import TimeLimit
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph, captured_whole
from ...graph.scale import at_batch
from ...job import Training
from ...kernels.garbage import few_collections
from ...plan.plan import Alternative, Plan, Prediction, TrainingLayout
from ...timeline import Timeline
from ..plans import check_plan, make_plan
from .context import Context, Found, Made, SearchBudget
from .decisions import begin, context_of, finish, refine, require_asked
from .evaluated import Evaluated, fastest
from .reproducible import folding, require_folds
from .sharding import ShardingWanted, as_wanted
from .step_end import require_recipe
from .wishes import LayoutWanted, Wishes

__all__ = ["plan_of", "plan_training", "require_job", "roofline_bound"]

# Layouts that are tried, fastest first, until the checker decides on one.
MAX_LAYOUTS_PROVED = 3
SMALLER = "larger micro-batches (--microbatch), or other degrees (--dp, --tp, --pp), make a smaller one"


def require_job(job: Training, fabric: Fabric, wishes: Iterable[object] = (), without: Collection[str] = ()) -> Wishes:
    """The wishes with what follows from them. What can be refused without the model is refused here, before it is captured.

    Raises: Disconnected, UsageError; Unsupported for what a reproducible job cannot have.
    """
    fabric.require_connected()
    asked = folding(job, fabric, Wishes.these(wishes))
    require_asked(job, fabric, asked, without)
    return asked


@few_collections()
def plan_training(
    job: Training, fabric: Fabric, cost: Cost | None = None, *, graph: OpGraph | None = None, wishes: Iterable[object] = (),
    budget: SearchBudget | None = None, without: Collection[str] = (), watch: Callable[[Made], None] | None = None,
) -> Plan:  # fmt: skip
    """Plans a training job on all devices of `fabric`.

    Args:
        graph: a captured graph; None captures `job.model` (needs torch).
        wishes: what is asked of decisions, at most one record of a kind: `LayoutWanted` (degrees that are fixed), `ShardingWanted`, `PipelineWanted`,
            `RecomputeWanted`, `MemoryWanted`, `DivisionWanted`, `CollectivesWanted`, `CompressWanted`; `StepPrices`. The rest has its defaults.
        budget: effort of the search. If its time limit is reached, the plan is the best so far, and its entries say `cut`.
        without: names of decisions to leave out.
        watch: called after each decision with what it gained and how long it took.

    Raises: Disconnected, UsageError (degrees or batch that do not divide), Infeasible (nothing fits: carries the smallest violated
        limit), TimeLimit (degrees were left out for size or time, none of the others fits), CaptureError,
        CheckFailed (a planner is wrong: please report it); as `require_recipe`.
    """
    asked, captured = require_job(job, fabric, wishes, without), graph
    if graph is None:
        from ...capture.precision import capture_job, cast_as

        job = cast_as(job, fabric)
        graph = _at_a_size_to_plan(job, asked, fabric, capture_job(job))
    require_recipe(job, graph)
    context = context_of(job, fabric, cost, graph=graph, wishes=asked.given, budget=budget, without=without, watch=watch)
    found = begin(context)
    if captured is None and (other := _graph_of_its_size(job, graph, found)) is not None:
        only = replace(asked.of(LayoutWanted), microbatch=other.batch_size)
        if large := context.is_large((best := found.winner).candidate):  # nor are other degrees judged again, which takes long
            only = replace(only, data=best.layout.data, tensor=best.layout.tensor, pipeline=best.layout.pipeline)
        context = context_of(job, fabric, cost, graph=other, wishes=asked.but(only).given, budget=budget, without=without, watch=watch)
        found = (_same_on(found, context) if large else None) or begin(context)
    found = finish(context, found)
    require_folds(found.winner.layout)
    return _proved(found, context)


def _at_a_size_to_plan(job: Training, asked: Wishes, fabric: Fabric, graph: OpGraph) -> OpGraph:
    """The graph; where it holds at one batch size only (a Python loop over samples makes other calls at every size), that of the micro-batches that
    were asked for, else of one micro-batch for each replica that was asked for, else for each device."""
    wanted = asked.of(LayoutWanted)
    rows, rest = (wanted.microbatch, 0) if wanted.microbatch else divmod(job.global_batch, wanted.data or len(fabric.devices))
    if graph.scaling is not None or rest or rows in (0, graph.batch_size):
        return graph
    from ...capture.precision import capture_job

    return msgspec.structs.replace(capture_job(job, batch_size=rows, scalable=False), notes=graph.notes)


def _same_on(found: Found, context: Context) -> Found | None:
    """The chosen degrees, sharding and placement on the context's graph; None where they do not fit there, or another order of stages was chosen."""
    best, asked = found.winner, found.winner.candidate
    if asked.schedule:
        return None
    candidate = context.grid().sharded(context.problem, asked.degrees, asked.sharding, asked.division)
    made = context.judge(candidate, best.placement, best.placement_name) if candidate.layout is not None else []
    chosen = fastest(made, lambda e: (e.placement_name,))
    if chosen is None:
        return None
    of = f"with several samples in a micro-batch, where a model makes other calls than for {context.graph.batch_size}"
    others = [e if e.timeline is None else replace(e, timeline=None, why=f"{e.time_s:.4g} s {of}") for e in found.judged if e is not best]
    return replace(found, best=chosen, judged=[chosen, *others])


def _proved(found: Found, context: Context) -> Plan:
    """The plan of the winner, or of the next fastest layouts where the checker cannot decide in its budget, which the plan then says
    (`job.undecided`). Raises: CheckFailed."""
    winner, wanted = found.winner, context.wish(ShardingWanted)
    alike = (e for e in found.judged if e.fits and as_wanted(e, wanted) and e.candidate.schedule == winner.candidate.schedule)
    rivals = sorted((e for e in alike if e.identity != winner.identity), key=lambda e: e.time_s)
    others, undecided, first = iter(rivals), list[str](), plan_of(found, context)
    plan, best = first, found.best
    while best is not None and not (verdict := check_plan(plan)).ok:
        why = f"its program is too large to be proved ({verdict.findings[0].message}); {SMALLER}"
        undecided.append(f"{best.candidate.what}: {why}")
        best = _next_best(islice(others, MAX_LAYOUTS_PROVED - len(undecided)), context)
        plan = first if best is None else plan_of(refine(context, replace(found, best=best)), context)
    return replace(plan, job={**plan.job, "undecided": undecided}) if undecided else plan


def _next_best(others: Iterable[Evaluated], context: Context) -> Evaluated | None:
    """The first that fits when it is written out."""
    for e in others:
        try:
            best = context.evaluator.whole(context.evaluator.again(e))
        except TimeLimit:
            continue
        if best.fits:
            return best
    return None


def _graph_of_its_size(job: Training, graph: OpGraph, found: Found) -> OpGraph | None:
    """The graph at the plan's micro-batch size, where it makes other calls than the captured one; None where it makes the same.

    Only one sample differs from several: a dimension of size 1 broadcasts, so models and torch make other calls for it (`expand` to it is none).
    """
    layout = found.winner.layout
    if layout is None or (layout.microbatch_size == 1) == (graph.batch_size == 1):
        return None
    from ...capture.precision import capture_job

    other = capture_job(job, batch_size=layout.microbatch_size, scalable=False)
    return None if other.fingerprint() == graph.fingerprint() else other


def roofline_bound(graph: OpGraph, fabric: Fabric, cost: Cost, global_batch: int, layout: TrainingLayout | None = None) -> Bound:
    """No plan can do the step's arithmetic faster than all devices at their peak together. `layout`: of the plan, where there is one."""
    flops = _flops(graph) * global_batch // graph.batch_size
    if layout is not None:  # a split segment says a part of it, rounded down in each pass
        parts = ((s.forward.flops + s.backward.flops, (2, layout.tensor) if s.split else (0, 1)) for s in layout.segments)
        planned = layout.all_microbatches * sum((done + lost) * times for done, (lost, times) in parts)
        if planned < flops:  # the work of a sample depends on how many there are
            flops = min(planned, _least_flops(graph, global_batch))
    speed = sum(int(d.flops.get(cost.dtype, cost.default_flops)) for d in fabric.devices)
    written = flops if flops < 1 << 63 else str(flops)  # plans hold integers of 64 bits: a step of 405 billion parameters has more
    data = {"flops": written, "flops_per_s": speed, "devices": len(fabric.devices), "dtype": cost.dtype}
    return Bound(quantity="step time", value=f"{flops}/{speed}", unit="s", certificate=Certificate(kind="roofline", data=data))


def _flops(graph: OpGraph) -> int:
    return sum(n.forward.flops + n.backward.flops for n in graph.nodes)


def _least_flops(graph: OpGraph, global_batch: int) -> int:
    """Of a step, by the micro-batch with the least: work that is done once per call (a matrix that parameters are made of) is least in a large one,
    that of samples compared with each other in a small one."""
    if graph.scaling is None:
        return _flops(graph) * global_batch // graph.batch_size
    one, two, three = (_flops(at_batch(graph, rows)) for rows in (1, 2, 3))
    square = (three - 2 * two + one) // 2
    slope = two - one - 3 * square
    return min((one + (slope + square * (rows + 1)) * (rows - 1)) * global_batch // rows for rows in range(1, global_batch + 1))


def plan_of(found: Found, context: Context) -> Plan:
    """The plan of the winner, with an entry of every decision."""
    best, job, graph = found.winner, context.job, context.graph
    assert best.program is not None and best.cost is not None, "the best candidate was simulated"
    others = sorted((e for e in found.judged if e is not best and e.identity != best.identity), key=_rank)
    return make_plan(
        "training", context.fabric, best.placement, best.program,
        job={
            "training": msgspec.to_builtins(job), "graph_fingerprint": graph.fingerprint(), "graph_outline": graph.outline(),
            "parameters": graph.parameter_count, **({"captured": told} if (told := captured_whole(graph)) else {}),
        },
        cost=best.cost, works=best.works, others=best.callees.values(), layout=best.layout, seed=job.seed,
        decisions=_entries(found, context),
        bound=roofline_bound(graph, context.fabric, context.cost, job.global_batch, best.layout),
        prediction=_prediction(context.fabric, best, best.recorded()),
        alternatives=[_alternative(e, best) for e in others],
    )  # fmt: skip


def _entries(found: Found, context: Context) -> dict[str, Any]:
    """Of every decision; where the clock cut one, its entry says so, or the layout's if it has none. The layout's tells what each gained and took."""
    entries: dict[str, Any] = {}
    for decision in context.decisions:
        own = decision.entries(found, context)
        entries |= own
        key, cut = next(iter(own), "layout"), found.cuts.get(decision.name)
        if cut is not None and "cut" not in entries[key]:
            entries[key] |= {"why": f"{entries[key]['why']}; {cut}", "cut": cut.to_json()}
    entries["layout"]["made"] = [made.to_json() for made in found.made]
    return entries


def _prediction(fabric: Fabric, best: Evaluated, timeline: Timeline) -> Prediction:
    from ...check.program.memory import worst_order_peaks

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


def _rank(e: Evaluated) -> tuple[object, ...]:
    return e.timeline is None, e.excess_bytes > 0, e.time_s, str(e.candidate.degrees), e.placement_name


def _alternative(e: Evaluated, best: Evaluated) -> Alternative:
    what = f"{e.candidate.what}, {e.placement_name}" if e.timeline is not None else e.candidate.what
    what += f", {e.policy}" if str(e.policy) else ""
    if e.timeline is None:
        return Alternative(what=what, why=e.why)
    slower, over = f"{e.time_s / best.time_s:.3f} times the chosen step time", f"needs {e.excess_bytes} bytes more than rank {e.worst_rank} has"
    why = (over if e.excess_bytes > 0 else slower) + (", each sum timed alone" if e.lone_sums else "")
    return Alternative(what=what, time_s=e.time_s, memory_peak_bytes=e.peak_bytes, why=why)
