"""What is beside a plan whose program is folded: layouts of nearby degrees, and what a changed fabric does to them.

Planning thousands of devices anew for every question takes minutes. Here the layer table orders the degrees at most a factor of two from the plan's,
and the best few of them are built, lowered folded and simulated. On a changed fabric the plan and these are simulated again; others are not
tried, and the explanation says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..decide.layout.problem import Degrees
from ..drive.training.context import Context
from ..drive.training.evaluated import Evaluated
from ..drive.training.order import sizes, table_order
from ..drive.training.wishes import LayoutWanted
from ..errors import Infeasible
from ..fabric.fabric import Fabric
from ..plan.plan import Plan, TrainingLayout
from .rivals import name_of

__all__ = ["MAX_NEIGHBOURS", "among", "neighbours"]

MAX_NEIGHBOURS = 2  # neighbouring degrees that are built: each is lowered and simulated


def neighbours(context: Context, plan: Plan) -> list[Evaluated]:
    """The neighbouring degrees that are best by the layer table, judged as the search does."""
    layout = plan.layout
    assert layout is not None
    evaluator = context.evaluator
    context = replace(context, evaluator=replace(evaluator, planner=replace(evaluator.planner, strategy="ring")))
    own = Degrees(layout.data // layout.context, layout.tensor, layout.pipeline, layout.microbatch_size)
    small, large = sizes(context)
    near = [d for d in {**small, **large} if d != own and _near(d, layout)]
    seconds, _ = table_order(context, near)
    found: list[Evaluated] = []
    for d in sorted(seconds, key=lambda d: (seconds[d], d))[:MAX_NEIGHBOURS]:
        options = replace(context.wish(LayoutWanted).tensor_options, sequence=layout.sequence and d.tensor > 1)
        wanted = LayoutWanted(data=d.data, tensor=d.tensor, pipeline=d.pipeline, microbatch=d.microbatch_size, tensor_options=options)
        near_one = context.wishing(wanted)
        for candidate in near_one.grid().plan(near_one.problem):
            if candidate.layout is None:
                found.append(Evaluated(candidate=candidate, why=candidate.why))
                continue
            for name, placement in near_one.placements(candidate.layout):
                judged = context.judge(candidate, placement, name)
                found += judged
                if any(e.timeline is not None for e in judged):
                    break
    return found


def _near(d: Degrees, layout: TrainingLayout) -> bool:
    pairs = ((d.data, layout.data), (d.tensor, layout.tensor), (d.pipeline, layout.pipeline), (d.microbatch_size, layout.microbatch_size))
    return all(a <= 2 * b and b <= 2 * a for a, b in pairs)


def among(known: Sequence[Evaluated], notes: list[str]) -> Callable[[Fabric], tuple[float, str]]:
    """The best of these layouts on another fabric (`changes.what_ifs`), each simulated again where it is."""
    notes.append("what a changed fabric would bring: the plan and its runners-up simulated there, nothing planned anew")

    def best(fabric: Fabric) -> tuple[float, str]:
        found: list[tuple[float, str]] = []
        for e in known:
            assert e.cost is not None
            short = [r for r, over in enumerate(e.over_bytes) if over > fabric.device(e.placement[r]).memory_bytes - _memory(e, r)]
            if not short:
                found.append((e.steady.time_s(fabric, e.placement, e.cost, e.works), name_of(e)))
        if not found:
            raise Infeasible("none of the known layouts fits on that fabric", hint="plan the job on that fabric")
        return min(found)

    return best


def _memory(e: Evaluated, rank: int) -> int:
    assert e.fabric is not None
    return e.fabric.device(e.placement[rank]).memory_bytes
