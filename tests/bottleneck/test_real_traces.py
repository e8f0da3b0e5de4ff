"""Traces that torch.profiler writes here: a slow dataset and a copy in one layer are named, waits on gloo are communication, sums are the steps."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from meshwright.bottleneck.breakdown import break_down
from meshwright.bottleneck.from_trace import rank_view
from meshwright.bottleneck.lanes import Kind, Stage
from meshwright.capture.modules import capture_modules
from meshwright.compare.breakdown import breakdown_of
from meshwright.io.trace.module_tree import write_module_tree
from meshwright.io.trace.read import read_trace


class Layer(nn.Module):
    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(64, 64), rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows:
            x = x + 0.0 * x.detach().flatten()[:1024].expand(self.rows, -1).transpose(0, 1).contiguous()[0, 0]
        return torch.relu(self.linear(x))


class Data(torch.utils.data.Dataset):
    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return torch.ones(64)


def profiled(folder, module: nn.Module, sleep_s: float = 0.0) -> float:
    """Writes trace.json and modules.json of four steps; how long they took together, and what lies between them, by the clock."""
    torch.set_num_threads(1)
    loader = iter(torch.utils.data.DataLoader(Data(sleep_s), batch_size=4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> None:
        loss = module(next(loader)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        begun = time.perf_counter()
        for number in range(4):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step()
        took_s = time.perf_counter() - begun
    profiler.export_chrome_trace(str(folder / "trace.json"))
    write_module_tree(folder / "modules.json", capture_modules(module, (torch.ones(4, 64),)))
    return took_s


def test_a_slow_dataset(tmp_path):
    took_s = profiled(tmp_path, nn.Sequential(*[Layer() for _ in range(3)]), sleep_s=0.004)
    found, devices = breakdown_of([tmp_path / "trace.json"], modules=tmp_path / "modules.json")
    stall = next(c for c in found.causes if c.kind == "data stall")
    assert not devices and stall.where == "load data on rank 0" and stall.gain_s >= 0.016
    (times,) = found.times
    assert times.steps == 4 and 0.016 <= times.step_s <= 1.05 * took_s / 4
    assert times.total["data_stall_s"] >= 0.016 and times.stages["load data"]["data_stall_s"] == pytest.approx(times.total["data_stall_s"])
    assert {"forward", "backward", "optimizer"} <= times.stages.keys()


def test_a_copy_in_one_layer(tmp_path):
    profiled(tmp_path, nn.Sequential(Layer(), Layer(), Layer(rows=32000), Layer()))
    found, _ = breakdown_of([tmp_path / "trace.json"], modules=tmp_path / "modules.json")
    largest = next(c for c in found.causes if c.kind == "copies")  # what else the machine does meanwhile may be ahead of it
    assert largest.where == "module 2" and largest.gain_s > 0


def test_waits_on_gloo_are_communication_and_lost_messages_stay_alone(tmp_path):
    """A host that runs nothing while a collective is under way waits for it; what it runs meanwhile is overlap."""
    event = {"ph": "X", "pid": 1, "tid": 1, "args": {}}
    events = [
        {**event, "cat": "user_annotation", "name": "ProfilerStep#0", "ts": 0, "dur": 1000},
        {**event, "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 300},
        {**event, "cat": "cpu_op", "name": "aten::add", "ts": 700, "dur": 100},
        {**event, "cat": "user_annotation", "name": "gloo:all_reduce", "tid": 2, "ts": 200, "dur": 400},
        {**event, "cat": "user_annotation", "name": "gloo:recv", "ts": 850, "dur": 50},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": 0, "world_size": 4}, "traceEvents": events}))
    view = rank_view(read_trace(path))
    length = view.host.end - view.host.start
    spent = {k: int(length[view.host.kind == k].sum()) // 1000 for k in Kind}
    assert spent[Kind.COMPUTE] == 400 and spent[Kind.WAIT] == 300 + 50 and spent[Kind.HOST] == 250
    assert sorted(view.meetings.label) == ["all_reduce", "recv"] and any("rank 0 alone" in k for k in view.meetings.key)
    found = break_down([view])
    assert found.times[0].communication_s == pytest.approx(450e-6) and found.times[0].overlap_s == pytest.approx(100e-6)
    assert int(length[view.host.stage == Stage.FORWARD].sum()) > 0
