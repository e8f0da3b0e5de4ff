"""Traces in the words of torch 1.8 to 1.12 say the same as today's; one truth about loading; whose the host's time is; gains within the waiting."""

import json

import numpy as np
import pytest
from cuda_traces import COMPUTE, Maker, Settings

from meshwright.annotate import Evidence, Stage, annotate
from meshwright.bottleneck.breakdown import break_down
from meshwright.bottleneck.device import device_times
from meshwright.bottleneck.from_trace import rank_view
from meshwright.bottleneck.tiles import busy_before
from meshwright.cli.frame import main
from meshwright.compare.breakdown import breakdown_of
from meshwright.io.trace.read import read_trace

OLD = {"cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel",
       "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}  # fmt: skip
ARROW = {"1.8": ("async", "launch"), "1.10": ("async_gpu", "cudaLaunchKernel"), "1.12": ("async_cpu_to_gpu", "async_gpu")}


def old_dress(document, version):
    """The same events as Kineto of that torch wrote them: categories, threads as texts, no slice of the engine (and in 1.8 no numbers)."""
    out = []
    for e in document["traceEvents"]:
        if e.get("name", "").startswith("autograd::engine::evaluate_function") and version != "1.12":
            continue
        e = dict(e, args=dict(e.get("args", {})))
        if e["ph"] == "X":
            e["cat"] = OLD[e["cat"]]
            e["tid"] = f"stream {e['tid']}" if e["cat"] in ("Kernel", "Memcpy", "Memset") else str(e["tid"])
        elif e["ph"] in "sf":
            e["cat"], e["name"] = ARROW[version]
            e["tid"] = f"stream {e['tid']}" if e["ph"] == "f" else e["tid"]
        if version == "1.8":
            for key in ("Sequence number", "Fwd thread id"):
                e["args"].pop(key, None)
        out.append(e)
    return {**document, "traceEvents": out}


def written(path, document):
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("version", ARROW)
def test_the_words_of_old_versions_say_the_same(tmp_path, version):
    (document,) = Maker(Settings(ranks=1, steps=2, layers=3, seed=4)).documents()
    new = read_trace(written(tmp_path / "new.json", document))
    old = read_trace(written(tmp_path / "old.json", old_dress(document, version)))
    assert old.warnings == () and len(old.flows["ac2g"][0]) == len(new.flows["ac2g"][0])
    assert set(old.categories) == set(new.categories)
    assert device_times(old) == device_times(new)
    (bare, _), (dressed, _) = (breakdown_of([tmp_path / name]) for name in ("new.json", "old.json"))
    assert [t.stages for t in dressed.times] == [t.stages for t in bare.times]
    told = [(c.kind, c.where.removeprefix("module ")) for c in dressed.causes if c.gain_s]
    assert told == [(c.kind, c.where.removeprefix("module ")) for c in bare.causes if c.gain_s]
    kernels = {(a.trace.name_of(r), int(a.labels.stage[r])) for a in (annotate(old),) for r in a.units.rows.tolist() if a.units.kernel[r]}
    assert kernels == {(a.trace.name_of(r), int(a.labels.stage[r])) for a in (annotate(new),) for r in a.units.rows.tolist() if a.units.kernel[r]}
    nodes = [r for a in (annotate(old),) for r in a.units.rows.tolist() if "Backward" in a.trace.name_of(r)]
    assert nodes and {int(annotate(old).labels.stage[r]) for r in nodes} == {Stage.BACKWARD}


def events(*slices):
    """(category, name, thread, start, length, arguments) in us."""
    return {
        "traceEvents": [
            {"ph": "X", "cat": c, "name": n, "pid": 0 if c == "kernel" else 1, "tid": t, "ts": s, "dur": d, "args": a} for c, n, t, s, d, a in slices
        ]
    }


def test_waiting_for_the_loader_is_loading_for_both(tmp_path):
    """Two steps: the loader's wait holds one short operator; the optimizer ran just before."""
    slices = []
    for k in range(2):
        at = 1000.0 * k
        slices += [
            ("user_annotation", f"ProfilerStep#{k}", 1, at, 999.0, {}), ("user_annotation", "enumerate(DataLoader)#X.__next__", 1, at + 1, 700.0, {}),
            ("cpu_op", "aten::stack", 1, at + 600, 5.0, {}), ("cpu_op", "aten::linear", 1, at + 710, 50.0, {}),
            ("user_annotation", "Optimizer.step#SGD.step", 1, at + 800, 100.0, {}), ("cpu_op", "aten::add_", 1, at + 820, 60.0, {}),
        ]  # fmt: skip
    path = written(tmp_path / "loader.json", events(*slices))
    annotation = annotate(read_trace(path))
    stages = {(step.name, stage.name): stage.host_ns for step in annotation.root.children for stage in step.children}
    assert stages["step 0", "load data"] == stages["step 1", "load data"] == 700_000
    assert stages["step 0", "optimizer"] < 210_000
    assert next(n.evidence_ns for s in annotation.root.children for n in s.children if n.name == "load data")[Evidence.EXACT] == 700_000
    found, _ = breakdown_of([path])
    assert sum(found.times[0].stages["load data"].values()) == pytest.approx(700e-6, rel=1e-9)


@pytest.mark.parametrize("spans", [True, False])
def test_the_hosts_time_inside_a_module_is_the_modules(tmp_path, spans):
    """Block 2 sleeps for 400 us between two of its operators."""
    slices, at = [("user_annotation", "ProfilerStep#0", 1, 0.0, 900.0, {})], 10.0
    for block in range(4):
        start = at
        for op in ("linear", "relu"):
            if spans:
                slices.append(("user_annotation", f"module:blocks.{block}.{op}", 1, at, 21.0, {}))
            else:
                slices.append(("python_function", f"nn.Module: blocks.{block}.{op}", 1, at, 21.0, {}))
            slices.append(("cpu_op", f"aten::{op}", 1, at + 0.5, 20.0, {}))
            at += 22.0 + (400.0 if block == 2 and op == "linear" else 0.0)
        if spans:
            slices.append(("user_annotation", f"module:blocks.{block}", 1, start, at - start, {}))
    found = break_down([rank_view(read_trace(written(tmp_path / "sleep.json", events(*slices))))])
    first = found.causes[0]
    assert (first.kind, first.where) == ("host overhead", "module blocks.2") and first.gain_s == pytest.approx(400e-6, rel=0.02)
    assert "torch.compile" not in first.advice


def launches_of(found, name):
    modules = found.tree.modules
    shares = {r: found.labels.shares.get(r) for r in found.units.rows.tolist() if found.trace.name_of(r) == name}
    return [[(modules[m].path, w) for m, w in s] if s else modules[found.labels.module[r]].path for r, s in shares.items()]


@pytest.mark.parametrize(("kernels", "expected"), [(2, ["a", "b"]), (3, [[("a", 1), ("b", 1)]] * 3)])
def test_one_number_of_several_launches_is_taken_in_turn_or_shared(tmp_path, kernels, expected):
    slices = []
    for i, path in enumerate("ab"):
        at = 100.0 * i
        slices += [
            ("user_annotation", f"module:{path}", 1, at, 50.0, {}), ("cpu_op", "aten::mm", 1, at + 1, 40.0, {}),
            ("cuda_runtime", "cudaLaunchKernel", 1, at + 2, 10.0, {"correlation": 7}),
            ("cuda_driver", "cuLaunchKernel", 1, at + 3, 5.0, {"correlation": 7}),
        ]  # fmt: skip
    slices += [("kernel", "k", COMPUTE, 300.0 + 10 * i, 9.0, {"correlation": 7, "device": 0, "stream": COMPUTE}) for i in range(kernels)]
    found = annotate(read_trace(written(tmp_path / "twice.json", events(*slices))))
    assert launches_of(found, "k") == expected
    assert found.root.host_ns + found.root.device_ns == sum(found.track_ns.values())
    view = rank_view(found.trace)
    clock = found.trace.origin_ns  # the view's times are on the file's clock
    assert (view.device.launch - clock).tolist() == ([2000, 102000] if kernels == 2 else [102000] * 3)


@pytest.mark.parametrize("seed", range(4))
def test_gains_never_exceed_what_the_device_waited_and_are_shown_once(tmp_path, seed):
    kinds = [{"launch_us": 30.0, "kernel_us": 20.0}, {"slow_data_rank": 0, "slow_data_us": 900.0}, {"slow_rank": (1, 2.5)}, {"copy_in": (1, 400.0)}]
    documents = Maker(Settings(ranks=1 + (seed == 2), steps=3, layers=4, seed=seed, **kinds[seed])).documents()
    views = [rank_view(read_trace(written(tmp_path / f"{r}.json", d))) for r, d in enumerate(documents)]
    found = break_down(views)
    whole = {t.rank: t.step_s - t.total["compute_s"] - t.total["copy_s"] for t in found.times}
    waiting = [c for c in found.causes if c.kind in ("data stall", "launch-bound", "host overhead", "idle", "exposed communication")]
    assert sum(c.gain_s for c in waiting) <= max(whole.values()) * (1 + 1e-9)
    assert sum(c.gain_s for c in found.causes) <= found.step_s * (1 + 1e-9)
    assert all(c.gain_s <= c.path_s + 1e-12 for c in found.causes)


def test_busy_time_up_to_an_instant_is_that_of_a_count():
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 100, 20))
    end = start + rng.integers(1, 15, 20)
    ticks = np.array([bool(((start <= t) & (t < end)).any()) for t in range(130)])
    times = np.arange(130)
    assert busy_before(start, end, times).tolist() == [int(ticks[:t].sum()) for t in times]
    assert busy_before(start[:0], end[:0], times).tolist() == [0] * 130


def test_device_totals_say_which_steps_they_cover(tmp_path, capsys):
    (document,) = Maker(Settings(ranks=1, steps=3, layers=2, seed=1)).documents()
    path = written(tmp_path / "t.json", document)
    for flags, says in (((), "device totals of steps 5 to 7:"), (("--without-last-step",), "device totals of steps 5 to 6 without step 7:")):
        assert main(["trace", "breakdown", str(path), *flags]) == 0
        assert says in capsys.readouterr().out
