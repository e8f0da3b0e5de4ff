"""Random task graphs on random clusters, as GiPH trains and tests on (card: giph, 3.7; code of uidmice/placement-rl, env/utils.py).

Deviations: a kind of task that no device can run is given to one device; the published generator may leave it without. Rates are whole numbers, in
units of 1e-9 of the published ones.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from ....fabric.fabric import Device, Fabric, Link
from ....graph.tasks import Task, TaskEdge, TaskGraph
from ..problem import PlaceProblem

__all__ = ["random_problem"]

UNIT = 10**9
KINDS = 5
SIZES, SHAPES, CONNECTIONS = (10, 15), (0.1, 0.2, 0.3), (0.1, 0.2)  # of graphs: v, alpha, p; drawn for each problem
WORK, SIZE_BYTES, SPREAD = 100.0, 100.0, 0.4  # of tasks and messages
SPEED, BANDWIDTH, DELAY, UNLIKE = 5.0, 100.0, 10.0, 0.8  # of clusters
RUNS_KIND = 0.2  # chance that a device runs a kind


def random_problem(rng: np.random.Generator, *, devices: int = 20) -> PlaceProblem:
    """A task graph of about 10 or 15 tasks in levels, on devices that each run some of five kinds of tasks."""
    return PlaceProblem(graph=_graph(rng), fabric=_cluster(rng, devices))


def _graph(rng: np.random.Generator) -> TaskGraph:
    v, shape, chance = int(rng.choice(SIZES)), float(rng.choice(SHAPES)), float(rng.choice(CONNECTIONS))
    height = math.ceil(rng.uniform(0.8, 1.2) * math.sqrt(v) / shape)
    widths = [max(1, math.ceil(rng.uniform(0, 2 * shape * math.sqrt(v)))) for _ in range(height)]
    levels: list[list[int]] = [[0]]
    for width in (*widths, 1):
        first = levels[-1][-1] + 1
        levels.append(list(range(first, first + width)))
    last = levels[-1][0]
    edges = {(a, b) for level in levels[1:-1] for b in level for a in range(level[0]) if rng.random() < chance}
    spine = [int(rng.choice(level)) for level in levels]
    edges |= set(pairwise(spine))
    for n, level in enumerate(levels[1:-1], start=1):
        for i in level:
            if not any(a == i for a, _ in edges):
                edges.add((i, int(rng.integers(level[-1] + 1, last + 1))))
            if not any(b == i for _, b in edges):
                edges.add((int(rng.integers(0, levels[n][0])), i))
    low, high = 1 - SPREAD / 2, 1 + SPREAD / 2
    tasks = tuple(Task(name=f"t{i}", work=float(rng.uniform(low, high)) * WORK * UNIT, kind=f"k{rng.integers(KINDS)}") for i in range(last + 1))
    made = tuple(TaskEdge(src=f"t{a}", dst=f"t{b}", size_bytes=round(rng.uniform(low, high) * SIZE_BYTES * UNIT)) for a, b in sorted(edges))
    return TaskGraph(tasks=tasks, edges=made, name="random")


def _cluster(rng: np.random.Generator, devices: int) -> Fabric:
    low, high = 1 - UNLIKE / 2, 1 + UNLIKE / 2
    runs = rng.random((devices, KINDS)) < RUNS_KIND
    runs[np.arange(devices), np.where(runs.any(1), runs.argmax(1), rng.integers(KINDS, size=devices))] = True
    for kind in np.flatnonzero(~runs.any(0)):
        runs[rng.integers(devices), kind] = True
    rates = UNIT * rng.uniform(low * SPEED, high * SPEED, devices)
    delay, rate = rng.uniform(0, 2 * DELAY, (devices, devices)), UNIT * BANDWIDTH / rng.uniform(low, high, (devices, devices))
    made = tuple(
        Device(name=f"d{k}", kind="cpu", runs={f"k{t}": round(rates[k]) for t in np.flatnonzero(runs[k])}) for k in range(devices)
    )  # fmt: skip
    links = tuple(
        Link(src=f"d{a}", dst=f"d{b}", rate_Bps=round(rate[min(a, b), max(a, b)]), latency_s=float(delay[min(a, b), max(a, b)]))
        for a in range(devices) for b in range(devices) if a != b
    )  # fmt: skip
    return Fabric(name="random", devices=made, links=links)
