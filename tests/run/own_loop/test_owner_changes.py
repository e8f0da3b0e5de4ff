"""What an owner changes on his module or loss between two steps: taken over, or refused by name, never silently left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.errors import UsageError
from meshwright.run.own_loop.as_traced import AsTraced

BETA = 1.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * BETA


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.drop = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Dropout(0.0)
        self.alpha, self.beta, self.kinds, self.told = 1.0, torch.tensor(1.0), {"k": [1.0]}, SimpleNamespace(depth=1, name="a")
        self.seen, self._rate = 0, 1.0  # `seen` is read by nobody
        self.register_buffer("scale", torch.ones(()))

    @property
    def rate(self) -> float:
        return self._rate

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.up(x)) * self.alpha * self.rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.told.depth):
            x = scaled(x) * self.kinds["k"][0]
        return self.down(self.drop(self.hidden(x))) * self.scale * getattr(self, "beta")


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.smoothing = 0.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, label_smoothing=self.smoothing)


LOSS = Loss()
BATCH = (torch.randn(4, 8), torch.randint(4, (4,)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@cache
def plan() -> mw.Plan:
    return mw.plan(net(), BATCH, fabric="laptop:1", loss=LOSS, microbatch=2)


def step_of(model: nn.Module) -> Any:
    return mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(), loss=LOSS)


def setting(name: str, value: Any, path: str = "") -> Callable[[Net], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def freeze(model: Net) -> None:
    model.up.weight.requires_grad_(False)


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "number": (setting("alpha", 0.5), "alpha of model has changed from 1.0 to 0.5"),
    "behind a property": (setting("_rate", 0.5), "_rate of model has changed"),
    "tensor": (setting("beta", torch.tensor(2.0)), "beta of model has changed since"),
    "tensor in place": (lambda m: m.beta.fill_(2.0), "beta of model has changed since"),
    "in containers": (lambda m: m.kinds["k"].append(2.0) or m.kinds["k"].reverse(), "kinds of model has changed since"),
    "of an object": (lambda m: setattr(m.told, "depth", 2), "told of model has changed since"),
    "gone": (lambda m: delattr(m, "alpha"), "alpha of model has changed since"),
    "of a library's module": (setting("p", 0.5, "drop"), "p of model.drop has changed from 0.0 to 0.5"),
    "another module": (setting("act", nn.Tanh()), "model has other modules than before"),
    "another parameter": (lambda m: setattr(m.up, "weight", nn.Parameter(torch.ones(16, 8))), "model.up has other parameters"),
    "frozen": (freeze, "requires_grad of a parameter of model.up has changed"),
    "another buffer": (setting("scale", torch.tensor(2.0)), "model has other buffers"),
    "hook": (lambda m: m.up.register_forward_hook(lambda *given: None), "model.up has other hooks"),
    "forward": (setting("forward", lambda x: x), "model has another forward"),
    "class": (setting("__class__", nn.Tanh, "act"), "model.act has another class"),
    "mode": (lambda m: m.drop.eval(), "model.drop is in evaluation mode, and was in training mode"),
    "loss": (lambda m: setattr(LOSS, "smoothing", 0.1), "smoothing of the loss has changed from 0.0 to 0.1"),
    "global": (lambda m: globals().update(BETA=2.0), "BETA of .*test_owner_changes has changed from 1.0 to 2.0"),
}


@pytest.fixture(autouse=True)
def as_before():
    yield
    globals().update(BETA=1.0)
    LOSS.smoothing = 0.0


@pytest.mark.parametrize("case", CHANGES)
def test_what_forward_or_the_loss_would_see_is_refused_by_name(case: str) -> None:
    model = net()
    traced = AsTraced(model, LOSS)
    traced.require()
    change, said = CHANGES[case]
    change(model)
    with pytest.raises(UsageError, match=said) as caught:
        traced.require()
    assert caught.value.where == "step" and caught.value.hint
    if case == "mode":
        traced.require(training=False)


def test_what_nobody_reads_may_change_and_so_may_values() -> None:
    model = net()
    traced = AsTraced(model, LOSS)
    model.seen, model.told.name, model.note = 5, "b", "new"
    with torch.no_grad():
        model.up.weight.clamp_(-0.1, 0.1)
        model.scale.fill_(2.0)
    model.down.bias.data = torch.zeros(4)
    traced.require()
    assert traced.names >= {"alpha", "beta", "_rate", "smoothing"} and "seen" not in traced.names


def test_losses_of_every_form_are_looked_at() -> None:
    class Weighted:
        def __init__(self) -> None:
            self.weight, self.calls = 1.0, 0

        def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.weight * F.cross_entropy(output, target)

        def method(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self(output, target)

    around = 1.0

    def free(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return around * F.cross_entropy(output, target)

    held = Weighted()
    for loss in (held, held.method, functools.partial(held.method)):
        held.weight = 1.0
        traced = AsTraced(net(), loss)
        held.calls += 1
        traced.require()
        held.weight = 0.5
        with pytest.raises(UsageError, match=r"weight of the loss has changed from 1\.0 to 0\.5"):
            traced.require()
    traced = AsTraced(net(), free)
    traced.require()
    around = 2.0
    with pytest.raises(UsageError, match=r"around around .*free has changed"):
        traced.require()


def test_a_step_refuses_and_goes_on_when_it_is_as_before() -> None:
    model = net()
    step = step_of(model)
    step(BATCH)
    model.alpha = 0.5
    for call in (step, step.evaluate):
        with pytest.raises(UsageError, match="alpha of model"):
            call(BATCH)
    model.alpha = 1.0
    model.eval()
    step.evaluate(BATCH)
    with pytest.raises(UsageError, match=r"model is in evaluation mode, and was in training mode") as caught:
        step(BATCH)
    assert "model.train()" in caught.value.hint
    model.train()
    model.scale.fill_(2.0)
    plain = net()
    plain.load_state_dict(model.state_dict())
    assert float(step(BATCH)) == pytest.approx(LOSS(plain(BATCH[0]), BATCH[1]).item(), rel=1e-6)
