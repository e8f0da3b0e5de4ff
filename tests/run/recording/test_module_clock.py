"""Module marks: the order of the calls' modules forward, its reverse backward; the step's numbers do not change; the files beside the run."""

from __future__ import annotations

import gzip
from itertools import groupby, pairwise

import msgspec
import pytest
import torch
from rig import TINY, forward_of, lowered, make_plan, whole_model

from meshwright.capture.resolve import build_model
from meshwright.io.trace.module_tree import read_module_tree
from meshwright.plan.shards import local_values
from meshwright.plan.vocabulary import base_node
from meshwright.program.calls import inline
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.executor.transport import TaggedTransport
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.run_folder import read_run
from meshwright.run.launch.train_run import train_run
from meshwright.run.recording.module_clock import ModuleClock
from meshwright.run.train.data import Batches, open_data
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import TrainingWork, gradient_bytes

CPU = torch.device("cpu")


def one_rank(clock: ModuleClock | None, steps: int = 2):
    layout, program, callees = lowered(TINY, (1, 1, 1), microbatch=2, global_batch=2)
    flat, graph = inline(program, callees).program, forward_of(TINY, 2)
    _, parameters, buffers = whole_model(TINY)
    module = build_rank_module(graph, layout, 0, parameters, buffers, device=CPU, gradient_bytes=gradient_bytes(flat, 0), clock=clock)
    optimizer = make_optimizer("adamw", [(p.name, p.tensor) for p in module.trained()], 1e-3)
    dataset = open_data("synthetic", build_model(TINY, device="cpu", batch_size=2).inputs, 0)
    work = TrainingWork(flat, layout, 0, module, Batches(dataset, layout, graph.inputs, CPU), optimizer)
    memory = RankMemory(flat, 0, CPU, local_values(layout, 0), module.gradients, layout=layout)
    executor = Executor(flat, fuse_lanes(flat), 0, memory=memory, transport=TaggedTransport(None), work=work)
    losses, marks = [], []
    for step in range(steps):
        work.begin(step)
        executor.run()
        losses.append(work.loss())
        if clock is not None:
            marks.append(clock.take(0.0))
    return layout, graph, executor, losses, marks


def test_marks_follow_the_calls_and_backward_reverses_them():
    clock = ModuleClock()
    layout, graph, executor, _, marks = one_rank(clock)
    calls = [(s.key, graph.modules[base_node(n)]) for s in layout.segments for n in s.nodes]
    expected = [key for key, _ in groupby(calls)]
    assert len({m for _, m in expected}) > 20
    for which, times in marks:
        runs = [clock.runs[i] for i in which]
        forward = [(r.segment, r.module) for r in runs if not r.backward]
        backward = [(r.segment, r.module) for r in runs if r.backward]
        assert forward == expected
        assert [x for x in backward if x[1] not in ("", "positions")] == [x for x in reversed(expected) if x[1] not in ("", "positions")]
        assert set(backward) <= set(expected)
        assert all(a <= b for a, b in pairwise(times))
    assert executor.starts[0] <= marks[-1][1][0] <= marks[-1][1][-1] <= executor.ends[-1]


def test_numbers_are_the_same_with_and_without_marks():
    assert one_rank(ModuleClock(), 3)[3] == one_rank(None, 3)[3]


def test_backward_marks_agree_with_autograds_own_order():
    """Every autograd node, hooked in a plain forward of three modules with a residual, runs where the marks say."""
    clock = ModuleClock()
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    x, ran = torch.randn(2, 4, requires_grad=True), []
    value = x
    for i, layer in enumerate(layers):
        enter, leave = clock.begins("s", f"m{i}")
        enter()
        value = torch.tanh(layer(value)) + (value if i == 1 else 0)
        leave(value)
        value.grad_fn.register_prehook(lambda _, i=i: ran.append(f"m{i}"))
    value.sum().backward()
    assert [clock.runs[i].module for i in clock.which if clock.runs[i].backward] == ran == ["m2", "m1", "m0"]


@pytest.mark.real
def test_run_leaves_module_spans_tree_and_traces(tmp_path):
    plan = make_plan((1, 1, 1))
    document = train_run(plan, RunRequest(out=tmp_path / "run", steps=4, data="synthetic", calibrate=False, profile=True)).document
    assert document is not None and document.modules == "modules.json" and document.traces == ["trace-rank-000.json.gz"]
    run = read_run(tmp_path / "run", plan)
    (recording,) = run.recordings
    assert [s.traced for s in recording.steps] == [False, True, True, True]
    for step in recording.steps:
        assert step.start_s <= step.data_end_s <= step.marks_s[0] and len(step.marks) == len(step.marks_s) > 100
    tree = read_module_tree(tmp_path / "run" / "modules.json")
    assert {m.path: m.kind for m in tree.modules}["blocks.0.attention.qkv"] == "Linear"
    assert {tree.modules[c.module].path for c in tree.operators} == {r.module for r in recording.module_runs} - {"loss"}
    assert "aten::linear" in {c.name for c in tree.operators}
    trace = msgspec.json.decode(gzip.decompress((tmp_path / "run" / "trace-rank-000.json.gz").read_bytes()))
    names = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"}
    assert {"ProfilerStep#1", "ProfilerStep#3", "load data", "module:blocks.0.attention.qkv", "module:loss"} <= names
    train_run(plan, RunRequest(out=tmp_path / "run", steps=2, data="synthetic", calibrate=False, module_spans=False))
    assert not list((tmp_path / "run").glob("trace-*")), "traces of an earlier run"
    assert not read_run(tmp_path / "run", plan).recordings[0].module_runs
