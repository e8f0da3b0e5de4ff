"""Task graphs and fabrics of the placement tests, and a schedule by brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from meshwright.decide.place import PlaceProblem
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.graph.tasks import Task, TaskEdge, TaskGraph

FAST_BPS = 10**15


def random_problem(seed: int, *, tasks: int, devices: int, dense: float = 0.3, rate: tuple[int, int] = (5, 40), switch: bool = False) -> PlaceProblem:
    r = np.random.default_rng(seed)
    names = [f"t{i}" for i in range(tasks)]
    made = tuple(Task(name=n, work=float(r.integers(0, 100)), kind=str(r.choice(["a", "b", "any"]))) for n in names)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if r.random() < dense]
    edges = tuple(TaskEdge(src=a, dst=b, size_bytes=int(r.integers(0, 200))) for a, b in pairs)
    kinds = [{"a": int(r.integers(1, 10)), **({"b": int(r.integers(1, 10))} if k % 2 or devices == 1 else {})} for k in range(devices)]
    where = tuple(Device(name=f"d{k}", kind="cpu", runs=flops) for k, flops in enumerate(kinds))
    if switch:
        links = tuple(
            Link(src=a, dst=b, rate_Bps=int(r.integers(*rate)), latency_s=0.5) for d in where for a, b in ((d.name, "s"), ("s", d.name))
        )  # fmt: skip
        star = Fabric(name="star", devices=where, switches=(Switch(name="s"),), links=links)
        return PlaceProblem(graph=TaskGraph(tasks=made, edges=edges), fabric=star)
    links = tuple(
        Link(src=f"d{i}", dst=f"d{j}", rate_Bps=int(r.integers(*rate)), latency_s=float(r.integers(0, 5)))
        for i in range(devices) for j in range(devices) if i != j
    )  # fmt: skip
    return PlaceProblem(graph=TaskGraph(tasks=made, edges=edges), fabric=Fabric(name="direct", devices=where, links=links))


def seconds(problem: PlaceProblem, task: int, device: int) -> float:
    t, d = problem.graph.tasks[task], problem.fabric.devices[device]
    rate = max(d.runs.values()) if t.kind == "any" else d.runs.get(t.kind, 0)
    return t.work / rate if rate else float("inf")


def message_s(problem: PlaceProblem, size: int, a: int, b: int) -> float:
    if a == b:
        return 0.0
    links = [problem.fabric.links[x] for x in problem.fabric.route(a, b)]
    return sum(x.latency_s for x in links) + max(x.library_latency_s for x in links) + size / min(x.rate_Bps for x in links)


def makespan_s(problem: PlaceProblem, sequence: tuple[int, ...], on: tuple[int, ...]) -> float:
    """Each device runs its tasks in the sequence's order, each as early as it can."""
    into = {j: [(i, e.size_bytes) for (i, k), e in zip(problem.graph.pairs, problem.graph.edges, strict=True) if k == j] for j in range(len(on))}
    end: dict[int, float] = {}
    free = dict.fromkeys(on, 0.0)
    for i in sequence:
        ready = max((end[p] + message_s(problem, size, on[p], on[i]) for p, size in into[i]), default=0.0)
        end[i] = free[on[i]] = max(ready, free[on[i]]) + seconds(problem, i, on[i])
    return max(end.values())


def shortest_s(problem: PlaceProblem) -> float:
    """Of all orders and all devices."""
    n, devices = len(problem.graph.tasks), range(len(problem.fabric.devices))
    orders = [o for o in itertools.permutations(range(n)) if all(o.index(i) < o.index(j) for i, j in problem.graph.pairs)]
    places = list(itertools.product(*([k for k in devices if seconds(problem, i, k) < float("inf")] for i in range(n))))
    return min(makespan_s(problem, o, on) for on in places for o in orders)


def with_powers(problem: PlaceProblem, objective: str, seed: int = 0) -> PlaceProblem:
    """The problem with watts and joules drawn at random, chosen by `objective`."""
    r, f = np.random.default_rng(seed), problem.fabric
    devices = tuple(replace(d, watts=float(r.integers(1, 30))) for d in f.devices)
    links = tuple(replace(x, joules_per_byte=float(r.integers(0, 5)) / 10) for x in f.links)
    return replace(problem, fabric=replace(f, devices=devices, links=links), objective=objective)


def sum_of(problem: PlaceProblem, on: tuple[int, ...]) -> float:
    """Joules, or seconds of all tasks and messages, task by task."""
    total = sum(seconds(problem, i, k) * (problem.fabric.devices[k].watts if problem.objective == "energy" else 1) for i, k in enumerate(on))
    for (i, j), e in zip(problem.graph.pairs, problem.graph.edges, strict=True):
        if problem.objective == "energy":
            total += e.size_bytes * sum(problem.fabric.links[x].joules_per_byte for x in problem.fabric.route(on[i], on[j]))
        else:
            total += message_s(problem, e.size_bytes, on[i], on[j])
    return total
