"""Work divided by speed: whole numbers that add up, near their due, and nothing where devices are alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Cost
from meshwright.decide.layout.cut import Unit, cut_stages
from meshwright.decide.layout.tensor_shares import LEVEL
from meshwright.decide.layout.unlike_devices import EVEN, Division, device_orders, divide, moved, relative_speeds
from meshwright.graph.graph import GraphValue, OpGraph, OpNode, Work
from meshwright.io.fabric.name import load_fabric

SPEEDS = st.sampled_from([1.0, 0.5, 0.25, 0.7])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.data())
def test_parts_are_whole_and_nothing_changes_among_equals(data, tensor, pipeline, microbatches, draw):
    cells = {(p, d, t): draw.draw(SPEEDS) for p in range(pipeline) for d in range(data) for t in range(tensor)}
    found = divide((data, tensor, pipeline), microbatches, lambda *at: cells[at])
    assert divide((data, tensor, pipeline), microbatches, lambda *at: 0.5) == EVEN
    if found.microbatches:
        assert sum(found.microbatches) == microbatches and min(found.microbatches) >= 1 and len(found.microbatches) == data
        assert len(set(found.microbatches)) > 1
    assert len(found.stage_speeds) in (0, pipeline) and len(found.tensor_speeds) in (0, tensor)
    if tensor == 1 and microbatches >= 4 * data:  # nothing but replicas: each gets its due within one, or one at least
        own = [sum(cells[p, d, 0] for p in range(pipeline)) for d in range(data)]
        due = [microbatches * x / sum(own) for x in own]
        counts = found.microbatches or (microbatches / data,) * data
        assert all(abs(c - x) < 1 or c == 1 for c, x in zip(counts, due, strict=True)) or len(set(own)) == 1


def test_each_axis_gets_what_its_devices_are_worth():
    fast, slow = 1.0, 0.5
    assert divide((2, 1, 1), 9, lambda p, d, t: (fast, slow)[d]) == Division(microbatches=(6, 3))
    assert divide((1, 1, 2), 8, lambda p, d, t: (fast, slow)[p]) == Division(stage_speeds=(fast, slow))
    assert divide((2, 2, 1), 8, lambda p, d, t: (fast, slow)[t]) == Division(tensor_speeds=(fast, slow))
    # of two replicas with a slow device each, at other ends: nothing helps but what the slow ones bound
    assert divide((2, 1, 2), 8, lambda p, d, t: fast if p == d else slow) == EVEN
    assert divide((2, 1, 1), 2, lambda p, d, t: (fast, slow)[d]) == EVEN, "each must have one"
    assert str(Division(stage_speeds=(1.0, 0.5), microbatches=(2, 1))) == "stages by speed 2:1, micro-batches 2 + 1" and not str(EVEN)
    assert EVEN.options(LEVEL) is LEVEL and Division(tensor_speeds=(1.0, 0.5)).options(LEVEL) == replace(LEVEL, speeds=(1.0, 0.5))


def test_micro_batches_move_one_by_one():
    at = Division(microbatches=(3, 1))
    assert moved(at, 0, 1) == EVEN and moved(at, 1, 0) is None and moved(at, 0, 0) is None and moved(EVEN, 0, 1) is None
    assert moved(Division(microbatches=(4, 1), stage_speeds=(1.0, 0.5)), 0, 1) == Division(microbatches=(3, 2), stage_speeds=(1.0, 0.5))


def test_speeds_and_orders_of_devices():
    work = Work(flops=10**9, bytes_read=0, bytes_written=0, calls=0)
    node = OpNode(
        name="a", target="aten.relu.default", module="", inputs=(), outputs=(GraphValue(shape=(2,), dtype="float32", storage=0),), forward=work,
        backward=work,
    )  # fmt: skip
    graph = OpGraph(model="m", method="export", batch_size=2, loss="mse", inputs=(), parameters=(), nodes=(node,), outputs=("a",))
    net = load_fabric("laptop:3")
    unlike = replace(net, devices=tuple(replace(d, cpu_share=s) for d, s in zip(net.devices, (0.5, 1.0, 0.25), strict=True)))
    found = relative_speeds(unlike, Cost(), graph)
    assert list(found.values()) == pytest.approx([0.5, 1.0, 0.25])
    a, b, c = unlike.devices
    assert device_orders(unlike, found) == [("", (a, b, c)), ("fastest first", (b, a, c)), ("slowest first", (c, a, b))]
    same = relative_speeds(net, Cost(), graph)
    assert set(same.values()) == {1.0} and device_orders(net, same) == [("", net.devices)]


@given(st.data(), st.integers(2, 8), st.integers(1, 4))
def test_stages_of_unlike_speed_are_cut_as_brute_force_does(data, n, stages):
    time_of = data.draw(st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n))
    border = [0.0, *data.draw(st.lists(st.integers(0, 5).map(float), min_size=n - 1, max_size=n - 1)), 0.0]
    speeds = data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=stages, max_size=stages))
    options = [[0, *c] for c in combinations(range(1, n), stages - 1)]
    if not options:
        return

    def slowest(starts):
        ends = [*starts[1:], n]
        return max(sum(time_of[a:b]) / s + (border[b] if b < n else 0.0) for a, b, s in zip(starts, ends, speeds, strict=True))

    found = cut_stages([Unit(())] * n, stages, time_of, border, [True] * (n + 1), speeds)
    assert slowest(found) == pytest.approx(min(map(slowest, options)))
