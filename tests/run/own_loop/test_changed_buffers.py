"""Buffers that a module changes, in training and in evaluation: as one call of it on the whole batch, in every layout, or refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from loop_rig import world
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import meshwright as mw
from meshwright.errors import MeshwrightError, Unsupported
from meshwright.run.executor.transport import TaggedTransport

WIDTH = 8
LAYOUTS = {
    "one": {}, "dp2": {"data": 2}, "pp2": {"pipeline": 2}, "tp2": {"tensor": 2}, "zero3": {"data": 2, "zero": 3},
    "dp2xpp2": {"data": 2, "pipeline": 2, "fabric": "laptop:4"},
}  # fmt: skip

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


class Part(nn.Module):
    """Counts its calls, in both modes and in one, and what it computes depends on them; `by`: it follows its samples, too, in evaluation."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.up, self.down, self.by = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), by
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        self.forwards += 1
        if not self.training:
            self.calls[1] += 1
            self.calls = self.calls * 1.5
        x = x + self.down(nn.functional.gelu(self.up(x))) * (1 + self.calls.sum() + self.forwards / 8)
        if self.by == "samples" and not self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x


class Counted(nn.Module):
    """Its first and its last operator read one counter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("begun", torch.zeros(()))

    def forward(self, x):
        self.begun += 1
        return self.inner(x * (1 + self.begun / 8)) * (1 + self.begun / 4)


def make(by: str = "calls") -> nn.Module:
    torch.manual_seed(0)
    last = spectral_norm(nn.Linear(WIDTH, WIDTH))
    parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), Part("calls" if by == "ends" else by), Part("calls"), last)
    return (Counted(parts) if by == "ends" else parts).double()


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(8, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def planned(by: str = "calls", *, microbatch: int = 2, **options: Any) -> Any:
    options = {"fabric": "laptop:2", "data": 1, "tensor": 1, "pipeline": 1, "zero": 0} | (options or {"fabric": "laptop:1"})
    return mw.plan(make(by), rows(0), loss="mse", optimizer="sgd", microbatch=microbatch, **options)


def evaluated(rank: int, group: Any, ranks: int, store: str, plan: Any, by: str = "calls") -> dict[str, Any]:
    with world(rank, ranks, store):
        return loop(plan, by)


def sent(rank: int, group: Any, ranks: int, store: str, plan: Any, by: str) -> tuple[int, int]:
    """Messages of a step, and how many lie in a buffer of the module."""
    tensors: list[torch.Tensor] = []
    hand_over = TaggedTransport.send

    def send(self, tensor, peer, tag):
        tensors.append(tensor)
        return hand_over(self, tensor, peer, tag)

    with world(rank, ranks, store), patch.object(TaggedTransport, "send", send):
        model = make(by)
        step = mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.05), plan)
        step(rows(0))
        own = {b.untyped_storage().data_ptr() for b in model.buffers()}
        return len(tensors), sum(x.untyped_storage().data_ptr() in own for x in tensors)


def loop(plan: Any, by: str = "calls") -> dict[str, Any]:
    model = make(by)
    step = mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.05), plan)
    losses = []
    for i in range(3):
        losses += [float(step.evaluate(rows(9 + i))), float(step(rows(i)))]
    return {"losses": losses, "state": step.state_dict(full=True)}


def plain(by: str = "calls") -> tuple[list[float], Any]:
    model = make(by)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(3):
        model.eval()
        with torch.no_grad():
            losses.append(float(nn.functional.mse_loss(model(rows(9 + i)[0]), rows(9 + i)[1])))
        model.train()
        loss = nn.functional.mse_loss(model(rows(i)[0]), rows(i)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def test_what_a_stage_sends_is_not_changed_by_its_next_micro_batch(pool, tmp_path, monkeypatch):
    """A counter that a later stage reads, as it lies in its buffer: put back for the next micro-batch, perhaps before it is sent."""
    monkeypatch.setattr(pool, "timeout_s", 200.0)
    plan = planned("ends", **LAYOUTS["dp2xpp2"])
    assert any("add_" in s.writes for s in plan.layout.segments)
    for messages, own in pool.run(sent, 4, 4, str(tmp_path / "store"), plan, "ends"):
        assert messages and not own


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_depends_on_no_sample_changes_once_in_a_batch(layout, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "timeout_s", 200.0)
    plan = planned(**LAYOUTS[layout])
    losses, state = plain()
    assert state["1.calls"][1] > 4 and state["1.forwards"] == 6  # three evaluations, three steps of several micro-batches
    ranks = plan.layout.ranks
    for found in pool.run(evaluated, ranks, ranks, str(tmp_path / "store"), plan) if ranks > 1 else [loop(plan)]:
        assert found["losses"] == pytest.approx(losses, rel=1e-9, abs=0)
        assert all(torch.allclose(found["state"][n], x, rtol=1e-9, atol=1e-9) for n, x in state.items())


def test_what_follows_samples_is_right_of_the_whole_batch_and_refused_of_parts():
    losses, state = plain("samples")
    found = loop(planned("samples", microbatch=8), "samples")
    assert found["losses"] == pytest.approx(losses, rel=1e-9) and torch.allclose(found["state"]["1.mean"], state["1.mean"], rtol=1e-9)
    with pytest.raises(Unsupported, match=r"changes the buffer '1.mean' by the samples"):
        loop(planned("samples"), "samples")


class Hidden(nn.Module):
    """Cannot be traced in either mode: its way depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            self.calls += 1
        return self.a(x) if x.sum() > 1e9 else self.a(x) * (1 + self.calls)


def test_a_module_kept_whole_that_changes_buffers_in_evaluation_is_refused_and_puts_them_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hidden()).double()
    plan = mw.plan(model, rows(0), loss="mse", optimizer="sgd", microbatch=2, fabric="laptop:1")
    step = mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    with pytest.raises(MeshwrightError, match=r"changes the buffer '1.calls'"):
        step.evaluate(rows(0))
    assert not float(step.state_dict(full=True)["1.calls"])
