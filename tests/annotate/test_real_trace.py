"""A real training step under torch.profiler: what alignment gives, without module slices, is what the module slices say."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from meshwright.annotate import Evidence, Stage, annotate
from meshwright.capture.modules import capture_modules, module_spans
from meshwright.io.trace.read import read_trace
from meshwright.trace.module_tree import MODULE_SPAN, ModuleTree


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU()
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.act(self.norm(self.stem(x))).transpose(1, 2)
        y = y + checkpoint(self.mix, y, use_reentrant=False)
        return self.head(self.act(y.mean(1)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    torch.manual_seed(0)
    net, x, target = Net(), torch.randn(2, 4, 8), torch.tensor([0, 2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with module_spans(net), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(x), target).backward()
            optimizer.step()
    path = tmp_path_factory.mktemp("real") / "t.json"
    profiler.export_chrome_trace(str(path))
    return path, capture_modules(net, (x,), model="net")


def units(annotation, *, again=True):
    labels, trace = annotation.labels, annotation.trace
    modules = annotation.tree.modules
    return [
        (trace.name_of(r), modules[labels.module[r]].path if labels.module[r] >= 0 else None, int(labels.stage[r]))
        for r in annotation.units.rows.tolist()
        if again or not labels.recompute[r]
    ]


def without_spans(path):
    document = json.loads(path.read_text())
    document["traceEvents"] = [e for e in document["traceEvents"] if not e["name"].startswith(MODULE_SPAN)]
    plain = path.with_name("plain.json")
    plain.write_text(json.dumps(document))
    return read_trace(plain)


def test_captured_equals_module_slices(recorded):
    path, tree = recorded
    by_spans, by_capture = annotate(read_trace(path), tree), annotate(without_spans(path), tree)
    assert units(by_capture) == units(by_spans)
    found = {p for _, p, _ in units(by_spans)}
    assert found == {None, "", "stem", "norm", "act", "mix.0", "mix.1", "mix.2", "head"}
    assert by_spans.labels.recompute.any() and len(by_spans.root.children) == 2
    assert Evidence.CAPTURED in by_capture.labels.evidence and Evidence.CAPTURED not in by_spans.labels.evidence


def test_the_tree_alone(recorded):
    path, tree = recorded
    alone = ModuleTree(model="net", modules=tree.modules)
    trace = without_spans(path)
    by_tree, by_capture = units(annotate(trace, alone), again=False), units(annotate(trace, tree), again=False)
    forward = [(a, b) for a, b in zip(by_tree, by_capture, strict=True) if b[2] in (Stage.FORWARD, Stage.BACKWARD)]
    same = sum(a == b for a, b in forward)
    assert same >= 0.9 * len(forward), [pair for pair in forward if pair[0] != pair[1]]


class Shared(nn.Module):
    """A block that is called three times between others of its class, one layer called twice in a row, one of its own kind called again later."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.other = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())
        self.twice = nn.Conv1d(4, 4, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.inward(x)
        for _ in range(3):
            y = y + self.block(y)
        y = self.twice(self.twice(self.other(y)))
        return self.head(self.other(y).mean(1))


def profiled(net, x, target, path, *, train=True):
    with torch.set_grad_enabled(train), profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = F.cross_entropy(net(x), target)
        if train:
            loss.backward()
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


@pytest.mark.parametrize("frozen", [False, True])
def test_modules_that_are_called_again_with_the_tree_alone(tmp_path, frozen):
    """What is not accumulated after backward of an operator tells that it was a further call; where parameters are frozen, nothing is told."""
    torch.manual_seed(0)
    net, x, target = Shared(), torch.randn(2, 4, 8), torch.tensor([0, 2])
    for p in net.other.parameters():
        p.requires_grad_(not frozen)
    tree = capture_modules(net, (x,), model="shared")
    trace = profiled(net, x, target, tmp_path / "t.json")
    by_capture, by_tree = (units(annotate(trace, t)) for t in (tree, ModuleTree(model="shared", modules=tree.modules)))
    wrong = [(a, b) for a, b in zip(by_tree, by_capture, strict=True) if a != b]
    assert {p for _, p, _ in by_capture} >= {"block.0", "block.2", "other.1", "twice", "head"}
    if frozen:
        assert len(wrong) < 0.4 * len(by_capture)
    else:
        assert wrong == []


@pytest.mark.interpreter
def test_annotating_with_a_model_prints_nothing_of_torchs_own(recorded, tmp_path):
    """The profiler that captures the model's operators announces itself, unless it is told not to before torch is loaded."""
    path, _ = recorded
    (tmp_path / "net.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(4, 3), (torch.randn(2, 4),)\n")
    words = ["trace", "annotate", str(path), "--model", f"{tmp_path / 'net.py'}:net"]
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert "USDT" not in done.stderr and "step" in done.stdout
