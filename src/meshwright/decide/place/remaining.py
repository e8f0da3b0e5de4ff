"""What is left to do when devices leave in the middle of a run: tasks that did not end, and those whose results left with a device.

A result that is still there stays where it is: its task becomes one of no work that only its device can run, of a kind of its own. So what remains is
an ordinary problem, with an ordinary plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ...errors import UsageError
from ...fabric.fabric import Fabric
from ...graph.tasks import Task, TaskGraph
from .problem import PlaceProblem

__all__ = ["AT", "remaining"]

AT = "result at "  # begins the kind of a task whose result is on the device that follows


def remaining(graph: TaskGraph, fabric: Fabric, on: Mapping[str, str], finished: Collection[str]) -> PlaceProblem:
    """The problem that remains on `fabric`, which holds the devices that are there now, started from `on` (device by task). `finished`: tasks that
    ended.

    Raises: UsageError for unknown tasks and where nothing remains; what `PlaceProblem` raises: a kind that no device is left for, no link left."""
    there = {d.name for d in fabric.devices}
    if unknown := next((t for t in finished if t not in graph.number_of), None):
        raise UsageError(f"there is no task {unknown[:64]!r}", where="finished")
    to_run = {t.name for t in graph.tasks if t.name not in finished}
    for i in reversed(graph.order):
        name = graph.tasks[i].name
        if name not in to_run and on.get(name) not in there and any(e.src == name and e.dst in to_run for e in graph.edges):
            to_run.add(name)
    if not to_run:
        raise UsageError("no task is left to run", where="finished")
    edges = tuple(e for e in graph.edges if e.dst in to_run)
    held = {e.src for e in edges} - to_run
    tasks = tuple(
        Task(name=t.name, work=0.0, kind=AT + on[t.name]) if t.name in held else t for t in graph.tasks if t.name in to_run or t.name in held
    )  # fmt: skip
    holders = {on[name] for name in held}
    devices = tuple(replace(d, runs={**d.runs, AT + d.name: 1}) if d.name in holders else d for d in fabric.devices)
    start = {t.name: on[t.name] for t in tasks if on.get(t.name) in there}
    return PlaceProblem(graph=TaskGraph(name=graph.name, tasks=tasks, edges=edges), fabric=replace(fabric, devices=devices), start=start)
