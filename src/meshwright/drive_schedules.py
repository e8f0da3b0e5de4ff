"""Pipeline schedules on a training layout: the problem that the layout poses, and the layout that a schedule makes of it."""

from __future__ import annotations

from .decide.pipeline import Schedule
from .errors import Unsupported
from .graph import OpGraph
from .layout_pipeline import on_schedule
from .lowering_pipeline import RankOrder
from .plan import TrainingLayout

__all__ = ["actions_of", "scheduled"]


def actions_of(schedule: Schedule) -> list[RankOrder]:
    """(phase, stage, micro-batch) of every device in order; a forward of several micro-batches as one after the other."""
    return [[(a.kind, a.stage, m) for a in order for m in range(a.microbatch, a.microbatch + a.count)] for order in schedule.orders]


def scheduled(layout: TrainingLayout, graph: OpGraph, schedule: Schedule) -> TrainingLayout:
    """`layout`, which has a pipeline index per stage of the schedule, put on its devices. Raises: Unsupported, see `on_schedule`."""
    if schedule.parts != 1:
        raise Unsupported(
            "backward passes of half a micro-batch are not executed on models", where=f"schedule {schedule.name}",
            hint="mode=double, with --microbatch half as large",
        )  # fmt: skip
    return on_schedule(
        layout, graph, name=schedule.name, pipeline=schedule.devices, placement=schedule.placement, copy_of=schedule.copy_of,
        split=schedule.split,
    )  # fmt: skip
