"""Interval sums beside brute force at ns resolution: every ns asked which slices are under way, on random slices of all kinds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cuda_traces import ALL_REDUCE, COPY, GEMM
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.bottleneck.device import device_times
from meshwright.bottleneck.from_trace import rank_view
from meshwright.bottleneck.lanes import Kind
from meshwright.bottleneck.tiles import flattened, overlap_ns, tiles, union_ns
from meshwright.io.trace.read import read_trace
from meshwright.kernels.pieces import places

NAMES = {GEMM: "kernel", COPY: "kernel", ALL_REDUCE: "kernel", "Memcpy HtoD (Pageable -> Device)": "gpu_memcpy", "Memset (Device)": "gpu_memset"}
slices = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), max_size=25)
one_kernel = st.tuples(st.sampled_from(sorted(NAMES)), st.integers(7, 9), st.integers(5, 300), st.integers(1, 90), st.integers(0, 2))
kernels = st.lists(one_kernel, min_size=1, max_size=20)


@given(slices)
@settings(max_examples=150, deadline=None)
def test_pieces_are_the_latest_started_slice_of_every_ns(found):
    start, end = np.array([a for a, _ in found], np.int64), np.array([a + b for a, b in found], np.int64)
    rows = np.lexsort((-end, start))
    a, b, row = flattened(start, end, rows)
    expected = []
    order = {int(r): i for i, r in enumerate(rows)}
    for t in range(400):
        inside = [i for i in range(len(found)) if start[i] <= t < end[i]]
        expected.append(max(inside, key=lambda i: order[i]) if inside else -1)
    got = [-1] * 400
    for x, y, r in zip(a.tolist(), b.tolist(), row.tolist(), strict=True):
        assert all(g == -1 for g in got[x:y]), "pieces overlap"
        got[x:y] = [r] * (y - x)
    assert got == expected
    assert union_ns(start, end) == sum(e >= 0 for e in expected)


def write(path: Path, found, steps=3) -> Path:
    """One rank with `steps` steps of 100 ns, a launch in step `at` for each kernel."""
    step = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "dur": 0.1, "args": {}}
    events = [{**step, "name": f"ProfilerStep#{k}", "ts": k * 0.1} for k in range(steps)]
    for i, (name, stream, start, length, at) in enumerate(found):
        args = {"correlation": i + 1, "stream": stream, "device": 0}
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "dur": 0.001, "args": {"correlation": i + 1}}
        events.append({**call, "ts": round(at * 0.1 + 0.001 * (i % 90) + 0.002, 3)})
        events.append({"ph": "X", "cat": NAMES[name], "name": name, "pid": 0, "tid": stream, "ts": start / 1000, "dur": length / 1000, "args": args})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def counted(found, last_step):
    """HolisticTraceAnalysis's definitions, ns by ns."""
    kept = [k for k in found if last_step or k[4] < 2]
    if not kept:
        return None
    at = {kind: set() for kind in ("compute", "collective", "any")}
    for name, _, start, length, _ in kept:
        span = range(start, start + length)
        at["any"].update(span)
        if name in (GEMM, COPY):
            at["compute"].update(span)
        if name == ALL_REDUCE:
            at["collective"].update(span)
    kernel = max(at["any"]) + 1 - min(at["any"])
    busy, compute, collective = at["any"], at["compute"], at["collective"]
    return kernel, kernel - len(busy), len(compute), len(busy) - len(compute), len(collective), len(compute & collective)


@given(kernels, st.booleans())
@settings(max_examples=60, deadline=None)
def test_device_times_equal_brute_force(tmp_path_factory, found, last_step):
    trace = read_trace(write(tmp_path_factory.mktemp("d") / "t.json", found))
    times, expected = device_times(trace, last_step=last_step), counted(found, last_step)
    if expected is None:
        assert times is None
        return
    kernel, idle, compute, other, collective, both = expected
    got = (times.kernel_s, times.idle_s, times.compute_s, times.other_s, times.communication_s)
    assert [round(x * 1e9) for x in got] == [kernel, idle, compute, other, collective]
    assert times.overlap == pytest.approx(both / collective) if collective else times.overlap != times.overlap


@given(kernels)
@settings(max_examples=60, deadline=None)
def test_tiles_cover_the_window_once_and_follow_priority(tmp_path_factory, found):
    view = rank_view(read_trace(write(tmp_path_factory.mktemp("t") / "t.json", found)), rank=0)
    pieces = tiles(view)
    low, high = view.steps[0].start, max(view.steps[-1].end, *(view.steps[0].start + s + n for _, _, s, n, _ in found))
    assert (pieces.start[1:] == pieces.end[:-1]).all() and (pieces.end > pieces.start).all()
    assert int(pieces.start[0]) == low and int(pieces.end[-1]) == high
    length = pieces.end - pieces.start
    at = {k: set() for k in NAMES}
    for name, _, start, n, _ in found:
        at[name].update(range(start, start + n))
    compute = at[GEMM] | at[COPY]
    copies = set().union(*(at[k] for k in NAMES if k.startswith("Mem")))
    got = {k: int(length[pieces.kind == k].sum()) for k in Kind}
    assert got[Kind.COMPUTE] + got[Kind.COPY] == len(compute)
    assert got[Kind.COLLECTIVE] == len(at[ALL_REDUCE] - compute)
    assert got[Kind.TRANSFER] == len(copies - compute - at[ALL_REDUCE])
    assert overlap_ns(view) == (len(at[ALL_REDUCE]), len(at[ALL_REDUCE] & compute))


def test_places_among_sorted_times_are_those_of_numpy():
    rng = np.random.default_rng(4)
    for size in (0, 1, 2, 7, 300):
        values = np.sort(rng.integers(-20, 20, size))
        for wanted in (np.sort(rng.integers(-25, 25, 60)), rng.integers(-25, 25, 60), np.array([np.iinfo(np.int64).max, np.iinfo(np.int64).min, 0])):
            assert np.array_equal(places(values, wanted), np.searchsorted(values, wanted))
            assert np.array_equal(places(values, wanted, right=True), np.searchsorted(values, wanted, side="right"))
