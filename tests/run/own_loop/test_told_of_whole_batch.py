"""A loop without a batch to compare a step of is told where its micro-batches are not the whole batch, and only there."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.errors import Unsupported


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        return self.layers(x)


def dice(y, t):
    p, t = y.sigmoid(), (t > 0).double()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def dice_of_each(y, t):
    p, t = y.sigmoid(), (t > 0).double()
    return (1 - 2 * (p * t).sum(1) / (p.sum(1) + t.sum(1))).mean()


def contrast(y, t):
    scores = F.normalize(y, dim=-1) @ F.normalize(t, dim=-1).t()
    return F.cross_entropy(scores, torch.arange(len(scores)))


def explained(y, t):
    return ((y - t) ** 2).sum() / ((t - t.mean(0)) ** 2).sum()


def masked(y, t):
    return ((y - t) ** 2 * (t > 0)).sum() / (t > 0).sum()


def picked(y, t):
    rows = (t.sum(1) > -1e9).nonzero()[:, 0]
    return (y[rows] - t[rows]).square().mean()


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (dice, "aten.sum.default of the loss"), (contrast, "aten.matmul.default of the loss"),
        (explained, "aten.mean.dim of the loss"), (picked, "the loss is kept whole, so"),
        (dice_of_each, ""), (masked, ""),
    ],
)  # fmt: skip
def test_losses_over_the_batch(loss, told):
    torch.manual_seed(0)
    model, batch = Net().double(), (torch.randn(8, 6).double(), torch.randn(8, 6).double())
    expected = float(loss(model(batch[0]), batch[1]).detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = mw.plan(model, batch, fabric="laptop:1", loss=loss, optimizer="sgd", microbatch=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = mw.torch.parallelize(model, optimizer, plan, loss=loss)
    assert [told in str(w.message) for w in found] == [True] * bool(told)
    assert not told or found[0].filename == __file__
    if not told:
        assert float(step(batch)) == pytest.approx(expected, rel=1e-12)


class Running(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layers(x - self.mean)


def test_a_buffer_that_follows_samples() -> None:
    model, batch = Running(), (torch.randn(8, 6), torch.randn(8, 6))
    plan = mw.plan(model, batch, fabric="laptop:1", loss="mse", optimizer="sgd", microbatch=2)
    with pytest.warns(UserWarning, match=r"buffer 'mean' follows the samples that forward sees.*; plan with one micro-batch in all"):
        mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)


class Picking(Net):
    """Each sample's own by its number in the batch, as masks and pooled tokens are picked; `other`: the next sample's."""

    def __init__(self, other=0) -> None:
        super().__init__()
        self.other = other

    def forward(self, x):
        numbers = torch.arange(len(x))
        mask = (x > 0)[(numbers[:, None] + self.other) % len(x) if self.other else numbers[:, None], torch.arange(6)[None]]
        ends = torch.zeros_like(x)
        ends[numbers, x.argmin(1)] = 1.0
        return self.layers(x * mask + ends.cumsum(1))[numbers, x.argmax(1)]


@pytest.mark.parametrize(("other", "told"), [(0, []), (1, ["aten.index.Tensor of the model brings samples together"])])
def test_what_is_picked_by_the_numbers_of_the_samples(other, told):
    model, batch = Picking(other).double(), (torch.randn(8, 6).double(), torch.randn(8).double())
    expected = float(F.mse_loss(model(batch[0]), batch[1]).detach())
    plan = mw.plan(model, batch, fabric="laptop:1", loss="mse", optimizer="sgd", microbatch=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    assert [str(w.message).partition(",")[0] for w in found] == told
    assert told or float(step(batch)) == pytest.approx(expected, rel=1e-12)


class Summed(nn.Module):
    """Kept whole, as it goes by values: of every sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, samples):
        if samples[0].sum() > 1e9:
            raise ValueError("too large")
        return torch.stack([self.layer(x) for x in samples])


class OfSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = Summed(), nn.Linear(6, 6)

    def forward(self, x):
        return self.head(self.each(list(x)))


def test_what_is_kept_whole_and_given_as_many_tensors_as_samples_runs_after_it_was_traced_at_another_batch():
    model, batch = OfSamples().double(), (torch.randn(8, 6).double(), torch.randn(8, 6).double())
    expected = float(F.mse_loss(model(batch[0]), batch[1]).detach())
    plan = mw.plan(model, batch, fabric="laptop:1", loss="mse", optimizer="sgd", microbatch=2)
    assert float(mw.torch.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)(batch)) == pytest.approx(expected, rel=1e-12)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, output, target):
        error = (output - target) ** 2
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * error.mean())
        return (error / self.scale).mean()


def test_a_loss_that_keeps_a_buffer_is_refused() -> None:
    batch = (torch.randn(8, 6), torch.randn(8, 6))
    with pytest.raises(Unsupported, match=r"test_told_of_whole_batch.py:\d+: the loss leaves a tensor") as caught:
        mw.plan(Net(), batch, fabric="laptop:1", loss=Scaled(), optimizer="sgd", microbatch=8)
    assert "a buffer of the model" in caught.value.hint
