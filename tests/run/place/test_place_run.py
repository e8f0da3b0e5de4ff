"""Placements on real processes: data arrives as it was made, times stand beside the simulator's, others take over from a lost device."""

from __future__ import annotations

import dataclasses
import json

import pytest
from msgspec.structs import replace

from meshwright.cli import main
from meshwright.decide.place import PlaceProblem
from meshwright.decide.place.lists import Heft
from meshwright.drive.place import devices_of, plan_placement, tasks_of
from meshwright.drive.plans import write_plan
from meshwright.errors import FormatError, Infeasible, RankDied, RankFailed, RunError, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.graph.tasks import Task, TaskEdge, TaskGraph
from meshwright.io.model.tasks import read_tasks
from meshwright.kernels.garbage import kept_memory
from meshwright.lab.handle import StandingLab
from meshwright.run.machine.cpu_quota import quota_place

pytest.importorskip("torch")

WORK = '''
import hashlib, os, signal
from pathlib import Path
import numpy as np

FOLDER = Path(__file__).parent

def work(task, inputs, outputs):
    """Every task hashes its name and all that it reads; the last one leaves its hash."""
    seen = hashlib.sha256(task.encode() + b"".join(inputs[p].tobytes() for p in sorted(inputs))).digest()
    for child, out in outputs.items():
        out[:] = np.resize(np.frombuffer(seen, np.uint8), len(out))
    with open(FOLDER / "ran.txt", "a") as file:
        file.write(task + "\\n")
    if not outputs:
        (FOLDER / f"{task}.hash").write_bytes(seen)
    if task == DIES and not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if task == FAILS:
        raise ValueError("lens cap")
'''


def problem(kinds=("x", "y", "z")):
    devices = tuple(Device(name=f"d{k}", kind="cpu", runs={kind: 10**9, "any": 10**9}) for k, kind in enumerate(kinds))
    links = tuple(Link(src=a.name, dst=b.name, rate_Bps=10**9) for a in devices for b in devices if a is not b)
    tasks = (
        Task(name="shoot", work=1e6, kind=kinds[0]), Task(name="look > far", work=2e6, kind="any"), Task(name="act:near", work=1e6, kind=kinds[1]),
        Task(name="think", work=1e6, kind=kinds[0]), Task(name="tell", work=1e6, kind="any"),
    )  # fmt: skip
    pairs = [("shoot", "look > far", 1000), ("shoot", "act:near", 77), ("look > far", "think", 5), ("act:near", "think", 33), ("think", "tell", 0)]
    edges = tuple(TaskEdge(src=a, dst=b, size_bytes=n) for a, b, n in pairs)
    return PlaceProblem(graph=TaskGraph(tasks=tasks, edges=edges, name="frames"), fabric=Fabric(name="three", devices=devices, links=links))


def expected(graph):
    """Hashes by hand, in one process."""
    import hashlib

    import numpy as np

    size = {(e.src, e.dst): max(1, e.size_bytes) for e in graph.edges}
    seen = {}
    for i in graph.order:
        name = graph.tasks[i].name
        parents = sorted(e.src for e in graph.edges if e.dst == name)
        read = b"".join(np.resize(np.frombuffer(seen[p], np.uint8), size[p, name]).tobytes() for p in parents)
        seen[name] = hashlib.sha256(name.encode() + read).digest()
    return seen


def files(tmp_path, *, dies="", fails="", kinds=("x", "y", "z")):
    made = problem(kinds)
    plan, _, _ = plan_placement(made, [Heft()])
    write_plan(tmp_path / "plan.json", plan)
    (tmp_path / "work.py").write_text(WORK + f"\nDIES, FAILS = {dies!r}, {fails!r}\n", encoding="utf-8")
    return made, plan, f"{tmp_path / 'work.py'}:work"


