"""Annotation of made-up traces with known owners, and of arbitrary slices: time is conserved to the ns whatever the slices are."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import Made, found, tree

from meshwright.annotate import Evidence, Stage, annotate
from meshwright.annotate.ranges import ranges
from meshwright.io.trace.read import read_trace

MODULES = [("", "Net"), ("conv", "Conv2d"), ("norm", "BatchNorm2d"), ("relu", "ReLU"), ("head", "Linear")]
FORWARD = ["aten::conv2d", "aten::batch_norm", "aten::relu", "aten::add", "aten::linear"]
OWNERS = ["conv", "norm", "relu", "", "head"]
OPERATORS = [(n, p, ()) for n, p in zip(FORWARD, OWNERS, strict=True)]


def training(steps=2, marks=True, backward_tid=1):
    made = Made()

    def step():
        made.annotation("enumerate(DataLoader)#_Iter.__next__", lambda: made.slice("aten::stack"))
        ran = made.forward(*FORWARD)
        loss = made.forward("aten::cross_entropy_loss")
        made.slice("aten::ones_like")
        made.backward(ran + loss, tid=backward_tid, accumulate=("aten::conv2d", "aten::linear"))
        made.slice("aten::_foreach_norm")
        made.annotation("Optimizer.step#SGD.step", lambda: made.slice("aten::_foreach_add_"))

    for i in range(steps):
        made.annotation(f"ProfilerStep#{i + 3}", step) if marks else step()
    return made


def owners_of(rows, names):
    return [(n, p) for n, p, *_ in rows if n in names]


@pytest.mark.parametrize(("told", "tier"), [("operators", Evidence.CAPTURED), ("modules", Evidence.STRUCTURAL)])
@pytest.mark.parametrize("backward_tid", [1, 9])
@pytest.mark.parametrize("marks", [True, False])
def test_a_training_loop(tmp_path, told, tier, backward_tid, marks):
    given_tree = tree(*MODULES, operators=OPERATORS if told == "operators" else ())
    a = annotate(training(marks=marks, backward_tid=backward_tid).trace(tmp_path), given_tree)
    rows = found(a)
    step = rows[: len(rows) // 2]
    stages = [Stage(s) for _, _, s, _ in step]
    backward = 1 + 6 + 2
    assert stages == [Stage.LOAD, *[Stage.FORWARD] * 5, Stage.LOSS, *[Stage.BACKWARD] * backward, *[Stage.OPTIMIZER] * 2]
    assert [p for _, p, _, _ in step[1:6]] == OWNERS and {e for *_, e in step[1:6]} == {tier}
    nodes = [(n, p) for n, p, s, _ in step if s == Stage.BACKWARD and "ones_like" not in n]
    assert nodes == [
        ("Cross_Entropy_LossBackward0", None), ("LinearBackward0", "head"), ("torch::autograd::AccumulateGrad", "head"), ("AddBackward0", ""),
        ("ReluBackward0", "relu"), ("Batch_NormBackward0", "norm"), ("Conv2DBackward0", "conv"), ("torch::autograd::AccumulateGrad", "conv"),
    ]  # fmt: skip
    assert rows[len(rows) // 2 :] == step
    assert [n.name for n in a.root.children] == (["step 3", "step 4"] if marks else ["step 0", "step 1"])
    assert a.root.host_ns == sum(a.track_ns.values()) == sum(a.root.evidence_ns)


def test_without_a_tree_stages_and_operators_remain(tmp_path):
    a = annotate(training().trace(tmp_path))
    assert {Stage(s) for _, _, s, _ in found(a)} == {Stage.LOAD, Stage.FORWARD, Stage.LOSS, Stage.BACKWARD, Stage.OPTIMIZER}
    assert {p for _, p, _, _ in found(a)} == {None}


def test_inference_and_several_calls(tmp_path):
    made = Made()
    for _ in range(3):
        made.forward(*FORWARD)
    a = annotate(made.trace(tmp_path), tree(*MODULES, operators=OPERATORS))
    assert [p for _, p, _, _ in found(a)] == OWNERS * 3 and {s for *_, s, _ in found(a)} == {Stage.FORWARD}


def test_a_missing_module_does_not_shift_the_others(tmp_path):
    made = Made()
    made.forward("aten::conv2d", "aten::odd_thing", "aten::linear")
    for operators in (OPERATORS, ()):
        a = annotate(made.trace(tmp_path), tree(*MODULES, operators=operators))
        assert [p for _, p, _, _ in found(a)] == ["conv", "", "head"]


def test_owner_of_a_parameter_that_another_module_uses(tmp_path):
    made = Made()
    made.backward(made.forward("aten::linear"), accumulate=("aten::linear",))
    operators = [("aten::linear", "head", [("LinearBackward0", ["conv"])])]
    rows = found(annotate(made.trace(tmp_path), tree(*MODULES, operators=operators)))
    assert [(n, p) for n, p, *_ in rows[1:]] == [("LinearBackward0", "head"), ("torch::autograd::AccumulateGrad", "conv")]


def test_arrows_where_numbers_are_missing(tmp_path):
    made = training(1)
    for event in [e for e in made.events if "Fwd thread id" in e["args"]]:
        if not event["name"].startswith("autograd"):
            side = {"ph": "s"} if event["name"].startswith("aten::") else {"ph": "f", "bp": "e"}
            made.events.append({**side, "cat": "fwdbwd", "id": event["args"]["Sequence number"], "pid": 1, "tid": 1, "ts": event["ts"]})
        event["args"] = {}
    rows = found(annotate(made.trace(tmp_path), tree(*MODULES, operators=OPERATORS)))
    assert {("Conv2DBackward0", "conv", Stage.BACKWARD, Evidence.CAPTURED), ("ReluBackward0", "relu", Stage.BACKWARD, Evidence.CAPTURED)} <= set(rows)


def test_checkpointed_forward_runs_again_inside_backward(tmp_path):
    made = Made()
    ran = made.forward(*FORWARD)
    again = [lambda n=n: made.slice(n, **{"Sequence number": 90, "Fwd thread id": 0}) for n in FORWARD[:3]]
    args = {"Sequence number": ran[2][1], "Fwd thread id": 1}
    made.backward(ran[3:])
    made.slice("autograd::engine::evaluate_function: ReluBackward0", inside=[*again, lambda: made.slice("ReluBackward0", **args)], **args)
    a = annotate(made.trace(tmp_path), tree(*MODULES, operators=OPERATORS))
    repeated = [r for r in found(a)[7:] if r[0].startswith("aten::")]
    assert repeated == [(n, p, Stage.BACKWARD, Evidence.CAPTURED) for n, p in zip(FORWARD[:3], OWNERS[:3], strict=True)]
    kinds = {n.kind for s in a.root.children for stage in s.children for m in stage.children for c in m.children for n in (c, *c.children)}
    assert "recomputed" in kinds


def test_collectives_and_idle_time_are_named(tmp_path):
    made = Made()
    ran = made.forward(*FORWARD)
    made.clock += 50
    made.slice("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", inside=[lambda: made.slice("c10d::allreduce_", dur=40.0)])
    made.slice("gloo:all_reduce", cat="user_annotation", tid=5, dur=30.0)
    a = annotate(made.trace(tmp_path), tree(*MODULES, operators=OPERATORS))
    leaves = {(n.kind, n.name): n.host_ns for s in a.root.children for stage in s.children for n in stage.children}
    assert leaves["communication", "c10d::allreduce_"] == 40_000 and leaves["communication", "gloo:all_reduce"] == 30_000
    assert leaves["idle", "idle"] >= 50_000 and ran


def test_a_receive_under_way_does_not_own_what_runs_meanwhile(tmp_path):
    made = Made()
    made.slice("gloo:recv", cat="user_annotation", dur=80.0, inside=[lambda: made.forward(*FORWARD)])
    a = annotate(made.trace(tmp_path), tree(*MODULES, operators=OPERATORS))
    assert [p for _, p, *_ in found(a)] == OWNERS
    assert "communication" not in {n.kind for s in a.root.children for stage in s.children for n in stage.children}


def test_what_the_backends_own_thread_copies_is_the_collectives(tmp_path):
    """gloo's threads run nothing but its collectives, which copy between the user's tensors and one flat buffer."""
    made = Made()
    made.forward(*FORWARD[:2])
    made.slice("gloo:all_gather", cat="user_annotation", tid=5, dur=9.0, inside=[lambda: made.slice("aten::copy_", tid=5)])
    made.forward(*FORWARD[2:])
    a = annotate(made.trace(tmp_path), tree(*MODULES, operators=OPERATORS))
    assert [p for n, p, *_ in found(a) if n in FORWARD] == OWNERS
    (copy,) = np.flatnonzero(a.trace.where_name(np.array([n == "aten::copy_" for n in a.trace.names])))
    assert a.units.communication[a.units.outer[copy]] and a.labels.module[copy] == -1
    assert {n.kind for s in a.root.children for stage in s.children for n in stage.children} >= {"communication"}


def test_module_slices_are_exact_and_python_is_the_modules(tmp_path):
    made = Made()

    def model():
        made.slice("module:conv", cat="user_annotation", dur=30.0, inside=[lambda: made.slice("aten::conv2d")])
        made.slice("aten::add")

    made.slice("module:", cat="user_annotation", dur=60.0, inside=[model])
    made.slice("aten::mse_loss")
    a = annotate(made.trace(tmp_path), tree(*MODULES))
    assert found(a) == [("aten::conv2d", "conv", Stage.FORWARD, 0), ("aten::add", "", Stage.FORWARD, 0), ("aten::mse_loss", None, Stage.LOSS, 0)]
    assert annotate(made.trace(tmp_path)).tree.modules[1].path == "conv"
    (model,) = [n for stage in a.root.children[0].children for n in stage.children if n.kind == "module"]
    (conv,) = [n for n in model.children if n.kind == "module"]
    assert {n.kind: n.host_ns for n in conv.children} == {"operator": 10_000, "python": 20_000}


def numbered(made):
    def block(i):
        inside = [lambda: made.slice("aten::conv2d"), lambda: made.slice("aten::relu")]
        names = [f"nn.Module: Conv2d_{i}", "nn.Module: ReLU_0"]
        for k in (0, 1):
            made.slice(names[k], cat="python_function", inside=[inside[k]], **{"Python module id": i})

    made.slice("nn.Module: Net_0", cat="python_function", inside=[lambda: [block(i) for i in (0, 1)]])
    return made


def test_numbered_module_slices(tmp_path):
    trace = numbered(Made()).trace(tmp_path)
    mine = tree(("", "Net"), ("b", "Conv2d"), ("a", "Conv2d"), ("act", "ReLU"))
    assert [p for _, p, *_ in found(annotate(trace, mine))] == ["b", "act", "a", "act"]
    operators = [("aten::conv2d", "a", ()), ("aten::relu", "act", ()), ("aten::conv2d", "b", ()), ("aten::relu", "act", ())]
    called = tree(("", "Net"), ("b", "Conv2d"), ("a", "Conv2d"), ("act", "ReLU"), operators=operators)
    assert [p for _, p, *_ in found(annotate(trace, called))] == ["a", "act", "b", "act"], "the capture knows the order of calls"
    assert [p for _, p, *_ in found(annotate(trace))] == ["Net_0.Conv2d_0", "Net_0.ReLU_0", "Net_0.Conv2d_1", "Net_0.ReLU_0"]


def test_kernels_belong_to_what_launched_them(tmp_path):
    made = Made()
    made.slice("aten::conv2d", inside=[lambda: made.slice("cudaLaunchKernel", cat="cuda_runtime", dur=2.0, correlation=7)])
    made.slice("aten::linear", inside=[lambda: made.slice("cudaLaunchKernel", cat="cuda_runtime", dur=2.0, correlation=8)])
    for name, number in (("sgemm", 8), ("convolve", 7), ("stray", 99)):
        made.slice(name, cat="kernel", tid="stream 7", dur=20.0, correlation=number, device=0, stream=7)
    made.slice("ncclDevKernel_AllReduce_Sum", cat="kernel", tid="stream 9", dur=15.0, correlation=0)
    a = annotate(made.trace(tmp_path), tree(*MODULES, operators=OPERATORS))
    owned = {n: p for n, p, *_ in found(a)}
    assert owned["sgemm"] == "head" and owned["convolve"] == "conv" and owned["stray"] is None
    assert a.root.device_ns == sum(a.track_ns[t] for t in range(len(a.trace.tracks)) if str(a.trace.tracks[t].tid).startswith("stream"))
    assert a.root.host_ns + a.root.device_ns == sum(a.track_ns.values())


def test_kernels_of_a_compiled_graph_are_shared(tmp_path):
    modules = [("", "Net"), ("up", "Linear"), ("act", "GELU"), ("norm", "LayerNorm"), ("down", "Linear")]
    names = ["aten::addmm", "aten::gelu", "aten::native_layer_norm", "aten::addmm"]
    operators = [(n, p, ()) for n, p in zip(names, ["up", "act", "norm", "down"], strict=True)]
    made = Made()
    number = {"Sequence number": 5, "Fwd thread id": 0}

    def graph(*names):
        return lambda: made.slice("## Call CompiledFxGraph abc ##", inside=[lambda n=n: made.slice(n, dur=7.0) for n in names])

    ran = graph("aten::addmm", "triton_per_fused_gelu_native_layer_norm_0", "aten::addmm")
    made.slice("Torch-Compiled Region: 0/0", inside=[lambda: made.slice("CompiledFunction", inside=[ran], **number)])
    back = graph("aten::mm", "aten::mm", "triton_red_fused_native_layer_norm_backward_1", "triton_poi_fused_gelu_backward_2", "aten::mm")
    number = {"Sequence number": 5, "Fwd thread id": 1}
    node = lambda: made.slice("CompiledFunctionBackward", inside=[back], **number)  # noqa: E731
    made.slice("autograd::engine::evaluate_function: CompiledFunctionBackward", inside=[node], **number)
    a = annotate(made.trace(tmp_path), tree(*modules, operators=operators))
    rows = found(a)
    assert [p for n, p, s, _ in rows if s == Stage.FORWARD] == ["up", "act", "down"]
    assert [p for _, p, s, _ in rows if s == Stage.BACKWARD] == ["", "down", "down", "norm", "act", "up"]
    (shared,) = a.labels.shares.values()
    assert sorted(a.tree.modules[m].path for m, _ in shared) == ["act", "norm"]
    (model,) = [n for n in a.root.children[0].children[0].children if n.kind == "module"]
    times = {n.name: (n.host_ns, n.estimated_ns) for n in model.children}
    assert times["act"] == (3500, 3500) and times["norm"] == (3500, 3500) and times["up"] == (7000, 0)
    assert a.root.host_ns == sum(a.track_ns.values())


NAMES = st.sampled_from([
    "## Call CompiledFxGraph x", "triton_poi_fused_relu_1", "aten::addmm",
    "aten::linear", "aten::relu", "autograd::engine::evaluate_function: LinearBackward0", "LinearBackward0", "c10d::allreduce_", "ProfilerStep#3",
    "Optimizer.step#SGD.step", "enumerate(DataLoader)#x", "module:head", "nn.Module: Linear_0", "cudaLaunchKernel", "kernel", "PyTorch Profiler (0)",
    "aten::cross_entropy_loss", "<b>", "", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
])  # fmt: skip
CATEGORIES = st.sampled_from(["cpu_op", "user_annotation", "python_function", "kernel", "cuda_runtime", "gpu_user_annotation", "Trace", ""])
IDS = (st.integers(-1, 4), st.integers(-1, 1), st.integers(-1, 4))
SLICE = st.tuples(NAMES, CATEGORIES, st.integers(0, 60), st.integers(0, 40), st.integers(1, 3), *IDS)


@settings(max_examples=250, deadline=None)
@given(st.lists(SLICE, max_size=25), st.sampled_from(["none", "modules", "operators"]))
def test_any_slices_conserve_time_and_nest(tmp_path_factory, slices, told):
    path = tmp_path_factory.mktemp("any") / "t.json"
    keys = ("Sequence number", "Fwd thread id", "correlation")
    path.write_text(json.dumps([
        {"ph": "X", "name": n, "cat": c, "ts": ts + 0.25, "dur": dur, "pid": 1, "tid": tid, "args": dict(zip(keys, ids, strict=True))}
        for n, c, ts, dur, tid, *ids in slices
    ]))  # fmt: skip
    given_tree = None if told == "none" else tree(*MODULES, operators=OPERATORS if told == "operators" else ())
    a = annotate(read_trace(path), given_tree)
    assert a.root.host_ns + a.root.device_ns == sum(a.track_ns.values()) == sum(a.root.evidence_ns)
    for t, window in a.track_ns.items():
        rows = np.flatnonzero(~a.units.ignored[a.trace.rows(t)]) + a.trace.rows(t).start
        assert window == int(a.trace.end_ns[rows].max() - a.trace.start_ns[rows].min())

    def adds_up(node):
        if node.children:
            assert node.host_ns == sum(c.host_ns for c in node.children) and node.device_ns == sum(c.device_ns for c in node.children)
            assert node.evidence_ns == tuple(sum(x) for x in zip(*(c.evidence_ns for c in node.children), strict=True))
        for child in node.children:
            adds_up(child)

    adds_up(a.root)
    drawn = ranges(a)
    for i, r in enumerate(drawn):
        assert r.end_ns >= r.start_ns
        for s in drawn[i + 1 :]:
            apart = s.track != r.track or s.start_ns >= r.end_ns or s.start_ns < r.start_ns
            assert apart or s.end_ns <= r.end_ns
    assert np.array_equal(a.units.head[a.units.rows], a.units.rows)
