"""`place run` in a real lab: data crosses shaped links as the simulator says at the soonest, and others take over from a device that dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.decide.place import PlaceProblem
from meshwright.decide.place.lists import Heft
from meshwright.drive.place import devices_of, plan_placement
from meshwright.drive.plans import write_plan
from meshwright.errors import Unsupported
from meshwright.graph.tasks import Task, TaskEdge, TaskGraph
from meshwright.io.fabric.name import load_fabric
from meshwright.lab import Lab

pytest.importorskip("torch")
pytestmark = [pytest.mark.lab, pytest.mark.timeout(280)]
RATE_BPS, SIZE_BYTES = 2_000_000, 600_000

WORK = '''
import os, signal
from pathlib import Path
import numpy as np

FOLDER = Path(__file__).parent

def work(task, inputs, outputs):
    """Every task hands on what it read, plus its own number; the last one leaves the sums."""
    value = sum(int(x[0]) for x in inputs.values()) + int(task[1:])
    assert all((x == x[0]).all() for x in inputs.values())
    for out in outputs.values():
        out[:] = value
    if not outputs:
        (FOLDER / "found.txt").write_text(str(value))
    if task == "t2" and (FOLDER / "die").exists():
        (FOLDER / "die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("MESHWRIGHT_LAB_DIR", str(tmp_path / "labs"))
    (tmp_path / "labs").mkdir()
    try:
        made = Lab.up(load_fabric(f"star:3?link={RATE_BPS // 1000}kB/s"), name="places", verify=False)
    except Unsupported as error:
        pytest.skip(f"no lab can be built here: {error.message}")
    try:
        yield made
    finally:
        made.down()


def placed(fabric) -> PlaceProblem:
    """t0 feeds t1 and t2, which feed t3; kinds say where: t2 on the third device, or slowly on the second."""
    runs = ({"x": 10**9}, {"y": 10**9, "z": 10**6}, {"z": 10**9})
    devices = tuple(replace(d, runs=r) for d, r in zip(fabric.devices, runs, strict=True))
    tasks = tuple(Task(name=f"t{i}", work=1e6, kind=k) for i, k in enumerate(("x", "y", "z", "x")))
    ends = (("t0", "t1", SIZE_BYTES), ("t0", "t2", SIZE_BYTES // 2), ("t1", "t3", 1000), ("t2", "t3", 0))
    edges = tuple(TaskEdge(src=a, dst=b, size_bytes=n) for a, b, n in ends)
    return PlaceProblem(graph=TaskGraph(tasks=tasks, edges=edges), fabric=replace(fabric, devices=devices))


def test_a_placement_runs_over_shaped_links_and_survives_a_lost_device(lab, tmp_path, capsys):
    problem = placed(lab.fabric)
    plan, _, _ = plan_placement(problem, [Heft()])
    write_plan(tmp_path / "plan.json", plan)
    (tmp_path / "work.py").write_text(WORK, encoding="utf-8")
    line = ["place", "run", str(tmp_path / "plan.json"), "--work", f"{tmp_path / 'work.py'}:work", "--lab", "places", "--json"]
    assert main(line) == 0
    found, on = json.loads(capsys.readouterr().out), devices_of(plan)
    assert (tmp_path / "found.txt").read_text() == "6" and {t["task"]: t["device"] for t in found["tasks"]} == on
    at = {t["task"]: t["measured_s"] for t in found["tasks"]}
    crossing = [e for e in problem.graph.edges if on[e.src] != on[e.dst]]
    assert any(e.size_bytes == SIZE_BYTES for e in crossing)
    burst = max(s.burst_bytes for s in lab.state.links)
    for e in crossing:  # a shaped link is not faster than its rate, but for its bucket; a path has two
        assert at[e.dst][0] - at[e.src][1] >= max(0, e.size_bytes - 2 * burst) / RATE_BPS * 0.95
    (tmp_path / "die").touch()
    assert main(line) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["lost"] == [on["t2"]] and (tmp_path / "found.txt").read_text() == "6" and not (tmp_path / "die").exists()
    assert all(t["device"] != on["t2"] for t in again["tasks"] if t["round"] == 1)
    other = replace(problem, fabric=replace(problem.fabric, devices=tuple(replace(d, name=f"o{i}") for i, d in enumerate(problem.fabric.devices)),
                    links=tuple(_renamed(x, problem.fabric) for x in problem.fabric.links)))  # fmt: skip
    write_plan(tmp_path / "plan.json", plan_placement(other, [Heft()])[0])
    assert main(line) == 1 and "has no device o0" in capsys.readouterr().err


def _renamed(link, fabric):
    names = {d.name: f"o{i}" for i, d in enumerate(fabric.devices)}
    return replace(link, src=names.get(link.src, link.src), dst=names.get(link.dst, link.dst))