def test_tasks_read_what_their_parents_made(tmp_path, capsys):
    made, plan, work = files(tmp_path)
    line = ["place", "run", str(tmp_path / "plan.json"), "--work", work, "--runs", "2", "--trace", str(tmp_path / "t.json"), "--json"]
    assert main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert (tmp_path / "tell.hash").read_bytes() == expected(made.graph)["tell"]
    on = devices_of(plan)
    assert {t["task"]: t["device"] for t in found["tasks"]} == on and len(set(on.values())) >= 2
    at = {t["task"]: t["measured_s"] for t in found["tasks"]}
    assert all(at[e.src][1] <= at[e.dst][0] for e in made.graph.edges) and all(a <= b for a, b in at.values())
    assert len(found["runs_s"]) == 2 and found["measured_s"] in found["runs_s"] and found["simulated_s"] == pytest.approx(found["planned_s"])
    assert (tmp_path / "t.json").stat().st_size > 0 and not found["lost"]


def test_tasks_are_written_with_the_work_that_they_took(tmp_path, capsys):
    made, _, work = files(tmp_path)
    out = tmp_path / "measured.json"
    assert main(["place", "run", str(tmp_path / "plan.json"), "--work", work, "--runs", "3", "--tasks-out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    again = read_tasks(out)
    took = {t["task"]: t["took_s"] for t in found["tasks"]}
    assert found["tasks_out"] == str(out) and all(s > 0 for s in took.values())
    assert {t.name: t.work for t in again.tasks} == pytest.approx({name: s * 1e9 for name, s in took.items()})  # all devices do 10^9 a second
    assert replace(again, tasks=made.graph.tasks) == made.graph  # and nothing else is another
    wanted = plan_placement(PlaceProblem(graph=again, fabric=made.fabric), [Heft()])[0]
    assert tasks_of(wanted) == again


@pytest.mark.skipif(quota_place() is None, reason="no control group with the cpu controller can be made here")
def test_a_task_under_a_share_takes_its_processor_time(tmp_path):
    """A task that only waits needs next to nothing of its device's share, however long it took."""
    from meshwright.run.place.run import run_placement

    made = problem()
    devices = tuple(dataclasses.replace(d, cpu_share=0.5) if d.name == "d0" else d for d in made.fabric.devices)
    plan = plan_placement(PlaceProblem(graph=made.graph, fabric=dataclasses.replace(made.fabric, devices=devices)), [Heft()])[0]
    (tmp_path / "work.py").write_text("import time\n\ndef work(task, inputs, outputs):\n    time.sleep(0.1)\n", encoding="utf-8")
    first = run_placement(plan, work=f"{tmp_path / 'work.py'}:work").rounds[0]
    on, m = devices_of(plan), first.measured.spans
    for name, begin_s, end_s in zip(m.name, m.start_s, m.end_s, strict=True):
        assert (first.took_s[name] < (end_s - begin_s) / 2) == (on[name] == "d0")


def test_what_did_not_run_keeps_its_work(tmp_path):
    from meshwright.run.place.run import PlacementRun, measured_work, run_placement

    made, plan, work = files(tmp_path)
    first = run_placement(plan, work=work).rounds[0]
    told = measured_work(PlacementRun(rounds=(dataclasses.replace(first, took_s={"think": 5.0}),)))
    assert {t.name: t.work for t in told.tasks} == {**{t.name: t.work for t in made.graph.tasks}, "think": pytest.approx(5e9)}


def test_a_lost_device_is_replaced(tmp_path, capsys):
    """d1 dies in a task that only it and another device can run; the rest does what it left, and nothing that is still there is made again."""
    made, plan, work = files(tmp_path, dies="act:near", kinds=("x", "x", "y"))
    lost = devices_of(plan)["act:near"]
    assert main(["place", "run", str(tmp_path / "plan.json"), "--work", work, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lost"] == [lost] and all(t["device"] != lost for t in found["tasks"] if t["round"] == 1)
    assert (tmp_path / "tell.hash").read_bytes() == expected(made.graph)["tell"]
    ran = (tmp_path / "ran.txt").read_text(encoding="utf-8").split("\n")[:-1]
    kept = {t["task"] for t in found["tasks"] if t["round"] == 0 and t["device"] != lost}
    assert ran.count("act:near") == 2 and "shoot" in kept and all(ran.count(t) == 1 for t in kept)


def test_what_cannot_go_on_is_refused(tmp_path):
    from meshwright.run.place.run import run_placement

    _, plan, work = files(tmp_path, dies="act:near")
    with pytest.raises(Infeasible, match="task act:near, which is of kind 'y'"):
        run_placement(plan, work=work)
    (tmp_path / "died").unlink()
    with pytest.raises(RankDied, match="device d1 was lost"):
        run_placement(plan, work=work, replan=False)


def test_a_task_that_fails_is_no_lost_device(tmp_path):
    from meshwright.run.place.run import run_placement

    _, plan, work = files(tmp_path, fails="think")
    with pytest.raises(RankFailed, match="lens cap"):
        run_placement(plan, work=work)
    with pytest.raises(UsageError, match="at least 1"):
        run_placement(plan, runs=0)


def test_plans_of_other_things_have_no_tasks():
    from dataclasses import replace

    plan = plan_placement(problem(), [Heft()])[0]
    with pytest.raises(FormatError, match="of kind 'tables'"):
        tasks_of(replace(plan, kind="tables"))
    with pytest.raises(FormatError, match="lacks or mangles"):
        tasks_of(replace(plan, job={}))


class _Lab:
    """What `run_placement` asks of a lab; `codes`: how the ranks ended."""

    def __init__(self, fabric, codes=(), first=0):
        from types import SimpleNamespace

        self.fabric, self.name, self.state, self.codes, self.first = fabric, "edge", SimpleNamespace(verified=False), codes, first

    as_measured = StandingLab.as_measured

    def device_number(self, name):
        return [d.name for d in self.fabric.devices].index(name)

    def run(self, line, **_):
        raise RankFailed("rank failed", data={"rank": self.first, "returncodes": list(self.codes)})


def test_who_was_lost_in_a_lab():
    """The one that was killed, though another failed first for want of it; those that the lab itself ended are not lost."""
    from meshwright.run.place.run import run_placement

    made = problem()
    plan = plan_placement(made, [Heft()])[0]
    for codes, first, lost in (((1, -9, -15), 0, "d1"), ((-15, -9, -9), 2, "d2"), ((-6, -15, -15), 0, "d0")):
        with pytest.raises(RankDied, match=f"device {lost} was lost"):
            run_placement(plan, lab=_Lab(made.fabric, codes, first), replan=False)
    with pytest.raises(RankFailed):
        run_placement(plan, lab=_Lab(made.fabric, (1, -15, -15)))
    with pytest.raises(RunError, match="lab edge has no device d1"):
        run_placement(plan, lab=_Lab(Fabric(name="other", devices=made.fabric.devices[:1])))


FILTER = '''
import resource
from pathlib import Path
import numpy as np

def work(task, inputs, outputs):
    """Page faults of an array that every task makes and lets go: more than glibc keeps by itself."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(96 << 17)
    with open(Path(__file__).with_name("faults.txt"), "a") as file:
        file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}\\n")
'''


def test_what_a_task_lets_go_stays_with_its_process(tmp_path):
    """Else the same task takes longer on a device of its own than beside others, by the pages that come anew each time."""
    from meshwright.run.place.run import run_placement

    (tmp_path / "filter.py").write_text(FILTER, encoding="utf-8")
    graph = TaskGraph(tasks=(Task(name="filter", work=1e6, kind="any"),), edges=(), name="one")
    made = PlaceProblem(graph=graph, fabric=Fabric(name="one", devices=(Device(name="d0", kind="cpu", runs={"any": 10**9}),)))
    plan, _, _ = plan_placement(made, [Heft()])
    run_placement(plan, work=f"{tmp_path / 'filter.py'}:work", runs=6)
    first, *later = [int(x) for x in (tmp_path / "faults.txt").read_text().split()]
    with kept_memory() as known:
        assert not known or min(later) < 0.2 * first  # a page may be a large one, so that the first run makes few hundred, too
