"""A plan is for one model: a file that changed since is refused before anything runs; another batch size is the same model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rig import graph_of, make_plan

from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture, executed_graph
from meshwright.errors import FormatError, UsageError
from meshwright.run.launch.outcome import forward_graph

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
"""


def _plan(path: Path, **job):
    model = f"{path}:model"
    graph = graph_of(model, 2)
    plan = make_plan((1, 1, 1), model=model)
    return replace(plan, job={**plan.job, "graph_fingerprint": graph.fingerprint(), "graph_outline": graph.outline(), **job})


@pytest.mark.parametrize(
    ("old", "new", "first"),
    [
        ("nn.ReLU()", "nn.GELU()", "planned `relu = aten.relu.default(linear)`, found `gelu = aten.gelu.default(linear)`"),
        ("nn.ReLU()", "nn.Identity()", "planned `relu = aten.relu.default(linear)`, found `linear_1 = aten.linear.default("),
        (", nn.ReLU()", ", nn.ReLU(), nn.Tanh()", "planned `linear_1 = aten.linear.default(relu, param:2.weight, param:2.bias)`, found `tanh = "),
        ("8), nn.ReLU(), nn.Linear(8", "9), nn.ReLU(), nn.Linear(9", "planned `parameter 0.weight: float32[8, 4]`, found `parameter 0.weight: "),
    ],
)  # fmt: skip
def test_a_changed_model_file_is_refused(tmp_path, old, new, first):
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    plan = _plan(path)
    assert forward_graph(plan, plan.layout).nodes
    path = tmp_path / "changed.py"  # under another name: a process imports a file once
    path.write_text(MODEL.replace(old, new))
    plan = replace(plan, job={**plan.job, "training": {**plan.job["training"], "model": f"{path}:model"}})
    with pytest.raises(UsageError) as caught:
        forward_graph(plan, plan.layout)
    error = caught.value
    now = executed_graph(trace_forward(f"{path}:model", batch_size=2)).fingerprint()
    planned = plan.job["graph_fingerprint"]
    assert f"its graph is {now}, the plan was made for {planned}; first difference: {first}" in error.message
    assert error.exit_code == 2 and "\n" not in error.message and error.hint == "make the plan again"
    assert error.data["planned"] == planned and error.data["found"] == now != planned
    bare = replace(plan, job={**plan.job, "graph_outline": []})
    with pytest.raises(UsageError, match="is not the one that was planned") as caught:
        forward_graph(bare, bare.layout)
    assert "first difference" not in caught.value.message


def test_another_batch_size_or_place_is_the_same_model(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    planned = _plan(path).job["graph_fingerprint"]
    for batch in (1, 3, 64):
        assert executed_graph(trace_forward(f"{path}:model", batch_size=batch)).fingerprint() == planned
    shutil.move(path, tmp_path / "moved.py")
    assert executed_graph(trace_forward(f"{tmp_path}/moved.py:model")).fingerprint() == planned


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "loss"), [("gpt.py:tiny", "cross-entropy"), ("convnet.py:small", "cross-entropy"), ("dlrm.py:small", "mse")])
def test_tracing_to_run_finds_what_capture_found(model, loss):
    name = f"examples/{model}"
    graph = capture(name, loss=loss, batch_size=4, scalable=False)
    for batch in (1, 2):
        traced = executed_graph(trace_forward(name, loss=loss, batch_size=batch))
        assert traced.fingerprint() == graph.fingerprint() and traced.outline() == graph.outline()


def test_a_damaged_outline_is_a_format_error(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    plan = _plan(path, graph_outline=[1, 2], graph_fingerprint="0")
    with pytest.raises(FormatError, match=r"plan.job.graph_outline"):
        forward_graph(plan, plan.layout)
