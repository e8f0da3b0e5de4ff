"""What every placement strategy must do, on small problems."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from ...decide.place import PlaceProblem, PlaceStrategy, place_bound
from ...decide.place.lower import lower_placement
from ...errors import MeshwrightError, MissingExtra, UsageError
from ...fabric.fabric import Device, Fabric, Link
from ...graph.tasks import Task, TaskEdge, TaskGraph
from .chosen import named_and_cited, parametrized

Kind = type[PlaceStrategy]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "place")


def _problem(seed: int) -> PlaceProblem:
    r = np.random.default_rng(seed)
    tasks = tuple(Task(name=f"t{i}", work=float(r.integers(1, 50)), kind=str(r.choice(["x", "y", "any"]))) for i in range(4 + 3 * seed))
    pairs = [(a.name, b.name) for i, a in enumerate(tasks) for b in tasks[i + 1 :] if r.random() < 0.3]
    edges = tuple(TaskEdge(src=a, dst=b, size_bytes=int(r.integers(100))) for a, b in pairs)
    devices = tuple(Device(name=f"d{k}", kind="cpu", runs={"x": int(r.integers(1, 9)), **({"y": 4} if k else {})}) for k in range(2 + seed % 2))
    links = tuple(Link(src=a.name, dst=b.name, rate_Bps=20, latency_s=0.5) for a in devices for b in devices if a is not b)
    return PlaceProblem(graph=TaskGraph(tasks=tasks, edges=edges), fabric=Fabric(name="small", devices=devices, links=links))


PROBLEMS = [_problem(seed) for seed in range(4)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{len(p.graph.tasks)}on{len(p.fabric.devices)}")
def test_every_task_is_on_a_device_that_can_and_after_its_data(kind: Kind, problem: PlaceProblem) -> None:
    try:
        found = kind().plan(problem, rng=np.random.default_rng(0))
    except MissingExtra:
        return
    except MeshwrightError as refused:
        assert not isinstance(refused, UsageError) and refused.hint, "a refusal says why and what to do"
        return
    assert sorted(found.sequence) == list(range(len(problem.graph.tasks)))
    at = {task: n for n, task in enumerate(found.sequence)}
    assert all(at[a] < at[b] for a, b in problem.graph.pairs)
    assert all(np.isfinite(problem.arrays.dur[i, k]) for i, k in enumerate(found.on))
    assert float(place_bound(problem)) <= found.makespan_s
    lower_placement(problem, found)


def test_equal_seeds_give_equal_placements(kind: Kind) -> None:
    try:
        first = kind().plan(PROBLEMS[1], rng=np.random.default_rng(0))
    except MeshwrightError:
        return
    assert kind().plan(PROBLEMS[1], rng=np.random.default_rng(0)) == first


def test_name_citation_and_options(kind: Kind) -> None:
    named_and_cited(kind)
    assert kind(**asdict(kind())) == kind()  # type: ignore[call-overload]
