"""A layout that the search found, as a training plan that runs: what of it `train run` cannot do, and the plan where there is nothing.

The plan goes the way of `train plan`: the found degrees, precision, schedule, borders of stages and pieces, sharding level and recomputation are
fixed, the layout is built from the operator graph, lowered, placed, simulated and checked. On devices of unlike speed the plan divides micro-batches
and tensor shares by itself, and stages too where that is faster than with the found borders. Where layers recompute differently, the plan
chooses again (`auto`: what fits, at least time). What the search assumed beyond that (kernels, overlap) is not in it: its time is the plan's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ...cost import Cost
from ...decide.layout.mixed.search import Judged
from ...decide.pipeline import OneFOneB
from ...errors import Unsupported
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...job import Training
from ...plan.plan import Plan
from ...plan.routing import UNIFORM, Routing
from ...profile.network import ProfiledLayout
from ..layout.search import LayoutFindings
from ..pipeline.pipelines import make_strategy
from .collective_choice import CollectivesWanted
from .context import TIME_LIMIT_S, SearchBudget
from .pipeline import PipelineWanted
from .program_sizes import MAX_PROGRAM_STEPS, predicted_steps
from .recompute import RecomputeWanted
from .sharding import ShardingWanted
from .training import plan_training
from .wishes import LayoutWanted, PrecisionWanted

__all__ = ["best_runnable", "not_runnable", "plan_found"]


def not_runnable(found: LayoutFindings, judged: Judged) -> tuple[str, ...]:
    """What keeps a found layout from being a plan: one line per property, none where it can be run."""
    layout, choices = judged.candidate.layout, judged.candidate.choices
    why = []
    replicas = {r for s in layout.stages for r in s.replicas}
    if len({r.tensor for r in replicas}) > 1 or any(c.tensor for c in choices):
        degrees = sorted({r.tensor for r in replicas} | {c.tensor for c in choices if c.tensor})
        why.append(f"tensor degrees differ ({', '.join(map(str, degrees))})")
    if (count := sum(layout.microbatches)) % layout.data:
        why.append(f"its {count} micro-batches do not divide by {layout.data} pipelines, from which a plan's unequal numbers start")
    levels = sorted({c.sharding for c in choices})
    if len(levels) > 1 and layout.data > 1:
        why.append(f"layers have different sharding levels ({', '.join(map(str, levels))})")
    if rank_by_rank := _written_out(layout):
        why.append(rank_by_rank)
    used, there = layout.gpus, sum(p.kind.devices for p in found.problem.pools)
    if used != there:
        why.append(f"it uses {used} of {there} devices (--devices)")
    return tuple(why)


def _written_out(layout: ProfiledLayout) -> str:
    """Where a plan would hold every rank's steps and these are too many: what keeps it from holding one rank of every stage; empty where it can."""
    tensor, stages = max(r.tensor for s in layout.stages for r in s.replicas), len(layout.stages)
    steps = predicted_steps(layout.data, tensor, stages, layout.microbatches[0], stages, 0)  # at least
    name, options = _schedule_of(layout)
    if steps <= MAX_PROGRAM_STEPS or make_strategy(name, options).traits.copies == 1:
        return ""
    return f"copies of the stages (schedule {name}) would be written out for every rank, more than {steps:,} steps (at most {MAX_PROGRAM_STEPS:,})"


def _schedule_of(layout: ProfiledLayout) -> tuple[str, dict[str, str]]:
    """Its name and options."""
    name, *options = layout.schedule.name.split() if layout.schedule is not None else (OneFOneB.name,)
    pairs = (x.partition("=") for x in options)
    return name, {key: value or "true" for key, _, value in pairs}


def best_runnable(found: LayoutFindings) -> Judged:
    """The fastest simulated layout that can be run. Raises: Unsupported naming what the best one has that cannot."""
    for judged in found.found.ranked:
        if not not_runnable(found, judged):
            return judged
    best = found.found.best
    why = not_runnable(found, best)
    raise Unsupported(
        f"none of the {len(found.found.ranked)} simulated layouts can be run; the best, {best.candidate.layout.name}: {'; '.join(why)}",
        where="--out", hint="search for layouts that can: one level (--levels 0), one tensor degree (--tensors), --schedules 1f1b, --contexts 1",
        data={"layout": best.candidate.layout.name, "why": list(why)},
    )  # fmt: skip


def plan_found(
    found: LayoutFindings, judged: Judged, job: Training, fabric: Fabric, cost: Cost, graph: OpGraph, *, collective: str = "auto",
    routing: Routing = UNIFORM, time_limit_s: float = TIME_LIMIT_S,
) -> Plan:  # fmt: skip
    """The checked plan of a found layout. Raises: Unsupported for one that cannot be run; what `plan_training` raises."""
    why = not_runnable(found, judged)
    layout = judged.candidate.layout
    if why:
        hint = "search with one level (--levels)"
        raise Unsupported(f"{layout.name} cannot be run: {'; '.join(why)}", where="--out", hint=hint)
    choices = judged.candidate.choices
    again = {c.recompute for c in choices}
    level = choices[0].sharding if layout.data > 1 else 0
    wanted = LayoutWanted(
        data=layout.data // layout.context, context=layout.context, tensor=layout.stages[0].replicas[0].tensor, pipeline=len(layout.stages),
        microbatch=layout.microbatch, expert=found.problem.table.experts, routing=routing, borders=_borders(found, [n for _, _, n in layout.pieces]),
    )  # fmt: skip
    name, options = _schedule_of(layout)
    schedule = PipelineWanted(name=name, options=options)
    recompute = RecomputeWanted(again.pop() if len(again) == 1 and again != {"none"} else "auto")
    rest: tuple[object, ...] = (recompute, CollectivesWanted(collective), ShardingWanted(level=level), schedule)
    budget = SearchBudget(time_limit_s=time_limit_s)
    if (precision := found.precision).torch_name != "float32":
        job = msgspec.structs.replace(job, dtype=precision.torch_name)
        rest = (*rest, PrecisionWanted(precision))
    made = plan_training(job, fabric, cost, graph=graph, wishes=(wanted, *rest), budget=budget)
    if len({r.device for s in layout.stages for r in s.replicas}) == 1 or len(layout.stages) == 1:
        return made
    anywhere = replace(wanted, borders=())  # by the speed of the devices in each order of them, which the found ones are not for
    other = plan_training(job, fabric, cost, graph=graph, wishes=(anywhere, *rest), budget=budget)
    assert made.prediction is not None and other.prediction is not None
    return min(made, other, key=lambda p: p.prediction.time_s if p.prediction is not None else float("inf"))


def _borders(found: LayoutFindings, layers: Sequence[int]) -> tuple[str, ...]:
    """The first operator of every piece after the first."""
    heads, at, borders = found.problem.table.heads, 0, []
    for n in layers[:-1]:
        at += n
        borders.append(heads[at])
    return tuple(borders)
