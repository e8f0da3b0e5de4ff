"""Placement strategies against brute force, published schedules and each other."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from cases import makespan_s, message_s, random_problem, seconds, shortest_s

from effort import few
from meshwright.decide.place import STRATEGIES, PlaceProblem, place_bound
from meshwright.decide.place.exact import Exact
from meshwright.decide.place.lists import Cpop, Heft, RandomEft, upward_ranks
from meshwright.decide.place.search import Search
from meshwright.errors import Disconnected, Infeasible, MissingExtra, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.graph.tasks import MAX_TASKS, Task, TaskEdge, TaskGraph
from meshwright.kernels.tasks import first_come

ALL = [Heft(), Cpop(), RandomEft(), Search(evaluations=3000), Search(evaluations=3000, links="own")]


def planned(strategy, problem):
    return strategy.plan(problem, rng=np.random.default_rng(0))


@pytest.mark.parametrize("seed", range(few(20)))
def test_every_strategy_gives_a_schedule_that_takes_as_long_as_it_says(seed):
    problem = random_problem(seed, tasks=3 + seed, devices=1 + seed % 4, switch=bool(seed % 2))
    for strategy in ALL:
        found = planned(strategy, problem)
        assert found.makespan_s == pytest.approx(makespan_s(problem, found.sequence, found.on), rel=1e-12)
        at = {i: n for n, i in enumerate(found.sequence)}
        assert sorted(at) == list(range(3 + seed)) and all(at[i] < at[j] for i, j in problem.graph.pairs)
        assert found.makespan_s >= float(place_bound(problem)) and planned(strategy, problem) == found


@pytest.mark.parametrize("seed", range(few(16)))
def test_search_and_bound_beside_brute_force(seed):
    problem = random_problem(seed, tasks=5, devices=2 + seed % 2, dense=0.4)
    best = shortest_s(problem)
    assert float(place_bound(problem)) <= best
    assert planned(Search(evaluations=4000, links="own"), problem).makespan_s == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(few(12)))
def test_search_is_never_longer_than_its_starts_in_the_simulator(seed):
    from meshwright.decide.place.judge import simulated_s

    problem = random_problem(seed, tasks=14, devices=4, switch=True)
    times = [simulated_s(problem, planned(s, problem)) for s in (Search(evaluations=2000), Heft(), Cpop())]
    assert times[0] <= min(times[1:])
    own = [planned(s, problem).makespan_s for s in (Search(evaluations=2000, links="own"), Heft(), Cpop())]
    assert own[0] <= min(own[1:])


def published() -> PlaceProblem:
    """The example of Topcuoglu et al., figure 3 and table 2: ten tasks on three processors, messages of equal rate."""
    rows = ["14 16 9", "13 19 18", "11 13 19", "13 8 17", "12 13 10", "13 16 9", "7 15 11", "5 11 14", "18 12 20", "21 7 16"]
    edges = ["1 2 18", "1 3 12", "1 4 9", "1 5 11", "1 6 14", "2 8 19", "2 9 16", "3 7 23", "4 8 27", "4 9 23", "5 9 13", "6 8 15", "7 10 17"]
    edges += ["8 10 11", "9 10 13"]
    whole = 720_720_720_720  # all durations divide it
    tasks = tuple(Task(name=f"n{i}", work=float(whole), kind=f"k{i}") for i in range(1, 11))
    flops = [{f"k{i + 1}": whole // int(row.split()[k]) for i, row in enumerate(rows)} for k in range(3)]
    devices = tuple(Device(name=f"p{k + 1}", kind="cpu", runs=flops[k]) for k in range(3))
    links = tuple(Link(src=a.name, dst=b.name, rate_Bps=1) for a in devices for b in devices if a is not b)
    made = tuple(TaskEdge(src=f"n{a}", dst=f"n{b}", size_bytes=int(c)) for a, b, c in (e.split() for e in edges))
    return PlaceProblem(graph=TaskGraph(tasks=tasks, edges=made), fabric=Fabric(name="three", devices=devices, links=links))


def test_the_published_example():
    """HEFT 80 and CPOP 86, with the paper's upward ranks (table 3)."""
    problem = published()
    ranks = [108.000, 77.000, 80.000, 80.000, 69.000, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert upward_ranks(problem)[0] == pytest.approx(ranks, abs=5e-4)
    assert planned(Heft(), problem).makespan_s == pytest.approx(80, rel=1e-9)
    assert planned(Cpop(), problem).makespan_s == pytest.approx(86, rel=1e-9)
    assert planned(Search(links="own"), problem).makespan_s <= 73 + 1e-6  # 73 is what exact solvers find


def served(problem: PlaceProblem, on: list[int]) -> float:
    """First come, first served, event by event: the oracle of `first_come`, for data that never arrives twice at one time."""
    waits = {j: sum(k == j for _, k in problem.graph.pairs) for j in range(len(on))}
    queues: dict[int, list[int]] = {k: [] for k in on}
    busy: dict[int, bool] = dict.fromkeys(on, False)
    events = [(0.0, 1, j) for j, n in waits.items() if not n]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, what, i = heapq.heappop(events)
        if what == 0:  # a task is done
            busy[on[i]] = False
            for (a, j), e in zip(problem.graph.pairs, problem.graph.edges, strict=True):
                if a == i:
                    heapq.heappush(events, (now + message_s(problem, e.size_bytes, on[i], on[j]), 2, j))
        elif what == 2:
            waits[i] -= 1
            if not waits[i]:
                queues[on[i]].append(i)
        else:
            queues[on[i]].append(i)
        for k, queue in queues.items():
            if queue and not busy[k]:
                busy[k] = True
                j = queue.pop(0)
                heapq.heappush(events, (now + seconds(problem, j, k), 0, j))
    return now


@pytest.mark.parametrize("seed", range(few(20)))
def test_first_come_first_served(seed):
    problem = random_problem(seed, tasks=10, devices=3)
    r = np.random.default_rng(seed)
    tasks = tuple(Task(name=t.name, work=float(r.random()) + 0.1, kind=t.kind) for t in problem.graph.tasks)
    problem = PlaceProblem(graph=TaskGraph(tasks=tasks, edges=problem.graph.edges), fabric=problem.fabric)
    on = np.array([r.choice(np.flatnonzero(np.isfinite(row))) for row in problem.arrays.dur])
    start, end = np.empty(10), np.empty(10)
    found = first_come(problem.edge_numbers, on, *problem.arrays, start, end)
    assert found == pytest.approx(served(problem, on.tolist()), rel=1e-12)


def test_a_gap_is_filled():
    """HEFT of a fork: the short task goes before the long one that waits for its message."""
    tasks = tuple(Task(name=n, work=w, kind=k) for n, w, k in (("a", 1, "x"), ("long", 9, "y"), ("short", 2, "y")))
    devices = (Device(name="d0", runs={"x": 1}), Device(name="d1", runs={"y": 1}))
    links = (Link(src="d0", dst="d1", rate_Bps=1), Link(src="d1", dst="d0", rate_Bps=1))
    graph = TaskGraph(tasks=tasks, edges=(TaskEdge(src="a", dst="long", size_bytes=4),))
    found = planned(Heft(), PlaceProblem(graph=graph, fabric=Fabric(name="f", devices=devices, links=links)))
    assert found.makespan_s == 14 and found.start_s[2] == 0


def test_bounds_are_tight_where_they_can_be():
    devices = tuple(Device(name=f"d{k}", runs={"x": k + 1}) for k in range(3))
    links = tuple(Link(src=a.name, dst=b.name, rate_Bps=10) for a in devices for b in devices if a is not b)
    fabric = Fabric(name="f", devices=devices, links=links)
    links_of_chain = tuple(TaskEdge(src=f"t{i}", dst=f"t{i + 1}") for i in range(3))
    chain = TaskGraph(tasks=tuple(Task(name=f"t{i}", work=6) for i in range(4)), edges=links_of_chain)
    bound = place_bound(PlaceProblem(graph=chain, fabric=fabric))
    assert float(bound) == pytest.approx(8, rel=1e-8) and bound.certificate.data == {"form": "path"}
    many = TaskGraph(tasks=tuple(Task(name=f"t{i}", work=1) for i in range(60)))
    bound = place_bound(PlaceProblem(graph=many, fabric=fabric))
    assert float(bound) == pytest.approx(10, rel=1e-8) and bound.certificate.data["form"] == "load"
    assert planned(Search(), PlaceProblem(graph=many, fabric=fabric)).makespan_s == pytest.approx(10, rel=1e-9)


@pytest.mark.parametrize("seed", range(few(4)))
def test_the_exact_solver_proves_what_brute_force_finds(seed):
    pytest.importorskip("ortools", reason="ortools is not installed: exact placement is not checked (pip install ortools)")
    problem = random_problem(seed, tasks=6, devices=2)
    found = planned(Exact(), problem)
    assert found.notes["solver"] == "optimal" and found.makespan_s == pytest.approx(shortest_s(problem), rel=1e-5)


def test_what_cannot_be_placed_is_refused(monkeypatch):
    problem = random_problem(0, tasks=4, devices=2)
    fabric = problem.fabric
    with pytest.raises(Infeasible, match="no device of direct can run task lens, which is of kind 'camera'"):
        PlaceProblem(graph=TaskGraph(tasks=(Task(name="lens", work=1, kind="camera"),)), fabric=fabric)
    with pytest.raises(Disconnected):
        PlaceProblem(graph=problem.graph, fabric=Fabric(name="f", devices=fabric.devices))
    with pytest.raises(UsageError, match="more than"):
        PlaceProblem(graph=TaskGraph(tasks=tuple(Task(name=str(i), work=1) for i in range(MAX_TASKS))), fabric=wide())
    for options in ({"evaluations": -1}, {"rounds": 0}, {"links": "none"}):
        with pytest.raises(UsageError, match="search"):
            planned(Search(**options), problem)
    with pytest.raises(UsageError, match=r"heft\.pairs"):
        planned(Heft(pairs="some"), problem)
    monkeypatch.setattr("meshwright.decide.place.exact.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="ortools"):
        planned(Exact(), problem)
    monkeypatch.setattr("meshwright.decide.place.exact.find_spec", lambda name: object())
    monkeypatch.setattr("meshwright.decide.place.exact.MAX_PAIRS", 3)
    with pytest.raises(Unsupported, match="too many"):
        planned(Exact(), problem)


def wide() -> Fabric:
    devices = tuple(Device(name=f"d{k}", runs={"x": 1}) for k in range(501))
    return Fabric(name="wide", devices=devices, links=tuple(Link(src="d0", dst=d.name, rate_Bps=1) for d in devices[1:]))


def test_a_solver_that_dies_is_named(monkeypatch, tmp_path):
    from meshwright.errors import RunError

    monkeypatch.setattr("meshwright.decide.place.exact.find_spec", lambda name: object())
    monkeypatch.setattr("meshwright.decide.place.exact.sys.executable", "/bin/false")
    with pytest.raises(RunError, match="exact solver's process failed"):
        planned(Exact(), random_problem(0, tasks=3, devices=2))


def one(*names: str) -> tuple[Task, ...]:
    return tuple(Task(name=n, work=1) for n in names)


@pytest.mark.parametrize(
    ("tasks", "edges", "says"),
    [
        ((), (), "must be 1"), (one("a", "a"), (), "empty or taken"), (one(""), (), "empty or taken"),
        ((Task(name="a", work=float("nan")),), (), "work of nan"), ((Task(name="a", work=-1),), (), "work of -1"),
        (one("a"), (TaskEdge(src="a", dst="b"),), "no task 'b'"), (one("a", "b"), (TaskEdge(src="a", dst="b"),) * 2, "twice"),
        (one("a", "b"), (TaskEdge(src="a", dst="b", size_bytes=-1),), "-1 bytes"),
        (one("a", "b", "c"), tuple(TaskEdge(src=x, dst=y) for x, y in ("ab", "bc", "cb")), "in a circle: (b > c > b|c > b > c)"),
    ],
)  # fmt: skip
def test_a_graph_that_is_none_is_refused(tasks, edges, says):
    with pytest.raises(UsageError, match=says):
        TaskGraph(tasks=tasks, edges=edges)


def test_the_list_is_the_list():
    assert [s.name for s in STRATEGIES] == ["heft", "cpop", "random-eft", "search", "exact", "giph"]
