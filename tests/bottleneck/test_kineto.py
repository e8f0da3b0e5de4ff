"""Traces in Kineto's own dress say the same as the work alone: waits and annotations on the tracks of streams are no work."""

import gzip
import json

import pytest
from cuda_traces import COMPUTE, Maker, Settings, write_ranks
from kineto_format import as_kineto

from meshwright.annotate import Evidence, Stage, annotate
from meshwright.bottleneck.device import device_times
from meshwright.compare.breakdown import breakdown_of
from meshwright.io.trace.read import read_trace

SETTINGS = Settings(ranks=2, steps=3, layers=4, slow_rank=(1, 1.8), seed=3)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Files of two ranks: the work alone, and in Kineto's dress."""
    folder = tmp_path_factory.mktemp("kineto")
    plain = write_ranks(folder, SETTINGS)
    dressed = []
    for rank, document in enumerate(Maker(SETTINGS).documents()):
        dressed.append(folder / f"kineto-{rank}.json.gz")
        dressed[-1].write_bytes(gzip.compress(as_kineto(document).encode(), 1))
    return plain, dressed


def leaves(node, path=()):
    """(path of names) -> ns on the device, of what takes any."""
    path = (*path, node.name)
    if not node.children:
        return {path[1:]: node.device_ns} if node.device_ns else {}
    return {k: v for child in node.children for k, v in leaves(child, path).items()}


def test_every_kernel_is_its_modules_to_the_ns(both):
    for plain, dressed in zip(*both, strict=True):
        bare, full = annotate(read_trace(plain)), annotate(read_trace(dressed))
        assert leaves(full.root) == leaves(bare.root)
        names = {path[-2:] for path in leaves(full.root)}
        assert not any("Sync" in name or "Wait" in name or "outside" in name for _, name in names), names
        assert full.root.host_ns + full.root.device_ns == sum(full.track_ns.values())


def test_nothing_is_warned_of(both):
    for path in both[1]:
        trace = read_trace(path)
        assert trace.warnings == ()
        assert trace.rank is not None and trace.world_size == 2
        assert len(trace.flows["ac2g"][0]) == sum(trace.in_category("kernel", "gpu_memcpy"))


@pytest.mark.parametrize("last", [True, False])
def test_device_times_are_the_same(both, last):
    for plain, dressed in zip(*both, strict=True):
        assert device_times(read_trace(dressed), last_step=last) == device_times(read_trace(plain), last_step=last)


def test_the_breakdown_is_the_same(both):
    (bare, _), (full, _) = (breakdown_of(files) for files in both)
    assert [t.total for t in full.times] == [t.total for t in bare.times] and full.step_s == bare.step_s
    assert [(c.kind, c.where) for c in full.causes] == [(c.kind, c.where) for c in bare.causes]
    assert (full.causes[0].kind, full.causes[0].where) == ("slow rank", "rank 1")


def test_kernels_of_a_cuda_graph_belong_to_where_it_was_launched(tmp_path):
    """One launch outside all operators, three kernels with its number."""
    maker = Maker(Settings(ranks=1, steps=1, layers=2))
    (document,) = maker.documents()
    events = document["traceEvents"]
    module = next(e for e in events if e["name"] == "module:layers.1")
    last = max((e for e in events if e.get("cat") == "cpu_op" and e["ts"] < module["ts"] + module["dur"]), key=lambda e: e["ts"])
    last["dur"] -= 0.5
    end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 4000, "tid": 4000, "ts": last["ts"] + last["dur"] + 0.05, "dur": 0.4,
            "args": {"cbid": 311, "correlation": 999_999}}  # fmt: skip
    kernels = [
        {"ph": "X", "cat": "kernel", "name": f"graphed_{i}", "pid": 0, "tid": COMPUTE, "ts": end + 10 * i, "dur": 7.0,
         "args": {"device": 0, "stream": COMPUTE, "correlation": 999_999, "graph id": 3, "graph node id": i}}
        for i in range(3)
    ]  # fmt: skip
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**document, "traceEvents": [*events, call, *kernels]}))
    a = annotate(read_trace(path))
    rows = [r for r in a.units.rows.tolist() if a.trace.name_of(r).startswith("graphed")]
    assert len(rows) == 3
    assert {a.tree.modules[a.labels.module[r]].path for r in rows} == {"layers.1"}
    assert {(a.labels.stage[r], a.labels.evidence[r]) for r in rows} == {(Stage.FORWARD, Evidence.EXACT)}
    assert a.root.host_ns + a.root.device_ns == sum(a.track_ns.values())
