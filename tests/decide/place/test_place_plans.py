"""Placements as plans: written, read, proved, simulated; and what is edited is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from cases import FAST_BPS, random_problem

from effort import few
from meshwright.check.placement import check_tasks, placed_tasks
from meshwright.check.program.order import Order
from meshwright.decide.place import PlaceProblem
from meshwright.decide.place.lists import Heft
from meshwright.decide.place.search import Search
from meshwright.drive.place import compare_placements, plan_placement
from meshwright.drive.plans import check_plan, fabric_of, read_plan, simulate_plan, write_plan
from meshwright.errors import CheckFailed, MissingExtra
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.graph.tasks import Task, TaskEdge, TaskGraph
from meshwright.program.hash import program_hash

QUICK = [Search(evaluations=500)]


@pytest.mark.parametrize("seed", range(few(12)))
def test_a_plan_goes_full_circle(seed, tmp_path):
    problem = random_problem(seed, tasks=4 + seed, devices=1 + seed % 4, switch=bool(seed % 2))
    plan, ranked, bound = plan_placement(problem, QUICK)
    write_plan(tmp_path / "p.json", plan)
    again = read_plan(tmp_path / "p.json")
    verdict = check_plan(again)
    assert verdict.ok and not any("nothing to prove" in note for note in verdict.notes)
    assert simulate_plan(again).makespan_s == pytest.approx(ranked[0].time_s, rel=1e-12) == plan.prediction.time_s
    assert float(bound) <= plan.prediction.time_s * (1 + 1e-9)
    write_plan(tmp_path / "q.json", plan_placement(problem, QUICK)[0])
    assert (tmp_path / "q.json").read_bytes() == (tmp_path / "p.json").read_bytes()


@pytest.mark.parametrize("seed", range(few(12)))
def test_the_simulator_agrees_where_links_are_fast(seed):
    """Messages that take no time of a link share none: both clocks are one."""
    problem = random_problem(seed, tasks=15, devices=4, rate=(FAST_BPS, FAST_BPS + 1))
    ranked, _ = compare_placements(problem, [Heft(), *QUICK])
    for tried in ranked:
        assert tried.time_s == pytest.approx(tried.placement.makespan_s, rel=1e-9)


def chain() -> PlaceProblem:
    """Two devices that must both be used: a camera and a processor."""
    devices = (Device(name="cam", kind="cpu", runs={"camera": 10}), Device(name="cpu", kind="cpu", runs={"fp32": 20}))
    links = (Link(src="cam", dst="cpu", rate_Bps=100, latency_s=0.5), Link(src="cpu", dst="cam", rate_Bps=100))
    tasks = (Task(name="shoot", work=10, kind="camera"), Task(name="look", work=40, kind="fp32"), Task(name="say", work=20, kind="fp32"))
    edges = (TaskEdge(src="shoot", dst="look", size_bytes=150), TaskEdge(src="look", dst="say", size_bytes=8), TaskEdge(src="shoot", dst="say"))
    return PlaceProblem(graph=TaskGraph(tasks=tasks, edges=edges), fabric=Fabric(name="two", devices=devices, links=links))


def with_program(plan, program):
    name = program_hash(program)
    return replace(plan, programs={name: program}, cycle=(msgspec.structs.replace(plan.cycle[0], program=name),))


def changed(values, at, value):
    made = np.array(values)
    made[at] = value
    return made


def renamed(p, old, new):
    return replace(p, ops=replace(p.ops, graph=tuple(new if g == old else g for g in p.ops.graph)))


def test_an_edited_plan_is_refused():
    plan = plan_placement(chain(), QUICK)[0]
    p = plan.main
    tasks = plan.job["tasks"]
    look = p.ops.graph.index("look")
    received = p.buffers.name.index("shoot>look received")
    smaller = np.where(np.isin(np.arange(len(p.buffers)), _pair(p, received)), 149, p.buffers.chunk_bytes)
    edits = {
        "the job has no such task": with_program(plan, renamed(p, "look", "stare")),
        "it is run more than once": with_program(plan, renamed(p, "say", "look")),
        "reads nothing of it": with_program(plan, replace(p, ops=replace(p.ops, reads=type(p.ops.reads).of([[]] * len(p.ops))))),
        "device cpu takes 2 s for it, the plan says 1 s": replace(plan, job=plan.job | {"cost": _with_price(plan.job["cost"], "look|task", 1.0)}),
        "reads 149 bytes of it": with_program(plan, replace(p, buffers=replace(p.buffers, chunk_bytes=smaller))),
        "cannot run tasks of kind 'gpu'": replace(plan, job=plan.job | {"tasks": _with_kind(tasks, "say", "gpu")}),
        "no device runs task rest": replace(plan, job=plan.job | {"tasks": {**tasks, "tasks": [*tasks["tasks"], {"name": "rest", "work": 1.0}]}}),
        "lacks or mangles": replace(plan, job={k: v for k, v in plan.job.items() if k != "tasks"}),
    }  # fmt: skip
    assert p.ops.graph[look] == "look" and check_plan(plan).ok
    for says, edited in edits.items():
        with pytest.raises(CheckFailed, match=says):
            check_plan(edited)


def _pair(p, received):
    """A received buffer and the one that its message is read from."""
    recv = int(np.flatnonzero(p.steps.dst_buffer == received)[0])
    send = int(np.flatnonzero(p.steps.chan_out == p.steps.chan_in[recv])[0])
    return [received, int(p.steps.src_buffer[send])]


def _with_price(cost, key, time_s):
    return {**cost, "table": {**cost["table"], key: [time_s, "assumed", 0.0] if not isinstance(cost["table"][key], dict) else {"time_s": time_s}}}


def _with_kind(tasks, name, kind):
    return {**tasks, "tasks": [{**t, "kind": kind} if t["name"] == name else t for t in tasks["tasks"]]}


def test_data_that_comes_too_late_is_refused():
    """The receive no longer holds the task back."""
    plan = plan_placement(chain(), QUICK)[0]
    p = plan.main
    s = p.steps
    compute = np.flatnonzero(s.kind == 0)
    none = replace(s, after_ptr=np.zeros_like(s.after_ptr), after_step=s.after_step[:0], after_lag=s.after_lag[:0])
    assert len(compute) == 3
    late = replace(p, steps=none)
    with pytest.raises(CheckFailed):
        check_plan(with_program(plan, late))
    found = check_tasks(late, placed_tasks(plan, fabric_of(plan)), Order(late))
    assert ["nothing makes it wait" in f.message for f in found] == [True, True] and found[0].witness["edge"] == ["shoot", "look"]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"value": "1000/1"}, "proves"), ({"unit": "bytes"}, "seconds"), ({"quantity": "step time"}, "on its time"),
        ({"data": {"form": "load", "weights": {"cam": 1.0}}}, "lacks or mangles"), ({"data": {}}, "lacks or mangles"),
        ({"data": {"form": "load", "weights": {"cam": -1.0, "cpu": 2.0}}}, "lacks or mangles"),
    ],
)  # fmt: skip
def test_a_bound_that_lies_is_refused(edit, says):
    plan = plan_placement(chain(), QUICK)[0]
    bound = plan.bound
    if "data" in edit:
        bound = msgspec.structs.replace(bound, certificate=msgspec.structs.replace(bound.certificate, data=edit["data"]))
    else:
        bound = msgspec.structs.replace(bound, **edit)
    with pytest.raises(CheckFailed, match=says):
        check_plan(replace(plan, bound=bound))


def test_any_weights_give_a_bound():
    """Weights of the solver are only the best ones: others prove less."""
    plan = plan_placement(chain(), QUICK)[0]
    weights = {"form": "load", "weights": {"cam": 0.25, "cpu": 0.75}}
    bound = msgspec.structs.replace(plan.bound, value="24999999/10000000", certificate=msgspec.structs.replace(plan.bound.certificate, data=weights))
    assert check_plan(replace(plan, bound=bound)).ok  # 0.25 * 1 s + 0.75 * 3 s = 2.5 s
    assert check_plan(replace(plan, bound=msgspec.structs.replace(bound, value="24/10"))).ok


def test_one_that_is_named_says_why_it_cannot():
    problem = chain()
    ranked, _ = compare_placements(problem)
    assert [t.strategy.name for t in ranked if t.placement is None] in (["giph"], ["exact", "giph"])
    try:
        import ortools  # noqa: F401
    except ImportError:
        from meshwright.decide.place.exact import Exact

        with pytest.raises(MissingExtra):
            plan_placement(problem, [Exact(), Exact(effort=1.0)])


@pytest.mark.parametrize("seed", range(few(4)))
def test_bounds_allow_for_what_full_buckets_let_through(seed):
    """The simulator's links have buckets of `burst_bytes`; a bound without them would be above the prediction."""
    problem = random_problem(seed, tasks=5, devices=3, dense=0.6, switch=bool(seed % 2))
    links = tuple(replace(x, burst_bytes=400) for x in problem.fabric.links)
    plan, _, bound = plan_placement(replace(problem, fabric=replace(problem.fabric, links=links)), QUICK)
    assert check_plan(plan).ok and float(bound) <= plan.prediction.time_s * (1 + 1e-9)
