"""When the gradients of a stage are all-reduced over its copies and data-parallel replicas.

eager: as soon as they are final on a device; eager-opt (Chimera's): only where the device has work left afterwards, else with the rest at the end;
lazy: after all of the device's work. Devices that share several stages launch by falling stage, so that no two wait for each other; without
copies all replicas of a device run the same order, and stages go as they become final.
"""

from __future__ import annotations

from dataclasses import replace

from .problem import Collective, PipelineProblem, Schedule

__all__ = ["SYNCS", "synchronisation", "synchronised"]

SYNCS = ("eager-opt", "eager", "lazy")


def synchronisation(schedule: Schedule, sync: str) -> tuple[tuple[Collective, ...], ...]:
    """Per device the all-reduces of the stages it holds."""
    found = []
    for d, order in enumerate(schedule.orders):
        end = len(order) - 1
        last = dict.fromkeys(schedule.hosted(d), -1)
        last |= {(a.copy, a.stage): place for place, a in enumerate(order) if a.kind in "BW"}
        rows = []
        for (copy, stage), final in last.items():
            now = sync == "eager" or (sync == "eager-opt" and final < end)
            rows.append(Collective("all-reduce", stage, copy, final if now else end))
        found.append(tuple(sorted(rows, key=lambda c: (-c.stage, c.copy) if schedule.copies > 1 else (c.after, -c.stage))))
    return tuple(found)


def synchronised(problem: PipelineProblem, schedule: Schedule) -> Schedule:
    """With an eager all-reduce of every stage if there are replicas and the schedule says nothing itself."""
    if schedule.collectives or (problem.data < 2 and schedule.copies < 2):
        return schedule
    return replace(schedule, collectives=synchronisation(schedule, "eager"))
