"""Curves from timed sizes, ready order from autograd, ring times from the fabric."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.codec.codec import parse_codec
from meshwright.decide.traffic.problem import curve_at
from meshwright.errors import CaptureError, RunError, UsageError
from meshwright.io.fabric.name import load_fabric
from meshwright.probe.traffic.costs import codec_cost, time_codec
from meshwright.probe.traffic.curves import fit_curve
from meshwright.probe.traffic.profile import network_times, ready_times


def test_a_line_is_found_in_spite_of_one_disturbed_size():
    import numpy as np

    sizes = [0, 10**3, 10**4, 10**5, 10**6, 2 * 10**6]
    exact = [1e-3 + 2e-9 * x for x in sizes]
    curve = fit_curve(sizes * 3, exact * 3)
    assert curve.sizes == (0, 2 * 10**6) and curve.r2 == pytest.approx(1)
    assert curve_at(curve, np.array([5 * 10**5]))[0] == pytest.approx(2e6, rel=1e-6)
    noisy = [t if i != 9 else 5.0 for i, t in enumerate(exact * 3)]
    assert fit_curve(sizes * 3, noisy) == curve


def test_times_that_are_no_line_are_followed_and_never_fall():
    curve = fit_curve([1, 10, 100, 1000], [1e-3, 2e-3, 1e-3, 9e-3])
    assert curve.sizes == (1, 10, 100, 1000) and list(curve.times_ns) == [10**6, 15 * 10**5, 15 * 10**5, 9 * 10**6]
    weighed = fit_curve([1, 10, 100, 1000], [4e-3, 2e-3, 1e-3, 9e-3], [1, 1, 6, 1])
    assert list(weighed.times_ns) == [15 * 10**5] * 3 + [9 * 10**6]  # eight groups take as long as before
    assert fit_curve([7], [1e-3]).times_ns == (10**6,)
    for sizes, times in (([], []), ([1], [-1.0]), ([1], [float("nan")]), ([1, 2], [1.0])):
        with pytest.raises(UsageError, match="finite"):
            fit_curve(sizes, times)


class Shared(nn.Module):
    """`shared` is used first and last: its gradient is complete only at the end of backward, though it is declared first."""

    def __init__(self):
        super().__init__()
        self.shared, self.middle, self.unused = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.shared(torch.relu(self.middle(torch.relu(self.shared(x)))))


def test_gradients_stand_in_autograds_order_shared_ones_late_unused_ones_last():
    module = Shared()
    tensors, end_ns = ready_times(module, lambda: module(torch.randn(3, 5)).sum(), repeats=3)
    names = [t.name for t in tensors]
    assert {"middle.weight", "middle.bias"} == set(names[:2]) and {"shared.weight", "shared.bias"} <= set(names[2:])
    assert end_ns >= tensors[-1].ready_ns and [t.ready_ns for t in tensors] == sorted(t.ready_ns for t in tensors)
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(CaptureError, match="no parameter gets a gradient"):
        ready_times(module, lambda: torch.zeros((), requires_grad=True) * 1.0, repeats=1)


def test_codecs_are_timed_and_priced_with_the_simulated_network():
    tensors, _ = ready_times(module := Shared(), lambda: module(torch.randn(3, 5)).sum(), repeats=1)
    network_s = network_times(load_fabric("laptop:4"), 4)
    for text, payload in (("none", 4), ("topk:density=0.2", 8)):
        spec = parse_codec(text)
        times = time_codec(spec, tensors, 4, repeats=1)
        cost = codec_cost(spec, tensors, times, network_s)
        assert cost.evidence == "assumed" and cost.codec == spec.text and min(cost.payload_bytes) >= payload
        assert max(t.elements for t in times) == sum(t.elements for t in tensors)
        assert cost.exchange.times_ns[-1] >= network_s(spec.aggregation, times[0].payload_bytes) * 1e9 * 0.5
    assert network_s("all-reduce", 0) == 0 and network_s("all-gather", 1000) > 0
    with pytest.raises(RunError, match="was not timed"):
        codec_cost(parse_codec("none"), tensors, [], network_s)
