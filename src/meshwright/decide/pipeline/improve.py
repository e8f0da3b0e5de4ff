"""Better orders for any schedule, by annealing priorities under caps on activations: the same work on the same devices, never slower.

Cite: B. Giffler, G. L. Thompson, "Algorithms for Solving Production-Scheduling Problems", Operations Research 1960 (how schedules are generated);
    R. Kolisch, "Serial and parallel resource-constrained project scheduling methods revisited", EJOR 1996 (look-ahead between both).
Micro-batches are alike, so those of a stage keep the order that the given schedule runs them in (of F, of the backward and of W each): this loses
nothing for schedules that run all in the order of the micro-batches.
Cost: `tries` schedules; about 20 us each for 200 actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .orders import action_s, border_delays, times
from .problem import Action, PipelineProblem, Schedule

if TYPE_CHECKING:
    from ...kernels.pipeline_search import Shop

__all__ = ["improved", "is_large"]

# Actions placed over all schedules of one call: some seconds at the 0.1 us an action that the header states; large steps get fewer tries.
MAX_PLACED_ACTIONS = 20_000_000
# Steps of more actions stay as they were built: the few hundred tries that are left for so many find nothing, and list schedules take too long.
MAX_ANNEALED_ACTIONS = 40_000


def is_large(schedule: Schedule) -> bool:
    """Too many actions for anything but compiled constructions."""
    return sum(map(len, schedule.orders)) > MAX_ANNEALED_ACTIONS


def improved(
    problem: PipelineProblem, schedule: Schedule, cap: Sequence[Sequence[int]], *, tries: int, seed: int = 0, least_s: float = 0.0,
    sizes: Sequence[int] = (),
) -> Schedule:  # fmt: skip
    """`schedule`, or one with orders of its own that our clock finds faster.

    cap[device][copy]: most activations kept, in units of `sizes[stage]` (1 each if not given). The given schedule stands if it is not beaten; it
    may itself exceed the cap, then the result is the best one within it, or the given one where none is found (see `in_flight_peaks`).
    """
    from ...kernels.pipeline_search import anneal

    if is_large(schedule) and _within(schedule, cap, sizes or [1] * schedule.stages):
        return schedule
    tries = min(tries, MAX_PLACED_ACTIONS // max(1, sum(map(len, schedule.orders))))
    actions, shop = _shop(problem, schedule, cap, sizes or [1] * schedule.stages)
    clock = times(problem, schedule)
    began = {a: clock.start_s[d][i] for d, order in enumerate(schedule.orders) for i, a in enumerate(order)}
    span, found = anneal(shop, np.array([began[a] for a in actions]), tries=tries, seed=seed, least_s=least_s)
    if not span < float("inf"):
        return schedule
    orders: list[list[Action]] = [[] for _ in range(schedule.devices)]
    for i in found.tolist():
        orders[int(shop.device[i])].append(actions[i])
    better = replace(schedule, orders=tuple(map(tuple, orders)))
    # priorities that are starts need not give those starts again
    keeps = _within(schedule, cap, sizes or [1] * schedule.stages)
    return better if not keeps or times(problem, better).makespan_s < clock.makespan_s else schedule


def _within(schedule: Schedule, cap: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    end = "W" if schedule.split else "B"
    for d, order in enumerate(schedule.orders):
        held = [0] * schedule.copies
        for a in order:
            held[a.copy] += a.count * sizes[a.stage] * ((a.kind == "F") - (a.kind == end))
            if held[a.copy] > cap[d][a.copy]:
                return False
    return True


def _shop(problem: PipelineProblem, schedule: Schedule, cap: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[list[Action], Shop]:
    """The actions, class by class, and their problem for the kernel."""
    from ...kernels.pipeline_search import Shop

    classes: dict[tuple[int, int, str], list[Action]] = {}
    for order in schedule.orders:
        for a in order:
            classes.setdefault((a.copy, a.stage, a.kind), []).append(a)
    # numbered class by class, each in the given order: within a class the order stays, so only classes compete for a device
    actions = [a for key in sorted(classes) for a in classes[key]]
    number: dict[tuple[str, int, int], int] = {
        (a.kind, a.stage, m): i for i, a in enumerate(actions) for m in range(a.microbatch, a.microbatch + a.count)
    }
    class_ptr = np.cumsum([0] + [len(classes[k]) for k in sorted(classes)])
    klass = np.repeat(np.arange(len(classes)), np.diff(class_ptr))
    follow, waits = _edges(problem, schedule, actions, number, klass)
    counts = [len(x) for x in follow]
    device = np.array([schedule.device(a) for a in actions], np.int64)
    level = {(c, s): sum(1 for copy, t in schedule.hosted(where[s]) if copy == c and t < s) for c, where in enumerate(schedule.placement)
             for s in range(schedule.stages)}  # fmt: skip
    most = max(level.values()) + 1
    above, held = np.zeros((schedule.devices * schedule.copies, most), np.int64), np.zeros((schedule.devices * schedule.copies, most), np.int64)
    group = {(a.copy, a.stage): a.count for a in actions if a.kind == "F"}
    for (c, s), at in level.items():
        pool = schedule.placement[c][s] * schedule.copies + c
        above[pool, :at] += sizes[s] * group.get((c, s), 1)
        held[pool, at + 1 :] += sizes[s]
    end = "W" if schedule.split else "B"
    return actions, Shop(
        device=device, duration_s=np.array([action_s(problem, schedule, a) for a in actions]), klass=klass, waits=np.array(waits, np.int64),
        takes=np.array([a.count * sizes[a.stage] * ((a.kind == "F") - (a.kind == end)) for a in actions], np.int64),
        brings=np.array([a.count * held[schedule.device(a) * schedule.copies + a.copy, level[a.copy, a.stage]] * (a.kind == "F") for a in actions]),
        pool=np.array([schedule.device(a) * schedule.copies + a.copy for a in actions], np.int64),
        level=np.array([level[a.copy, a.stage] for a in actions], np.int64), succ_ptr=np.cumsum([0, *counts]),
        succ=np.array([s for row in follow for s, _ in row], np.int64), lag_s=np.array([t for row in follow for _, t in row], np.float64),
        cap=np.array([c for row in cap for c in row], np.int64), above=above, class_ptr=class_ptr, devices=schedule.devices,
        most_classes=int(max(np.bincount(device[class_ptr[:-1][np.diff(class_ptr) > 0]]))) if actions else 0,
    )  # fmt: skip


def _edges(
    problem: PipelineProblem, schedule: Schedule, actions: list[Action], number: dict[tuple[str, int, int], int], klass: Any
) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """Who waits for whom and how long after its end; how many each waits for."""
    top, back = schedule.stages - 1, "I" if schedule.split else "B"
    delay = border_delays(problem, schedule)
    follow: list[list[tuple[int, float]]] = [[] for _ in actions]
    waits = [0] * len(actions)
    for i, a in enumerate(actions):
        needs: dict[int, float] = {}
        for m in range(a.microbatch, a.microbatch + a.count):
            if a.kind == "F" and a.stage:
                needs[number["F", a.stage - 1, m]] = delay[a.copy][a.stage - 1][0]
            elif a.kind == "W":
                needs[number["I", a.stage, m]] = 0.0
            elif a.kind == back:
                needs[number["F", a.stage, m]] = 0.0
                if a.stage < top:
                    needs[number[back, a.stage + 1, m]] = delay[a.copy][a.stage][1]
        if i and klass[i] == klass[i - 1]:
            # a chain through its class, without time: the kernel looks at one action of a class only
            needs.setdefault(i - 1, 0.0)
        for j, lag_s in needs.items():
            follow[j].append((i, lag_s))
        waits[i] = len(needs)
    return follow, waits
