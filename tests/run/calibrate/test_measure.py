"""Operator times against eager execution of the same modules, by a clock that only operators move: what is counted, once and where."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import FormatError
from meshwright.run.calibrate.operator_times import OperatorTime, OperatorTimes, call_key, environment
from meshwright.run.calibrate.operators import (
    DispatchOverhead,
    _BackwardTimer,
    _last_uses,
    dispatch_overhead,
    measure_graph,
    measure_weight_shares,
    measured_total_s,
)


class Traced:
    """The least that `measure_graph` needs, made by symbolic tracing of functional ATen calls."""

    def __init__(self, function, values):
        graph = fx.symbolic_trace(function).graph
        self.graph_module = fx.GraphModule({}, graph)
        self.values = dict(values)
        self.placeholders = tuple(self.values)

    def value(self, name):
        return self.values[name]


class Worked(TorchDispatchMode):
    """Seconds go by while operators run, as many as they have to do, and none between them: no other process takes any."""

    now_s = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            inner = args[0].shape[-1] if function is torch.ops.aten.mm.default else 1
            Worked.now_s += 1e-9 * inner * math.prod(found.shape)
        return found


@pytest.fixture
def worked(monkeypatch):
    monkeypatch.setattr("meshwright.run.calibrate.operators._clock", lambda: Worked.now_s)
    monkeypatch.setattr("meshwright.run.calibrate.operators.dispatch_overhead", lambda: DispatchOverhead(0.0, 0.0))
    with Worked():
        yield


def test_backward_time_belongs_to_the_call_that_made_the_node():
    x = torch.ones(3, requires_grad=True)
    inner = x * 2
    y = inner.exp()
    with _BackwardTimer() as timer:
        timer.own("first", [y])  # two nodes, the inner one seen only through the outer
        z = y.sum()
        timer.own("second", [z])
        timer.run([z], [x], [torch.tensor(1.0)])
    assert timer.owner == {z.grad_fn: "second", y.grad_fn: "first", inner.grad_fn: "first"}
    assert timer.calls == {"first": 2, "second": 1} and set(timer.seconds) == {"first", "second"}


def test_values_are_let_go_after_their_last_use():
    graph = fx.symbolic_trace(net).graph
    with graph.inserting_before(next(iter(graph.nodes)).next):
        unused = graph.call_function(torch.ops.aten.ones.default, ([3],))
    last = _last_uses(graph)
    assert last[unused] == [unused]  # nobody uses it
    products = [n for n in graph.nodes if n.target is torch.ops.aten.mm.default]
    assert [n.name for n in last[products[1]]] == ["w1", "relu_default"] and [n.name for n in last[products[0]]] == ["x"]


def net(x, w1, w2):
    h = torch.ops.aten.relu.default(torch.ops.aten.mm.default(x, w1))
    h = torch.ops.aten.relu.default(torch.ops.aten.mm.default(h, w1))
    return (torch.ops.aten.sum.default(torch.ops.aten.mm.default(h, w2)),)


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(0)
    weights = {"w1": nn.Parameter(torch.randn(512, 512) / 23), "w2": nn.Parameter(torch.randn(512, 64) / 23)}
    return Traced(net, {"x": torch.randn(256, 512), **weights})


def test_sum_of_operators_is_the_eager_time(traced, worked):
    values = [traced.value(n) for n in traced.placeholders]
    marks = [Worked.now_s]
    loss = net(*values)[0]
    marks.append(Worked.now_s)
    torch.autograd.grad(loss, [v for v in values if v.requires_grad])
    marks.append(Worked.now_s)
    assert measured_total_s(measure_graph(traced, repeats=3)) == pytest.approx((marks[1] - marks[0], marks[2] - marks[1]), rel=0.01)


def test_every_call_has_a_price_and_equal_calls_equal_prices(traced, worked):
    prices = measure_graph(traced, repeats=2, warmup=1)
    calls = [n.name for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    assert list(prices) == calls and len(calls) == 6
    assert all(f.evidence == b.evidence == "measured" and f.time_s == f.cpu_s > 0 and b.cpu_s > 0 for f, b in prices.values())
    # The two activations have equal shapes, but the first product needs no gradient of its input: other work, other key.
    assert prices["relu_default"] == prices["relu_default_1"] and prices["mm_default"] != prices["mm_default_1"]
    assert prices["mm_default_1"][1].cpu_s > prices["relu_default"][1].cpu_s


def test_backward_belongs_to_the_call_that_caused_it(worked):
    """One huge product among trifles: nearly all backward time must be its own."""
    values = {"a": nn.Parameter(torch.ones(8, 8)), "b": nn.Parameter(torch.randn(512, 1024)), "c": nn.Parameter(torch.randn(1024, 512))}

    def lopsided(a, b, c):
        small = torch.ops.aten.sum.default(torch.ops.aten.mul.Tensor(a, a))
        return (torch.ops.aten.add.Tensor(small, torch.ops.aten.sum.default(torch.ops.aten.mm.default(b, c))),)

    prices = measure_graph(Traced(lopsided, values), repeats=3)
    total = sum(b.cpu_s for _, b in prices.values())
    assert prices["mm_default"][1].cpu_s > 0.8 * total


def test_shares_of_weights_are_those_of_their_products(worked):
    """Of a product with a square weight about half of the backward is for it."""
    values = {
        "x": torch.randn(64, 256), "first": nn.Parameter(torch.randn(256, 512)), "square": nn.Parameter(torch.randn(512, 512)),
        "scale": nn.Parameter(torch.ones(1)),
    }  # fmt: skip

    def chain(x, first, square, scale):
        mm, relu = torch.ops.aten.mm.default, torch.ops.aten.relu.default
        y = relu(mm(relu(mm(x, first)), square))
        return (torch.ops.aten.sum.default(torch.ops.aten.mul.Tensor(y, scale)),)

    shares = measure_weight_shares(Traced(chain, values))
    assert set(shares) == {"mm_default_1", "mul_tensor"}, "the first product has no gradient but its weight's"
    assert 0.4 < shares["mm_default_1"] < 0.6


def test_nothing_to_differentiate():
    prices = measure_graph(Traced(lambda x: (torch.ops.aten.sum.default(x),), {"x": torch.ones(16)}), repeats=2)
    assert [b.cpu_s for _, b in prices.values()] == [0.0]


def test_threads_are_put_back(traced):
    before = torch.get_num_threads()
    measure_graph(traced, repeats=1, warmup=0)
    assert torch.get_num_threads() == before


def test_dispatch_overhead_is_small():
    overhead = dispatch_overhead()
    assert abs(overhead.forward_s) < 1e-4 and abs(overhead.backward_s) < 1e-4
    assert dispatch_overhead() is overhead


def test_cache_saves_measuring(traced, tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    first = measure_graph(traced, repeats=1, warmup=0, cache=OperatorTimes(path))
    loaded = OperatorTimes(path)
    assert len(loaded.times) == 5  # six calls, two of them alike
    monkeypatch.setattr("meshwright.run.calibrate.operators._summary", None)  # measuring again would fail
    assert measure_graph(traced, repeats=1, warmup=0, cache=loaded) == first


def test_cache_of_another_machine_is_not_used(traced, tmp_path):
    path = tmp_path / "times.json"
    cache = OperatorTimes(path)
    cache.update({"k": OperatorTime(1.0, 2.0, 3)})
    cache.save()
    assert OperatorTimes(path)["k"] == OperatorTime(1.0, 2.0, 3) and "k" in OperatorTimes(path)
    document = json.loads(path.read_text())
    assert document["environment"] == environment()
    document["environment"]["cpu"] = "another"
    path.write_text(json.dumps(document))
    assert OperatorTimes(path).times == {}


NEGATIVE = '{"environment": {}, "times": {"k": {"forward_s": -1, "backward_s": 0}}}'


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "x"}', NEGATIVE, "[" * 100000, "\xff"])
def test_wrong_cache_files(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match="not a file of operator times"):
        OperatorTimes(path)


def test_cache_file_of_another_schema(tmp_path):
    path = tmp_path / "times.json"
    path.write_text('{"schema": "meshwright.plan", "version": 1, "environment": {}, "times": {}}')
    with pytest.raises(FormatError, match="schema"):
        OperatorTimes(path)


def test_too_large_cache_file(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.run.calibrate.operator_times.MAX_FILE_BYTES", 8)
    (tmp_path / "times.json").write_text(" " * 9)
    with pytest.raises(FormatError, match="larger"):
        OperatorTimes(tmp_path / "times.json")


def test_keys_tell_apart_what_costs_differently():
    x = torch.zeros(4, 6)
    keys = [
        call_key("op", (y,), {})
        for y in (x, x.t(), x.double(), x.clone().requires_grad_(), torch.zeros(6, 4), x[:, ::2], [x, 1], 2.5, None)
    ]
    assert len(set(keys)) == len(keys)
    assert call_key("op", (x,), {"dim": 1}) != call_key("op", (x,), {"dim": 0})
    assert call_key("op", (x,), {}) == call_key("op", (torch.ones(4, 6),), {})
