"""Gradients of the owner's own making: noticed while a module is traced, with their place; nothing else is."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

from meshwright.capture.forward import trace_objective
from meshwright.capture.graph import capture
from meshwright.capture.losses import Objective
from meshwright.capture.resolve import ModelSource
from meshwright.capture.user_gradients import functions_watched, refuse_parameter_hooks
from meshwright.errors import Unsupported


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Net(nn.Module):
    def __init__(self, change=None):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, x):
        y = self.a(x)
        return self.b(self.change(y) if self.change else y)


def hooked(y):
    y.register_hook(lambda g: 2 * g)
    return y


def trace(module):
    source = ModelSource(name="net", module=module, inputs=(torch.randn(2, 4), torch.randn(2, 4)))
    return trace_objective(Objective(module, "mse"), source, loss="mse", mode=None)


@pytest.mark.parametrize("change", [Doubling.apply, lambda y: Doubling.apply(y), hooked])
def test_what_changes_gradients_while_tracing_keeps_the_module_whole(change):
    traced = trace(Net(change))
    assert traced.method == "opaque" and traced.refusal is not None
    assert traced.refusal.where.startswith("tests/capture/test_user_gradients.py:")


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_module_with_a_backward_hook_is_kept_whole(register):
    net = Net()
    getattr(net.b, register)(functools.partial(lambda module, *gradients: None))
    traced = trace(net)
    assert traced.method == "export" and any("b (Linear): export would lose the backward hooks of a module" in n for n in traced.notes)
    getattr(net, register)(lambda module, *gradients: None)
    assert trace(net).method == "opaque"


def test_forward_hooks_are_traced():
    net = Net(torch.relu)
    net.a.register_forward_hook(lambda module, given, y: y + 1)
    traced = trace(net)
    assert traced.method == "export" and not any("kept whole" in n for n in traced.notes)


def test_what_is_watched_is_put_back():
    before, told = Doubling.__dict__["forward"], []
    with pytest.raises(ValueError), functions_watched(told.append):
        assert Doubling.__dict__["forward"] is not before
        Doubling.apply(torch.zeros(1))
        raise ValueError
    assert Doubling.__dict__["forward"] is before and told == [Doubling]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register):
    net = Net()
    refuse_parameter_hooks(net, "net")
    getattr(net.a.weight, register)(lambda g: None)
    with pytest.raises(Unsupported, match=r"parameter 'a\.weight' has a hook on its gradient"):
        refuse_parameter_hooks(net, "net")


@pytest.mark.parametrize("model", ["reversible", "reversible_outermost"])
def test_gradients_that_backward_puts_into_parameters_are_refused_with_the_line(model):
    with pytest.raises(Unsupported, match=re.escape("backward of _Reversible puts the gradient of parameter")) as found:
        capture(f"tests/run/gate_models.py:{model}", loss="mse", scalable=False)
    assert found.value.where.startswith("tests/run/gate_models.py:") and "torch.autograd.grad" in found.value.hint
    assert found.value.data["cause"] == "user-gradients"
