"""Pipeline CSV: read back, refused where PyTorch cannot say it, and loaded by PyTorch, whose own schedules must equal ours cell by cell."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meshwright.decide.pipeline import Chimera, OneFOneB, PipelineProblem, Schedule
from meshwright.decide.pipeline.breadthfirst import BreadthFirst
from meshwright.decide.pipeline.dualpipe import DualPipeV
from meshwright.decide.pipeline.gpipe import GPipe
from meshwright.decide.pipeline.interleaved import Interleaved
from meshwright.decide.pipeline.vschedules import ZBV, VHalf
from meshwright.decide.pipeline.zerobubble import ZB1P
from meshwright.errors import FormatError, Unsupported
from meshwright.io.plan.pipeline_csv import pipeline_csv, read_pipeline_csv

TORCH = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as s
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
def stages(mine, count):
    return [PipelineStage(torch.nn.Linear(2, 2), i, count, torch.device("cpu")) for i in mine]
def cells(order):
    rows = []
    for r in sorted(order):
        row = [x for a in order[r] if a is not None for x in (a.sub_actions or [a])]
        rows.append([str(a) for a in row if a.computation_type.name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")])
    return rows
out = {"loaded": {}, "own": {}}
for name, (path, mine, count, n) in json.loads(sys.argv[1]).items():
    runtime = s._PipelineScheduleRuntime(stages(mine, count), n, loss_fn=lambda a, b: a.sum())
    runtime._load_csv(path, format="compute_only")
    out["loaded"][name] = cells(runtime.pipeline_order_with_comms)
for cls, mine in (("ScheduleInterleaved1F1B", (0, 4)), ("ScheduleLoopedBFS", (0, 4)), ("ScheduleDualPipeV", (0, 7))):
    out["own"][cls] = cells(getattr(s, cls)(stages(mine, 8), 8, loss_fn=lambda a, b: a.sum()).pipeline_order)
print(json.dumps(out))
"""


def text_of(schedule: Schedule) -> str:
    return pipeline_csv([[(a.kind, a.stage, a.microbatch) for a in order] for order in schedule.orders], copies=schedule.copies)


def test_torch_loads_them_and_agrees(tmp_path) -> None:
    pytest.importorskip("torch")
    problem = PipelineProblem.of(4, 8)
    kinds = (GPipe(), OneFOneB(), Interleaved(), BreadthFirst(reverse=True), ZB1P(), ZBV(), VHalf(), DualPipeV())
    made = {type(k).__name__: k.plan(problem) for k in kinds}
    asked = {}
    for name, schedule in made.items():
        path = tmp_path / f"{name}.csv"
        path.write_text(text_of(schedule))
        asked[name] = (str(path), [s for s, d in enumerate(schedule.placement[0]) if d == 0], schedule.stages, 8)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TORCH, json.dumps(asked)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ours = {name: [[str(a) for a in order] for order in s.orders] for name, s in made.items()}
    assert found["loaded"] == ours
    assert found["own"]["ScheduleInterleaved1F1B"] == ours["Interleaved"] and found["own"]["ScheduleLoopedBFS"] == ours["BreadthFirst"]
    halves = lambda c: (c.replace("B", "I"), c.replace("B", "W")) if "B" in c else (c,)  # noqa: E731
    whole = [[x for c in row for x in halves(c)] for row in found["own"]["ScheduleDualPipeV"]]
    assert whole == ours["DualPipeV"]


def test_read_back() -> None:
    schedule = ZBV().plan(PipelineProblem.of(2, 3))
    rows = read_pipeline_csv(text_of(schedule))
    assert rows == [[(a.kind, a.stage, a.microbatch) for a in order] for order in schedule.orders]
    assert read_pipeline_csv('0F0,,"0B0",\n') == [[("F", 0, 0), ("B", 0, 0)]]


@pytest.mark.parametrize("cell", ["F0", "0X1", "0F", "0F-1", "0FF1", "x", "0F" + "1" * 5000, "1" * 5000 + "B0"])
def test_cells_that_are_no_action(cell: str) -> None:
    with pytest.raises(FormatError, match="line 2, cell 1"):
        read_pipeline_csv(f"0F0\n{cell}\n")


def test_what_torch_cannot_say() -> None:
    with pytest.raises(Unsupported, match="copies"):
        text_of(Chimera().plan(PipelineProblem.of(4, 4)))
    with pytest.raises(Unsupported, match="one micro-batch"):
        pipeline_csv([[("F", 0, 0)]], grouped=True)
